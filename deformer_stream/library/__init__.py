"""The library: its objects and functions. `deformer_stream.api` offers the public ones.

detector           a trained model as an object: loading, scores, explanations, imputation
scorer             scoring of readings that arrive one by one
training           training on a table
training_scores    anomaly scores of training records that are comparable with those of new records
frames, records, readings   conversion of data frames, of records, and of readings with times
results            scores, predictions and tables of explanations
"""
