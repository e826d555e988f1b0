"""Fit the Gaussian process prior of irregular readings (`model.gaussian_process`) before the network is trained.

The parameters maximise the mean ln p(reading | its neighbors) of random blocks of training records, by Adam. The
density is that which the prior uses: a mixture of the conditional Gaussian of the process and of a wider one for
outliers. The neighbors of a reading depend on the parameters, so they are chosen anew in each round. In a round, the
readings of random blocks are drawn, their neighbors are chosen, and some steps are done with these readings.

The process has few parameters compared with the readings of a table of long records. Unlike the mixture of
`trainer.gaussian_prior`, it therefore needs no cross-fitting.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from deformer_stream.counts import format_count
from deformer_stream.kernels.process_sequences import compile_process
from deformer_stream.model.gaussian_prior import PriorConditional
from deformer_stream.model.gaussian_process import GaussianProcessPrior, Neighbors
from deformer_stream.model.process_conditionals import condition_in_order, is_exact, predict_from_others
from deformer_stream.model.schema import Schema
from deformer_stream.model.time_inputs import find_previous_of_sensor
from trainer.budget import MessageLimiter
from trainer.examples import BlockExamples
from trainer.sampling import create_generator

NUM_ROUNDS, STEPS_PER_ROUND, BATCH_READINGS = 16, 75, 512
"""Number of rounds, steps of Adam in each, and readings of a step."""

BLOCKS_PER_ROUND = 200
"""Number of random blocks whose readings are used in a round."""

BLOCKS_PER_STEP = 8
"""Number of random blocks of a step if the process is exact: if it is conditioned on all readings of a context."""

MAX_EXACT_ROUNDS = 32
"""Number of rounds of the fit of an exact process for imputation."""

EXACT_LEARNING_RATE, EXACT_BETAS = 0.02, (0.9, 0.99)
"""Learning rate of the first step, and decay rates of Adam, for an exact process for imputation."""

MIN_SUBSET_SHARE = 0.15
"""Smallest share of the readings of a block from which each of them is predicted, for imputation."""

LEARNING_RATE = 0.03
"""Learning rate of the first step. It falls linearly to 0."""

SHORT_SCALE = 0.1
"""The shortest time scale of an exact process for imputation in units of `ReadingTimes.resolution`.

