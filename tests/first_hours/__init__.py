"""First hours: a user with data of their own types commands, and each trial ends with a right result or a clear line.

test_unknown_tables    tables with row numbers, times, constants and texts; few rows; calibration on training data
test_exports           files as plants export them: CSV dialects, wide tables with windows, slots, globs, time zones
test_library           data frames of pandas, polars, Arrow and NumPy; scikit-learn and joblib
test_three_commands    from an unknown CSV file to the first alert with three commands
long_trials            trials that take minutes, which only `make first-hours` runs
"""
