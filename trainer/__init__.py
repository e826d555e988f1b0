"""Train models: from Parquet tables to a model directory, by the command `deformer-train`."""
