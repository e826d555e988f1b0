"""A training job for irregular readings, from the table to a model directory that scores them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from click.testing import CliRunner

from benchmarks.early import compute_false_alarm_bounds
from deformer_stream import model_store
from deformer_stream.calibration.conformal import PrefixState, advance_prefix_state
from deformer_stream.calibration.cusum import (
    CusumScale,
    advance_sums,
    compute_statistics,
    create_states,
    find_previous_values,
)
from deformer_stream.calibration.seen_records import RecordHasher
from deformer_stream.errors import ConfigError
from deformer_stream.kernels.cpu import attached_kernels, is_supported
from deformer_stream.model.deformer import DEformer
from deformer_stream.settings import load_settings
from tests.trainer.irregular import CONFIG, START, divided, fleet, prepared_irregular
from tests.trainer.tables import write
from trainer import cusum_scale, gaussian_process, irregular_job
from trainer.budget import StepCost, TimeBudget
from trainer.cli import command
from trainer.cusum_scale import SensorDistributions, find_largest_sums, fit_cusum_scale, score_records
from trainer.data import EMPTY_RECORDS, Split
from trainer.distributed import Ranks
from trainer.faults import learn_faults
from trainer.fit import Interrupted, TrainingRun
from trainer.gaussian_process import fit_process
from trainer.irregular_calibration import average_neg_log_p, score_irregular_records
from trainer.irregular_job import IrregularOutput, train_irregular
from trainer.irregular_table import NO_VALUE, IrregularTable
from trainer.recipes import MIN_STEPS_OF_LARGER_PRESET
from trainer.settings import TrainConfig

SMALL: dict[str, Any] = {
    "d_model": 16,
    "layers": 1,
    "heads": 2,
    "feedforward": 32,
    "mixtures": 3,
    "hidden": (16,),
    "embedding": 4,
    "neighbors": 4,
    "process_rank": 2,
    "process_scales": 3,
    "context_recent": 5,
    "context_block": 16,
    "batch": 8,
}


@pytest.fixture(autouse=True)
def _fit_the_process_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gaussian_process, "NUM_ROUNDS", 3)
    monkeypatch.setattr(gaussian_process, "STEPS_PER_ROUND", 15)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    columns = fleet(np.random.default_rng(0))
    return write(tmp_path / "fleet.parquet", {name: pa.array(values) for name, values in columns.items()})


def run(source: Path, out: Path, **options: Any) -> IrregularOutput:
    settings = TrainConfig(out=out, irregular=True, **{"epochs": 3, **SMALL, **options})
    return train_irregular([source], settings)


@pytest.mark.charts
def test_job_writes_a_model_directory_that_describes_irregular_readings(tmp_path: Path, source: Path) -> None:
    output = run(source, tmp_path / "model")
    artifact = model_store.read(tmp_path / "model")
    assert artifact.model.schema.reading_times == output.data.schema.reading_times
    assert artifact.model.process is not None
    assert artifact.model.config.context_limit is not None
    assert artifact.model.ranking is None
    held_out = output.held_out
    assert held_out.mean_nll < held_out.baselines["marginal"] - 0.1
    training = artifact.manifest["training"]
    assert training["held_out"]["log_likelihood_per_reading"] == -held_out.mean_nll
    assert training["readings"] == output.data.offsets[-1]
    assert training["records_used"]["calibration"] == len(artifact.calibration.scores) == 19
    assert set(artifact.calibration.mean_neg_log_p_by_feature) == {"a", "b", "state"}
    page = (tmp_path / "model" / "report.html").read_text()
    assert "Irregular readings" in page
    assert "<svg" in page
    assert "the Gaussian process alone" in page
    assert not (tmp_path / "model.training").exists()
    seen = model_store.read_seen_records(tmp_path / "model", artifact.manifest)
    assert seen is not None
    assert seen.calibration is not None
    hasher, data = RecordHasher(artifact.model.schema), output.data
    record = int(data.select_rows(Split.CALIBRATION)[0])
    own = slice(data.offsets[record], data.offsets[record + 1])
    raw = data.schema.denormalise(data.codes[own], data.values[own].astype(np.float64))
    fingerprint = hasher.hash_readings(data.codes[own], raw).sum(dtype=np.uint64)
    assert fingerprint in seen.calibration.fingerprints, "the fingerprint that a stream computes from raw values"


def test_faults_of_irregular_readings_are_not_learnt(tmp_path: Path) -> None:
    columns = fleet(np.random.default_rng(0))
    columns["fault"] = ["none"] * len(columns["value"])
    table = write(tmp_path / "fleet.parquet", {name: pa.array(values) for name, values in columns.items()})
    settings = TrainConfig.model_validate(
        {"out": tmp_path / "model", "irregular": True, "label": "fault", "normal": "none", "epochs": 1, **SMALL}
    )
    messages: list[str] = []
    train_irregular([table], settings, on_message=messages.append)
    assert "the names of faults are not learnt, because readings are irregular" in messages
    with pytest.raises(ConfigError, match="irregular readings, which cannot name faults"):
        learn_faults([table], tmp_path / "model", settings)


def test_continued_run_equals_one_that_was_not_interrupted(tmp_path: Path, source: Path) -> None:
    whole = run(source, tmp_path / "whole")
    steps = 0

    def stop_at_the_fifth_step() -> bool:
        nonlocal steps
        steps += 1
        return steps == 5

    settings = TrainConfig(out=tmp_path / "cut", irregular=True, epochs=3, **SMALL)
    with pytest.raises(Interrupted):
        train_irregular([source], settings, should_stop=stop_at_the_fifth_step)
    messages: list[str] = []
    resumed = settings.model_copy(update={"resume": True})
    continued = train_irregular([source], resumed, on_message=messages.append)
    assert any("continuing at step 5" in line for line in messages)
    assert "fitting the Gaussian process prior" not in messages
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, continued.model.state_dict()[name]), name
    assert np.array_equal(whole.calibration.scores, continued.calibration.scores)
    assert whole.fingerprint == continued.fingerprint


def test_records_without_readings_do_not_raise_the_number_of_false_alarms(tmp_path: Path) -> None:
    """Such records never open in a stream, so half of the records of a table may be such ones."""
    columns = fleet(np.random.default_rng(4), num_records=200, max_readings=12)
    for record in range(200):
        for name, cell in zip(columns, (f"empty{record}", "a", None, START), strict=True):
            columns[name].append(cell)
    table = write(tmp_path / "half.parquet", {name: pa.array(values) for name, values in columns.items()})
    output = run(table, tmp_path / "model", epochs=1, calibration_share=0.5)
    data, calibration = output.data, output.calibration
    assert data.skipped_by_reason == {NO_VALUE: 200, EMPTY_RECORDS: 200}
    rows = data.select_rows(Split.CALIBRATION)
    assert len(calibration.scores) == output.summary["records_used"]["calibration"] == len(rows) < 120
    assert output.summary["records_available"]["calibration"] == len(rows)
    (tmp_path / "new").mkdir()
    new = prepared_irregular(tmp_path / "new", fleet(np.random.default_rng(5), num_records=300, max_readings=12))
    new = replace(new, schema=data.schema)  # whose scales are nearly those of the new table
    scores = score_irregular_records(output.model, new, np.arange(300), cusum_scale=calibration.cusum_scale)
    num_alerts = int((calibration.compute_pooled_p_values(scores) <= 0.2).sum())
    low, high = compute_false_alarm_bounds(0.2, len(rows), 300)
    assert low <= num_alerts <= high


def test_job_under_a_time_limit_uses_it(tmp_path: Path, source: Path) -> None:
    clock = iter(np.arange(0, 1e5, 0.05).tolist())  # every look at the clock takes 50 ms
    settings = TrainConfig(out=tmp_path / "model", irregular=True, max_time="60s", epochs=10_000, **SMALL)
    output = train_irregular([source], settings, budget=TimeBudget(60.0, lambda: next(clock)))
    assert output.training_result.steps > 5
    assert output.training_result.steps < output.training_result.planned_steps
    assert output.summary["seconds"] < 66
    assert len(output.calibration.scores) == 19


def test_job_finishes_as_early_as_possible_if_the_time_is_over(tmp_path: Path, source: Path) -> None:
    messages: list[str] = []
    settings = TrainConfig(out=tmp_path / "model", irregular=True, max_time="1s", epochs=10_000, **SMALL)
    budget = TimeBudget(1.0, lambda: 0.0, spent=2.0)
    output = train_irregular([source], settings, budget=budget, on_message=messages.append)
    assert "too short" in messages[0]
    assert output.training_result.steps == 1
    assert len(output.calibration.scores) == 19, "all that the table has, because 99 are the least"
    assert "few_steps" in [warning["code"] for warning in output.summary["warnings"]]


def test_windows_are_records(tmp_path: Path) -> None:
    columns = fleet(np.random.default_rng(1))
    columns["device"] = columns.pop("record")
    table = write(tmp_path / "t.parquet", {name: pa.array(values) for name, values in columns.items()})
    output = run(table, tmp_path / "model", window="30m", epochs=1)
    assert output.data.schema.window is not None
    assert output.data.schema.window.width == 1800 * 10**6
    assert model_store.read(tmp_path / "model").schema.window == output.data.schema.window


@pytest.fixture
def table(tmp_path: Path) -> IrregularTable:
    return prepared_irregular(tmp_path, fleet(np.random.default_rng(3)))


def test_calibration_through_the_engine_gives_the_scores_of_the_blocks(tmp_path: Path, table: IrregularTable) -> None:
    examples = divided(tmp_path, table)
    torch.manual_seed(0)
    model = DEformer(table.schema, replace(CONFIG, context_recent=5, context_block=8)).eval()
    assert model.process is not None
    fit_process(model.process, examples, 0)
    rows = table.select_rows(Split.CALIBRATION)
    actual = score_irregular_records(model, table, rows, batch_size=5)
    for row, statistic in zip(rows.tolist(), actual.tolist(), strict=True):
        state = PrefixState.initial(1)
        for index in np.flatnonzero(examples.blocks.records == row):
            batch = examples.gather(np.array([index]), torch.Generator().manual_seed(0))
            values = torch.from_numpy(table.values[batch.readings])
            with torch.inference_mode():
                log_p = model.conditionals(batch.features, values, ages=batch.ages).score(values)[0].double().numpy()
            is_target = batch.weights.numpy() > 0
            _, state = advance_prefix_state(state, log_p, is_target)
        assert statistic == pytest.approx(state.max_statistic[0], rel=1e-3, abs=1e-3)
    stopped = score_irregular_records(model, table, rows, 5, should_continue=lambda num_done: num_done < 10)
    assert np.array_equal(stopped, actual[:10])
    blocks = examples.select(Split.CALIBRATION)
    means = average_neg_log_p(model, examples, blocks, 16).average_neg_log_p_by_feature(table.schema.names)
    assert set(means) == {"a", "b", "state"}
    assert all(0.3 < mean < 3.0 for mean in means.values())


def test_scale_of_cumulative_sums_is_fitted_to_the_scores_of_the_engine(tmp_path: Path) -> None:
    """The sums of the records, from which the scale is fitted, are those that a stream would have."""
    # None of these records has a reading at the mode of its density, where p-values in float32 are less precise.
    table = prepared_irregular(tmp_path, fleet(np.random.default_rng(2)), calibration_share=0.2)
    examples = divided(tmp_path, table)
    torch.manual_seed(0)
    size = {"d_model": 64, "heads": 2, "feedforward": 64}  # which the compiled kernels support
    model = DEformer(table.schema, replace(CONFIG, context_recent=5, context_block=8, **size)).eval()
    assert is_supported(model)
    assert model.process is not None
    fit_process(model.process, examples, 0)
    rows = np.random.default_rng(0).permutation(table.select_rows(Split.TRAIN))[:40]
    distributions = SensorDistributions.fit(table, rows)
    marginals = distributions.marginals
    scale = fit_cusum_scale(model, examples, rows, distributions, 7)
    assert scale.num_sensors == 3
    assert (scale.slopes < 1.0).any()  # an untrained model is wrong, so normal records have large sums
    assert scale.marginals is not None
    is_linear = table.schema.is_linear
    assert is_linear.any()
    assert ((scale.marginals.num_readings >= 100) == is_linear).all()  # labels have no cells
    assert scale.steps is not None
    assert ((scale.steps.num_steps > 0) == is_linear).all()
    with attached_kernels(model) as kernels:
        assert kernels is not None
        readings = score_records(kernels, model, examples, rows, marginals, 7)
    reference = score_records(None, model, examples, rows, marginals, 7)  # PyTorch computes the same
    for name in ("log_p", "log_p_others", "log_masses"):
        np.testing.assert_allclose(getattr(readings, name), getattr(reference, name), rtol=1e-3, atol=1e-3)
    assert not np.array_equal(readings.log_p, reference.log_p)  # rounding errors differ
    assert readings.is_counted.sum(1).tolist() == table.num_readings[rows].tolist()
    previous = find_previous_values(create_states(len(rows), 3), readings.codes, readings.values, readings.is_counted)
    log_p_step = scale.steps.compute_log_p(readings.codes, readings.values, previous)
    sums = advance_sums(create_states(len(rows), 3), replace(readings, log_p_step=log_p_step))
    statistics = np.where(readings.is_counted, compute_statistics(scale, readings.codes, *sums), 0.0)
    actual = score_irregular_records(model, table, rows, 5, scale)
    np.testing.assert_allclose(actual, statistics.max(1), rtol=1e-3, atol=1e-3)
    assert len(np.unique(actual.round(3))) > 15


def test_chunks_change_no_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: IrregularTable) -> None:
    monkeypatch.setattr(gaussian_process, "STEPS_PER_ROUND", 75)  # a prior that is hardly fitted gives small sums
    examples = divided(tmp_path, table)
    torch.manual_seed(0)
    model = DEformer(table.schema, replace(CONFIG, context_recent=5, context_block=8)).eval()
    assert model.process is not None
    fit_process(model.process, examples, 0)
    rows = np.random.default_rng(0).permutation(len(table.split))[:12]
    distributions = SensorDistributions.fit(table, rows)
    whole = find_largest_sums(None, model, examples, rows, distributions, 4)
    monkeypatch.setattr(cusum_scale, "CHUNK_READINGS", 10)  # 16 readings, of two blocks
    chunks = find_largest_sums(None, model, examples, rows, distributions, 4)
    assert whole.record_sums.max() > 1.0
    for name in ("sums", "record_sums", "has_readings"):
        np.testing.assert_allclose(getattr(chunks, name), getattr(whole, name), rtol=1e-4, atol=1e-4)


def test_memory_for_sums_does_not_grow_with_the_longest_record(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    columns = fleet(rng, num_records=40, max_readings=12)
    num_long = 10_000
    values = np.sin(np.arange(num_long) / 50) + 0.1 * rng.normal(size=num_long)
    cells = {
        "record": ["long"] * num_long,
        "feature": ["a", "b"] * (num_long // 2),
        "value": values.astype(str).tolist(),
        "time": (START + np.arange(num_long)).tolist(),
    }
    table = prepared_irregular(tmp_path, {name: [*column, *cells[name]] for name, column in columns.items()})
    examples = divided(tmp_path, table, 5, 256)
    torch.manual_seed(0)
    model = DEformer(table.schema, replace(CONFIG, context_recent=5, context_block=256, neighbors=0)).eval()
    rows = np.append(np.arange(15), 40)
    assert table.num_readings[40] == num_long
    distributions = SensorDistributions.fit(table, rows[:-1])
    tracemalloc.start()
    sums = find_largest_sums(None, model, examples, rows, distributions, 4)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 14 * 2**20  # the arrays of the padded readings of all records would have about 25 MiB
    reporting = [name for name, has in zip(table.schema.names, sums.has_readings[-1].tolist(), strict=True) if has]
    assert sorted(reporting) == ["a", "b"]


def test_evidence_fades_by_default(tmp_path: Path, source: Path) -> None:
    fading = run(source, tmp_path / "fading", epochs=1).calibration
    assert fading.cusum_scale is not None
    stored = model_store.read(tmp_path / "fading").calibration
    assert stored.cusum_scale is not None
    np.testing.assert_array_equal(stored.cusum_scale.slopes, fading.cusum_scale.slopes)
    lasting = run(source, tmp_path / "lasting", epochs=1, evidence="lasting").calibration
    assert lasting.cusum_scale is None
    assert not np.allclose(lasting.scores, fading.scores, rtol=0.01)
    with pytest.raises(ConfigError, match="--evidence needs --irregular"):
        load_settings(TrainConfig, {"out": tmp_path, "evidence": "fading"}, None, "train")


def test_model_for_imputation_has_no_sums_unless_they_are_requested(tmp_path: Path, source: Path) -> None:
    assert run(source, tmp_path / "default", arrival_share=0.0, epochs=1).calibration.cusum_scale is None
    requested = run(source, tmp_path / "sums", arrival_share=0.0, epochs=1, evidence="fading")
    assert requested.calibration.cusum_scale is not None


@pytest.mark.parametrize(("minimum", "part"), [(5, Split.VALIDATION), (50, Split.TRAIN)])
def test_scale_is_fitted_to_records_that_the_network_has_not_learnt_if_there_are_enough(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, minimum: int, part: Split
) -> None:
    fitted: list[np.ndarray[Any, Any]] = []

    def fit(model: object, examples: object, rows: np.ndarray[Any, Any], *others: Any) -> CusumScale:
        fitted.append(rows)
        return fit_cusum_scale(model, examples, rows, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(irregular_job, "MIN_HELD_OUT_RECORDS", minimum)
    monkeypatch.setattr(irregular_job, "fit_cusum_scale", fit)
    output = run(source, tmp_path / "model", epochs=1)
    assert sorted(fitted[0].tolist()) == output.data.select_rows(part).tolist()


@pytest.mark.parametrize(
    "option",
    [
        {"slots": 2, "window": "60s"},
        {"per_slot": "mean", "window": "60s"},
        {"ties": "hold"},
        {"order": "random"},
        {"folds": 3},
        {"contamination": 0.1},
        {"init_from": "old"},
        {"layout": "wide"},
    ],
)
def test_options_without_meaning_are_refused(tmp_path: Path, option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="irregular cannot be combined with"):
        load_settings(TrainConfig, {"out": tmp_path, "irregular": True, **option}, None, "train")


def test_hyperparameters_need_irregular_readings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="context_block needs --irregular"):
        load_settings(TrainConfig, {"out": tmp_path, "context_block": 8}, None, "train")


def test_several_processes_are_refused(tmp_path: Path, source: Path) -> None:
    settings = TrainConfig(out=tmp_path / "model", irregular=True)
    with pytest.raises(ConfigError, match="one process"):
        train_irregular([source], settings, ranks=Ranks(0, 2))


def test_command_trains_and_previews(tmp_path: Path, source: Path) -> None:
    arguments = [str(source), "--layout", "long", "--irregular"]
    result = CliRunner().invoke(command, [*arguments, "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "dry run: 3 features" in result.output
    config = tmp_path / "config.toml"
    lines = [f"{name} = {list(value) if isinstance(value, tuple) else value}" for name, value in SMALL.items()]
    config.write_text("[train]\n" + "\n".join(lines) + "\n")
    out = ["--out", str(tmp_path / "model"), "--config", str(config), "--epochs", "1"]
    result = CliRunner().invoke(command, [*arguments, *out])
    assert result.exit_code == 0, result.output
    assert "nats a reading (sensor alone" in result.output


class Clock:
    """A clock that stands still unless work is simulated."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def plan_job(
    tmp_path: Path, source: Path, clock: Clock, messages: list[str] | None = None, **options: Any
) -> tuple[Any, TrainingRun]:
    """Return a planned job with a limit of 1,000 seconds."""
    (tmp_path / "work").mkdir()
    settings = TrainConfig(out=tmp_path / "model", irregular=True, **options)
    on_message = (list[str]() if messages is None else messages).append
    job = irregular_job._Job(settings, tmp_path / "work", TimeBudget(1000.0, clock), on_message)
    job.prepare([source])
    return job, job.plan()


