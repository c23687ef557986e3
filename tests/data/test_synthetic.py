"""Synthetic ads: rows are pure functions of their position, and the reported best NE is the true one."""

import pickle
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_gem.data.batch import RecBatch
from lightning_gem.data.stream import BatchStream, StreamLoader
from lightning_gem.data.synthetic import SyntheticAds, SyntheticSequence


def make(seed: int = 0, num_train: int = 4000, num_val: int = 20_000) -> SyntheticAds:
    data = SyntheticAds(num_train=num_train, num_val=num_val, num_test=1000, seed=seed)
    data.setup("fit")
    return data


def flat(batch: RecBatch) -> dict[str, Tensor]:
    """Everything a row holds; the sequences of one row of a batch as they lie there."""
    assert batch.sparse is not None
    out = {
        "sparse": batch.sparse.values().view(-1, len(batch)),
        "labels": batch.labels,
        "time": batch.request_timestamps,
    }
    for name, sequence in batch.sequences.items():
        out[f"{name}.ids"] = sequence.ids.values()
        out[f"{name}.time"] = sequence.timestamps
        out[f"{name}.lengths"] = sequence.lengths_cpu
    return out


def same(a: RecBatch, b: RecBatch) -> bool:
    left, right = flat(a), flat(b)
    return all(torch.equal(left[key].nan_to_num(-1), right[key].nan_to_num(-1)) for key in left)


@pytest.fixture(scope="module")
def data() -> SyntheticAds:
    return make()


@pytest.fixture(scope="module")
def batch(data: SyntheticAds) -> RecBatch:
    (only,) = BatchStream(data.sources["val"], 20_000)
    return only


def clicks_by_row(stream: BatchStream | StreamLoader) -> dict[int, tuple[float, int]]:
    return {
        int(row): (float(label), int(length))
        for batch in stream
        for row, label, length in zip(batch.row, batch.labels[:, 0], batch.sequences["views"].lengths_cpu, strict=True)
    }


def test_same_seed_same_rows_and_other_seeds_or_splits_other_rows(data: SyntheticAds) -> None:
    def first(module: SyntheticAds, split: str) -> RecBatch:
        return next(iter(BatchStream(module.sources[split], 500)))

    assert same(first(data, "train"), first(make(), "train"))
    assert not same(first(data, "train"), first(make(seed=1), "train"))
    assert not same(first(data, "train"), first(data, "val"))


def test_rows_do_not_depend_on_the_chunks_read_before(data: SyntheticAds) -> None:
    source = data.sources["train"]
    alone = pickle.loads(pickle.dumps(source)).read(3, 2, 9).to_batch()
    for chunk in (7, 0, 3):
        source.read(chunk, 0, source.chunk_sizes[chunk])
    assert same(source.read(3, 2, 9).to_batch(), alone)
    whole = source.read(3, 0, source.chunk_sizes[3])
    assert same(whole.take(np.arange(2, 9)).to_batch(), alone)


@pytest.mark.parametrize("world_size", [1, 3])
def test_rows_do_not_depend_on_order_or_ranks(data: SyntheticAds, world_size: int) -> None:
    expected = clicks_by_row(BatchStream(data.sources["train"], 512))
    found: dict[int, tuple[float, int]] = {}
    for rank in range(world_size):
        found |= clicks_by_row(BatchStream(data.sources["train"], 128, rank, world_size, shuffle_rows=1024, seed=5))
    assert found == expected
    assert len(found) == 4000


def test_rows_do_not_depend_on_workers(data: SyntheticAds) -> None:
    source = data.sources["test"]
    assert clicks_by_row(StreamLoader(BatchStream(source, 100), num_workers=2)) == clicks_by_row(
        BatchStream(source, 256)
    )


def test_ids_are_zipf(data: SyntheticAds, batch: RecBatch) -> None:
    assert batch.sparse is not None
    for name in ("user", "item"):
        counts = np.bincount(batch.sparse[name].values().numpy(), minlength=1000) / len(batch)
        decades = [counts[a:b].sum() for a, b in ((0, 10), (10, 100), (100, 1000))]
        np.testing.assert_allclose(decades, 1 / 3, atol=0.03)  # each decade of ranks is as popular as the next
        assert counts[0] > 20 * counts[100:].mean()


def test_histories_are_heavy_tailed_with_empty_ones_within_max_len(data: SyntheticAds, batch: RecBatch) -> None:
    for schema in data.schema.sequences:
        lengths = batch.sequences[schema.name].lengths_cpu.double()
        assert 0.03 < (lengths == 0).double().mean() < 0.07
        assert lengths.max() == schema.max_len
        assert (lengths == schema.max_len).double().mean() > 0.05  # the tail that the cap cuts
        assert lengths.mean() > lengths.median()


def test_events_are_ascending_bursty_and_before_the_request(batch: RecBatch) -> None:
    for sequence in batch.sequences.values():
        row = torch.repeat_interleave(torch.arange(len(batch)), sequence.lengths_cpu.long())
        assert (sequence.timestamps < batch.request_timestamps[row]).all()
        gaps = sequence.timestamps.diff()[row.diff() == 0].double()
        assert (gaps > 0).all()
        assert gaps.mean() > 20 * gaps.median()


