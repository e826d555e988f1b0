"""Train models from Parquet tables and write model directories (the command `deformer-train`)."""
