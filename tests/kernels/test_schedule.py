"""Tile schedules: every tile once, long work first, room for slack, one schedule for all calls on the same offsets."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import PAIRED_BATCH, QUICK, offsets

from lightning_gem.kernels import TileSchedule, build_tile_schedule
from lightning_gem.kernels.schedule import Schedules, dense_offsets


def listed(schedule):
    size = int(schedule.num_tiles)
    return list(zip(schedule.sequence[:size].tolist(), schedule.tile[:size].tolist(), strict=True))


@QUICK
@given(lengths=PAIRED_BATCH, block=st.sampled_from([1, 16, 64]), slack=st.sampled_from([0, 1, 100]))
def test_every_tile_is_listed_once_and_long_work_first(lengths, block, slack):
    lengths_q, lengths_k = [q for q, _ in lengths], [k for _, k in lengths]
    rows = sum(lengths_q) + slack
    schedule = build_tile_schedule(offsets(lengths_q), offsets(lengths_k), block_m=block, num_rows=rows)

    order = sorted(range(len(lengths)), key=lambda b: (-lengths_k[b], b))
    assert listed(schedule) == [(b, tile) for b in order for tile in range(-(-lengths_q[b] // block))]
    assert (schedule.capacity - int(schedule.num_tiles)) * block >= slack
    assert schedule.sequence.dtype == schedule.tile.dtype == schedule.num_tiles.dtype == torch.int32
    assert ((schedule.sequence >= 0) & (schedule.sequence < len(lengths))).all()
    unsorted = build_tile_schedule(offsets(lengths_q), block_m=block, num_rows=rows, order="none")
    assert listed(unsorted) == [(b, tile) for b, n in enumerate(lengths_q) for tile in range(-(-n // block))]


def test_shared_queries_have_tiles_in_every_sequence():
    schedule = build_tile_schedule(None, offsets([3, 0, 9]), block_m=16, num_rows=20)
    assert listed(schedule) == [(2, 0), (2, 1), (0, 0), (0, 1), (1, 0), (1, 1)]


def test_batches_without_sequences():
    schedule = build_tile_schedule(offsets([]), block_m=16, num_rows=40)
    assert int(schedule.num_tiles) == 0
    assert schedule.capacity >= 3


def test_calls_on_the_same_offsets_share_a_schedule():
    cu_q, cu_k = offsets([3, 20]), offsets([5, 1])
    first = Schedules(cu_q, cu_k, 23, 6).queries(16)
    assert Schedules(cu_q, cu_k, 23, 6).queries(16) is first
    assert Schedules(cu_q, cu_k, 23, 6).queries(32) is not first
    assert Schedules(cu_q, cu_k, 40, 6).queries(16) is not first
    assert Schedules(cu_q, cu_k.clone(), 23, 6).queries(16) is not first
    assert Schedules(cu_q, cu_k, 23, 6, share=False).queries(16) is not first
    assert listed(Schedules(cu_q, cu_k, 23, 6).keys(16)) == [(1, 0), (0, 0)]
    cu_q.copy_(offsets([20, 3]))  # the same tensor with other lengths
    assert listed(Schedules(cu_q, cu_k, 23, 6).queries(16)) == [(0, 0), (0, 1), (1, 0)]
    with torch.inference_mode():
        inference = offsets([3])
        Schedules(inference, inference, 3, 3).queries(16)


def test_a_given_schedule_is_taken_where_its_blocks_fit():
    cu = offsets([3, 20])
    given = build_tile_schedule(cu, block_m=16, num_rows=23)
    assert Schedules(cu, cu, 23, 23, given).queries(16) is given
    assert Schedules(cu, cu, 23, 23, given).queries(32).block_size == 32
    with pytest.raises(ValueError, match="schedule has room for 4 tiles, but these queries need 9"):
        Schedules(cu, cu, 100, 100, given).queries(16)
    again = TileSchedule.from_storage(given.storage, 16)
    assert torch.equal(again.sequence, given.sequence)
    assert torch.equal(again.num_tiles, given.num_tiles)


def test_dense_offsets_are_one_tensor_per_batch():
    cu = offsets([3, 20], torch.int32)
    assert dense_offsets(cu, 7).tolist() == [0, 7, 14]
    assert dense_offsets(cu, 7) is dense_offsets(cu, 7)
    assert dense_offsets(cu, 7).dtype == torch.int32


def test_bad_schedules_are_named():
    with pytest.raises(ValueError, match="cu_seqlens_q and cu_seqlens_k are both None"):
        build_tile_schedule(None, block_m=16, num_rows=3)
    with pytest.raises(ValueError, match="block_m must be at least 1"):
        build_tile_schedule(offsets([3]), block_m=0, num_rows=3)
