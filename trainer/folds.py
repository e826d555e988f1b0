"""Cross-conformal calibration, for tables too small for a split (after Vovk, "Cross-conformal predictors").

With K folds the model is trained as always, without the K-th part of the records that is held out. Then K − 1 siblings
are trained in the same way, each without another part, and each judges the part that it has not seen. So all records
calibrate: every statistic is that of a record under a model that has not seen it and was trained on as many others.
Each statistic alone has the law of a future normal record's. Together they are not exchangeable with it, since siblings
differ: alpha holds as far as models trained on other parts of the same records judge alike. Kinds and transforms of
features are the first model's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from trainer.data import PreparedTable, Split


def split_folds(data: PreparedTable, folds: int, seed: int) -> Iterator[PreparedTable]:
    """The same records split otherwise, `folds` − 1 times: those that the first split holds out are trained on, and
    each of the others is held out once. As many validate as before."""
    first, apart = data.split == Split.CALIBRATION, data.split == Split.LEFT_OUT
    rng = np.random.default_rng([seed, 0xF01D])
    part = np.zeros(len(data.split), np.int64)
    others = ~first & ~apart
    part[others] = rng.permutation(np.arange(int(others.sum())) % (folds - 1)) + 1
    validating = int((data.split == Split.VALIDATION).sum())
    for fold in range(1, folds):
        split = np.full(len(data.split), Split.TRAIN, np.uint8)
        split[part == fold] = Split.CALIBRATION
        split[rng.permutation(np.flatnonzero((part != fold) & ~apart))[:validating]] = Split.VALIDATION
        split[apart] = Split.LEFT_OUT
        yield replace(data, split=split)
