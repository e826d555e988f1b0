"""The experiments of the DEformer paper (arXiv 2106.06989): each trains, scores, and writes a model and a report.

    python -m experiments.binarized_mnist --data DIR --out DIR
    python -m experiments.power --data FILE --out DIR

A run can be interrupted at any time and continued with `--resume`. It uses the training loop of `trainer.fit` and
writes a model directory like that of `deformer-train`, so the model can score streams, impute and sample.
"""
