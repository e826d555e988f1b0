"""Law 6 on a simulated fleet: of 10,000 held-out normal records, no more alert than alpha and chance allow.

One model, trained for half a minute; per arrival law a calibration of its own and 10,000 fresh normal records, streamed
event by event, interleaved as they arrive.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from deformer_stream import model_store
from deformer_stream.calibration.conformal import Calibration
from deformer_stream.calibration.torch_scoring import compute_max_statistics
from deformer_stream.codec import Codec
from deformer_stream.demo.simulate import FEATURES, Order, SimulatedFleet, simulate
from deformer_stream.engine.engine import Engine
from deformer_stream.model.schema import Schema
from deformer_stream.runtime.metrics import Metrics
from deformer_stream.runtime.pipeline import Pipeline
from deformer_stream.runtime.timing import EventClock
from deformer_stream.testing import MemorySink, MemorySource
from tests.beta_binomial import compute_beta_binomial_upper

ALPHA = 0.01
CALIBRATION, HELD_OUT = 5_000, 10_000

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guarantee")
    pq.write_table(simulate(4_000, seed=1).select_normal_records(), folder / "normal.parquet")
    command = [sys.executable, "-m", "trainer.cli", str(folder / "normal.parquet"), "--out", str(folder / "model")]
    subprocess.run([*command, "--preset", "tiny", "--epochs", "1", "--seed", "0"], check=True)
    return folder / "model"


def in_arrival_order(fleet: SimulatedFleet, schema: Schema) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """(N, F) codes, −1 padding at the end, and normalised values of each record's readings in order of arrival."""
    raw = np.full((len(fleet.delays), len(schema)), np.nan)
    for f, feature in enumerate(schema.features):
        column = fleet.table.column(feature.name)
        if feature.kind == "discrete":
            codes = {label: k for k, label in enumerate(feature.labels)}
            raw[:, f] = [np.nan if v is None else codes.get(str(v), len(codes)) for v in column.to_pylist()]
        else:
            raw[:, f] = column.to_numpy()
    delays = fleet.delays[:, [FEATURES.index(name) for name in schema.names]]
    order = np.argsort(np.where(np.isnan(raw), np.inf, delays), 1, kind="stable")
    values = np.take_along_axis(raw, order, 1)
    codes = np.where(np.isnan(values), -1, order)
    return codes, schema.normalise(order, values)


@pytest.mark.parametrize("law", ["random", "fixed", "bursty"])
def test_false_alarms_keep_to_alpha(model_dir: Path, law: Order) -> None:
    loaded = model_store.read(model_dir)
    codes, values = in_arrival_order(simulate(CALIBRATION, seed=2, order=law), loaded.schema)
    calibration = Calibration.from_statistics(compute_max_statistics(loaded.model, codes, np.nan_to_num(values)), law)
    engine = Engine(loaded.model, calibration, loaded.fingerprint, ALPHA, effort="off")
    sink = MemorySink()
    source = MemorySource(simulate(HELD_OUT, seed=3, order=law).iterate_messages(), chunk=8_192)
    totals = Pipeline(source, Codec(loaded.schema), engine, [sink], EventClock(), Metrics(), is_finite=True).run(
        threading.Event()
    )
    bound = compute_beta_binomial_upper(CALIBRATION, HELD_OUT, ALPHA, 0.99)
    print(f"{law}: {totals.alerts} of {totals.closed} normal records alerted at alpha {ALPHA}, bound {bound}")
    assert totals.closed == HELD_OUT
    assert not totals.rejected
    assert 0 < totals.alerts <= bound
