"""Anomalies among the training records are detected without a model, even if they are similar to each other."""

from __future__ import annotations

import dataclasses
import html
import math
from pathlib import Path

import numpy as np
import pytest

from deformer_stream import model_store
from tests.trainer.tables import mixed, prepared, write
from trainer import outliers
from trainer.calibrate import split_folds
from trainer.data import PreparedTable, Split
from trainer.job import train
from trainer.outliers import (
    FIRST_MEASURED_RECORDS,
    MIN_REFERENCES,
    MIN_SEARCH_REFERENCES,
    NUM_REFERENCES,
    SearchSize,
    choose_num_references,
    compute_median_distances,
    count_examined,
    describe_suspects,
    drop_outliers,
    find_suspects,
    leave_out,
    plan_search,
    restore_left_out,
)
from trainer.settings import TrainConfig

SMALL = {"d_model": 16, "layers": 1, "heads": 2, "feedforward": 32, "mixtures": 4, "hidden": (16,), "gaussians": 2}


@pytest.fixture
def contaminated(tmp_path: Path, rng: np.random.Generator) -> PreparedTable:
    """Return 400 records of which the first 40 are anomalies that are close to each other."""
    columns = mixed(rng, 400)
    columns["b"][:40] = 4.0 + 0.05 * rng.normal(size=40)
    columns["c"][:40] = -4.0
    return prepared(tmp_path, columns)


def test_cluster_of_similar_anomalies_is_distant(contaminated: PreparedTable) -> None:
    far = compute_median_distances(contaminated, 0)
    assert np.isfinite(far).all()
    assert (far[:40].min() > np.sort(far[40:])[: int(0.95 * 360)]).all()


def test_distances_are_medians_of_root_mean_square_differences(tmp_path: Path, rng: np.random.Generator) -> None:
    """Numbers, labels, cyclic features and missing readings, compared with a plain loop over pairs of records."""
    columns = mixed(rng, 60) | {"heading": rng.uniform(0, 360, 60)}
    data = prepared(tmp_path, columns, cycle=(("heading", 360.0),))
    values = np.asarray(data.values, np.float64)
    schema = data.schema
    deviations = np.nanstd(values, 0)
    expected = np.zeros(60)
    for i, record in enumerate(values):
        distances = []
        for other in values:
            squares = []
            for code in np.flatnonzero(~np.isnan(record) & ~np.isnan(other)):
                difference = abs(record[code] - other[code])
                if schema.is_discrete[code]:
                    squares.append(float(difference > 0))
                    continue
                if schema.is_cyclic[code]:
                    difference = min(difference, schema.cycle_lengths[code] - difference)
                squares.append((difference / deviations[code]) ** 2)
            distances.append(np.sqrt(np.mean(squares)))
        expected[i] = np.median(distances)
    assert schema.is_cyclic.any()
    num_done: list[int] = []
    np.testing.assert_allclose(compute_median_distances(data, 0, on_progress=num_done.append), expected, atol=1e-6)
    assert num_done[-1] == 60


def test_short_time_means_fewer_references(tmp_path: Path, rng: np.random.Generator) -> None:
    data = prepared(tmp_path, mixed(rng, 4000))
    now = iter([0.0, 1.0, 5.0, 6.0, 9.0, 9.01])  # two seconds for all records with all references, then 0.02 seconds
    assert choose_num_references(data, 1.0, lambda: next(now)) == 250
    assert choose_num_references(data, 0.01, lambda: next(now)) == MIN_REFERENCES
    assert choose_num_references(data, 1.0, lambda: next(now)) == NUM_REFERENCES


def test_suspected_anomalies_are_removed_from_training_only(contaminated: PreparedTable) -> None:
    clean = drop_outliers(contaminated, 0.1, 0)
    out = clean.split == Split.LEFT_OUT
    assert out[:40].sum() + (contaminated.split[:40] == Split.CALIBRATION).sum() >= 36
    assert out.sum() <= 40
    assert ((clean.split == Split.CALIBRATION) == (contaminated.split == Split.CALIBRATION)).all()
    assert clean.summarize()["rows"]["left_out"] == out.sum()
    assert drop_outliers(contaminated, 0.0, 0) is contaminated
    for fold in split_folds(clean, 3, 0):
        assert ((fold.split == Split.LEFT_OUT) == out).all()