def test_reserve_is_the_time_of_the_work_itself(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The costs of all phases are those of the functions that they call, whatever computes the scores."""
    clock = Clock()

    def simulate(name: str, seconds: float) -> None:
        real = getattr(irregular_job, name)

        def work(*arguments: Any, **options: Any) -> Any:
            rows = next(a for a in arguments if isinstance(a, np.ndarray))
            clock.now += seconds * len(rows)
            return real(*arguments, **options)

        monkeypatch.setattr(irregular_job, name, work)

    simulate("score_irregular_records", 0.7)
    simulate("find_largest_sums", 0.3)
    simulate("iterate_predictions", 0.02)
    simulate("average_neg_log_p", 0.1)
    job, _ = plan_job(tmp_path, source, clock, preset="tiny", **SMALL)
    assert job.costs.calibration == pytest.approx(1.1 * 0.7)
    assert job.costs.ranking == pytest.approx(1.1 * 0.3)
    assert job.costs.held_out == pytest.approx(1.1 * irregular_job.BLOCKS_PER_PASS * (0.02 + 0.2 * 0.1))
    expected = 19 * 0.7 + 91 * 0.3  # calibration and training records, of which 10 are for validation
    reserve = job.compute_costs().after - job.costs.fixed - job.maximum.held_out_passes * job.costs.held_out
    assert reserve == pytest.approx(1.1 * expected)


def test_a_short_load_while_costs_are_measured_does_not_shorten_training(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, slowness = Clock(), 10.0

    def work(model: DEformer, table: IrregularTable, rows: np.ndarray[Any, Any]) -> None:
        clock.now += slowness * 0.2 * len(rows)

    monkeypatch.setattr(irregular_job, "score_irregular_records", work)
    job, run = plan_job(tmp_path, source, clock, preset="tiny", epochs=10_000, **SMALL)
    reserve = job.compute_costs().after
    slowness = 1.0
    again = [job.measure_costs_again(run.averaged_model).after for _ in range(3)]
    assert max(again) < reserve - 24 * 1.5  # seconds of 24 calibration records
    slowness = 10.0
    assert job.measure_costs_again(run.averaged_model).after == again[-1]  # a single measurement does not count
    assert job.measure_costs_again(run.averaged_model).after == pytest.approx(reserve)  # lasting load does


def test_a_cost_is_the_smaller_one_of_two_measurements(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, num_calls = Clock(), 0

    def work(model: DEformer, table: IrregularTable, rows: np.ndarray[Any, Any]) -> None:
        nonlocal num_calls
        num_calls += 1
        clock.now += (50.0 if num_calls == 2 else 0.6) * len(rows)  # the first call is the warm-up

    monkeypatch.setattr(irregular_job, "score_irregular_records", work)
    job, _ = plan_job(tmp_path, source, clock, preset="tiny", **SMALL)
    assert num_calls == 3
    assert job.costs.calibration == pytest.approx(1.1 * 0.6)


def test_larger_preset_is_chosen_if_the_smaller_one_would_end_before_the_limit(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = {"small": StepCost(0.0, 1.5 / 32), "tiny": StepCost(0.0, 0.1 / 32)}
    monkeypatch.setattr(irregular_job._Job, "_measure_step", lambda job, run: costs[run.identity["preset"]])
    monkeypatch.setattr(gaussian_process, "STEPS_PER_ROUND", 2)
    job, run = plan_job(tmp_path, source, Clock())
    assert job.settings.preset == run.identity["preset"] == "small"
    assert "tiny would end its training" in job.preset_reason


def take_steps(clock: Clock, fixed: float, per_block: float) -> Callable[[TrainingRun, int], float]:
    """Return a simulated `TrainingRun.measure_step_seconds` for which the clock advances."""

    def measure_step_seconds(run: TrainingRun, num_blocks: int) -> float:
        seconds = fixed + per_block * num_blocks
        clock.now += seconds
        return seconds

    return measure_step_seconds


def test_time_that_is_the_same_for_all_blocks_does_not_count_for_each_of_them(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, a step with one block takes long enough to be a measurement.

    A step with 32 blocks then seemed to take 6.6 s in place of 0.4 s. So preset small had no time for 1,000 steps, and
    batches were reduced.
    """
    clock, messages = Clock(), list[str]()
    monkeypatch.setattr(TrainingRun, "measure_step_seconds", take_steps(clock, 0.2, 0.005))
    monkeypatch.setattr(gaussian_process, "STEPS_PER_ROUND", 2)
    job, run = plan_job(tmp_path, source, clock, messages, epochs=10_000)
    assert (run.identity["preset"], run.recipe.batch) == ("small", 32)
    assert not [line for line in messages if "batch" in line]
    cost = job._measure_step(run)
    assert (cost.fixed, cost.per_record) == (pytest.approx(0.2), pytest.approx(0.005))
    seconds = irregular_job.estimate_training_seconds(
        job.budget, job.costs, job.maximum, irregular_job._estimate_validation_seconds(job.costs)
    )
    measured = irregular_job._MeasuredRun(run, job.settings, cost, job.costs)
    assert job._estimate_steps(measured) == int(irregular_job.STEPS_SHARE * seconds / (0.2 + 32 * 0.005))


@pytest.mark.parametrize("batch", [64, None])
def test_a_reduced_batch_is_reported_above_all_if_the_user_has_set_it(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, batch: int | None
) -> None:
    clock, messages = Clock(), list[str]()
    monkeypatch.setattr(TrainingRun, "measure_step_seconds", take_steps(clock, 0.0, 2.0 if batch is None else 0.12))
    options = {**SMALL, "preset": "tiny", "batch": batch, "epochs": 10_000}
    _, run = plan_job(tmp_path, source, clock, messages, **options)
    (line,) = (line for line in messages if "the batch is reduced" in line)
    reduced = (
        f"the batch is reduced from {batch or 32} to {run.recipe.batch} blocks, so that --max-time allows enough steps"
    )
    expected = f"batch = 64 of the settings is not used: {reduced}; raise --max-time to use it"
    assert line == (reduced if batch is None else expected)
    assert run.recipe.batch < (batch or 32)


@pytest.mark.parametrize(("seconds_per_block", "preset"), [(1e-6, "small"), (1e3, "tiny")])
def test_the_preset_depends_on_the_steps_that_irregular_readings_need(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, seconds_per_block: float, preset: str
) -> None:
    monkeypatch.setattr(irregular_job._Job, "_measure_step", lambda job, run: StepCost(0.0, seconds_per_block))
    monkeypatch.setattr(gaussian_process, "STEPS_PER_ROUND", 2)
    options: dict[str, Any] = {"out": tmp_path / "model", "irregular": True, "epochs": 1000}
    settings = TrainConfig(**options)
    (tmp_path / "work").mkdir()
    job = irregular_job._Job(settings, tmp_path / "work", TimeBudget(1000.0), lambda line: None)
    job.prepare([source])
    job.plan()
    assert job.settings.preset == preset
    if preset == "tiny":
        assert f"at least {MIN_STEPS_OF_LARGER_PRESET}" in job.preset_reason
