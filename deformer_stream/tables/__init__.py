"""One reader for tables, used by every command that reads files: training, replay, calibrate, impute and produce.

discovery    finding input files: paths, folders and patterns; nothing heavy is imported
table        `Table`: a table with a schema that yields batches of rows, from Parquet, CSV or memory
csv_dialect  delimiter, decimal character, encoding and header of a CSV file, guessed from its beginning
conversion   conversion of text cells to numbers and times
partitions   columns that are written in the path, such as `site=north/`
unpivot      rows of a wide table as one row per reading
"""
