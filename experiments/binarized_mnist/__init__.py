"""Binarised MNIST, the paper's first experiment: `python -m experiments.binarized_mnist --help`."""
