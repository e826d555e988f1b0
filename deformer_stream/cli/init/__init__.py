"""The command `init`: the first look at unknown data, and the first configuration file.

command       the command itself
table_view    what the first rows of a table show
messages      JSON messages of a topic as a table
column_names  what the names of columns usually mean
label_columns which columns may say whether a row is normal, or a reading valid
questions     the questions and their defaults
config_file   the configuration file that is written
"""