It stands for what only simultaneous readings of different sensors have in common.
"""

LONG_SCALE = 1000.0
"""The longest time scale in units of `ReadingTimes.duration`. It stands for what differs from record to record."""

MIN_DIFFERENCES, MIN_STEP_VARIANCE = 20, 1e-3
"""Number of differences of successive readings from which their variance is estimated, and its smallest value."""

MIN_SHARE, MAX_SHARE = 1e-4, 0.5
"""Limits of the probability of the wider Gaussian."""

MIN_FACTOR = 1.5
"""Smallest standard deviation of the wider Gaussian, relative to that of the process."""


@dataclass(frozen=True, slots=True)
class Targets:
    """M readings with the readings on which they are conditioned.

    Attributes:
        features: (M,) feature codes.
        values: (M,) float64 values in normalised units.
        ages: (M,) float64 seconds since the origin of the record.
        neighbors: The readings on which they are conditioned.
    """

    features: Tensor
    values: Tensor
    ages: Tensor
    neighbors: Neighbors

    def __getitem__(self, index: Tensor) -> Targets:
        """Return some of the readings."""
        n = self.neighbors
        neighbors = Neighbors(n.features[index], n.values[index], n.ages[index], n.is_neighbor[index])
        return Targets(self.features[index], self.values[index], self.ages[index], neighbors)


class _Parameters(nn.Module):
    """The parameters of a Gaussian process without bounds, from which its buffers are computed.

    The initial parameters follow from how much successive readings of a sensor differ, so that few steps are enough. A
    part of this variance is noise, a part changes within a record, and the rest changes slowly.

    Args:
        schema: The features, with the time scales of their readings.
        process: The process, for the shapes of its buffers.
        step_variances: (S,) half of the mean squared difference of successive readings of each sensor.
        generator: The source of random numbers.
        has_short_scale: Whether the first time scale is `SHORT_SCALE` and fixed.
    """

    def __init__(
        self,
        schema: Schema,
        process: GaussianProcessPrior,
        step_variances: Tensor,
        generator: torch.Generator,
        has_short_scale: bool = False,
    ) -> None:
        super().__init__()
        times = schema.reading_times
        if times is None:
            raise ValueError("the readings of the schema are not irregular (Schema.reading_times is None)")

        def create(like: Tensor, value: float) -> nn.Parameter:
            return nn.Parameter(torch.full_like(like, value))

        self.means = create(process.means, 0.0)
        num_scales, _, rank = process.factors.shape
        quick, slow = max(1, num_scales - 2), min(2, num_scales)
        variances = (0.5 * step_variances / quick).repeat(num_scales, 1)  # of the scales within a record
        variances[-slow:] = (1.0 - step_variances).clamp(min=0.1) / slow
        deviations = (0.7 * variances).sqrt()
        random = torch.randn(process.factors.shape, generator=generator, dtype=torch.float64)
        self.factors = nn.Parameter(random * (0.3 * variances / max(rank, 1)).sqrt().unsqueeze(-1))
        self.log_deviations = nn.Parameter(deviations.log())
        self.log_noise = nn.Parameter(0.5 * (0.5 * step_variances).log())
        # From the resolution to a third of the duration; the last scale is longer than any record, and fixed.
        has_short_scale = has_short_scale and num_scales > 1
        num_fitted = len(process.scales) - 1 - has_short_scale
        duration, resolution = times.duration / 1e6, times.resolution / 1e6
        spread = np.geomspace(resolution, max(duration / 3.0, resolution), num_fitted) if num_fitted else np.empty(0)
        self.log_scales = nn.Parameter(torch.from_numpy(np.log(spread)))
        self.short_scale = torch.full((int(has_short_scale),), SHORT_SCALE * resolution, dtype=torch.float64)
        self.long_scale = torch.tensor([LONG_SCALE * duration], dtype=torch.float64)
        self.share_logits = create(process.outlier_share, math.log(0.05 / 0.45))
        self.log_excess = create(process.outlier_factor, math.log(3.0 - MIN_FACTOR))

    def fill(self, process: GaussianProcessPrior) -> None:
        """Set the buffers of the process, which are then differentiable functions of the parameters.

        If an `nn.Parameter` is assigned to the name of a buffer, the module makes it its own parameter, which training
        would then change. Copies are differentiable as well, and stay buffers.
        """
        process.means, process.factors = self.means.clone(), self.factors.clone()
        process.deviations, process.noise = self.log_deviations.exp(), self.log_noise.exp()
        process.scales = torch.cat([self.short_scale, self.log_scales.exp(), self.long_scale])
        process.outlier_share = MIN_SHARE + (MAX_SHARE - MIN_SHARE) * self.share_logits.sigmoid()
        process.outlier_factor = MIN_FACTOR + self.log_excess.exp()


def fit_process(
    process: GaussianProcessPrior,
    examples: BlockExamples,
    seed: int,
    seconds: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
    on_progress: Callable[[float], None] = lambda nll: None,
    on_message: Callable[[str], None] = lambda line: None,
) -> int:
    """Fit a Gaussian process to the training records, in place.

    The fit ends if a loss or a gradient is not finite, or if a covariance matrix has no Cholesky factor. It returns the
    last parameters before that.

    Args:
        process: The process. Its parameters before the call have no effect.
        examples: The blocks of the records.
        seed: Seed of the initial parameters and of the choice of readings.
        seconds: Seconds that the fit may take. Fewer rounds are made if the time is short, but at least one step.
        clock: A function that returns the current time in seconds.
        on_progress: Called after each round with the mean −ln p of its readings in nats.
        on_message: Called with a line of text for the user: about the progress, at most every `PROGRESS_SECONDS`, and
            if the fit ends because of numerical problems.

    Returns:
        The number of rounds that were made.
    """
    num_threads = torch.get_num_threads()
    # The matrices are small: threads that share an operation would mainly wait for each other. So each of them computes
    # other blocks.
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(num_threads, "process-fit") as threads:
            return _run_rounds(process, examples, seed, seconds, clock, on_progress, on_message, threads)
    finally:
        torch.set_num_threads(num_threads)


def _run_rounds(
    process: GaussianProcessPrior,
    examples: BlockExamples,
    seed: int,
    seconds: float,
    clock: Callable[[], float],
    on_progress: Callable[[float], None],
    on_message: Callable[[str], None],
    threads: ThreadPoolExecutor,
) -> int:
    """Fit the process as `fit_process` does, with the same arguments and result; `threads` compute blocks."""
    schema = examples.table.schema
    generator = create_generator(seed, 0x6B)
    is_exact_imputation = is_for_imputation(process, examples)
    step_variances = estimate_step_variances(examples, generator)
    parameters = _Parameters(schema, process, step_variances, generator, is_exact_imputation)
    learning_rate, betas, max_rounds = LEARNING_RATE, (0.9, 0.999), NUM_ROUNDS
    if is_exact_imputation:
        learning_rate, betas, max_rounds = EXACT_LEARNING_RATE, EXACT_BETAS, MAX_EXACT_ROUNDS
    optimizer = torch.optim.Adam(parameters.parameters(), lr=learning_rate, betas=betas)
    started = clock()
    messages = MessageLimiter(on_message, started)
    num_rounds, step = 0, 0
    compute_loss: Callable[[], Tensor] | None = None
    total_steps = max_rounds * STEPS_PER_ROUND
    # The last parameters whose loss and gradient are finite, which replace those of a step that has failed.
    good_parameters = _copy_parameters(parameters)
    has_failed = False
    for round_index in range(max_rounds):
        generator = create_generator(seed, 0x6B, 1 + round_index)
        with torch.no_grad():
            parameters.fill(process)
            compute_loss = _prepare_loss(process, examples, generator, threads)
        if compute_loss is None:
            break
        losses: list[float] = []
        for _ in range(STEPS_PER_ROUND):
            # The first step is done in any case, because the process would have its initial parameters otherwise.
            now = clock()
            progress = max(step / total_steps, (now - started) / max(seconds, 1e-9)) if step else 0.0
            if progress >= 1.0:
                break
            if losses:
                messages.pass_on(now, partial(_describe_progress, progress, losses[-1]))
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * (1.0 - progress)
            parameters.fill(process)
            optimizer.zero_grad()
            loss = _compute_gradient(parameters, compute_loss)
            if loss is None:
                has_failed = True
                break
            good_parameters = _copy_parameters(parameters)
            optimizer.step()
            losses.append(loss)
            step += 1
        num_rounds += 1
        if losses:
            on_progress(float(np.mean(losses)))
        if has_failed or clock() - started > seconds:
            break
    if compute_loss is not None and not has_failed:
        optimizer.zero_grad()
        parameters.fill(process)
        has_failed = _compute_gradient(parameters, compute_loss) is None  # of the last step
    if has_failed:
        parameters.load_state_dict(good_parameters)
        on_message(
            f"the loss of the Gaussian process prior was not finite after {format_count(step, 'step')}: its parameters "
            "are those of the step before"
        )
    with torch.no_grad():
        parameters.fill(process)
        for name, buffer in list(process.named_buffers()):
            setattr(process, name, buffer.detach().clone())
    return num_rounds


def _copy_parameters(parameters: nn.Module) -> dict[str, Tensor]:
    """Return copies of the parameters of a module by name."""
    return {name: tensor.clone() for name, tensor in parameters.state_dict().items()}


def _compute_gradient(parameters: nn.Module, compute_loss: Callable[[], Tensor]) -> float | None:
    """Compute a loss and the gradients of the parameters; return the loss, None if any of these is not finite.

    Args:
        parameters: The parameters, whose gradients are empty.
        compute_loss: Returns the loss. It may raise `torch.linalg.LinAlgError`.
    """
    try:
        loss = compute_loss()
        torch.autograd.backward(loss)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # the stubs of torch do not export it
        return None
    gradients = [parameter.grad for parameter in parameters.parameters() if parameter.grad is not None]
    is_finite = all(bool(torch.isfinite(tensor).all()) for tensor in (loss, *gradients))
    return float(loss.detach()) if is_finite else None


def _describe_progress(progress: float, loss: float) -> str:
    """Return a message about the progress of the fit, from 0 to 1, and the last loss."""
    return f"fitting the Gaussian process prior: {progress:.0%} done, −ln p is {loss:.3f} nats"


def _prepare_loss(
    process: GaussianProcessPrior, examples: BlockExamples, generator: torch.Generator, threads: ThreadPoolExecutor
) -> Callable[[], Tensor] | None:
    """Return a function that computes the loss of random readings in each step of a round.

    The loss is the mean −ln p of the readings. If the process has as many neighbors as an example has readings, each
    reading is conditioned on all readings before it (`model.process_conditionals`). A step then uses complete examples.
    If the model is for imputation, each reading of a random subset of the block is conditioned on all others. The
    targets then have contexts of the size that imputation has. Otherwise the neighbors are chosen for the whole round.

    Args:
        process: The process.
        examples: The blocks of the records.
        generator: The source of random numbers.
        threads: Compute the blocks of a step.

    Returns:
        The function, None if there are no readings.
    """
    if not _fits_complete_examples(process, examples):
        targets = draw_targets(process, examples, BLOCKS_PER_ROUND, generator)

        def compute_loss() -> Tensor:
            chosen = torch.randint(len(targets.features), (BATCH_READINGS,), generator=generator)
            return -compute_log_prob(process, targets[chosen]).mean()

        return compute_loss if len(targets.features) else None

    arrival_share = choose_arrival_share(examples)

    def compute_exact_loss() -> Tensor:
        drawn = torch.randint(len(examples.train_indexes), (BLOCKS_PER_STEP,), generator=generator).numpy()
        batch = examples.gather(examples.train_indexes[drawn], generator, arrival_share=arrival_share)
        if arrival_share > 0.0:
            prior = condition_in_order(process, batch.features, batch.values.double(), batch.ages)
            return _compute_mean_nll(prior, batch.values, batch.weights)
        shares = MIN_SUBSET_SHARE + (1.0 - MIN_SUBSET_SHARE) * torch.rand(BLOCKS_PER_STEP, generator=generator)
        num_used = (shares * (batch.features >= 0).sum(1)).ceil().long().tolist()

        def compute_block_loss(i: int) -> Tensor:
            # One block alone: the work grows with the square of the width, so that padding would be costly.
            # The readings are in random order, so the first ones are a random subset.
            readings_of_block = slice(i, i + 1), slice(num_used[i])
            values = batch.values[readings_of_block].double()
            prior = predict_from_others(
                process, batch.features[readings_of_block], values, batch.ages[readings_of_block]
            )
            nll: Tensor = num_used[i] * _compute_mean_nll(prior, values, torch.ones_like(values))
            return nll

        losses = [partial(compute_block_loss, i) for i in range(BLOCKS_PER_STEP)]
        mean: Tensor = _sum_in_threads(process, losses, threads) / max(sum(num_used), 1)
        return mean

    return compute_exact_loss


def _sum_in_threads(
    process: GaussianProcessPrior, losses: Sequence[Callable[[], Tensor]], threads: ThreadPoolExecutor
) -> Tensor:
    """Return the sum of losses that depend on the buffers of a process, differentiable by these buffers.

    A thread computes a loss with its gradient. The result does not depend on the number of threads.

    Args:
        process: The process. Its numeric buffers are replaced by copies while this function runs.
        losses: Functions that return the losses.
        threads: Compute the losses.
    """
    buffers = {name: buffer for name, buffer in process.named_buffers() if buffer.is_floating_point()}
    copies = {name: buffer.detach().requires_grad_() for name, buffer in buffers.items()}

    def differentiate(compute_loss: Callable[[], Tensor]) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        loss = compute_loss()
        return loss.detach(), torch.autograd.grad(loss, list(copies.values()), allow_unused=True)

    def replace_buffers(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            setattr(process, name, tensor)

    replace_buffers(copies)
    try:
        futures = [threads.submit(differentiate, compute_loss) for compute_loss in losses]
        wait(futures)  # also if one of them fails: the others read the buffers
        results = [future.result() for future in futures]
    finally:
        replace_buffers(buffers)
    total = torch.stack([loss for loss, _ in results]).sum()
    for i, buffer in enumerate(buffers.values()):
        gradients = [part for _, parts in results if (part := parts[i]) is not None]
        if gradients:
            # It adds 0 to the sum, and the gradient to its derivative by the buffer.
            total = total + ((buffer - buffer.detach()) * torch.stack(gradients).sum(0)).sum()
    return total


def _compute_mean_nll(prior: PriorConditional, values: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean of −ln p of values, (N, L), of which the prior contains some."""
    z = (values.unsqueeze(-1) - prior.means) / prior.scales
    log_p = torch.logsumexp(prior.log_weights - prior.scales.log() - 0.5 * z.square(), -1)
    weights = weights * prior.has_prior
    nll: Tensor = -(log_p * weights).sum() / weights.sum().clamp(min=1e-9) + 0.5 * math.log(2.0 * math.pi)
    return nll


