"""The check that a model has at most one reading of each feature in a record.

Functions on complete records take one value of each feature, without a time. A model of irregular readings cannot use
such values.
"""

from __future__ import annotations

from deformer_stream.errors import ConfigError
from deformer_stream.model.schema import Schema


def check_single_readings(schema: Schema, task: str) -> None:
    """Check that records with one value of each feature can be used with a model.

    Args:
        schema: The features of the model.
        task: What is done with the records, for the error message: "impute".

    Raises:
        ConfigError: The readings of the model are irregular.
    """
    if schema.reading_times is not None:
        raise ConfigError(
            f"the model is for irregular readings, so it cannot {task} records that have one value of each feature and "
            "no times: give readings with their times (deformer-stream replay, consume or impute, or Detector.scorer)"
        )