def test_suspected_anomalies_are_neither_trained_on_nor_exemplars(tmp_path: Path, rng: np.random.Generator) -> None:
    columns = mixed(rng, 200)
    columns["b"][:20] = 50.0
    table = write(tmp_path / "table.parquet", columns)
    settings = TrainConfig(out=tmp_path / "m", contamination=0.1, epochs=1, device="cpu", preset="tiny", **SMALL)
    train([table], settings)
    loaded = model_store.read(tmp_path / "m")
    rows = loaded.manifest["training"]["rows"]
    assert rows["left_out"] > 10
    assert loaded.model.config.exemplars == rows["train"] + rows["validation"]
    assert len(loaded.calibration.scores) == 39 - 4


def prepare_numbers(folder: Path, values: np.ndarray) -> PreparedTable:
    """Return a prepared table of measurements with one column for each column of the values."""
    return prepared(folder, {f"x{index}": column for index, column in enumerate(values.T)})


def count_found(data: PreparedTable, num_anomalies: int) -> tuple[float, float]:
    """Return the shares of the first records and of the others that are suspects, of those that are examined."""
    suspects = find_suspects(data, 0)
    is_suspect = suspects.is_grouped | suspects.is_isolated
    is_examined = data.split != Split.CALIBRATION
    assert not is_suspect[~is_examined].any()
    assert suspects.num_examined == is_examined.sum()
    is_anomaly = np.arange(len(is_suspect)) < num_anomalies
    found, lost = is_suspect[is_anomaly & is_examined], is_suspect[~is_anomaly & is_examined]
    return float(found.sum() / max(len(found), 1)), float(lost.mean())


@pytest.mark.parametrize("share", [0.02, 0.05, 0.09])
def test_auto_leaves_out_a_group_of_similar_anomalies(tmp_path: Path, rng: np.random.Generator, share: float) -> None:
    values = rng.normal(size=(2000, 6))
    num_anomalies = round(share * 2000)
    values[:num_anomalies] = 3.0 + 0.3 * rng.normal(size=(num_anomalies, 6))
    found, lost = count_found(prepare_numbers(tmp_path, values), num_anomalies)
    assert found > 0.95
    assert lost < 0.01


