"""Binarised MNIST, the paper's first experiment: `python -m trainer.experiments.binarized_mnist --help`."""
