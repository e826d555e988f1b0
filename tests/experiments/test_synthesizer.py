"""Synthesizer attention: its equation, and that no prediction depends on its own or later readings."""

from __future__ import annotations

import pytest
import torch

from deformer_stream.model.config import ModelConfig
from deformer_stream.model.layers import TransformerLayer
from deformer_stream.model.schema import Feature, Schema
from experiments.reading_orders import compute_log_p, draw_any_order, draw_spans
from experiments.synthesizer import SynthesizerLayer, create_model
from trainer.sampling import create_generator

CONFIG = ModelConfig(d_model=16, layers=2, heads=2, feedforward=32, mixtures=3, hidden=(16,))
SCHEMA = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(6)))


def test_attention_follows_its_equation() -> None:
    torch.manual_seed(0)
    layer = SynthesizerLayer(CONFIG, num_tokens=4).double()
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(2, 4, 16, dtype=torch.float64)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    heads, normalised = [], layer.norm1(x)
    for i in range(2):
        part = slice(8 * i, 8 * i + 8)
        a, b_1 = layer.hidden.weight[part].T, layer.hidden.bias[part]
        logits = torch.relu(normalised @ a + b_1) @ layer.logits[i] + layer.bias[i]
        weights = torch.softmax(logits.masked_fill(~mask, -torch.inf), -1)
        heads.append(weights @ (normalised @ layer.value.weight[part].T + layer.value.bias[part]))
    torch.testing.assert_close(layer.attend(x, mask), torch.cat(heads, -1))


@pytest.mark.parametrize("draw", [draw_any_order, draw_spans])
@pytest.mark.parametrize("is_synthesizer", [False, True])
def test_predictions_depend_on_earlier_readings_only(is_synthesizer: bool, draw) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    model = create_model(SCHEMA, CONFIG, is_synthesizer).double().eval()
    is_earlier, is_predicted = draw(6, create_generator(3))
    values = torch.randn(1, 6, dtype=torch.float64)
    features = torch.arange(6)[None]
    before = model.conditionals(features, values, earlier_mask=is_earlier).log_prob(torch.zeros_like(values))[0]
    for changed in range(6):
        other = values.clone()
        other[0, changed] += 1.0
        after = model.conditionals(features, other, earlier_mask=is_earlier).log_prob(torch.zeros_like(values))[0]
        is_different = (after - before).abs() > 1e-12
        assert is_different[is_predicted].tolist() == is_earlier[is_predicted, changed].tolist()


def test_kinds_of_attention_differ_in_their_layers_only() -> None:
    for is_synthesizer, kind in ((False, TransformerLayer), (True, SynthesizerLayer)):
        model = create_model(SCHEMA, CONFIG, is_synthesizer)
        assert all(type(layer) is kind for layer in model.blocks)
        log_p = compute_log_p(model, torch.randn(3, 6), draw_any_order(6, create_generator(0))[0])
        log_p.sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
