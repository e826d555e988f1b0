"""The command `init`: the first look at unknown data, and the first configuration file.

command       the command itself
table_view    what the first rows of a table show
messages      JSON messages of a topic as a table
questions     the questions and their defaults
config_file   the configuration file that is written
"""
