"""The library: `train` and `load` return a `Detector`, which scores, explains and imputes records.

A record is a set of features. Complete or partial records are rows of a data frame, of an Arrow table or of a NumPy
array, or dicts:

detector = deformer_stream.train(normal, max_time="1m")        # or deformer_stream.load("model")
scores = detector.score(frame)                                 # a data frame of the same kind, with the same index

The readings of a record, each a value of one feature, may also arrive one by one:

scorer = detector.scorer(alpha=0.01)
scorer.update("pump-7/10:34:33", "Pressure", 9.1).p_value      # 0.0008
"""

from __future__ import annotations

from deformer_stream.calibration.fault_classifier import FaultCandidate, FaultName
from deformer_stream.engine.next_reading import NextReading
from deformer_stream.library.detector import Detector, load
from deformer_stream.library.records import Record, Value
from deformer_stream.library.results import Imputation, RecordScores
from deformer_stream.library.scorer import Scorer, Update
from deformer_stream.library.training import train

__all__ = [
    "Detector",
    "FaultCandidate",
    "FaultName",
    "Imputation",
    "NextReading",
    "Record",
    "RecordScores",
    "Scorer",
    "Update",
    "Value",
    "load",
    "train",
]
