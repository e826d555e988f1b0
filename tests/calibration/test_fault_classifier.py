"""Prediction sets and names of faults, from classifiers whose numbers are given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from deformer_stream.calibration.fault_classifier import UNKNOWN, FaultClassifier, standardise_inputs


def make_classifier(
    probabilities: list[float], num_records: list[int], scores: NDArray[np.float64], level: float = 0.9
) -> FaultClassifier:
    """Return a classifier of records of one feature, whose models have the same probabilities for all records.

    Args:
        probabilities: (C,) the probabilities of the faults A, B, ….
        num_records: (C,) the number of labelled records of each fault.
        scores: (L,) their nonconformity scores.
        level: The level of the prediction sets.
    """
    num_faults, num_all = len(num_records), sum(num_records)
    return FaultClassifier(
        names=tuple("ABC"[:num_faults]),
        level=level,
        weights=np.zeros((2, 4, num_faults), np.float32),
        biases=np.tile(np.log(probabilities), (2, 1)).astype(np.float32),
        means=np.zeros((2, num_faults, 2), np.float32),
        precisions=np.ones((2, num_faults, 2), np.float32),
        lengths=np.array([1]),
        scores=scores.reshape(num_all, 1, 1).astype(np.float32),
        fault_indexes=np.repeat(np.arange(num_faults), num_records),
        folds=np.arange(num_all) % 2,
    )


def test_error_names_the_array_and_what_it_must_be() -> None:
    good = make_classifier([0.5, 0.5], [2, 3], np.zeros(5))
    units = {"centers": np.zeros((2, 3), np.float32), "scales": np.ones((2, 3), np.float32)}
    faults: list[tuple[dict[str, Any], str]] = [
        ({"weights": good.weights[0]}, "'weights' .* must have three dimensions"),
        ({"weights": good.weights[:, :3]}, "'weights' .* at least 4 inputs for each of 1 features, but has 3"),
        ({"biases": good.biases[:1]}, r"'biases' .* must have the shape \(2, 2\), but has \(1, 2\)"),
        ({"biases": good.biases.astype(np.int32)}, "'biases' .* must have the type floating, but has int32"),
        ({"means": good.means * np.nan}, "'means' .* must have elements above -inf and below inf"),
        ({"precisions": 0 * good.precisions}, "'precisions' .* must have elements above 0 and below inf"),
        ({"lengths": np.array([1.0])}, "'lengths' .* must have the type integer, but has float64"),
        ({"lengths": np.array([2, 1]), "scores": np.zeros((5, 2, 1), np.float32)}, "'lengths' .* must be ascending"),
        ({"scores": good.scores[:, :0]}, "must have models, faults, lengths of records and prefixes"),
        ({"fault_indexes": np.full(5, 2)}, "'fault_indexes' .* must have elements above -1 and below 2"),
        ({"folds": np.full(5, -1)}, "'folds' .* must have elements above -1 and below 2"),
        ({"folds": good.folds[:3]}, r"'folds' .* must have the shape \(5,\), but has \(3,\)"),
        ({"scales": units["scales"]}, "both of the arrays 'centers' and 'scales', or neither"),
        (
            {**units, "scales": 0 * units["scales"], "weights": np.zeros((2, 5, 2), np.float32)},
            "'scales' .* must have elements above 0",
        ),
        ({"names": ("A", "A")}, "2 faults of the classifier must have names, all different"),
        ({"names": ("A", UNKNOWN)}, "must have names"),
        ({"level": 1.0}, "the level .* must be between 0 and 1, but is 1.0"),
    ]
    for changes, message in faults:
        with pytest.raises(ValueError, match=message):
            replace(good, **changes)


def make_inputs(*residuals: float) -> NDArray[np.float64]:
    """Return the inputs of records that have one reading with this residual."""
    return np.array([[residual, abs(residual), residual, 1.0] for residual in residuals])


ONE = np.array([1])


def test_inputs_are_in_units_of_the_labelled_records() -> None:
    """Two features; the second record lacks a reading of the second one. The last input is a label."""
    inputs = np.array(
        [[3.0, 1.0, 3.0, 1.0, 50.0, -2.0, 1.0, 1.0, 1.0], [-1.0, 0.0, 1.0, 0.0, 44.0, 0.0, 1.0, 0.0, 0.0]]
    )
    centers = np.array([1.0, 0.0, 2.0, 0.0, 48.0, 0.0], np.float32)
    scales = np.array([2.0, 1.0, 0.5, 0.0625, 2.0, 4.0], np.float32)
    standardised = standardise_inputs(inputs, centers, scales)
    mean = np.sqrt(2 / np.pi)
    assert standardised[0].tolist() == [1.0, 1.0, 2.0, 8.0, 1.0, -0.5, 1.0, 1.0, 1.0, 1 - mean, 0.5 - mean]
    assert standardised[1].tolist() == [-1.0, 0.0, -2.0, 0.0, -2.0, 0.0, 1.0, 0.0, 0.0, 2 - mean, 0.0]
    assert standardise_inputs(inputs.astype(np.float32), centers, scales).dtype == np.float32


def test_equal_records_have_equal_scores_despite_rounding() -> None:
    residuals = np.linspace(5.0, 25.0, 200)
    for residual in residuals.tolist():
        own = make_classifier([1.0], [20], np.zeros(20)).compute_scores(make_inputs(residual))[0, 0, 0]
        # Twenty labelled records that equal the new one. A backend computes its residual with a small error.
        classifier = make_classifier([1.0], [20], np.full(20, own))
        for inputs in (make_inputs(residual), make_inputs(residual * (1 + 1e-6))):
            assert classifier.compute_p_values(inputs, ONE)[0, 0] == 1.0


def test_p_values_count_the_labelled_records_that_fit_no_better() -> None:
    classifier = make_classifier([1.0], [9], np.arange(9) + 0.5)  # scores 0.5 to 8.5; the score of a record is 0.3 r²
    residuals = np.sqrt(np.array([0.0, 4.0, 100.0]) / 0.3)
    p_values = classifier.compute_p_values(make_inputs(*residuals.tolist()), np.array([1, 1, 1]))
    assert p_values[:, 0].tolist() == [1.0, pytest.approx(0.6), pytest.approx(0.1)]
    assert [name.name for name in classifier.classify(make_inputs(*residuals.tolist()), np.array([1, 1, 1]))[0]] == [
        "A",
        "A",
        UNKNOWN,
    ]


@pytest.mark.parametrize("level", [0.8, 0.9, 0.95])
def test_faults_are_excluded_from_the_smallest_number_of_records_on(level: float) -> None:
    least = make_classifier([1.0], [2], np.zeros(2), level).min_records
    assert least == round(1 / (1 - level)) - 1
    for num_records, name in ((least - 1, "A"), (least, UNKNOWN)):
        classifier = make_classifier([1.0], [num_records], np.zeros(num_records), level)
        assert classifier.classify(make_inputs(9.0), ONE)[0][0].name == name


def test_a_fault_that_cannot_be_excluded_takes_no_place_of_a_more_probable_one() -> None:
    # A fits no better than any of its 20 records, so it is excluded; three records of B can never exclude B.
    excludes_a = np.concatenate([np.zeros(20), np.zeros(3)])
    found = make_classifier([0.7, 0.3], [20, 3], excludes_a).classify(make_inputs(9.0), ONE)[0][0]
    assert found.name == UNKNOWN
    assert found.probability is None
    assert [(candidate.name, candidate.in_set) for candidate in found.candidates] == [("A", False), ("B", True)]
    # As the most probable one it is named, and so is a less probable fault that could have been excluded.
    assert make_classifier([0.3, 0.7], [20, 3], excludes_a).classify(make_inputs(9.0), ONE)[0][0].name == "B"
    fits_c = np.concatenate([np.zeros(20), np.zeros(3), np.full(20, 99.0)])
    assert make_classifier([0.6, 0.3, 0.1], [20, 3, 20], fits_c).classify(make_inputs(9.0), ONE)[0][0].name == "C"
