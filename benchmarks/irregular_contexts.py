"""Bounded contexts of irregular readings beside full attention, on stays of ICU 2012.

    python -m benchmarks.irregular_contexts --contexts 32/64,full --steps 1500 --folder /tmp/contexts

A reading is predicted from its context (`deformer_stream/model/bounded_context.py`): the earlier readings of its block,
some recent readings before the block, and the last reading of each sensor. With full attention, a record is one block,
so the context is all earlier readings of the record.

One network is trained for each context, on the same stays, for the same number of steps with about the same number of
readings in each, all in their real order. The networks differ in their attention alone: all of them get the predictions
of the same Gaussian process, with its neighbors in contexts of the default size. With --swap, each network is measured
with the contexts of the others, too.

Parameters that are constant in a stay are left out, and so are stays with many readings, because full attention needs
much memory for them. Faults, false alarms and the AUROC for `died` are those of `benchmarks.icu`. NLL is the mean −ln p
of a reading in nats, in the normalised units of the networks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.command import build_parser, describe_machine, format_today, publish_results, run_benchmark
from benchmarks.icu import AUROC_HOURS, CONSTANT_PARAMETERS, DELAYS, HOUR, make_case, read_stays
from benchmarks.irregular_alerts import (
    ALPHAS,
    Case,
    PrefixScores,
    combine_p_values,
    format_auroc,
    format_detections,
    format_false_alarms,
    measure_contender,
)
from benchmarks.irregular_records import Readings
from benchmarks.tables import format_markdown_header, format_markdown_row, get_tables_folder, require_scikit_learn
from deformer_stream.model.bounded_context import ContextLimit
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.gaussian_prior import PriorConditional
from deformer_stream.model.gaussian_process import GaussianProcessPrior
from trainer.budget import TimeBudget
from trainer.data import DataOptions, Split
from trainer.examples import BlockBatch, BlockExamples, Blocks, Ints
from trainer.fit import TrainingRun
from trainer.gaussian_process import fit_process
from trainer.irregular_table import IrregularTable, prepare_irregular_table
from trainer.recipes import choose_irregular_recipe, irregular_model_config
from trainer.sampling import create_generator
from trainer.settings import TrainConfig

Floats = NDArray[np.float64]

POSITIONS = (0, 96, 192, 288, 400)
"""Numbers of earlier readings in the stay at which the classes of the NLL by position begin."""

VALIDATION_READINGS = 8000
"""About how many readings are validated, only to find out whether the training has diverged."""

READINGS_PER_BATCH = 4000
"""About how many readings are scored together."""


@dataclass(frozen=True, slots=True)
class ProcessPredictions:
    """The predictions of a Gaussian process for all M readings of a table.

    Attributes:
        process: The process.
        means: (M,) means in normalised units.
        deviations: (M,) standard deviations in normalised units.
    """

    process: GaussianProcessPrior
    means: NDArray[np.float32]
    deviations: NDArray[np.float32]

    @staticmethod
    def compute(process: GaussianProcessPrior, table: IrregularTable, blocks: Blocks) -> ProcessPredictions:
        """Compute the predictions with the contexts of the given blocks."""
        means, deviations = (np.zeros(len(table.codes), np.float32) for _ in range(2))
        examples = BlockExamples(table, blocks)
        with torch.inference_mode():
            for batch in iterate_batches(examples, np.arange(len(blocks))):
                prior = process(batch.features, get_values(table, batch), batch.ages)
                is_target = batch.weights.numpy() > 0
                chosen = batch.readings[is_target]
                means[chosen] = prior.means[..., 0].numpy()[is_target]
                deviations[chosen] = prior.scales[..., 0].numpy()[is_target]
        return ProcessPredictions(process, means, deviations)

    def select(self, batch: BlockBatch) -> PriorConditional:
        """Return the predictions for the readings of a batch."""
        codes, readings = batch.features.clamp(min=0), np.maximum(batch.readings, 0)
        share, factor = self.process.outlier_share[codes], self.process.outlier_factor[codes]
        log_weights = torch.stack([torch.log1p(-share), share.log()], -1).float()
        deviation = torch.from_numpy(self.deviations[readings])
        means = torch.from_numpy(self.means[readings]).unsqueeze(-1).expand_as(log_weights)
        scales = torch.stack([deviation, factor.float() * deviation], -1)
        return PriorConditional(log_weights, means, scales, self.process.is_linear[batch.features])


class PredictedExamples(BlockExamples):
    """Blocks of a table whose prior is computed beforehand, with neighbors that do not depend on these blocks."""

    predictions: ProcessPredictions

    def compute_loss(self, model: DEformer, batch: BlockBatch, part: slice, is_low_precision: bool) -> Tensor:
        """Return the share of a part in the mean −ln p of a reading given its context."""
        own = batch[part]
        prior = self.predictions.select(own)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_low_precision):
            log_p = model.log_prob(own.features, own.values, prior, ages=own.ages)
        return -(log_p * own.weights).sum() / (len(batch) * self.mean_block_readings)

    def iterate_log_p(self, model: DEformer, indexes: Ints, seed: int, batch_size: int) -> Any:
        """Yield batches of blocks, each with ln p of its readings, (B, L) float64."""
        was_training = model.training
        model.eval()
        for batch in iterate_batches(self, indexes):
            with torch.inference_mode():
                log_p = model.log_prob(batch.features, batch.values, self.predictions.select(batch), ages=batch.ages)
            yield batch, log_p.double().numpy()
        model.train(was_training)


def iterate_batches(examples: BlockExamples, indexes: Ints) -> Iterator[BlockBatch]:
    """Yield blocks with their contexts in their real order, in batches with about the same number of readings."""
    size = max(1, int(READINGS_PER_BATCH / examples.blocks.lengths.mean()))
    for start in range(0, len(indexes), size):
        yield examples.gather(indexes[start : start + size], create_generator(1, start))


def get_values(table: IrregularTable, batch: BlockBatch) -> Tensor:
    """Return the values of a batch without noise, (B, L)."""
    return torch.from_numpy(np.asarray(table.values)[np.maximum(batch.readings, 0)])


@dataclass(frozen=True, slots=True)
class Training:
    """What the networks have in common.

    Attributes:
        table: The training stays.
        predictions: The predictions of the Gaussian process for their readings.
        settings: The options of the training.
        steps: Number of training steps.
        readings_per_step: About how many readings a step has.
        folder: Folder for arrays and checkpoints.
    """

    table: IrregularTable
    predictions: ProcessPredictions
    settings: TrainConfig
    steps: int
    readings_per_step: int
    folder: Path

    @property
    def default_limit(self) -> ContextLimit:
        """The context in which the process chooses neighbors."""
        limit = irregular_model_config(self.settings, len(self.table.schema)).context_limit
        assert limit is not None
        return limit

    def divide(self, table: IrregularTable, limit: ContextLimit) -> Blocks:
        """Divide the records of a table into blocks, whose arrays get a folder of their own."""
        folder = self.folder / f"blocks-{len(list(self.folder.iterdir()))}"
        folder.mkdir()
        return Blocks.divide(table, limit, folder)

    def convert(self, readings: Readings) -> IrregularTable:
        """Return readings as a table with the features of the training."""
        schema = self.table.schema
        codes = np.array([schema.code_by_name[name] for name in readings.sensors])[readings.codes]
        first = readings.times[readings.offsets[:-1]]
        return replace(
            self.table,
            split=np.full(len(readings.records), Split.CALIBRATION, np.uint8),
            codes=codes.astype(np.int16),
            values=schema.normalise(codes, readings.values).astype(np.float32),
            ages=readings.times - first[readings.record_index],
            offsets=readings.offsets,
            origins=np.zeros(len(readings.records), np.int64),
        )


class ContextNetwork:
    """A trained network behind the interface `irregular_alerts.Contender`, measured with one context.

    Args:
        name: The name of the contender.
        model: The trained network.
        limit: The context with which it is measured.
        training: What the networks have in common.
    """

    def __init__(self, name: str, model: DEformer, limit: ContextLimit, training: Training) -> None:
        self.name, self._model, self._limit, self._training = name, model.eval(), limit, training
        self._scores: dict[int, PrefixScores] = {}

    def fit(self, train: Readings) -> None:
        """Do nothing, because the network is trained already."""

    def score(self, readings: Readings) -> PrefixScores:
        """Score the readings, once for each object."""
        if id(readings) not in self._scores:
            self._scores[id(readings)] = self._score(readings)
        return self._scores[id(readings)]

    def _score(self, readings: Readings) -> PrefixScores:
        training = self._training
        table = training.convert(readings)
        process, default_blocks = training.predictions.process, training.divide(table, training.default_limit)
        predictions = ProcessPredictions.compute(process, table, default_blocks)
        examples = BlockExamples(table, training.divide(table, self._limit))
        log_likelihoods, log_p_values = np.full(len(readings), np.nan), np.zeros(len(readings))
        with torch.inference_mode():
            for batch in iterate_batches(examples, np.arange(len(examples.blocks))):
                values = get_values(table, batch)
                prior = predictions.select(batch)
                conditional = self._model.conditionals(batch.features, values, prior, ages=batch.ages)
                is_target = batch.weights.numpy() > 0
                chosen = batch.readings[is_target]
                log_likelihoods[chosen] = conditional.log_prob(values).numpy()[is_target]
                log_p_values[chosen] = conditional.log_p_value(values).numpy()[is_target]
        return PrefixScores(combine_p_values(log_p_values, readings.offsets), log_likelihoods)


def prepare(train: Readings, arguments: argparse.Namespace) -> Training:
    """Convert the training stays, fit the Gaussian process and compute its predictions."""
    folder: Path = arguments.folder
    folder.mkdir(parents=True)
    pq.write_table(train.to_table(), folder / "train.parquet")
    table = prepare_irregular_table([folder / "train.parquet"], DataOptions(), folder)
    settings = TrainConfig.model_validate({"out": folder / "unused", "irregular": True, "preset": arguments.preset})
    model = DEformer(table.schema, irregular_model_config(settings, len(table.schema)))
    limit = model.config.context_limit
    assert model.process is not None
    assert limit is not None
    blocks = Blocks.divide(table, limit, folder)
    fit_process(model.process, BlockExamples(table, blocks), 0)
    predictions = ProcessPredictions.compute(model.process, table, blocks)
    return Training(table, predictions, settings, arguments.steps, arguments.readings_per_step, folder)


def train_network(training: Training, limit: ContextLimit) -> tuple[DEformer, dict[str, Any]]:
    """Return a network that is trained with a context, and figures of its training."""
    table, recipe = training.table, choose_irregular_recipe(training.settings, 1)
    config = irregular_model_config(training.settings, len(table.schema))
    torch.manual_seed(0)
    model = DEformer(table.schema, replace(config, context_recent=limit.recent, context_block=limit.block))
    assert model.process is not None
    model.process.load_state_dict(training.predictions.process.state_dict())
    examples = PredictedExamples(table, training.divide(table, limit), recipe.smoothing, recipe.forget, 1.0)
    examples.predictions = training.predictions
    batch = max(1, round(training.readings_per_step / examples.mean_block_readings))
    folder = training.folder / f"network-{limit.recent}-{limit.block}"
    folder.mkdir()
    run = TrainingRun(examples, model, replace(recipe, batch=batch), 0, folder, TimeBudget(), {})
    run.steps, run.next_validation_progress = training.steps, 1.0  # there is one validation, at the end
    run.validation_rows = run.validation_rows[: max(1, int(VALIDATION_READINGS / examples.mean_block_readings))]
    result = run.run(on_status=lambda status: print_status(status.step, status.train_nll, limit))
    torch.save(result.model.state_dict(), folder / "network.pt")
    figures = {"batch": batch, "best_step": result.best_step, "validation": result.best_validation}
    return result.model, figures


def print_status(step: int, train_nll: float, limit: ContextLimit) -> None:
    """Print the progress of a training run from time to time."""
    if step % 50 == 0:
        print(f"{limit.recent}/{limit.block}: step {step}, training loss {train_nll:.4f}", flush=True)


def compute_nll_by_position(scores: PrefixScores, readings: Readings) -> list[float]:
    """Return the mean −ln p of readings by the number of earlier readings in their stay (`POSITIONS`)."""
    assert scores.log_likelihoods is not None
    position = np.arange(len(readings)) - readings.offsets[readings.record_index]
    group = np.searchsorted(POSITIONS, position, side="right") - 1
    sums = np.bincount(group, -scores.log_likelihoods, len(POSITIONS))
    return [float(x) for x in sums / np.maximum(np.bincount(group, minlength=len(POSITIONS)), 1)]


def measure(contender: ContextNetwork, case: Case, description: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a network with one context."""
    line = {**description, **measure_contender(contender, case)}
    line["nll_by_position"] = compute_nll_by_position(contender.score(case.test), case.test)
    print(json.dumps(line), flush=True)
    return line


