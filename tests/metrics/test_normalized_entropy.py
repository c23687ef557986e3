import math

import numpy as np
import pytest
import torch
from torch import nan, tensor

from lightning_gem.metrics import NormalizedEntropy


def loop_ne(logits, labels, weights):
    """The definition, example by example."""
    loss = positive = total = 0.0
    for x, y, w in zip(logits, labels, weights, strict=True):
        loss += w * (y * np.logaddexp(0, -x) + (1 - y) * np.logaddexp(0, x))
        positive += w * y
        total += w
    mean = positive / total
    return loss / -(total * (mean * math.log(mean) + (1 - mean) * math.log(1 - mean)))


def ne(*columns):
    metric = NormalizedEntropy()
    metric.update(*columns)
    return metric.compute().item()


def test_by_hand():
    # p = 1/2 for both: BCE = log 2; mean label 1/2: entropy = log 2
    assert ne(tensor([0.0, 0.0]), tensor([0.0, 1.0])) == pytest.approx(1, abs=1e-15)
    # p = 3/4 and 1/4: BCE = log(4/3) each
    logit = math.log(3)
    value = ne(tensor([logit, -logit], dtype=torch.float64), tensor([1, 0]))
    assert value == pytest.approx(math.log(4 / 3) / math.log(2), abs=1e-15)
    # weights 3 and 1: the mean label is 3/4
    value = ne(tensor([0.0, 0.0]), tensor([True, False]), tensor([3, 1]))
    assert value == pytest.approx(math.log(2) / (0.75 * math.log(4 / 3) + 0.25 * math.log(4)), abs=1e-15)


def test_predicting_the_mean_label_gives_one():
    labels = (torch.arange(1000) < 5).float()
    logits = torch.full((1000,), math.log(0.005 / 0.995), dtype=torch.float64)
    assert ne(logits, labels) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_equals_the_loop_over_batches(seed):
    rng = np.random.default_rng(seed)
    logits, weights = rng.normal(-3, 2, 500), rng.exponential(size=500)
    labels = np.where(rng.random(500) < 0.2, rng.random(500), rng.random(500) < 0.1)  # some soft labels
    metric = NormalizedEntropy()
    for part in np.array_split(np.arange(500), 7):
        metric.update(*(torch.from_numpy(column[part]) for column in (logits, labels, weights)))
    assert metric.compute().item() == pytest.approx(loop_ne(logits, labels, weights), rel=1e-12)


def test_accumulates_in_double_precision():
    # single precision would stop at 2**24
    metric = NormalizedEntropy()
    metric.update(torch.zeros(2), tensor([0.0, 1.0]), tensor([1e9, 1e9]))
    for _ in range(100):
        metric.update(torch.zeros(1), torch.ones(1))
    assert metric.entropy_sums[1].item() == 1e9 + 100


def test_sure_predictions_keep_their_tiny_loss():
    metric = NormalizedEntropy()
    metric.update(tensor([50.0, -50.0]), tensor([1.0, 0.0]))
    assert metric.compute().item() == pytest.approx(math.exp(-50) / math.log(2), rel=1e-12, abs=0)


@pytest.mark.parametrize("labels", [[], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [nan, nan]])
def test_nan_without_entropy(labels):
    assert math.isnan(ne(torch.randn(len(labels)), tensor(labels), torch.rand(len(labels))))
