"""Order, exactly-once delivery and exact resume of batches."""

import pickle
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gem.data.rows import Bags, Events, Rows
from lightning_gem.data.stream import BatchStream, StreamLoader
from tests.data.stream_helpers import CountingSource, check_content, in_workers, make_rows, rows_of

UNEVEN = [7, 1, 0, 12, 3, 9]


def make_stream(
    rank: int = 0, world_size: int = 1, batch_size: int = 4, shuffle_rows: int = 8, **kwargs: int
) -> BatchStream:
    return BatchStream(CountingSource(UNEVEN), batch_size, rank, world_size, shuffle_rows, **kwargs)


@settings(max_examples=60, deadline=None)
@given(
    chunks=st.lists(st.integers(0, 25), min_size=1, max_size=8),
    world_size=st.integers(1, 7),
    num_workers=st.integers(0, 3),
    batch_size=st.integers(2, 12),
    shuffle_rows=st.sampled_from([0, 1, 10, 1000]),
    piece=st.sampled_from([1, 5, 1000]),
    epoch=st.integers(0, 3),
)
def test_every_row_exactly_once(
    chunks: list[int], world_size: int, num_workers: int, batch_size: int, shuffle_rows: int, piece: int, epoch: int
) -> None:
    num_rows = sum(chunks)
    if num_rows < world_size:
        with pytest.raises(ValueError, match="fewer than the"):
            BatchStream(CountingSource(chunks), batch_size, 0, world_size)
        return
    ranks = []
    for rank in range(world_size):
        stream = BatchStream(CountingSource(chunks, piece), batch_size, rank, world_size, shuffle_rows)
        stream.epoch = epoch
        batches = list(in_workers(stream, num_workers))
        for batch in batches:
            check_content(batch)
        assert len(batches) == len(stream)
        assert all(1 <= len(batch) <= batch_size for batch in batches)
        ranks.append(rows_of(batches))
    assert len({len(batches) for batches in ranks}) == 1
    sizes = [sum(map(len, batches)) for batches in ranks]
    assert max(sizes) - min(sizes) <= 1
    rows = [row for batches in ranks for batch in batches for row in batch]
    assert sorted(rows) == list(range(num_rows))
    if not shuffle_rows and not num_workers:
        assert rows == sorted(rows)