def attach_compiled_process(process: GaussianProcessPrior, schema: Schema) -> None:
    """Let compiled code compute the conditionals of a process that will not change any more, if there is any.

    Args:
        process: The process, on a CPU.
        schema: Its features.
    """
    arrays = {name: tensor.numpy() for name, tensor in process.named_buffers()}
    process.compiled = compile_process(arrays, schema.is_linear, process.num_neighbors, process.decay)


def is_for_imputation(process: GaussianProcessPrior, examples: BlockExamples) -> bool:
    """Return whether a process is fitted to predict readings from all others, before and after them."""
    return _fits_complete_examples(process, examples) and choose_arrival_share(examples) == 0.0


def _fits_complete_examples(process: GaussianProcessPrior, examples: BlockExamples) -> bool:
    """Return whether the process has as many neighbors as an example has readings."""
    # The examples for the benchmark of imputation have no blocks.
    blocks = getattr(examples, "blocks", None)
    return blocks is not None and is_exact(process, blocks.limit.max_readings(len(examples.table.schema)))


def choose_arrival_share(examples: BlockExamples) -> float:
    """Return the share of the examples in their real order to which the process is fitted.

    A model for imputation learns from random orders only, in which readings have later ones as neighbors, too.
    """
    return 0.0 if examples.arrival_share == 0.0 else 1.0


