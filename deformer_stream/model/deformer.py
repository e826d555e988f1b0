"""The DEformer: an order-agnostic density that can be read while the record is still arriving.

Chain rule in any order o: p(x) = Π_k p(x_{o_k} | x_{o_<k}) (Alcorn and Nguyen, arXiv 2106.06989). Two interleaved
tokens a reading: z_k says which feature comes next, u_k says that feature with its value. A lower-triangular mask lets
z_k see z_≤k and u_<k, u_k see z_≤k and u_≤k; there are no positions. The output at z_k parametrises p(v_k | earlier).

`precision` "bfloat16": outside training, factors of the layers' products (weights, and what they and attention are
multiplied by) are rounded to bfloat16, on every machine alike; sums, and all outside the layers, are float32.

`memory` decides what later tokens may look back at: "all" earlier tokens (the paper), or only "values", the u tokens
(every token still sees itself). The second halves the cache; an identity alone carries nothing its u token lacks.

With `tokens` "single" (the authors' later variant) a reading has one token, which says what comes next and what came
last: half the tokens, and `memory` has nothing to decide. The reading that came last is in no cached token yet, so the
readings themselves are cached beside the keys and values.

With `gaussians`, a mixture of full-covariance Gaussians, fitted before training, tells the network at each z_k what it
expects of v_k; its shifted, widened and newly weighed components join those of the output (`model.gaussian_prior`).

Two paths, one law: `log_prob` sees whole records at once and is the reference; `extend` adds readings to records whose
keys and values are cached (one reading is a step, several are a prefill). The sum of the second equals the first.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from deformer_stream.model.attention import AttentionContext, attend
from deformer_stream.model.config import PRESETS, ModelConfig
from deformer_stream.model.distributions import Conditional, Head
from deformer_stream.model.gaussian_prior import VALUE_REACH, GaussianPrior, PriorConditional
from deformer_stream.model.layers import Encoder, TransformerLayer
from deformer_stream.model.ranking import Ranking
from deformer_stream.model.schema import LINEAR, Schema

__all__ = ["PRESETS", "DEformer", "KVCacheView", "ModelConfig", "StepOutput"]


@dataclass(frozen=True, slots=True)
class KVCacheView:
    """Cached keys and values of R records, padded to P tokens.

    keys, values: per layer (R, heads, P, d_head). lengths: (R,) tokens in use. readings: (R, P, 2) the code and the
    normalised value of the reading that left the token, where `DEformer.keeps_readings`.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    lengths: Tensor
    readings: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What `extend` answers: conditionals of shape (R, L), and what is to be appended to the cache (see `Past`): the
    new tokens' keys and values, per layer (R, heads, M, d_head), and their readings (R, M, 2), M = L × `tokens_kept`.
    """

    conditional: Conditional
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    readings: Tensor | None = None


class DEformer(nn.Module):
    """The density model of one schema.

    Records come as two arrays in arrival order: features (N, L) int64 codes, −1 for padding at the end, and values
    (N, L) in normalised units (`Schema.normalise`), a label's code for a discrete feature. A missing feature is
    simply absent.
    """

    def __init__(self, schema: Schema, config: ModelConfig) -> None:
        super().__init__()
        self.schema, self.config = schema, config
        dimension = len(schema.features[0].coordinates or ())
        if config.identity != "embedding" and not dimension:
            raise ValueError(f"identity={config.identity!r} needs coordinates in the schema")
        n = len(schema.sources)
        self.embedding = nn.Embedding(n, config.embedding) if config.identity != "coordinates" else None
        self.register_buffer(
            "sources", torch.from_numpy(schema.source_of) if schema.repeats else None, persistent=False
        )
        self.sources: Tensor | None
        self.coordinates: Tensor | None
        coordinates = None
        if config.identity != "embedding":
            coordinates = torch.tensor([f.coordinates for f in schema.features], dtype=torch.float64)
            spread = coordinates.std(0, correction=0)
            coordinates = (coordinates - coordinates.mean(0)) / torch.where(spread > 0, spread, torch.ones_like(spread))
        self.register_buffer("coordinates", coordinates, persistent=False)
        width = (config.embedding if self.embedding is not None else 0) + (dimension if coordinates is not None else 0)
        self._init_labels(schema, shared=self.embedding is None)
        self._init_cycles(schema)
        self._init_encoders(width, width + 1 + (0 if self.cycles is None else 2) + self.label_width)
        self.blocks = nn.ModuleList(TransformerLayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.d_model) if config.norm == "pre" else nn.Identity()
        self.gaussians, self.guidance = self._init_gaussians(schema)
        guides = self.gaussians.components if self.gaussians is not None else 0
        self.head = Head(schema, config.d_model, config.mixtures, guides)
        self.ranking = Ranking(schema, config.exemplars) if config.exemplars else None
        self.register_buffer("context", torch.tensor(schema.context), persistent=False)
        self.context: Tensor
        self.library: ctypes.CDLL | None = None  # compiled code that may score for this model (`kernels.cpu`)

    def _init_labels(self, schema: Schema, shared: bool) -> None:
        """A row per label and one for "unseen" per sensor; row 0 is the zero vector of continuous values.

        Where features are told apart by coordinates alone, label codes share their rows, as pixels share black."""
        counts = torch.tensor(schema.label_counts)
        of, first = (torch.from_numpy(part) for part in (schema.source_of, schema.first_of))
        rows = torch.where(counts > 0, counts + 1, 0)[first]
        offsets = torch.ones_like(counts) if shared else (1 + rows.cumsum(0) - rows)[of]
        total = 1 + int(rows.max() if shared else rows.sum())
        self.label_width = self.config.embedding if total > 1 else 0
        self.label_embedding = nn.Embedding(total, self.label_width, padding_idx=0) if self.label_width else None
        self.register_buffer("label_offsets", offsets, persistent=False)
        self.register_buffer("label_counts", counts, persistent=False)
        self.label_offsets: Tensor
        self.label_counts: Tensor

    def _init_cycles(self, schema: Schema) -> None:
        """(F, 2) per feature the angle of the normalised value 0 and what each scale adds to it, radians; 0 where it is
        no cycle."""
        table = None
        if schema.cyclic.any():
            turns = [
                (0.0, 0.0) if f.period is None else (f.location % f.period / f.period, f.scale / f.period)
                for f in schema.features
            ]
            table = 2.0 * math.pi * torch.tensor(turns, dtype=torch.float64)
        self.register_buffer("cycles", table, persistent=False)
        self.cycles: Tensor | None

    def _init_encoders(self, identity: int, reading: int) -> None:
        """g_z and g_u; of single tokens one that takes what both take, and what it is told before the first reading.
        identity, reading: widths."""
        single, hidden, d_model = self.config.tokens == "single", self.config.hidden, self.config.d_model
        self.identity_encoder = None if single else Encoder(identity, hidden, d_model)
        self.value_encoder = Encoder(identity + reading if single else reading, hidden, d_model)
        self.start = nn.Parameter(torch.randn(reading)) if single else None

    def _init_gaussians(self, schema: Schema) -> tuple[GaussianPrior | None, nn.Linear | None]:
        """The guide, and the map from what it expects to what the network is told; none without numbers to expect."""
        if not self.config.gaussians or not schema.linear.any():
            return None, None
        return GaussianPrior(schema, self.config.gaussians), nn.Linear(3 * self.config.gaussians, self.config.d_model)

    def _layers(self) -> Iterator[TransformerLayer]:
        return (cast(TransformerLayer, block) for block in self.blocks)

    @property
    def memory(self) -> AttentionContext | None:
        """What tokens of pairs may look back at; None of single tokens, which may look at all."""
        return self.config.memory if self.config.tokens == "pair" else None

    @property
    def tokens_kept(self) -> int:
        """Tokens a reading leaves in the cache: 2 with memory "all", otherwise 1."""
        return 2 if self.memory == "all" else 1

    @property
    def keeps_readings(self) -> bool:
        """Whether what is cached includes the readings themselves (`Past.readings`)."""
        return self.start is not None or self.gaussians is not None

    @property
    def dtype(self) -> torch.dtype:
        return self.head.project.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.head.project.weight.device

    def tokens(
        self, features: Tensor, values: Tensor, guide: PriorConditional | None, past: KVCacheView | None = None
    ) -> Tensor:
        """(N, L) readings → (N, 2L, d) tokens z_1, u_1, z_2, u_2, …, or (N, L, d) single ones, which follow a past."""
        kinds = self._kinds(features, values, guide, past)
        return torch.stack(kinds, -2).flatten(1, 2)

    def _kinds(
        self,
        features: Tensor,
        values: Tensor,
        guide: PriorConditional | None,
        past: KVCacheView | None = None,
        before: Tensor | None = None,
    ) -> list[Tensor]:
        """(N, L) readings → their tokens z and u, (N, L, d) each, or the single ones. before: see `conditionals`."""
        if self.identity_encoder is not None:
            return [self.query_tokens(features, guide), self.observation_tokens(features, values)]
        identity = self.identity()
        last = self._last(identity, self._readings(identity, features, values), past, before)
        own = nn.functional.embedding(features, identity)
        return [self._told(self.value_encoder(torch.cat([own, last], -1)), guide)]

    def query_tokens(self, features: Tensor, guide: PriorConditional | None) -> Tensor:
        """S features → tokens z, (*S, d): it is this one's turn. Of pairs."""
        encoder = cast(Encoder, self.identity_encoder)
        each = encoder(self.identity())  # looked up as embeddings are: the way back of an index is slow
        return self._told(nn.functional.embedding(features, each), guide)

    def observation_tokens(self, features: Tensor, values: Tensor) -> Tensor:
        """S readings → tokens u, (*S, d): this is what came. Of pairs."""
        u: Tensor = self.value_encoder(self._readings(self.identity(), features, values))
        return u

    def _told(self, tokens: Tensor, guide: PriorConditional | None) -> Tensor:
        """With what the Gaussians expect, in the size in which tokens enter the layers."""
        if guide is None or self.guidance is None:
            return tokens
        expected: Tensor = math.sqrt(self.config.d_model) * self.guidance(guide.as_features().to(self.dtype))
        return tokens + expected

    def identity(self) -> Tensor:
        """(F, ·) what is known of each feature."""
        parts = []
        if self.embedding is not None:
            parts.append(self.embedding.weight if self.sources is None else self.embedding.weight[self.sources])
        if self.coordinates is not None:
            parts.append(self.coordinates.to(self.dtype))
        return torch.cat(parts, -1)

    def _readings(self, identity: Tensor, features: Tensor, values: Tensor) -> Tensor:
        """S readings → (*S, ·): identity, number (or 0), sine and cosine of a place on a cycle (or 0) where there are
        cycles, and label (or 0) of each."""
        discrete = self.label_counts[features] > 0
        number = values.to(self.dtype).clamp(-VALUE_REACH, VALUE_REACH).masked_fill(discrete, 0.0)
        inputs = [nn.functional.embedding(features, identity), number.unsqueeze(-1)]
        if self.cycles is not None:
            start, turn = self.cycles[features].to(self.dtype).unbind(-1)
            cyclic = (turn != 0).unsqueeze(-1)
            size = number.abs()  # from here as in `Schema.denormalise`
            angle = start + turn * torch.where(
                size > LINEAR, number.sign() * (LINEAR + (size - LINEAR).expm1()), number
            )
            inputs[1] = inputs[1].masked_fill(cyclic, 0.0)
            inputs.append(torch.stack([angle.sin(), angle.cos()], -1).masked_fill(~cyclic, 0.0))
        if self.label_embedding is not None:
            code = torch.minimum(values.long().clamp(min=0), self.label_counts[features])
            inputs.append(self.label_embedding(torch.where(discrete, self.label_offsets[features] + code, 0)))
        return torch.cat(inputs, -1)

    def _last(self, identity: Tensor, readings: Tensor, past: KVCacheView | None, before: Tensor | None) -> Tensor:
        """(N, L, ·) what came last before each of the readings (N, L, ·); `start` where nothing came."""
        first = cast(Tensor, self.start).expand(len(readings), 1, -1)
        if past is not None and past.readings is not None and past.readings.shape[1]:
            row = torch.arange(len(readings), device=self.device)
            code, value = past.readings[row, past.lengths.long() - 1].unbind(-1)
            came = self._readings(identity, code.long(), value).unsqueeze(1)
            first = torch.where((past.lengths > 0)[:, None, None], came, first)
        if before is None:
            return torch.cat([first, readings[:, :-1]], 1)
        depth = before.sum(1)  # of those before a reading, the last is the one with most before it
        last = torch.where(before, depth + 1, 0)
        place = torch.where(depth > 0, last.argmax(1) + 1, 0)
        return torch.cat([first, readings], 1)[:, place]

    def _mask(self, tokens: int) -> Tensor:
        """(T, T) bool over a record's tokens, true where a row may look at a column."""
        index = torch.arange(tokens, device=self.device)
        mask = index[:, None] >= index[None, :]
        if self.memory == "values":
            mask = mask & ((index[None, :] % 2 == 1) | (index[:, None] == index[None, :]))
        return mask

    def conditionals(
        self, features: Tensor, values: Tensor, guide: PriorConditional | None = None, before: Tensor | None = None
    ) -> Conditional:
        """p(v_k | earlier readings) for every reading of whole records. features, values: (N, L) → shape (N, L).

        guide: what to tell the network in place of what the model's own Gaussians expect (training wants that).
        before: (L, L) bool, before[k, j] where reading j counts as earlier than reading k; by default where j < k. So
        one pass holds several orders of a record (`engine.order_trees`); a model with Gaussians needs the guide then, too."""
        codes = features.clamp(min=0)
        if guide is None and self.gaussians is not None:
            guide = self.gaussians(features, values)
        full_precision = torch.autocast(self.device.type, enabled=False)  # readings and densities, whatever layers do
        with full_precision:
            kinds = self._kinds(codes, values, guide, None, before)
        x = torch.cat(kinds, 1)
        for layer, block in enumerate(self._layers(), 1):
            q, k, v = block.project(x)
            if layer == self.config.layers:  # from here on only identity tokens are asked for anything
                q, x = (t[..., : codes.shape[1], :] for t in (q, x))
            attended = attend(q, k, v, self.memory, block.dropout if self.training else 0.0, before)
            x = block.finish(x, attended.transpose(1, 2).flatten(2))
        with full_precision:
            return cast(Conditional, self.head(self.norm(x.to(self.dtype)), codes, guide))

    def log_prob(self, features: Tensor, values: Tensor, guide: PriorConditional | None = None) -> Tensor:
        """ln p(v_k | earlier) of whole records, natural log, larger is likelier: (N, L), 0 at padding and context."""
        out = self.conditionals(features, values, guide).log_prob(values)
        return out.masked_fill((features < 0) | self.context[features.clamp(min=0)], 0.0)

    def prefill(self, features: Tensor, values: Tensor) -> StepOutput:
        """The first L readings of records without a past. features, values: (R, L), no padding but at the end."""
        R, d_head = len(features), self.config.d_model // self.config.heads
        empty = [self._zeros(R, self.config.heads, 0, d_head)] * self.config.layers
        return self.forward_cached(features, values, KVCacheView(empty, empty, self._zeros(R), self._zeros(R, 0, 2)))

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def forward_cached(
        self, features: Tensor, values: Tensor, past: KVCacheView, guide: PriorConditional | None = None
    ) -> StepOutput:
        """The next L readings of R records with cached pasts; L = 1 is a step.

        features, values: (R, L), padding (−1) only at the end of a row. Keys and values of padding are returned too;
        the caller keeps the first `lengths × tokens_kept` of each row. guide: what `expected` says, where it was asked
        before. Nothing else here looks at what tensors hold or makes one on the CPU, so that it can be recorded.
        """
        if past.readings is None and self.keeps_readings:
            raise ValueError("a past without readings is of no use to a model with Gaussians or single tokens")
        codes = features.clamp(min=0)
        guide = self.expected(features, values, past) if guide is None else guide
        x = self.tokens(codes, values, guide, past)
        T, P = x.shape[1], past.keys[0].shape[2]
        blocked = ~self._mask(T)
        ahead = (torch.arange(P, device=self.device) >= past.lengths[:, None])[:, None, None]
        kinds = 1 if self.memory is None else 2
        keep = slice(kinds - self.tokens_kept, None, kinds // self.tokens_kept)
        kept_keys, kept_values = [], []
        for layer, block in enumerate(self._layers()):
            q, k, v = block.project(x)
            kept_keys.append(k[:, :, keep])
            kept_values.append(v[:, :, keep])
            if layer == self.config.layers - 1:
                q, x, blocked = q[:, :, ::kinds], x[:, ::kinds], blocked[::kinds]
            # A batched matrix product with softmax beats the fused kernel for the one or two queries of a step.
            scores = (q @ k.transpose(-1, -2)).masked_fill(blocked, -math.inf)
            if P:
                old = (q @ past.keys[layer].transpose(-1, -2)).masked_fill(ahead, -math.inf)
                weights = torch.softmax(torch.cat([old, scores], -1), -1)
                attended = weights[..., :P] @ past.values[layer] + weights[..., P:] @ v
            else:
                attended = torch.softmax(scores, -1) @ v
            x = block.finish(x, attended.transpose(1, 2).flatten(2))
        readings = None
        if self.keeps_readings:
            readings = torch.stack([codes.to(self.dtype), values.to(self.dtype)], -1)
            readings = readings.repeat_interleave(self.tokens_kept, 1)
        return StepOutput(self.head(self.norm(x), codes, guide), kept_keys, kept_values, readings)

    def expected(self, features: Tensor, values: Tensor, past: KVCacheView) -> PriorConditional | None:
        """What the Gaussians expect of new readings (R, L) after those of the past, whose keys it does not look at."""
        if self.gaussians is None or past.readings is None:
            return None
        step = self.tokens_kept
        ahead = torch.arange(past.readings.shape[1], device=self.device) >= past.lengths[:, None]
        codes = past.readings[..., 0].long().masked_fill(ahead, -1)[:, ::step]
        earlier = past.readings[:, ::step, 1].to(values.dtype)
        guide: PriorConditional = self.gaussians(torch.cat([codes, features], 1), torch.cat([earlier, values], 1))
        return guide[:, codes.shape[1] :]


def to_tensor(array: NDArray[np.generic], model: DEformer) -> Tensor:
    """An array on the model's device, numbers in its dtype."""
    t = torch.from_numpy(array)
    return t.to(model.device, model.dtype) if t.is_floating_point() else t.to(model.device)
