"""A density for new tables, from some of their rows as context: `python -m experiments.pretrained --help`.

`synthetic` draws the tables of the training. `guide` fits the Gaussians on which the network builds. `network` is the
density. `training` trains it, in parts if necessary. `benchmarks.pretrained` compares it on public tables.
"""