def parse_context(text: str, max_readings: int) -> ContextLimit:
    """Return the context that a word such as "32/64" or "full" describes."""
    if text == "full":
        return ContextLimit(0, max_readings)
    recent, block = text.split("/")
    return ContextLimit(int(recent), int(block))


def leave_out(readings: Readings, sensors: Sequence[str]) -> Readings:
    """Return the readings without some sensors."""
    kept = [name for name in readings.sensors if name not in sensors]
    new_code = np.array([kept.index(name) if name in kept else -1 for name in readings.sensors])[readings.codes]
    is_kept = new_code >= 0
    offsets = np.concatenate([[0], np.cumsum(is_kept)])[readings.offsets]
    codes, values, times = new_code[is_kept], readings.values[is_kept], readings.times[is_kept]
    return Readings(tuple(kept), readings.records, offsets, codes, values, times)


def limit_records(case: Case, max_records: int) -> Case:
    """Return the case with at most `max_records` records to calibrate, to test, and abnormal.

    Faults remain in the records that are tested without them, too.
    """

    def select(readings: Readings) -> Readings:
        return readings.select(np.arange(min(max_records, len(readings.records))))

    faulty = {}
    for kind, faults in case.faulty_by_name.items():
        kept = np.flatnonzero(faults.rows < max_records)
        readings = faults.readings.select(kept)
        faulty[kind] = replace(faults, readings=readings, onsets=faults.onsets[kept], rows=faults.rows[kept])
    abnormal = {name: select(readings) for name, readings in case.abnormal_by_name.items()}
    calibration, test = select(case.calibration), select(case.test)
    return replace(case, calibration=calibration, test=test, faulty_by_name=faulty, abnormal_by_name=abnormal)


