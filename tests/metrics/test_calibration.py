import math

import numpy as np
import pytest
import torch
from torch import tensor

from lightning_gem.metrics import Calibration


def calibration(*columns):
    metric = Calibration()
    metric.update(*columns)
    return metric.compute().item()


def test_by_hand():
    logits = tensor([math.log(3), 0.0, 0.0], dtype=torch.float64)  # p = 3/4, 1/2, 1/2
    assert calibration(logits, tensor([1, 0, 0])) == pytest.approx(1.75, abs=1e-15)
    assert calibration(logits, tensor([1, 0, 0]), tensor([2, 1, 0])) == pytest.approx(1.0, abs=1e-15)


def test_equals_the_loop_over_batches():
    rng = np.random.default_rng(0)
    logits, labels, weights = rng.normal(size=300), rng.random(300) < 0.2, rng.exponential(size=300)
    predicted = observed = 0.0
    for x, y, w in zip(logits, labels, weights, strict=True):
        predicted += w / (1 + math.exp(-x))
        observed += w * y
    metric = Calibration()
    for part in np.array_split(np.arange(300), 7):
        metric.update(*(torch.from_numpy(column[part]) for column in (logits, labels, weights)))
    assert metric.compute().item() == pytest.approx(predicted / observed, rel=1e-12)


@pytest.mark.parametrize("labels", [[], [0.0, 0.0], [math.nan]])
def test_nan_without_positives(labels):
    assert math.isnan(calibration(torch.zeros(len(labels)), tensor(labels)))
