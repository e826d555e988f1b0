"""Binarised MNIST, the first experiment of the paper: `python -m experiments.binarized_mnist --help`.

`data` reads the images, `experiment` has the presets and published results, and `report` the figures of the paper.
"""