def format_report(lines: Sequence[dict[str, Any]], conditions: str) -> str:
    """Return the report in Markdown."""
    ends = [*(f"… {end - 1}" for end in POSITIONS[1:]), "or more"]
    titles = [f"{first} {end}" for first, end in zip(POSITIONS, ends, strict=True)]
    positions = format_markdown_header(["context", *titles])
    for line in lines:
        positions.append(format_markdown_row([line["contender"], *(f"{x:.3f}" for x in line["nll_by_position"])]))
    sections = [f"# Contexts of irregular readings (ICU 2012)\n\n{conditions}", format_false_alarms(lines)]
    sections.append("## NLL by the number of earlier readings\n\n" + "\n".join(positions))
    for alpha in ALPHAS:
        title = f"## Detections within hours after the onset of a fault, α = {alpha:.0%}"
        sections.append(f"{title}\n\n{format_detections(lines, alpha, DELAYS, HOUR, 'h')}")
    sections.append(f"## AUROC for `died`\n\n{format_auroc(lines, [f'{hours} h' for hours in AUROC_HOURS])}")
    return "\n\n".join(sections) + "\n"


def run(arguments: argparse.Namespace) -> None:
    """Train a network for each context, measure the networks and publish the results."""
    require_scikit_learn()
    stays, has_survived = read_stays(get_tables_folder().parent / "icu2012")
    stays = leave_out(stays, CONSTANT_PARAMETERS)
    num_readings = np.diff(stays.offsets)
    rows = np.flatnonzero((num_readings > 0) & (num_readings <= arguments.max_readings))
    case = limit_records(make_case(stays.select(rows), has_survived[rows], 0), arguments.records)
    train = case.train.select(np.arange(min(arguments.train_records, len(case.train.records))))
    case = replace(case, train=train, left_out=())
    training = prepare(case.train, arguments)
    limits = {text: parse_context(text, arguments.max_readings) for text in arguments.contexts.split(",")}
    lines = []
    for trained, limit in limits.items():
        model, figures = train_network(training, limit)
        for measured in limits if arguments.swap else [trained]:
            name = trained if measured == trained else f"{trained}, measured with {measured}"
            description = {"benchmark": "irregular_contexts", "steps": arguments.steps, **figures}
            lines.append(measure(ContextNetwork(name, model, limits[measured], training), case, description))
    conditions = (
        f"{describe_machine()}, {format_today()}; stays with at most {arguments.max_readings} readings: "
        f"{len(case.train.records)} train, {len(case.calibration.records)} calibrate, {len(case.test.records)} are "
        f"tested. Preset {arguments.preset}, {arguments.steps} steps."
    )
    publish_results("irregular_contexts", format_report(lines, conditions), lines)


def main() -> None:
    """Run the program."""
    options = build_parser(__doc__, tables="")
    options.add_argument("--contexts", default="32/64,full", help="contexts: RECENT/BLOCK or full, separated by commas")
    options.add_argument("--steps", type=int, default=1500, help="training steps of each network")
    options.add_argument("--readings-per-step", type=int, default=2048, help="about how many readings a step has")
    options.add_argument("--preset", default="tiny", help="size of the networks")
    options.add_argument("--max-readings", type=int, default=600, help="leave out stays with more readings")
    options.add_argument("--train-records", type=int, default=2000, help="largest number of stays for training")
    options.add_argument("--records", type=int, default=300, help="largest number of other stays of each kind")
    options.add_argument("--swap", action="store_true", help="measure each network with all contexts")
    options.add_argument("--folder", type=Path, required=True, help="new folder for arrays and checkpoints")
    run_benchmark("irregular_contexts", run, options)


if __name__ == "__main__":
    main()
