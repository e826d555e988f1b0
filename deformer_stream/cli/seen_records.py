"""The check of `calibrate` that its records are new: neither training nor the calibration in force has used them."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.seen_records import RecordSet, SeenRecords
from deformer_stream.errors import InputError

SeenRecordsPolicy = Literal["refuse", "drop", "allow"]


def select_new_records(
    seen_records: SeenRecords | None, fingerprints: NDArray[np.uint64], policy: SeenRecordsPolicy, data_fingerprint: str
) -> tuple[NDArray[np.bool_], str]:
    """Return which of N records may calibrate a model, and a clause for the user if some may not.

    Args:
        seen_records: Fingerprints of the records that the model has seen; None if the model directory has none, because
            an earlier release wrote it. All records are then used.
        fingerprints: (N,) the fingerprints of the records.
        policy: What to do with records that the model has seen: "refuse" raises an error, "drop" leaves them out, and
            "allow" uses them.
        data_fingerprint: The fingerprint of the training table, for the messages.

    Returns:
        A pair. First, (N,) whether the record is used. Second, a clause about records that the model has seen; "" if
        there are none.

    Raises:
        InputError: The model has seen some of the records and the policy is "refuse", or no record is known to be new
            and the policy is "drop".
    """
    use_all = np.ones(len(fingerprints), bool)
    if seen_records is None:
        note = "the model directory is of an earlier release and does not say which records the model was trained on"
        return use_all, f"{note}, so make sure that these are new"
    check = seen_records.check(fingerprints)
    if not check.num_seen:
        return use_all, ""
    found = f"{check.describe()} (data fingerprint {data_fingerprint})"
    if policy == "allow":
        # Records of the calibration in force are as new to the weights as when they were used first.
        return use_all, found + (", so the false-alarm rate is not guaranteed" if check.in_training.any() else "")
    if policy == "refuse":
        raise InputError(f"{found}: calibrate on records that are new, or add --seen-records drop")
    if not check.is_new.any():
        raise InputError(f"{found}, and none of the records is known to be new: calibrate on records that are new")
    return check.is_new, f"{found} and {int((~check.is_new).sum()):,} records were left out"


def replace_calibration_records(seen_records: SeenRecords | None, fingerprints: NDArray[np.uint64]) -> SeenRecords:
    """Return the records that a model has seen after a new calibration.

    Args:
        seen_records: The records that it had seen before, None if they are not known.
        fingerprints: (N,) the fingerprints of the records of the new calibration, and of the confirmed anomalies that
            were removed from it. Otherwise only the anomalies would be new to the next calibration.
    """
    training = () if seen_records is None else seen_records.training
    return SeenRecords(training, RecordSet.from_fingerprints(fingerprints))
