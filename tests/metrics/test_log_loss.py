import math

import numpy as np
import pytest
import torch
from torch import tensor

from lightning_gem.metrics import LogLoss


def log_loss(*columns):
    metric = LogLoss()
    metric.update(*columns)
    return metric.compute().item()


def test_by_hand():
    logit = math.log(3)  # p = 3/4
    logits = tensor([logit, logit], dtype=torch.float64)
    assert log_loss(logits, tensor([1, 0])) == pytest.approx((math.log(4 / 3) + math.log(4)) / 2, abs=1e-15)
    assert log_loss(logits, tensor([1, 0]), tensor([3, 1])) == pytest.approx(
        (3 * math.log(4 / 3) + math.log(4)) / 4, abs=1e-15
    )


def test_equals_the_loop_over_batches():
    rng = np.random.default_rng(0)
    logits, labels, weights = rng.normal(size=300), rng.random(300), rng.exponential(size=300)
    loss = 0.0
    for x, y, w in zip(logits, labels, weights, strict=True):
        p = 1 / (1 + math.exp(-x))
        loss -= w * (y * math.log(p) + (1 - y) * math.log(1 - p))
    metric = LogLoss()
    for part in np.array_split(np.arange(300), 7):
        metric.update(*(torch.from_numpy(column[part]) for column in (logits, labels, weights)))
    assert metric.compute().item() == pytest.approx(loss / weights.sum(), rel=1e-12)


def test_one_class_is_fine_and_no_example_is_nan():
    assert log_loss(torch.zeros(3), torch.ones(3)) == pytest.approx(math.log(2), abs=1e-15)
    assert math.isnan(log_loss(torch.zeros(0), torch.zeros(0)))
    assert math.isnan(log_loss(torch.zeros(2), torch.ones(2), torch.zeros(2)))
