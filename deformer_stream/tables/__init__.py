"""One reader for tables, used by every command that reads files: training, replay, calibrate, impute and produce.

discovery    finding input files: paths, folders and patterns; nothing heavy is imported
data_files, delta, iceberg   local files and object stores; the files of Delta Lake and Apache Iceberg tables
table        `Table`: a table with a schema that yields batches of rows, from Parquet, CSV or memory
csv_dialect, csv_rows   properties of a CSV file that follow from its beginning; its rows as texts
conversion   conversion of text cells to numbers and times
partitions   columns that are written in the path, such as `site=north/`
filters      conditions that choose rows (`--where`, `--normal`)
labels       labels in columns, and which rows have the label of normal records
unpivot      rows of a wide table as one row per reading
parts        a table that is split by the values of a column
"""
