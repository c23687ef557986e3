import math

import numpy as np
import pytest
import torch
from torch import nan, tensor

from lightning_gem.metrics import GAUC
from lightning_gem.metrics.gauc import hash_users


def loop_gauc(logits, labels, users, weights):
    """The definition, pair by pair within each user."""
    total = weight = 0.0
    for user in np.unique(users):
        rows = [row for row, u in enumerate(users) if u == user]
        wins = pairs = 0.0
        for i in rows:
            for j in rows:
                pair = weights[i] * labels[i] * weights[j] * (1 - labels[j])
                wins += pair * ((logits[i] > logits[j]) + 0.5 * (logits[i] == logits[j]))
                pairs += pair
        if pairs > 0:
            total += weights[rows].sum() * wins / pairs
            weight += weights[rows].sum()
    return total / weight


def gauc(*columns, **kwargs):
    metric = GAUC(**kwargs)
    metric.update(*columns)
    return metric.compute().item()


def many_users(seed, n_users):
    """Users who come with 2 to 40 examples in random order; the more examples, the better predicted."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 41, n_users)
    users = np.repeat(rng.integers(-(2**62), 2**62, n_users), sizes)
    quality = np.repeat(sizes / 10, sizes)
    labels = rng.random(len(users)) < 0.3
    logits = rng.normal(size=len(users)) + labels * quality
    order = rng.permutation(len(users))
    return [torch.from_numpy(column[order]) for column in (logits, labels, users)]


def test_by_hand():
    logits, users = tensor([0.0, 1.0, 2.0, 3.0, 4.0]), tensor([7, 7, -7, -7, -7])
    # user 7: AUC 0 of 2 examples; user -7: AUC 1/2 of 3 examples
    assert gauc(logits, tensor([1, 0, 0, 1, 0]), users) == pytest.approx(0.5 * 3 / 5)
    # user -7 has one class only
    assert gauc(logits, tensor([0, 1, 1, 1, 1]), users) == 1
    # weights: user -7 has AUC 3/4 and weight 6, user 7 weight 2
    assert gauc(logits, tensor([1, 0, 0, 1, 0]), users, tensor([1, 1, 3, 2, 1])) == pytest.approx(0.75 * 6 / 8)


def test_ties_count_one_half_within_a_user_only():
    assert gauc(torch.zeros(4), tensor([0, 1, 1, 0]), tensor([1, 1, 2, 2])) == 0.5
    assert gauc(tensor([1.0, 1.0, 0.0, 1.0, 0.0]), tensor([1, 0, 0, 0, 1]), tensor([1, 1, 1, 2, 2])) == pytest.approx(
        0.75 * 3 / 5
    )


@pytest.mark.parametrize("seed", range(5))
def test_equals_the_loop_over_batches(seed):
    rng = np.random.default_rng(seed)
    users = rng.integers(0, 30, 300)
    logits = np.round(rng.normal(size=300), 1).astype(np.float32)  # many ties
    labels = np.where(rng.random(300) < 0.1, rng.random(300), rng.random(300) < 0.2)  # some soft labels
    weights = rng.exponential(size=300)
    metric = GAUC()
    for part in np.array_split(np.arange(300), 7):
        metric.update(*(torch.from_numpy(column[part]) for column in (logits, labels, users, weights)))
    assert metric.compute().item() == pytest.approx(loop_gauc(logits, labels, users, weights), rel=1e-6)


@pytest.mark.parametrize("labels", [[], [0.0, 1.0], [nan, 1.0, 1.0]])
def test_nan_without_a_user_with_both_classes(labels):
    n = len(labels)
    assert math.isnan(gauc(torch.randn(n), tensor(labels), torch.arange(n)))


def test_hash_is_that_of_splitmix64_and_keeps_users_apart():
    def mix(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    users = tensor([0, 1, -1, 12345678901234567, -(2**63), 2**63 - 1])
    assert [h % 2**64 for h in hash_users(users).tolist()] == [mix(u % 2**64) for u in users.tolist()]
    assert len(hash_users(torch.arange(-50_000, 50_000)).unique()) == 100_000


def test_exact_up_to_max_samples():
    columns = many_users(0, n_users=200)
    n = len(columns[0])
    metric = GAUC(max_samples=n)
    for part in torch.arange(n).split(16):  # over 256 pieces, so they get merged
        metric.update(*(column[part] for column in columns))
        metric.update(torch.randn(50), torch.full((50,), nan), torch.arange(50))  # does not count
    assert len(metric.users) <= 256
    assert metric.compute().item() == pytest.approx(gauc(*columns), abs=1e-12)


@pytest.mark.parametrize("batch", [1000, 7000, 100_000])
def test_samples_whole_users(batch):
    columns = many_users(1, n_users=2000)
    n, max_samples = len(columns[0]), 5000
    metric = GAUC(max_samples=max_samples)
    for part in torch.arange(n).split(batch):
        metric.update(*(column[part] for column in columns))
        assert sum(map(len, metric.users)) <= 2 * max_samples + batch
    metric.compute()
    (kept,) = metric.users
    assert max_samples / 3 < len(kept) <= max_samples
    users, sizes = kept.unique(return_counts=True)
    all_users, all_sizes = hash_users(columns[2]).unique(return_counts=True)
    assert sizes.tolist() == all_sizes[torch.isin(all_users, users)].tolist()


def test_sampling_is_unbiased():
    # by the central limit theorem the mean of 100 estimates has a tenth of the deviation of one
    errors = []
    for seed in range(100):
        columns = many_users(seed, n_users=400)
        errors.append(gauc(*columns, max_samples=2000) - gauc(*columns))
    assert 0.002 < np.std(errors) < 0.02
    assert abs(np.mean(errors)) < 3 * np.std(errors) / 10


def test_a_user_that_does_not_fit_is_left_out():
    assert math.isnan(gauc(torch.randn(100), torch.arange(100) % 2, torch.zeros(100).long(), max_samples=40))


def test_forward_gives_the_batch_and_keeps_the_bound():
    columns = many_users(2, n_users=300)
    metric = GAUC(max_samples=1000)
    for part in torch.arange(len(columns[0])).split(500):
        rows = [column[part] for column in columns]
        assert metric(*rows).item() == pytest.approx(gauc(*rows), abs=1e-12)
        assert sum(map(len, metric.users)) <= 2500
    assert metric.compute().isfinite()


def test_bad_arguments():
    with pytest.raises(ValueError, match="`max_samples` is 0"):
        GAUC(max_samples=0)
    with pytest.raises(ValueError, match="`users` has dtype torch.float32"):
        GAUC().update(torch.randn(2), torch.ones(2), torch.randn(2))
    with pytest.raises(ValueError, match=r"`users` has shape \(3,\)"):
        GAUC().update(torch.randn(2), torch.ones(2), torch.arange(3))
