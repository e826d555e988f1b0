"""The false-alarm rate on a simulated fleet: at most alpha of normal records alert, up to random variation.

The training is short, because the rate does not depend on how well the model predicts. For each arrival-order
distribution, the model is calibrated on 5,000 normal records. Other normal records are then streamed event by event,
interleaved as they arrive.
"""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from deformer_stream import model_store
from deformer_stream.calibration.conformal import Calibration
from deformer_stream.calibration.false_alarms import bound_false_alarms
from deformer_stream.codec import Codec
from deformer_stream.demo.simulate import FEATURES, SimulatedFleet, simulate
from deformer_stream.engine.engine import Engine
from deformer_stream.engine.engine_set import EngineSet
from deformer_stream.model.schema import Schema
from deformer_stream.runtime.metrics import Metrics
from deformer_stream.runtime.pipeline import Pipeline
from deformer_stream.runtime.timing import EventClock
from deformer_stream.testing import MemorySink, MemorySource
from tests.demo.arrival_orders import Order, simulate_in_order
from tests.effort import IS_LONG
from tests.engine.max_statistics import compute_max_statistics
from trainer.job import train
from trainer.settings import TrainConfig

ALPHA = 0.01
NUM_TRAINING, NUM_CALIBRATION, NUM_HELD_OUT = 1_000, 5_000, 10_000 if IS_LONG else 4_000

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a model that is trained on simulated normal records."""
    folder = tmp_path_factory.mktemp("guarantee")
    pq.write_table(simulate(NUM_TRAINING, seed=1).select_normal_records(), folder / "normal.parquet")
    train([folder / "normal.parquet"], TrainConfig(out=folder / "model", preset="tiny", epochs=1, seed=0))
    return folder / "model"


def arrange_by_arrival(fleet: SimulatedFleet, schema: Schema) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the readings of N records in order of arrival: (N, F) codes, −1 for padding, and normalised values."""
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


@pytest.mark.parametrize("order", ["random", "fixed", "bursty"])
def test_false_alarm_rate_is_at_most_alpha(model_dir: Path, order: Order) -> None:
    loaded = model_store.read(model_dir)
    codes, values = arrange_by_arrival(simulate_in_order(NUM_CALIBRATION, seed=2, order=order), loaded.schema)
    calibration = Calibration.from_statistics(compute_max_statistics(loaded.model, codes, np.nan_to_num(values)), order)
    engine = Engine(loaded.model, calibration, loaded.fingerprint, ALPHA, effort="off")
    sink = MemorySink()
    source = MemorySource(simulate_in_order(NUM_HELD_OUT, seed=3, order=order).iterate_messages(), chunk=8_192)
    totals = Pipeline(
        source, Codec(loaded.schema), EngineSet.of_only_model(engine), [sink], EventClock(), Metrics(), is_finite=True
    ).run(threading.Event())
    bound = bound_false_alarms(ALPHA, NUM_CALIBRATION, NUM_HELD_OUT, 0.99)
    print(f"{order}: {totals.alerts} of {totals.closed} normal records alerted at alpha {ALPHA}, bound {bound}")
    assert totals.closed == NUM_HELD_OUT
    assert not totals.rejected
    assert 0 < totals.alerts <= bound
