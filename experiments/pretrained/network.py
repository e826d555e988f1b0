"""A network that predicts the readings of a table it was not trained on, from the guide and some reference rows.

For a row x with a random order of its features, the network gives the density of each value given the earlier ones. It
is a mixture with these components:

- the guide's mixture of Gaussians, conditioned exactly (`guide`);
- two copies of the single Gaussian's conditional with learnt widths;
- for each of H heads, a Gaussian with the mean and the deviation of the reference rows that resemble x;
- for each head, a kernel density: one narrow Gaussian at the value of each reference row, weighted by resemblance;
- for each head, the guide's density times a correction. The correction is the density of the normal scores of similar
  reference rows under the guide, divided by the standard normal density, which they would have under a perfect guide.

A head's resemblance of x and a reference row r is a softmax over the rows of −Σ_i Σ_b w_b(i, j) φ_b(x_i, r_i) over the
earlier features i, where φ_b are six distances of two values, and the weights w_b(i, j) ≥ 0 are outputs of a network
that sees statistics of the pair of features i, j in the reference rows: correlation, partial correlation, mutual
information. Two terms with the distance under the single Gaussian are added. The centre of a kernel is the value r_j,
or r_j + m(x) − m(r), where m is the conditional mean of the single Gaussian, or a value between both.

How well each component predicts is tested in context: on support rows, which are reference rows whose own copy is
hidden and to which the guide was not fitted. A few rounds of expectation-maximisation give the weights of the
components that suit the table and each feature. A network corrects these weights for each value.

Nothing depends on the names or positions of features or on the order of the reference rows.

Shapes: B rows, D features, R reference rows, H heads, C = 3 + 3H components, K Gaussians of the guide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from experiments.pretrained.guide import GuideTensors

NUM_DISTANCES = 6
"""Number of distances φ_b of two values."""

NUM_PAIR_STATISTICS, NUM_STATISTICS, NUM_POSITION_INPUTS = 16, 12, 4
"""Numbers of inputs that describe a pair of features, a feature, and the number of earlier values."""

NUM_BINS = 8
"""Bins of a feature for its mutual information with others."""

MIN_WIDTH = 0.02
"""Smallest standard deviation of a kernel, in normalised units.

It is that of the noise with which the product trains (`trainer.fit.Recipe.smoothing`). So a value that many rows share
does not get a higher density than the product can learn.
"""

LOG_2PI = math.log(2 * math.pi)


@dataclass(frozen=True, slots=True)
class Context:
    """What the network sees of a table.

    Attributes:
        references: (R, D) reference rows in normalised units.
        quantum_widths: (D,) resolution of each feature, 0 if it has none.
        num_rows: Number of rows to which the guide was fitted.
        mixture: The guide's mixture, fitted to all rows.
        gaussian: The single Gaussian, fitted to all rows.
        support: (S, D) rows of the fold.
        support_index: (S,) index of each support row among the reference rows, −1 if it is none.
        mixture_without_fold: The mixture fitted without the fold.
        gaussian_without_fold: The single Gaussian fitted without the fold.
    """

    references: Tensor
    quantum_widths: Tensor
    num_rows: int
    mixture: GuideTensors
    gaussian: GuideTensors
    support: Tensor
    support_index: Tensor
    mixture_without_fold: GuideTensors
    gaussian_without_fold: GuideTensors


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of the reference rows.

    Attributes:
        sorted_columns: (D, R) values of each feature, ascending.
        ranks: (D, R) rank of each reference value in (0, 1); equal values have nearly equal ranks.
        spacings: (D, R) distance of each reference value to its neighbours of the same feature.
        by_feature: (D, NUM_STATISTICS) inputs that describe each feature.
        by_pair: (D, D, NUM_PAIR_STATISTICS) inputs that describe how an earlier feature (first) predicts one (second).
    """

    sorted_columns: Tensor
    ranks: Tensor
    spacings: Tensor
    by_feature: Tensor
    by_pair: Tensor


def rank_values(sorted_columns: Tensor, values: Tensor) -> Tensor:
    """Return the rank in (0, 1) of values (D, M) among the sorted reference values (D, R) of their features."""
    left = torch.searchsorted(sorted_columns, values, side="left")
    right = torch.searchsorted(sorted_columns, values, side="right")
    return ((left + right).float() + 1.0) / (2.0 * sorted_columns.shape[1] + 2.0)


