"""Binarised MNIST, the first experiment of the paper: `python -m experiments.binarized_mnist --help`.

`data` reads the images, `foreign_images` draws letters and shapes, `experiment` has the presets and published results,
and `report` the figures of the paper.
"""
