"""The experiments of the DEformer paper (arXiv 2106.06989): each trains, scores, and writes a model and a report.

    python -m experiments.binarized_mnist --data DIR --out DIR
    python -m experiments.power --data FILE --out DIR

A run can be interrupted at any time and continued with `--resume`. It uses the training loop of `trainer.fit` and
writes a model directory like that of `deformer-train`, so the model can score streams, impute and sample.

    binarized_mnist, power     the two experiments of the paper: their data, models and figures
    pretrained                 a density for new tables, trained on synthetic ones
    command, options, run, experiment, score   the command, its options, a run, its parts, and test scores
    report, pictures, completion   the page of a run, black-and-white images, and images that are completed
    reading_orders, synthesizer, tie_groups   alternatives that were measured: objectives, attention, sets of readings
"""