def test_auto_leaves_out_a_group_that_a_tenth_of_the_records_would_cut_off(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """The tail of the normal records is more unusual than a part of the group, so that a tenth does not contain it."""
    values = rng.standard_t(4, (2000, 4))
    values[:140] = np.array([3.0, -3.0, 3.0, 0.0]) + 0.15 * rng.normal(size=(140, 4))
    found, lost = count_found(prepare_numbers(tmp_path, values), 140)
    assert found > 0.9
    assert lost < 0.02


def test_auto_leaves_a_mode_of_normal_operation_in_the_training(tmp_path: Path, rng: np.random.Generator) -> None:
    values = rng.normal(size=(2000, 6))
    values[:260] += 5.0
    assert count_found(prepare_numbers(tmp_path, values), 0)[1] < 0.02


def test_auto_leaves_out_anomalies_that_only_break_a_correlation(tmp_path: Path, rng: np.random.Generator) -> None:
    """Each reading by itself is ordinary, so the median distance cannot find them; the trimmed Gaussian can."""
    common = rng.normal(size=(2000, 1))
    values = common + 0.1 * rng.normal(size=(2000, 4))
    values[:80] = np.array([1.0, -1.0, 1.0, -1.0]) + 0.1 * rng.normal(size=(80, 4))
    found, lost = count_found(prepare_numbers(tmp_path, values), 80)
    assert found > 0.95
    assert lost < 0.06, "the two ends of the common direction are thin, and small groups remain there"


def test_auto_leaves_out_scattered_anomalies_that_are_far_away(tmp_path: Path, rng: np.random.Generator) -> None:
    values = rng.normal(size=(2000, 6))
    values[:60] = rng.uniform(-20, 20, (60, 6))
    found, lost = count_found(prepare_numbers(tmp_path, values), 60)
    assert found > 0.9
    assert lost < 0.01


@pytest.mark.parametrize("kind", ["normal", "student", "joint student", "lognormal", "two modes"])
def test_auto_leaves_nearly_nothing_out_of_a_clean_table(tmp_path: Path, rng: np.random.Generator, kind: str) -> None:
    """Tails of normal records are continuous, so their records are neither in groups apart nor isolated."""
    draws = {
        "normal": lambda: rng.normal(size=(2000, 6)),
        "student": lambda: rng.standard_t(3, (2000, 6)),
        "joint student": lambda: rng.normal(size=(2000, 6)) / np.sqrt(rng.chisquare(3, (2000, 1)) / 3),
        "lognormal": lambda: rng.lognormal(0, 1, (2000, 6)),
        "two modes": lambda: rng.normal(size=(2000, 6)) + 5.0 * rng.integers(0, 2, (2000, 1)),
    }
    assert count_found(prepare_numbers(tmp_path, draws[kind]()), 0)[1] < 0.04


@pytest.mark.parametrize("kind", ["labels", "binary", "counts", "numbers and labels", "a rare mode", "one number"])
def test_auto_leaves_nearly_nothing_out_of_clean_labels_and_coarse_numbers(
    tmp_path: Path, rng: np.random.Generator, kind: str
) -> None:
    """Many of these records equal others, so distances to the nearest ones are 0. Rare combinations are normal."""
    num_records = 4000
    labels = {f"l{i}": rng.choice(["a", "b", "c"], num_records, p=[0.9, 0.08, 0.02]) for i in range(5)}
    numbers = {f"x{i}": rng.normal(size=num_records) for i in range(3)}
    columns = {
        "labels": labels,
        "binary": {f"l{i}": rng.choice(["a", "b"], num_records, p=[0.9, 0.1]) for i in range(8)},
        "counts": {f"c{i}": 0.5 * rng.poisson(4, num_records) for i in range(4)},
        "numbers and labels": {name: (labels | numbers)[name] for name in ("x0", "x1", "l0", "l1", "l2")},
        "a rare mode": {**numbers, "mode": rng.choice(["on", "off"], num_records, p=[0.95, 0.05])},
        "one number": {"x0": numbers["x0"]},
    }
    assert count_found(prepared(tmp_path, columns[kind]), 0)[1] < 0.01


def test_auto_leaves_out_a_group_of_similar_anomalies_of_coarse_numbers(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """The records of the group equal each other, and are apart by more than the smallest distance that counts."""
    values = np.round(2.0 * rng.normal(size=(2000, 4))) / 2.0
    values[:80] = 4.0
    found, lost = count_found(prepare_numbers(tmp_path, values), 80)
    assert found > 0.95
    assert lost < 0.01


def test_auto_finds_anomalies_by_labels_cyclic_and_missing_readings(tmp_path: Path, rng: np.random.Generator) -> None:
    columns = mixed(rng, 1000) | {"heading": rng.uniform(350, 370, 1000) % 360}
    columns["b"] = columns["b"].astype(np.float64)
    columns["b"][100:300] = np.nan
    columns["heading"][:40] = rng.uniform(170, 190, 40)
    columns["c"][:40] += 6.0
    data = prepared(tmp_path, columns, cycle=(("heading", 360.0),))
    found, lost = count_found(data, 40)
    assert found > 0.9
    assert lost < 0.04
    summary = find_suspects(data, 0).summarize()
    assert summary["most_unusual_feature"].get("heading", 0) + summary["most_unusual_feature"].get("c", 0) > 20


def test_calibration_records_do_not_influence_what_auto_leaves_out(contaminated: PreparedTable) -> None:
    """The guarantee needs it: the model must not depend on the calibration records."""
    expected = find_suspects(contaminated, 0)
    values = np.array(contaminated.values)
    values[contaminated.split == Split.CALIBRATION] = 7.0
    changed = find_suspects(dataclasses.replace(contaminated, values=values), 0)
    assert (changed.is_grouped == expected.is_grouped).all()
    assert (changed.is_isolated == expected.is_isolated).all()
    left_out = leave_out(contaminated, expected)
    assert ((left_out.split == Split.CALIBRATION) == (contaminated.split == Split.CALIBRATION)).all()
    assert not (restore_left_out(left_out).split == Split.LEFT_OUT).any()


def test_auto_leaves_nothing_out_of_a_tiny_table(tmp_path: Path, rng: np.random.Generator) -> None:
    data = prepare_numbers(tmp_path, rng.normal(size=(40, 3)))
    summary = find_suspects(data, 0).summarize()
    assert (summary["records"], summary["examined"]) == (0, 0)
    assert describe_suspects(summary).startswith("no record was left out: there are too few records")


def test_records_are_searched_part_by_part(tmp_path: Path, rng: np.random.Generator) -> None:
    """A small type of machines is a group apart from the others, but not an anomaly (--per)."""
    values = rng.normal(size=(2000, 6))
    values[1880:] = 4.0 + 0.3 * rng.normal(size=(120, 6))  # the second type
    values[:60] = -4.0 + 0.3 * rng.normal(size=(60, 6))  # anomalies of the first type
    columns = {f"x{index}": column for index, column in enumerate(values.T)}
    together = prepared(tmp_path, columns)
    is_train = together.split != Split.CALIBRATION
    assert find_suspects(together, 0).is_grouped[1880:][is_train[1880:]].mean() > 0.9
    data = prepared(tmp_path, columns, part_sizes=(1880, 120))
    is_train = data.split != Split.CALIBRATION
    suspects = find_suspects(data, 0)
    assert suspects.is_grouped[:60][is_train[:60]].mean() > 0.9
    assert (suspects.is_grouped | suspects.is_isolated)[1880:].sum() <= 1
    assert suspects.num_examined == count_examined(data, SearchSize()) == is_train.sum()


def test_a_stated_share_is_left_out_of_each_part(tmp_path: Path, rng: np.random.Generator) -> None:
    """A small type of machines is far from all others. It must not be left out of the fleet model as a whole."""
    values = rng.normal(size=(1000, 4))
    values[900:] += 9.0
    columns = {f"x{index}": column for index, column in enumerate(values.T)}
    together = drop_outliers(prepared(tmp_path, columns), 0.1, 0)
    assert (together.split[900:] == Split.LEFT_OUT).sum() > 60
    num_done: list[int] = []
    data = prepared(tmp_path, columns, part_sizes=(900, 100))
    split = drop_outliers(data, 0.1, 0, on_progress=num_done.append).split
    assert 50 <= (split[:900] == Split.LEFT_OUT).sum() <= 90
    assert 2 <= (split[900:] == Split.LEFT_OUT).sum() <= 10
    assert num_done == sorted(num_done)
    assert num_done[-1] == 1000


@pytest.mark.parametrize("part_sizes", [(), (1000, 500, 2500)])
@pytest.mark.parametrize(
    "size", [SearchSize(), SearchSize(MIN_SEARCH_REFERENCES), SearchSize(MIN_SEARCH_REFERENCES, 0.2)]
)
def test_the_work_of_the_search_is_planned(
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    size: SearchSize,
    part_sizes: tuple[int, ...],
) -> None:
    """The number of computed distances is at most the planned one, and progress ends at the number of records."""
    columns = {f"x{index}": rng.normal(size=4000) for index in range(4)}
    data = prepared(tmp_path, columns, part_sizes=part_sizes)
    num_computed = 0
    iterate = outliers._iterate_distances

    def count(table: PreparedTable, rows: np.ndarray, references: np.ndarray, self_distance: float = np.inf) -> object:
        nonlocal num_computed
        num_computed += len(rows) * len(references)
        return iterate(table, rows, references, self_distance)

    monkeypatch.setattr(outliers, "_iterate_distances", count)
    num_done: list[int] = []
    suspects = find_suspects(data, 0, size, num_done.append)
    examined = [int(np.ceil(size.share * len(rows))) for rows in outliers._list_examined_parts(data)]
    planned = outliers._count_distances(examined, size.num_references)
    assert 0.4 * planned < num_computed <= 1.01 * planned, "without the second share it is about half"
    assert num_done == sorted(num_done)
    assert num_done[-1] == count_examined(data, size) == sum(examined)
    assert suspects.num_examined == sum(
        n for n in examined if round(min(outliers.UNUSUAL_SHARES) * n) >= outliers.MIN_UNUSUAL
    )


def test_less_time_means_a_smaller_search(tmp_path: Path, rng: np.random.Generator) -> None:
    data = prepared(tmp_path, {f"x{index}": rng.normal(size=4000) for index in range(3)})
    part_sizes = [int((data.split != Split.CALIBRATION).sum())]
    measured = int((data.split[:FIRST_MEASURED_RECORDS] != Split.CALIBRATION).sum())
    seconds_per_distance = outliers.COST_FACTOR / outliers._count_distances([measured], MIN_SEARCH_REFERENCES)

    def plan(seconds: float) -> SearchSize:
        now = iter([0.0, 1.0])  # the first measurement takes a second
        return plan_search(data, seconds, lambda: next(now))

    def estimate(num_references: int) -> float:
        return seconds_per_distance * outliers._count_distances(part_sizes, num_references)

    assert plan(0.5 * (estimate(200) + estimate(201))) == SearchSize(200)
    reduced = plan(estimate(MIN_SEARCH_REFERENCES) / 4)
    assert (reduced.num_references, reduced.share) == (MIN_SEARCH_REFERENCES, pytest.approx(0.25))
    assert plan(1e-9) == SearchSize(MIN_SEARCH_REFERENCES, FIRST_MEASURED_RECORDS / part_sizes[0])
    assert plan_search(data, np.inf, lambda: 0.0) == SearchSize()
    now = iter([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])  # short measurements are repeated with more records
    assert plan_search(data, 1e6, lambda: next(now)) == SearchSize()
    assert not list(now)


def test_a_reduced_search_finds_a_group_of_similar_anomalies(tmp_path: Path, rng: np.random.Generator) -> None:
    values = rng.normal(size=(4000, 6))
    values[:200] = 3.0 + 0.3 * rng.normal(size=(200, 6))
    data = prepare_numbers(tmp_path, values)
    suspects = find_suspects(data, 0, SearchSize(MIN_SEARCH_REFERENCES, 0.5))
    is_suspect = suspects.is_grouped | suspects.is_isolated
    num_examined = (data.split[:200] != Split.CALIBRATION).sum() / 2
    assert is_suspect[:200].sum() > 0.8 * num_examined
    assert is_suspect[200:].mean() < 0.01
    assert suspects.num_examined == math.ceil((data.split != Split.CALIBRATION).sum() / 2)


@pytest.mark.parametrize("folds", [None, 3])
def test_training_with_auto_reports_what_it_leaves_out(
    tmp_path: Path, rng: np.random.Generator, folds: int | None
) -> None:
    """Suspects are neither trained on nor exemplars. Calibration keeps all its records, with --folds all of them."""
    columns = mixed(rng, 300)
    columns["b"][:24] = 50.0 + rng.normal(size=24)
    table = write(tmp_path / "table.parquet", columns)
    settings = TrainConfig(
        out=tmp_path / "m", contamination="auto", epochs=1, device="cpu", preset="tiny", folds=folds, **SMALL
    )
    messages: list[str] = []
    output = train([table], settings, on_message=messages.append)
    loaded = model_store.read(tmp_path / "m")
    training = loaded.manifest["training"]
    summary = training["left_out"]
    assert training["options"]["contamination"] == "auto"
    assert summary["records"] == training["rows"]["left_out"] == (output.data.split == Split.LEFT_OUT).sum()
    assert summary["records"] >= (output.data.split[:24] != Split.CALIBRATION).sum()
    assert "b" in summary["most_unusual_feature"]
    assert describe_suspects(summary) in messages
    assert describe_suspects(summary) in html.unescape((tmp_path / "m" / model_store.REPORT).read_text())
    assert loaded.model.config.exemplars == training["rows"]["train"] + training["rows"]["validation"]
    assert len(loaded.calibration.scores) == (300 if folds else 99)
    assert training["records_used"]["calibration_trimmed"] == 0


@pytest.mark.parametrize("value", ["most", "0.5", "-1%"])
def test_invalid_contamination_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(ValueError, match="contamination"):
        TrainConfig(out=tmp_path / "m", contamination=value)  # type: ignore[arg-type]
