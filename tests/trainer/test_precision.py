"""What training computes in on which processor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer.precision import low_precision

CPU = torch.device("cpu")
VECTORS = {"avx512_f": True, "avx512_bf16": True}


@pytest.mark.parametrize(
    ("known", "low"),
    [
        ({"cpu_name": "AMD EPYC"} | VECTORS, True),
        (VECTORS, True),
        ({"cpu_name": "Intel Xeon"} | VECTORS, False),
        ({"cpu_name": "Intel Xeon", "amx_bf16": True} | VECTORS, True),
        ({"cpu_name": "AMD EPYC", "avx512_f": True}, False),
        ({}, False),
    ],
)
def test_bfloat16_is_taken_where_it_is_quicker(
    known: dict[str, Any], low: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known)
    assert low_precision("auto", CPU) is low
    assert low_precision("bfloat16", CPU)
    assert not low_precision("float32", CPU)
