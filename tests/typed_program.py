"""A program of a user of the library. `make lint` checks its types; it is not run.

Each name has the type that the documentation states, so that the check fails if a result has another one.
"""

import numpy as np
import polars as pl

import deformer_stream
from deformer_stream import Detector, Imputation, RecordScores, Scorer, Update

detector: Detector = deformer_stream.load("model")
trained: Detector = deformer_stream.train(pl.DataFrame({"x": [1.0]}), max_time="1m")
frame = pl.DataFrame({"x": [1.0]})
scores: pl.DataFrame = detector.score(frame)
listed: RecordScores = detector.score([{"x": 1.0}, {"x": None, "state": "run"}])
one: RecordScores = detector.score({"x": 1.0})
array: RecordScores = detector.score(np.ones((2, 1)), columns=["x"])
filled: pl.DataFrame = detector.impute(frame, bounds=True)
imputed: dict[str, Imputation] = detector.impute({"x": 1.0})
low: float = detector.quantiles({"x": 1.0}, [0.05])["x"][0]
drawn: pl.DataFrame = detector.complete(frame, draws=3)
name: str = detector.explain({"x": 1.0}, order="random")[0].feature
names: list[str] = [item.feature for row in detector.explain([{"x": 1.0}]) for item in row]
scorer: Scorer = detector.scorer(alpha=[0.01, 0.001])
update: Update = scorer.update("pump-1", "x", 1.0)
detector.save("copy")