def estimate_step_variances(examples: BlockExamples, generator: torch.Generator) -> Tensor:
    """Return half of the mean squared difference of successive readings of each sensor, (S,), estimated robustly.

    Args:
        examples: The blocks of the records, of which `BLOCKS_PER_ROUND` are used.
        generator: The source of random numbers.
    """
    chosen = torch.randint(len(examples.train_indexes), (BLOCKS_PER_ROUND,), generator=generator).numpy()
    batch = examples.gather(examples.train_indexes[chosen], generator)
    previous = find_previous_of_sensor(batch.features)
    difference = batch.values - batch.values.gather(1, previous.clamp(min=0))
    has_previous = (previous >= 0) & (batch.features >= 0)
    variances = torch.full((len(examples.table.schema),), 0.5, dtype=torch.float64)
    for code in range(len(variances)):
        differences_of_sensor = difference[has_previous & (batch.features == code)].double()
        if len(differences_of_sensor) >= MIN_DIFFERENCES:
            # The median absolute value of a standard normal variable is 0.6745. Many differences may be 0.
            robust = (differences_of_sensor.abs().median() / 0.6745).square()
            variances[code] = 0.5 * torch.maximum(robust, 0.1 * differences_of_sensor.clamp(-3.0, 3.0).square().mean())
    return variances.clamp(MIN_STEP_VARIANCE, 0.9)