def test_ids_fit_their_tables(data: SyntheticAds, batch: RecBatch) -> None:
    assert batch.sparse is not None
    for feature in data.schema.sparse:
        values = batch.sparse[feature.name].values()
        assert values.min() >= 0
        assert values.max() < feature.num_embeddings
    for schema in data.schema.sequences:
        events = batch.sequences[schema.name]
        for feature, key in zip(schema.features, schema.keys, strict=True):
            values = events.ids[key].values()
            assert values.min() >= 0
            assert values.max() < feature.num_embeddings


def test_conversions_are_labelled_only_on_clicks(batch: RecBatch) -> None:
    clicked = batch.labels[:, 0] == 1
    assert torch.equal(~batch.labels[:, 1].isnan(), clicked)
    assert torch.equal(batch.weights, torch.stack([torch.ones(len(batch)), clicked.float()], dim=1))
    assert 0 < batch.labels[clicked, 1].mean() < 1


def test_label_rate_is_stable(batch: RecBatch) -> None:
    halves = batch.labels[:, 0].chunk(2)
    assert abs(float(halves[0].mean() - halves[1].mean())) < 4 * (0.5 / 10_000) ** 0.5
    assert 0.1 < float(batch.labels[:, 0].mean()) < 0.6


def test_best_ne_is_the_ne_of_the_true_probabilities(data: SyntheticAds, batch: RecBatch) -> None:
    best = data.best_ne("val", num_draws=32)
    requests = data.world.requests(1, 0, len(batch))
    truth = torch.from_numpy(data.world.probabilities(requests, data.world.histories(requests)))
    for i, name in enumerate(("click", "conversion")):
        given = batch.weights[:, i] > 0
        p, y = truth[given, i], batch.labels[given, i].double()
        losses = torch.nn.functional.binary_cross_entropy(p, y, reduction="none")
        mean = y.mean()
        entropy = -(mean * mean.log() + (1 - mean) * (1 - mean).log())
        assert float(losses.mean() / entropy) == pytest.approx(best[name].realised, abs=1e-6)
        error = float(losses.std() / entropy) / len(losses) ** 0.5
        assert abs(best[name].realised - best[name].expected) < 5 * error
        assert abs(float((p - y).mean())) < 5 * (0.25 / len(y)) ** 0.5  # calibrated
        assert best[name].expected + 0.05 < best[name].without_sequences < 1


def test_any_size_costs_nothing() -> None:
    start = time.perf_counter()
    data = SyntheticAds(num_train=10**12, batch_size=64)
    data.setup("fit")
    stream = BatchStream(data.sources["train"], 64, rank=5, world_size=4096)
    last = data.sources["train"].read(len(data.sources["train"].chunk_sizes) - 1, 10**6, 10**6 + 4)
    assert len(next(iter(stream))) in (63, 64)  # the rows of a rank are spread evenly over its steps
    assert len(last) == 4
    assert time.perf_counter() - start < 2


def test_shapes_follow_the_arguments() -> None:
    shapes = [SyntheticSequence(50, 4, 2, "long"), SyntheticSequence(9, 2)]
    data = SyntheticAds(
        num_train=64, num_sparse=9, num_dense=3, num_tasks=3, num_domains=4, sequences=shapes, event_embedding_dim=8
    )
    data.setup("fit")
    batch = next(iter(BatchStream(data.sources["train"], 64)))
    assert batch.sparse is not None
    assert len(batch.sparse.keys()) == 9
    assert batch.dense.shape == (64, 3)
    assert batch.labels.shape == (64, 3)
    assert batch.domain.max() < 4
    assert [sequence.name for sequence in data.schema.sequences] == ["long", "sequence_1"]
    assert batch.sequences["long"].floats.shape[1] == 2
    assert len(batch.sequences["long"].ids.keys()) == 4
    assert data.schema.sequences[0].features[0].embedding_dim == 8


def test_arguments_that_leave_no_room_for_the_signal_are_refused() -> None:
    with pytest.raises(ValueError, match="num_sparse"):
        SyntheticAds(num_sparse=4)
    with pytest.raises(ValueError, match="num_features"):
        SyntheticAds(sequences=[replace(SyntheticSequence(), num_features=1)])


def test_long_histories_are_made_a_few_rows_at_a_time() -> None:
    data = SyntheticAds(num_train=3 * 10**8, sequences=[SyntheticSequence(4096, 2)])
    data.setup("test")
    source = data.sources["train"]
    rows = source.read(0, 0, 10**6)
    assert len(rows) == 64  # of 2,000 events on average
    # Batches span several reads.
    batch = next(iter(BatchStream(source, batch_size=150)))
    assert batch.row.tolist() == list(range(150))
    assert torch.equal(batch.user[:64], torch.from_numpy(rows.user))