@pytest.mark.parametrize("num_workers", range(4))
@pytest.mark.parametrize("world_size", range(1, 8))
def test_every_row_exactly_once_for_all_layouts(world_size: int, num_workers: int) -> None:
    ranks = [rows_of(in_workers(make_stream(rank, world_size), num_workers)) for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1
    assert sorted(row for batches in ranks for batch in batches for row in batch) == list(range(sum(UNEVEN)))


@settings(max_examples=30, deadline=None)
@given(
    num_workers=st.integers(0, 3), shuffle_rows=st.sampled_from([0, 8, 100]), batch_size=st.integers(2, 9),
    world_size=st.integers(1, 3),
)  # fmt: skip
def test_resume_at_every_position(num_workers: int, shuffle_rows: int, batch_size: int, world_size: int) -> None:
    stream = make_stream(world_size - 1, world_size, batch_size, shuffle_rows)
    whole = rows_of(in_workers(stream, num_workers))
    for position in range(len(whole) + 1):
        stream.first_batch = position
        assert rows_of(in_workers(stream, num_workers)) == whole[position:]


def test_order_follows_from_seed_and_epoch() -> None:
    def order(seed: int = 0, epoch: int = 0) -> list[list[int]]:
        stream = make_stream(seed=seed)
        stream.epoch = epoch
        return rows_of(iter(stream))

    assert order() == order()
    orders = [order(), order(seed=1), order(epoch=1), order(epoch=2)]
    for i, first in enumerate(orders):
        assert all(first != other for other in orders[i + 1 :])
        assert first != rows_of(iter(make_stream(shuffle_rows=0)))
    # The order of the chunks alone differs too.
    assert len({tuple(each[0][:1]) for each in orders}) > 1


def test_which_rows_share_a_batch_is_random() -> None:
    source = CountingSource([1000])
    partners = [next(iter(BatchStream(source, 10, shuffle_rows=1000, seed=seed))).row for seed in range(200)]
    counts = np.bincount(torch.cat(partners).numpy(), minlength=1000)
    assert counts.sum() == 2000
    assert counts.max() <= 12
    assert 100 < (counts == 0).sum() < 170


def test_shuffle_window_bounds_the_distance() -> None:
    stream = BatchStream(CountingSource([1000]), 10, shuffle_rows=100)
    for position, batch in enumerate(rows_of(iter(stream))):
        window = position // 10
        assert all(window * 100 <= row < (window + 1) * 100 for row in batch)


def test_streams_that_cannot_work() -> None:
    with pytest.raises(ValueError, match="3 rows, fewer than the 4 ranks"):
        BatchStream(CountingSource([3]), 2, 0, 4)
    with pytest.raises(ValueError, match="3 rows do not divide by 2 ranks: use batch_size=2"):
        BatchStream(CountingSource([3]), 1, 0, 2)
    with pytest.raises(ValueError, match="seed must not be negative"):
        make_stream(seed=-1)
    assert rows_of(iter(BatchStream(CountingSource([4]), 1, 1, 2))) == [[2], [3]]


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
def test_loader_gives_what_the_stream_gives(num_workers: int) -> None:
    loader = StreamLoader(make_stream(), num_workers)
    assert len(loader) == 8
    expected = rows_of(in_workers(make_stream(), num_workers))
    batches = list(loader)
    assert [batch.row.tolist() for batch in batches] == expected
    for batch in batches:
        check_content(batch)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_resumes_at_every_position(num_workers: int) -> None:
    epochs = []
    loader = StreamLoader(make_stream(), num_workers)
    for epoch in range(2):
        loader.set_epoch(epoch)
        epochs.append(rows_of(iter(loader)))
    for position in range(9):
        loader = StreamLoader(make_stream(), num_workers)
        loader.set_epoch(1)
        iterator = iter(loader)
        for _ in range(position):
            next(iterator)
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        del iterator
        resumed = StreamLoader(make_stream(), num_workers)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        resumed.set_epoch(1)
        assert rows_of(iter(resumed)) == epochs[1][position:]
        assert resumed.state_dict()["batch"] == 8
    # Once only: the next iteration is whole.
    assert rows_of(iter(resumed)) == epochs[1]


@pytest.mark.parametrize(
    ("changed", "num_workers", "text"),
    [
        ({}, 2, "num_workers=1, now it is 2"),
        ({"batch_size": 5}, 1, "batch_size=4, now it is 5"),
        ({"seed": 3}, 1, "seed=0, now it is 3"),
        ({"shuffle_rows": 12}, 1, "shuffle_rows=8, now it is 12"),
        ({"world_size": 2}, 1, "num_ranks=1, now it is 2"),
    ],
)
def test_resume_needs_the_same_layout(changed: dict[str, int], num_workers: int, text: str) -> None:
    loader = StreamLoader(make_stream(), num_workers=1)
    loader.batch = 3
    state = loader.state_dict()
    other = StreamLoader(make_stream(**changed), num_workers)
    other.load_state_dict(state)
    with pytest.raises(ValueError, match=f"middle of an epoch with {text}.*end of an epoch"):
        next(iter(other))
    # From the next epoch on, and from the start of one, anything goes.
    other.load_state_dict(state)
    other.set_epoch(1)
    next(iter(other))
    other.load_state_dict({**state, "batch": 0})
    next(iter(other))


def test_position_at_the_start_of_an_epoch() -> None:
    loader = StreamLoader(make_stream())
    list(loader)
    assert loader.state_dict()["batch"] == 8
    loader.set_epoch(1)
    assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (1, 0)
    iterator = iter(loader)
    assert loader.state_dict()["batch"] == 0
    next(iterator)
    assert loader.state_dict()["batch"] == 1
    assert rows_of(iter(loader))[0] == rows_of(iter(loader))[0]


def test_loading_does_not_touch_the_random_numbers_of_the_model() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    list(StreamLoader(make_stream()))
    assert torch.rand(1) == expected


def test_batches_do_not_share_memory_with_the_source() -> None:
    rows = make_rows(np.arange(12))

    class Fixed:
        chunk_sizes = [12]

        def read(self, chunk: int, start: int, stop: int) -> Rows:
            return rows.take(slice(start, stop))

    for shuffle_rows in (0, 12):
        for batch_size in (5, 12):
            for batch in BatchStream(Fixed(), batch_size, shuffle_rows=shuffle_rows):
                check_content(batch)
                assert batch.sparse is not None
                events = batch.sequences["s"]
                for tensor in (batch.dense, batch.labels, batch.row, batch.user, batch.domain, batch.sparse.values()):
                    tensor.fill_(99)
                for tensor in (events.ids.values(), events.floats, events.timestamps):
                    tensor.fill_(99)


def test_overlapping_histories_are_not_multiplied() -> None:
    log = Events(
        ids=np.arange(100)[None],
        floats=np.empty((100, 0), dtype=np.float32),
        timestamps=np.arange(100),
        starts=np.zeros(100, dtype=np.int64),
        lengths=np.arange(100),
    )
    rows = make_rows(np.arange(100))
    rows = Rows(**{**rows.__dict__, "sequences": {"s": log}, "sequence_keys": {"s": ["x"]}})
    assert rows.compact().sequences["s"].ids is log.ids
    batch = rows.take(np.array([3, 0, 99])).to_batch()
    assert batch.sequences["s"].timestamps.tolist() == [0, 1, 2, *range(99)]
    joined = Rows.concat([rows.take(slice(98, 100)), rows.take(slice(0, 3))]).to_batch()
    assert joined.sequences["s"].ids.values().tolist() == [*range(98), *range(99), 0, 0, 1]


def test_no_rows_and_no_sparse_features() -> None:
    rows = make_rows(np.arange(5))
    assert len(rows.take(slice(2, 2)).to_batch()) == 0
    assert len(Rows.concat([rows.take(slice(0, 0)), rows]).to_batch()) == 5
    bare = Rows(**{**rows.__dict__, "sparse": {}})
    assert bare.to_batch().sparse is None
    only = Rows(**{**rows.__dict__, "sparse": {"b": Bags(np.arange(0), np.zeros(5, int), np.zeros(5, int))}})
    sparse = only.to_batch().sparse
    assert sparse is not None
    assert sparse.values().numel() == 0


def test_histories_in_another_order() -> None:
    rng = np.random.default_rng(0)
    lengths = np.array([3, 0, 5, 1])
    starts, total = np.cumsum(lengths) - lengths, int(lengths.sum())
    events = Events(
        ids=rng.integers(0, 99, (3, total)),
        floats=rng.random((total, 2), dtype=np.float32),
        timestamps=np.arange(total),
        starts=starts,
        lengths=lengths,
        in_order=True,
    )
    events.timestamps.flags.writeable = False  # as columns of a file are
    order = np.array([2, 3, 1, 0])
    place = np.concatenate([np.arange(starts[row], starts[row] + lengths[row]) for row in order])
    for source in (events, Events(**{**events.__dict__, "in_order": False})):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            moved = source.reorder(order)
        assert moved.in_order
        np.testing.assert_array_equal(moved.ids, events.ids[:, place])
        np.testing.assert_array_equal(moved.floats, events.floats[place])
        np.testing.assert_array_equal(moved.timestamps, place)
        assert moved.lengths.tolist() == [5, 1, 0, 3]
        assert moved.starts.tolist() == [0, 5, 6, 6]
    empty = events.take(slice(1, 2)).reorder(np.array([0]))
    assert empty.ids.shape == (3, 0)
