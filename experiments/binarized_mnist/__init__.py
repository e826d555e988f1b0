"""Binarised MNIST, the first experiment of the paper: `python -m experiments.binarized_mnist --help`."""
