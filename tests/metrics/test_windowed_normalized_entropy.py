import pytest
import torch
from torchmetrics import MetricCollection

from lightning_gem.metrics import NormalizedEntropy, WindowedNormalizedEntropy


def batches(sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for size in sizes:
        logits = torch.randn(size, generator=generator, dtype=torch.float64)
        yield logits, (torch.rand(size, generator=generator) < 0.3).double(), torch.rand(size, generator=generator)


def lifetime_ne(rows):
    metric = NormalizedEntropy()
    metric.update(*(torch.cat(column) for column in zip(*rows, strict=True)))
    return metric.compute()


def test_is_the_lifetime_value_until_the_window_is_full():
    rows = list(batches([40, 0, 60]))
    metric = WindowedNormalizedEntropy(window=100, slots=10)
    for row in rows:
        metric.update(*row)
    torch.testing.assert_close(metric.compute(), lifetime_ne(rows))


def test_exact_when_batches_are_slots():
    rows = list(batches([10] * 35))
    metric = WindowedNormalizedEntropy(window=100, slots=10)
    for i, row in enumerate(rows, start=1):
        metric.update(*row)
        torch.testing.assert_close(metric.compute(), lifetime_ne(rows[max(0, i - 10) : i]))


@pytest.mark.parametrize("sizes", [[7] * 60, [1] * 130, [33, 0, 5, 64] * 8, [500, 3, 2, 250, 1]])
@pytest.mark.parametrize("slots", [1, 3, 10])
def test_window_holds_enough_and_not_much_more(sizes, slots):
    window = 100
    metric = WindowedNormalizedEntropy(window=window, slots=slots)
    rows = list(batches(sizes))
    for i, row in enumerate(rows, start=1):
        metric.update(*row)
        held = int(getattr(metric, metric.ring_name)[:, 3].sum())
        seen = sum(sizes[:i])
        assert min(seen, window) <= held < window + metric.slot_size + max(sizes)
        # and it is the latest ones that it holds
        latest = torch.cat([row[0] for row in rows[:i]])[seen - held :]
        latest_rows = [torch.cat(column)[seen - held :] for column in zip(*rows[:i], strict=True)]
        assert len(latest) == held
        torch.testing.assert_close(metric.compute(), lifetime_ne([latest_rows]), equal_nan=True)


def test_memory_is_bounded():
    metric = WindowedNormalizedEntropy(window=1000, slots=10)
    for row in batches([1] * 300):
        metric.update(*row)
    assert getattr(metric, metric.ring_name).shape == (11, 4)


def test_a_nan_leaves_with_its_window():
    metric = WindowedNormalizedEntropy(window=10, slots=5)
    metric.update(torch.tensor([torch.nan]), torch.tensor([1.0]))
    assert metric.compute().isnan()
    for row in batches([4] * 5):
        metric.update(*row)
    assert metric.compute().isfinite()


def test_missing_labels_take_room_in_the_window():
    metric = WindowedNormalizedEntropy(window=10, slots=10)
    metric.update(torch.randn(4), torch.tensor([0.0, 1.0, 0.0, 1.0]))
    metric.update(torch.randn(10), torch.full((10,), torch.nan))
    assert metric.compute().isnan()


def test_forward_gives_the_batch_and_fills_the_window():
    rows = list(batches([10] * 4))
    metric = WindowedNormalizedEntropy(window=20, slots=2)
    for row in rows:
        torch.testing.assert_close(metric(*row), lifetime_ne([row]))
    torch.testing.assert_close(metric.compute(), lifetime_ne(rows[2:]))


def test_a_collection_does_not_merge_windows():
    metrics = MetricCollection(
        {"short": WindowedNormalizedEntropy(window=10), "long": WindowedNormalizedEntropy(window=1000)}
    )
    rows = list(batches([10] * 4))
    for row in rows:
        metrics.update(*row)
    values = metrics.compute()
    torch.testing.assert_close(values["short"], lifetime_ne(rows[3:]))
    torch.testing.assert_close(values["long"], lifetime_ne(rows))


@pytest.mark.parametrize("argument", ["window", "slots"])
def test_bad_arguments(argument):
    with pytest.raises(ValueError, match=f"`{argument}` is 0"):
        WindowedNormalizedEntropy(**{argument: 0})