def draw_targets(
    process: GaussianProcessPrior, examples: BlockExamples, num_blocks: int, generator: torch.Generator
) -> Targets:
    """Return the readings of random training blocks with their neighbors.

    Args:
        process: The process, whose parameters decide which readings are neighbors.
        examples: The blocks of the records.
        num_blocks: Number of blocks.
        generator: The source of random numbers.
    """
    chosen = torch.randint(len(examples.train_indexes), (num_blocks,), generator=generator).numpy()
    indexes = examples.train_indexes[chosen]
    arrival_share = choose_arrival_share(examples)
    parts = []
    for start in range(0, num_blocks, 25):  # few blocks at once, because all pairs of their readings are compared
        batch = examples.gather(indexes[start : start + 25], generator, arrival_share=arrival_share)
        parts.append(find_targets(process, batch.features, batch.values, batch.ages, batch.weights > 0))
    return _concatenate(parts)


def find_targets(
    process: GaussianProcessPrior, features: Tensor, values: Tensor, ages: Tensor, is_target: Tensor
) -> Targets:
    """Return the readings of contexts that the process predicts, with their neighbors.

    Args:
        process: The process.
        features: (N, L) feature codes, −1 for padding.
        values: (N, L) normalised values.
        ages: (N, L) float64 seconds since the origin of the record.
        is_target: (N, L) bool, which readings are predicted. Those that the process does not contain are left out.
    """
    has_prior = process.is_linear[features]
    codes = features.clamp(min=0)
    index, is_neighbor = process.choose_neighbors(codes, ages, has_prior)
    row, place = torch.nonzero(is_target & has_prior, as_tuple=True)
    near = index[row, place]
    of_row = row.unsqueeze(1)
    values = values.double()
    neighbors = Neighbors(codes[of_row, near], values[of_row, near], ages[of_row, near], is_neighbor[row, place])
    # All targets must have the same number K of neighbors; a short context has fewer.
    return Targets(codes[row, place], values[row, place], ages[row, place], _pad(neighbors, process.num_neighbors))


