import math

import numpy as np
import pytest
import torch
from torch import inf, nan, tensor

from lightning_gem.metrics import AUC


def loop_auc(logits, labels, weights):
    """The definition, pair by pair."""
    wins = pairs = 0.0
    for x, y, w in zip(logits, labels, weights, strict=True):
        for x2, y2, w2 in zip(logits, labels, weights, strict=True):
            pair = w * y * w2 * (1 - y2)  # how much (x, x2) is a positive and a negative
            wins += pair * ((x > x2) + 0.5 * (x == x2))
            pairs += pair
    return wins / pairs


def rank_auc(logits, labels):
    """Mann-Whitney by ranks, for distinct logits."""
    ranks = np.empty(len(logits))
    ranks[np.argsort(logits)] = np.arange(1, len(logits) + 1)
    positives = labels.sum()
    return (ranks[labels].sum() - positives * (positives + 1) / 2) / (positives * (len(labels) - positives))


def auc(*columns, **kwargs):
    metric = AUC(**kwargs)
    metric.update(*columns)
    return metric.compute().item()


def test_by_hand():
    logits = tensor([0.0, 1.0, 2.0, 3.0])
    assert auc(logits, tensor([0, 0, 1, 1])) == 1
    assert auc(logits, tensor([1, 1, 0, 0])) == 0
    assert auc(logits, tensor([0, 1, 0, 1])) == 0.75
    assert auc(logits, tensor([0, 1, 0, 1]), tensor([1, 2, 3, 4])) == (2 * 1 + 4 * 4) / (6 * 4)


def test_ties_count_one_half():
    assert auc(torch.zeros(5), tensor([1, 0, 0, 1, 0])) == 0.5
    assert auc(tensor([1.0, 1.0, 0.0]), tensor([1, 0, 0])) == 0.75


@pytest.mark.parametrize("seed", range(3))
def test_equals_the_loop_over_batches(seed):
    rng = np.random.default_rng(seed)
    logits = np.round(rng.normal(-2, 2, 150), 1)  # many ties, and no two values in one bin
    labels = np.where(rng.random(150) < 0.2, rng.random(150), rng.random(150) < 0.3)  # some soft labels
    weights = rng.exponential(size=150)
    metric = AUC()
    for part in np.array_split(np.arange(150), 7):
        metric.update(*(torch.from_numpy(column[part]) for column in (logits, labels, weights)))
    assert metric.compute().item() == pytest.approx(loop_auc(logits, labels, weights), rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_close_to_exact_at_a_low_click_rate(seed):
    rng = np.random.default_rng(seed)
    logits = rng.normal(-6, 1.2, 400_000)
    labels = rng.random(len(logits)) < 1 / (1 + np.exp(-logits))
    assert 0.003 < labels.mean() < 0.007
    metric = AUC()
    metric.update(torch.from_numpy(logits), torch.from_numpy(labels))
    error = abs(metric.compute().item() - rank_auc(logits, labels))
    assert error <= metric.error_bound().item() < 1e-4
    assert error < 2e-6


def test_error_stays_within_its_bound():
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=1000), rng.random(1000) < 0.3
    exact = rank_auc(logits, labels)
    for bins in (1, 2, 3, 10, 100, 1000):
        for limit in (0.5, 3.0, 16.0):
            metric = AUC(bins=bins, limit=limit)
            metric.update(torch.from_numpy(logits), torch.from_numpy(labels))
            assert abs(metric.compute().item() - exact) <= metric.error_bound().item() + 1e-12


def test_logits_beyond_the_limit_share_the_outer_bins():
    assert auc(tensor([-inf, -20.0, 20.0, inf]), tensor([0, 0, 1, 1])) == 1
    assert auc(tensor([-20.0, -30.0]), tensor([0, 1])) == 0.5
    assert auc(tensor([-20.0, -30.0]), tensor([0, 1]), limit=32.0) == 0


@pytest.mark.parametrize("labels", [[], [0.0, 0.0], [1.0, 1.0], [nan, 1.0]])
def test_nan_without_both_classes(labels):
    assert math.isnan(auc(torch.randn(len(labels)), tensor(labels)))


def test_update_leaves_a_loaded_state_dict_alone():
    state = {"auc_histogram": torch.zeros(2, 2**16 + 1, dtype=torch.float64)}
    metric = AUC()
    metric.persistent(True)
    metric.load_state_dict(state)
    metric.update(torch.randn(5), torch.ones(5))
    assert state["auc_histogram"].sum() == 0


def test_bad_arguments():
    with pytest.raises(ValueError, match="`bins` is 0"):
        AUC(bins=0)
    with pytest.raises(ValueError, match="`limit` is nan"):
        AUC(limit=nan)
