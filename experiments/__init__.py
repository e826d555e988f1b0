"""The experiments of the paper (arXiv 2106.06989), each one command: train, score, write a model and a report.

    python -m experiments.binarized_mnist --data DIR --out DIR
    python -m experiments.power --data FILE --out DIR

A run may be cut anywhere and continued with `--resume`. It goes through the trainer's own loop (`trainer.fit`) and
leaves a model directory as `deformer-train` does, which streams, fills in and samples like any other.
"""