def compute_statistics(context: Context) -> Statistics:
    """Return the statistics of a table that the network sees."""
    references = context.references
    columns = references.T.contiguous()  # (D, R)
    num_features, num_references = columns.shape
    sorted_columns, order = columns.sort(1)
    half = max(2, num_references // 32)
    index = torch.arange(num_references)
    upper, lower = (index + half).clamp(max=num_references - 1), (index - half).clamp(min=0)
    sorted_spacings = (sorted_columns[:, upper] - sorted_columns[:, lower]) / (upper - lower) * half
    spacings = torch.empty_like(sorted_spacings).scatter_(1, order, sorted_spacings).clamp(min=MIN_WIDTH)
    ranks = rank_values(sorted_columns, columns)
    # Shares of rows in pairs of bins.
    bins = (ranks * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    one_hot = nn.functional.one_hot(bins, NUM_BINS).float()  # (D, R, bins)
    flat = one_hot.permute(0, 2, 1).reshape(-1, num_references)
    joint = (flat @ flat.T / num_references).reshape(num_features, NUM_BINS, num_features, NUM_BINS)
    marginal = flat.mean(1).reshape(num_features, NUM_BINS)
    expected = marginal[:, :, None, None] * marginal[None, None]
    terms = torch.where(joint > 0, joint * (joint.clamp(min=1e-9) / expected.clamp(min=1e-9)).log(), 0.0)
    occupied = (marginal > 0).sum(1).float() - 1
    bias = occupied[:, None] * occupied[None] / (2.0 * num_references)
    information = (terms.sum((1, 3)) - bias).clamp(min=0.0)  # (D, D)
    # Correlation ratios: the share of the variance of a feature's ranks between the bins of another one.
    means = torch.einsum("irb,jr->ibj", one_hot, ranks) / one_hot.sum(1).clamp(min=1.0).unsqueeze(-1)
    deviations = means - ranks.mean(1)
    explained = torch.einsum("ib,ibj->ij", marginal, deviations**2) / (ranks.var(1, unbiased=False) + 1e-6)
    explained = (explained - occupied[:, None] / num_references).clamp(0.0, 1.0)
    covariance = context.gaussian.covariances[0]
    deviation = covariance.diagonal().sqrt()
    correlation = (covariance / deviation[:, None] / deviation[None]).float()
    precision = torch.linalg.inv(covariance)
    precision_scale = precision.diagonal().sqrt()
    partial = (-precision / precision_scale[:, None] / precision_scale[None]).float()
    log_full_scale = -0.5 * (precision.diagonal() * covariance.diagonal()).log().float()
    off = 1.0 - torch.eye(num_features)
    standard = (columns - columns.mean(1, keepdim=True)) / (columns.std(1, keepdim=True) + 1e-6)
    window = torch.searchsorted(sorted_columns, sorted_columns + 0.05, side="right") - index
    spike = window.amax(1).float() / num_references
    log_quantum = (context.quantum_widths + 1e-3).log() / 3.0
    size = torch.tensor(
        [math.log(context.num_rows / 300.0), math.log(num_references / 200.0), math.log(num_features / 12.0)]
    )
    by_feature = torch.cat(
        [
            torch.stack(
                [
                    torch.asinh((standard**3).mean(1)) / 2.0,
                    torch.asinh((standard**4).mean(1) - 3.0) / 3.0,
                    spike,
                    spacings.median(1).values.log() / 3.0,
                    log_quantum,
                    log_full_scale / 2.0,
                    (information * off).amax(1),
                    (information * off).sum(1) / max(num_features - 1, 1),
                    torch.full((num_features,), math.log(len(context.mixture.log_weights)) / 2.0),
                ],
                1,
            ),
            size.expand(num_features, 3),
        ],
        1,
    )
    pair = torch.stack(
        [
            correlation**2,
            correlation.abs(),
            partial**2,
            partial.abs(),
            information,
            information.sqrt(),
            explained,
            explained.T,
            (information * off) / ((information * off).sum(0) + 0.05),
        ],
        2,
    )
    own = torch.stack([spike, log_quantum, log_full_scale / 2.0], 1)
    by_pair = torch.cat(
        [
            pair,
            own.unsqueeze(1).expand(num_features, num_features, 3),
            own.unsqueeze(0).expand(num_features, num_features, 3),
            size[2].expand(num_features, num_features, 1),
        ],
        2,
    )
    return Statistics(sorted_columns, ranks, spacings, by_feature, by_pair)


def build_network(num_inputs: int, width: int, num_outputs: int, scale: float = 0.1) -> nn.Sequential:
    """Return a network of two hidden layers with small initial outputs."""
    last = nn.Linear(width, num_outputs)
    with torch.no_grad():
        last.weight.mul_(scale)
        last.bias.zero_()
    return nn.Sequential(
        nn.Linear(num_inputs, width), nn.SiLU(), nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), last
    )


@dataclass(frozen=True, slots=True)
class Components:
    """The components of the densities of B rows, and what is known about each value before it arrives.

    Attributes:
        log_densities: (B, D, C) log-density of each value under each component; the guide is the first.
        inputs: (B, D, I) inputs of the networks: none depends on the value itself or later ones.
    """

    log_densities: Tensor
    inputs: Tensor


@dataclass(frozen=True, slots=True)
class PreparedContext:
    """A table with everything that does not depend on the rows to score.

    Attributes:
        context: The table.
        statistics: Its statistics.
        distance_weights: (D, D, H, NUM_DISTANCES) weights of the distances, earlier feature first.
        evidence: The results of `InContextDensity.summarize_evidence`, (D, C) each.
    """

    context: Context
    statistics: Statistics
    distance_weights: Tensor
    evidence: tuple[Tensor, Tensor]


class InContextDensity(nn.Module):
    """The density of rows, given reference rows of their table.

    Args:
        num_heads: Number H of heads.
        width: Width of the hidden layers.
    """

    def __init__(self, num_heads: int = 4, width: int = 96) -> None:
        super().__init__()
        H = self.num_heads = num_heads
        self.num_components = 3 + 3 * H
        num_inputs = NUM_STATISTICS + NUM_POSITION_INPUTS + 4 + 3 * H
        self.pair_network = build_network(NUM_PAIR_STATISTICS, 64, H * NUM_DISTANCES)
        self.attention_network = build_network(NUM_STATISTICS + NUM_POSITION_INPUTS + 1, 64, 4 * H)
        self.width_network = build_network(num_inputs, width, 7 * H + 2)
        self.gate_network = build_network(num_inputs + 3 * self.num_components, width, self.num_components)
        # Heads begin with different distances, bandwidths and centres.
        distance_bias = torch.full((H, NUM_DISTANCES), -4.0)
        for head in range(H):
            distance_bias[head, (0, 3, 1, 5, 2, 4)[head % NUM_DISTANCES]] = -1.0
        self.distance_bias = nn.Parameter(distance_bias)
        scale = torch.linspace(-0.5, 1.5, H)
        self.attention_bias = nn.Parameter(
            torch.stack([scale, torch.full((H,), -3.0), torch.full((H,), -3.0), torch.linspace(2.0, -2.0, H)])
        )
        widths = torch.zeros(7, H)
        widths[0] = torch.linspace(-0.3, -1.0, H)  # constant
        widths[1] = torch.linspace(0.0, 0.3, H)  # of the single Gaussian's deviation
        widths[2] = torch.linspace(0.2, 0.5, H)  # of the spacing
        widths[3] = 1.0 - widths[1] - widths[2]  # of the deviation of the head
        widths[5] = torch.linspace(-0.5, -1.5, H)  # of the normal scores
        widths[6] = 0.3  # of the deviation of the normal scores
        self.width_bias = nn.Parameter(widths)
        self.wide_bias = nn.Parameter(torch.tensor([0.0, 1.0]))
        self.gate_bias = nn.Parameter(torch.zeros(self.num_components))
        self.stacking_power = nn.Parameter(torch.ones(()))

    def forward(self, context: Context, rows: Tensor, order: Tensor, support_order: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-density of each value given the earlier ones of its row, and that of the guide.

        Args:
            context: The table.
            rows: (B, D) rows in normalised units.
            order: (B, D) the order of the features of each row.
            support_order: (S, D) orders of the support rows.

        Returns:
            Two tensors (B, D), in the order of each row.
        """
        return self.score(self.prepare(context, support_order), rows, order)

    def prepare(self, context: Context, support_order: Tensor) -> PreparedContext:
        """Return what depends on the table alone: statistics, weights of distances, evidence of the support rows."""
        statistics = compute_statistics(context)
        weights = self._compute_distance_weights(statistics)
        prepared = PreparedContext(context, statistics, weights, (torch.empty(0), torch.empty(0)))
        support = self._compute_components(prepared, context.support, support_order, is_in_fold=True)
        return replace(prepared, evidence=self.summarize_evidence(support.log_densities, support_order))

    def score(self, prepared: PreparedContext, rows: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-density of each value given the earlier ones of its row, and that of the guide, (B, D) each.

        Args:
            prepared: The prepared table.
            rows: (B, D) rows in normalised units.
            order: (B, D) the order of the features of each row.
        """
        parts = self._compute_components(prepared, rows, order, is_in_fold=False)
        log_weights = self._compute_gate(parts, prepared.evidence, order)
        return torch.logsumexp(log_weights + parts.log_densities, -1), parts.log_densities[..., 0]

    def _compute_distance_weights(self, statistics: Statistics) -> Tensor:
        """Return the weights w_b(i, j) of the distances, (D, D, H, NUM_DISTANCES), earlier feature i first."""
        shape = (*statistics.by_pair.shape[:2], self.num_heads, NUM_DISTANCES)
        raw = self.pair_network(statistics.by_pair).reshape(shape)
        # The mutual information of the pair raises all weights from the beginning.
        return nn.functional.softplus(8.0 * raw + self.distance_bias) * (0.1 + statistics.by_pair[..., 5, None, None])

    def _compute_components(
        self, prepared: PreparedContext, rows: Tensor, order: Tensor, is_in_fold: bool
    ) -> Components:
        """Return the components of the densities of rows.

        Args:
            prepared: The table; its evidence is not used.
            rows: (B, D) rows.
            order: (B, D) their orders.
            is_in_fold: Whether the rows are the support rows, for which the guide without the fold is used.
        """
        context, statistics, distance_weights = prepared.context, prepared.statistics, prepared.distance_weights
        (B, D), H = rows.shape, self.num_heads
        R = len(context.references)
        mixture = context.mixture_without_fold if is_in_fold else context.mixture
        gaussian = context.gaussian_without_fold if is_in_fold else context.gaussian
        with torch.no_grad():
            x = rows.gather(1, order)
            references = context.references.T[order]  # (B, D, R)
            guide_weights, guide_means, guide_scales = mixture.condition(x, order)
            means, factors = gaussian.factorize(order)
            both = torch.cat([x.unsqueeze(2), references], 2).double() - means.squeeze(1).unsqueeze(2)
            z = torch.linalg.solve_triangular(factors.squeeze(1), both, upper=False).float()
            z_x, z_references = z[..., :1], z[..., 1:]
            scale = factors.squeeze(1).diagonal(dim1=-2, dim2=-1).float()  # (B, D)
            mean = x - z_x.squeeze(2) * scale
            difference = (x.unsqueeze(2) - references).abs().clamp(max=8.0)
            rank = rank_values(statistics.sorted_columns, rows.T.contiguous()).T.gather(1, order)
            rank_difference = (rank.unsqueeze(2) - statistics.ranks[order]).abs()
            spacings = statistics.spacings[order]
            score = GuideTensors.compute_normal_score(x, guide_weights, guide_means, guide_scales).unsqueeze(2)
            reference_scores = mixture.compute_normal_scores(context.references, order)
            distances = torch.stack(
                [
                    difference.clamp(max=4.0) ** 2,
                    torch.log1p((difference / 0.3) ** 2),
                    torch.log1p((difference / 0.03) ** 2),
                    12.0 * rank_difference**2,
                    torch.log1p((rank_difference / 0.05) ** 2),
                    torch.log1p((difference / spacings) ** 2),
                ],
                2,
            )  # (B, D, 6, R)
            squares = ((z_x - z_references).clamp(-8.0, 8.0) ** 2).cumsum(1)
            mahalanobis = torch.cat([torch.zeros(B, 1, R), squares[:, :-1]], 1)  # of the earlier values
            position = torch.arange(D, dtype=torch.float32)
            position_inputs = torch.stack(
                [position / D, (1.0 + position).log() / 2.0, 1.0 / (1.0 + position), (position == 0).float()], 1
            ).expand(B, D, NUM_POSITION_INPUTS)
            log_scale = scale.log()
            guide_mean = (guide_weights.exp() * guide_means).sum(-1)
            guide_variance = (
                guide_weights.exp() * (guide_scales**2 + (guide_means - guide_mean.unsqueeze(-1)) ** 2)
            ).sum(-1)
            guide_entropy = -(guide_weights.exp() * guide_weights).sum(-1)
            value = x.unsqueeze(-1)
            log_guide = (
                torch.logsumexp(
                    guide_weights - 0.5 * ((value - guide_means) / guide_scales) ** 2 - guide_scales.log(), -1
                )
                - 0.5 * LOG_2PI
            )
            by_feature = statistics.by_feature[order]
        attention_inputs = torch.cat([by_feature, position_inputs, log_scale.unsqueeze(-1) / 2.0], -1)
        raw = self.attention_network(attention_inputs).reshape(B, D, 4, H) + self.attention_bias
        temperature = raw[:, :, 0].exp() / (1.0 + 0.1 * position[:, None])
        # The logits of a position are the weighted sum of the distances of the earlier positions.
        pair_weights = distance_weights[order.unsqueeze(2), order.unsqueeze(1)]  # (B, earlier, position, H, 6)
        is_earlier = torch.ones(D, D).triu(1)[None, :, :, None, None]
        pair_weights = (pair_weights * is_earlier).permute(0, 2, 3, 1, 4).reshape(B, D * H, D * NUM_DISTANCES)
        logits = -(pair_weights @ distances.reshape(B, D * NUM_DISTANCES, R)).reshape(B, D, H, R)
        logits = logits * temperature.unsqueeze(-1)
        coefficients = nn.functional.softplus(raw[:, :, 1:3])
        logits = logits - coefficients[:, :, 0, :, None] * mahalanobis.unsqueeze(2)
        logits = logits - coefficients[:, :, 1, :, None] * torch.log1p(mahalanobis).unsqueeze(2)
        if is_in_fold:
            is_itself = context.support_index[:, None] == torch.arange(R)
            logits = logits.masked_fill(is_itself[:, None, None, :], -1e9)
        log_attention = torch.log_softmax(logits, -1)
        attention = log_attention.exp()
        # Centres relative to the conditional mean of the single Gaussian.
        transfer = torch.sigmoid(raw[:, :, 3]).unsqueeze(-1)  # (B, D, H, 1)
        raw_centres = (references - mean.unsqueeze(2)).unsqueeze(2)
        moved_centres = (scale.unsqueeze(2) * z_references).unsqueeze(2)
        centres = raw_centres + transfer * (moved_centres - raw_centres)
        head_mean = (attention * centres).sum(-1)  # (B, D, H)
        head_variance = (attention * (centres - head_mean.unsqueeze(-1)) ** 2).sum(-1)
        head_scale = (head_variance + MIN_WIDTH**2).sqrt()
        effective = 1.0 / (attention**2).sum(-1)
        inputs = torch.cat(
            [
                by_feature,
                position_inputs,
                torch.stack(
                    [
                        log_scale / 2.0,
                        0.5 * guide_variance.log() - log_scale,
                        ((guide_mean - mean) / scale).clamp(-5.0, 5.0) / 2.0,
                        guide_entropy,
                    ],
                    -1,
                ),
                effective.log() / 2.0,
                head_scale.log() - log_scale.unsqueeze(-1),
                (head_mean / scale.unsqueeze(-1)).clamp(-5.0, 5.0) / 2.0,
            ],
            -1,
        )
        raw_widths = self.width_network(inputs)
        widths = raw_widths[..., : 7 * H].reshape(B, D, 7, H) + self.width_bias
        wide = raw_widths[..., 7 * H :] + self.wide_bias
        log_kernel = (
            widths[:, :, 0] + widths[:, :, 1] * log_scale.unsqueeze(-1) + widths[:, :, 3] * head_scale.log()
        ).unsqueeze(-1) + widths[:, :, 2].unsqueeze(-1) * spacings.log().unsqueeze(2)
        floor = (MIN_WIDTH + 0.25 * context.quantum_widths).log()[order][:, :, None, None]
        log_kernel = floor + nn.functional.softplus(4.0 * (log_kernel - floor)) / 4.0  # a smooth maximum
        offset = (x - mean).unsqueeze(-1)
        exponents = -0.5 * ((offset.unsqueeze(-1) - centres) * (-log_kernel).exp()) ** 2 - log_kernel
        log_kernels = torch.logsumexp(log_attention + exponents, -1)
        floor = floor.squeeze(-1)
        log_moment = 0.5 * (head_variance + (2.0 * floor).exp()).log() + widths[:, :, 4]
        log_moments = -0.5 * ((offset - head_mean) * (-log_moment).exp()) ** 2 - log_moment
        log_wide = log_scale.unsqueeze(-1) + wide
        log_wides = -0.5 * (offset * (-log_wide).exp()) ** 2 - log_wide
        # Densities of normal scores, divided by the standard normal density.
        score_mean = torch.einsum("bdhr,bdr->bdh", attention, reference_scores)
        score_variance = torch.einsum("bdhr,bdr->bdh", attention, reference_scores**2) - score_mean**2
        log_score_scale = 0.5 * (score_variance.clamp(min=0.0) + 1e-2).log()
        log_width = (widths[:, :, 5] + widths[:, :, 6] * log_score_scale).clamp(-3.5, 0.0)
        # A width above 1 could make the correction, and so the density, unbounded in the tails.
        score_difference = ((score - reference_scores) ** 2).unsqueeze(2)  # (B, D, 1, R)
        score_exponents = -0.5 * score_difference * (-2.0 * log_width).exp().unsqueeze(-1)
        log_scores = torch.logsumexp(log_attention + score_exponents, -1) - log_width
        log_corrections = log_guide.unsqueeze(-1) + log_scores + 0.5 * score**2
        others = torch.cat([log_wides, log_moments, log_kernels], -1) - 0.5 * LOG_2PI
        others = torch.cat([others, log_corrections], -1)
        log_densities = torch.cat([log_guide.unsqueeze(-1), others], -1)
        return Components(log_densities, inputs)

    def summarize_evidence(self, log_densities: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights of the components that suit the support rows, by feature, and their mean gains.

        Args:
            log_densities: (S, D, C) log-densities of the support rows in their orders.
            order: (S, D) the orders.

        Returns:
            Logarithms of the weights, (D, C), and mean gains over the guide in nats, clipped, (D, C).
        """
        index = order.argsort(1).unsqueeze(-1).expand_as(log_densities)
        by_feature = log_densities.detach().gather(1, index)  # (S, D, C) by feature
        num_support, _, num_components = by_feature.shape
        log_weights = torch.full((num_components,), -math.log(num_components))
        for _ in range(8):
            posterior = torch.softmax(by_feature + log_weights, -1)
            log_weights = (posterior.mean((0, 1)) + 1e-3).log()
            log_weights = log_weights - log_weights.logsumexp(0)
        common, pseudo_rows = log_weights.exp(), 8.0
        for _ in range(4):
            posterior = torch.softmax(by_feature + log_weights, -1).sum(0)  # (D, C)
            log_weights = ((posterior + pseudo_rows * common) / (num_support + pseudo_rows)).log()
        gains = (by_feature - by_feature[..., :1]).clamp(-4.0, 4.0).mean(0)
        return log_weights, gains

    def _compute_gate(self, parts: Components, evidence: tuple[Tensor, Tensor], order: Tensor) -> Tensor:
        """Return the log-weights of the components for each value, (B, D, C)."""
        log_weights, gains = (part[order] for part in evidence)
        ratios = (parts.log_densities - parts.log_densities[..., :1]).detach().clamp(-4.0, 4.0)
        sums = torch.cat([torch.zeros_like(ratios[:, :1]), ratios.cumsum(1)[:, :-1]], 1)
        position = torch.arange(sums.shape[1], dtype=torch.float32)[:, None]
        earlier_gains = sums / (1.0 + position)
        inputs = torch.cat([parts.inputs, log_weights / 3.0, gains, earlier_gains], -1)
        gate = self.stacking_power * log_weights + self.gate_bias + 3.0 * self.gate_network(inputs)
        return torch.log_softmax(gate, -1)