def _pad(neighbors: Neighbors, num_neighbors: int) -> Neighbors:
    """Return the neighbors padded to K for each reading."""
    missing = num_neighbors - neighbors.features.shape[1]
    if missing <= 0:
        return neighbors
    return Neighbors(
        nn.functional.pad(neighbors.features, (0, missing)),
        nn.functional.pad(neighbors.values, (0, missing)),
        nn.functional.pad(neighbors.ages, (0, missing)),
        nn.functional.pad(neighbors.is_neighbor, (0, missing)),
    )


def _concatenate(parts: list[Targets]) -> Targets:
    """Return the readings of several parts."""
    neighbors = Neighbors(
        torch.cat([part.neighbors.features for part in parts]),
        torch.cat([part.neighbors.values for part in parts]),
        torch.cat([part.neighbors.ages for part in parts]),
        torch.cat([part.neighbors.is_neighbor for part in parts]),
    )
    return Targets(
        torch.cat([part.features for part in parts]),
        torch.cat([part.values for part in parts]),
        torch.cat([part.ages for part in parts]),
        neighbors,
    )


def compute_log_prob(process: GaussianProcessPrior, targets: Targets) -> Tensor:
    """Return ln p of each of M readings given its neighbors, (M,), with the mixture of two Gaussians of the prior."""
    mean, deviation = process.condition(targets.features, targets.ages, targets.neighbors)
    share, factor = process.outlier_share[targets.features], process.outlier_factor[targets.features]
    z = (targets.values - mean) / deviation
    log_peak = -deviation.log() - 0.5 * math.log(2.0 * math.pi)
    usual = torch.log1p(-share) - 0.5 * z.square()
    outlier = share.log() - factor.log() - 0.5 * (z / factor).square()
    return log_peak + torch.logaddexp(usual, outlier)
