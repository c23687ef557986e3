"""Attention backward for Hopper (sm_90) with at most 64 queries a sequence (seeds): all gradients in one pass.

The queries of a sequence and the gradient of their output stay in shared memory while its keys and values stream by
once; dK and dV of a key tile are complete when the tile has been met, and leave through the place of the tile. Bound by
memory: K, V, dK and dV each move once, so that shared memory holds as many tiles on their way as it can. Two warpgroups
take 64 keys each of a tile, and give one partial dQ each, which the host adds up.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lightning_gem.kernels.attention.gluon_device import (
    activate_with_derivative,
    init_barriers,
    item_index,
    load_rows,
    load_stats,
    read_stats,
    segment_of,
    stats_start,
    store_rows,
)


@gluon.jit
def _item(index, sequence_list, cu_q, cu_k, seeds, HEADS: gl.constexpr, BROADCAST: gl.constexpr):
    sequence = gl.load(sequence_list + index // HEADS)
    start_k, length_k = segment_of(cu_k, sequence)
    if BROADCAST:
        start_q, length_q = 0, seeds
        start_o = sequence * seeds
    else:
        start_q, length_q = segment_of(cu_q, sequence)
        start_o = start_q
    return index % HEADS, sequence, start_q, length_q, start_o, start_k, length_k


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, do_desc, stats_desc, q_shared, k_shared, v_shared, do_shared, stats_shared,
    q_full, q_empty, kv_full, kv_empty, num_items, sequence_list, cu_q, cu_k, seeds,
    HEADS: gl.constexpr, BROADCAST: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SOFTMAX: gl.constexpr,
):  # fmt: skip
    STATS: gl.constexpr = 2 * 64 * 4 if SOFTMAX else 0
    rounds = gl.cdiv(num_items, gl.num_programs(0))
    step = 0
    done = 0
    for r in range(rounds):
        index = item_index(r, num_items)
        if index < num_items:
            head, sequence, start_q, length_q, start_o, start_k, length_k = _item(
                index, sequence_list, cu_q, cu_k, seeds, HEADS, BROADCAST
            )
            tiles = gl.cdiv(length_k, 128)
            # The first tiles may come while the queries before are still in use: two, for the third waits for the last.
            queries_after = gl.minimum(gl.maximum(tiles, 1) - 1, 1)
            for j in range(gl.maximum(tiles, 1)):
                if j < tiles:
                    stage = step % STAGES
                    phase = (step // STAGES) & 1
                    mbarrier.wait(kv_empty.index(stage), phase ^ 1)
                    mbarrier.expect(kv_full.index(stage), 4 * 64 * D * 2)
                    for half in gl.static_range(2):
                        row = j * 128 + half * 64
                        place = stage * 2 + half
                        load_rows(k_desc, start_k, length_k, row, head * D, kv_full.index(stage), k_shared.index(place))
                        load_rows(v_desc, start_k, length_k, row, head * D, kv_full.index(stage), v_shared.index(place))
                    step += 1
                if j == queries_after:
                    mbarrier.wait(q_empty, (done & 1) ^ 1)
                    mbarrier.expect(q_full, 2 * 64 * D * 2 + STATS)
                    load_rows(q_desc, start_q, length_q, 0, head * D, q_full, q_shared)
                    load_rows(do_desc, start_o, length_q, 0, head * D, q_full, do_shared)
                    if SOFTMAX:
                        entry = stats_start(start_o, sequence)
                        load_stats(stats_desc, head, entry, q_full, stats_shared.index(0))
                        load_stats(stats_desc, HEADS + head, entry, q_full, stats_shared.index(1))
            done += 1


@gluon.jit
def _consume(
    dq_desc, dk_desc, dv_desc, q_shared, k_shared, v_shared, do_shared, stats_shared,
    q_full, q_empty, kv_full, kv_empty, num_items, sequence_list, cu_q, cu_k, seeds, scale, dq_scale, dv_scale, rows,
    WARPGROUP: gl.constexpr, HEADS: gl.constexpr, BROADCAST: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 keys of every tile, with their share of dQ."""
    SOFTMAX: gl.constexpr = ACTIVATION == ""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, 2)
    COLUMN: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    dtype: gl.constexpr = q_shared.dtype
    zeros = gl.zeros([64, 64], gl.float32, S_LAYOUT)
    d_zeros = gl.zeros([64, D], gl.float32, D_LAYOUT)
    DS_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)

    rounds = gl.cdiv(num_items, gl.num_programs(0))
    step = 0
    done = 0
    for r in range(rounds):
        index = item_index(r, num_items)
        if index < num_items:
            head, sequence, start_q, length_q, start_o, start_k, length_k = _item(
                index, sequence_list, cu_q, cu_k, seeds, HEADS, BROADCAST
            )
            q = q_shared
            do = do_shared
            dq = gl.zeros([64, D], gl.float32, D_LAYOUT)
            mbarrier.wait(q_full, done & 1)
            real = gl.arange(0, 64, layout=COLUMN) < length_q  # a sequence without queries has no statistics either
            for j in range(gl.cdiv(length_k, 128)):
                stage = step % STAGES
                k = k_shared.index(stage * 2 + WARPGROUP)
                v = v_shared.index(stage * 2 + WARPGROUP)
                mbarrier.wait(kv_full.index(stage), (step // STAGES) & 1)
                scores = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
                dp = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
                scores = warpgroup_mma_wait(1, deps=[scores])
                if SOFTMAX:
                    column_lse = gl.where(real, read_stats(stats_shared.index(0), COLUMN), float("inf"))
                    weights = gl.exp2(scores * scale - column_lse[None, :])
                    slopes = weights
                else:
                    weights, slopes = activate_with_derivative(scores, scale, ACTIVATION)
                p = gl.convert_layout(weights.to(dtype), OPERAND)
                dp = warpgroup_mma_wait(0, deps=[dp])
                dv = warpgroup_mma(p, do, d_zeros, use_acc=False, is_async=True)
                if SOFTMAX:
                    column_delta = gl.where(real, read_stats(stats_shared.index(1), COLUMN), 0.0)
                    ds = (slopes * (dp - column_delta[None, :])).to(dtype)
                else:
                    ds = (slopes * dp).to(dtype)
                # The values have served: their place takes dS, and then dV.
                own_ds = v._reinterpret(dtype, [64, 64], DS_SHARED)
                own_ds.store(ds)
                fence_async_shared()
                tma.store_wait(0)  # the results of the tile before have left
                if step > 0:
                    mbarrier.arrive(kv_empty.index((step - 1) % STAGES), count=1)
                dq = warpgroup_mma(own_ds.permute((1, 0)), k, dq, is_async=True)
                dv, dq = warpgroup_mma_wait(0, deps=[dv, dq])
                v.store((dv * dv_scale).to(dtype))
                dk = warpgroup_mma(gl.convert_layout(ds, OPERAND), q, d_zeros, use_acc=False)
                k.store((dk * dq_scale).to(dtype))
                fence_async_shared()
                row = j * 128 + WARPGROUP * 64
                store_rows(dk_desc, start_k, length_k, row, head * D, k)
                store_rows(dv_desc, start_k, length_k, row, head * D, v)
                step += 1
            mbarrier.arrive(q_empty, count=1)
            tma.store_wait(0)
            # Released with the next tile. Before any tile, all sequences to come are as empty: they are sorted.
            staging = k_shared.index(gl.maximum(step - 1, 0) % STAGES * 2 + WARPGROUP)
            staging.store((dq * dq_scale).to(dtype))
            fence_async_shared()
            store_rows(dq_desc, WARPGROUP * rows + start_o, length_q, 0, head * D, staging)
            done += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_items", "seeds", "rows"])
def attention_backward_short_query(
    q_desc, k_desc, v_desc, do_desc, dq_desc, dk_desc, dv_desc, stats_desc, num_items, sequence_list, cu_q, cu_k, seeds,
    scale, dq_scale, dv_scale, rows,
    HEADS: gl.constexpr, BROADCAST: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """dK, dV, and two partial dQ of ``rows`` rows each; ``sequence_list`` names every sequence, most keys first."""
    dtype: gl.constexpr = q_desc.dtype
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], dtype)
    STATS_SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    q_shared = gl.allocate_shared_memory(dtype, [64, D], SHARED)
    do_shared = gl.allocate_shared_memory(dtype, [64, D], SHARED)
    k_shared = gl.allocate_shared_memory(dtype, [STAGES * 2, 64, D], SHARED)
    v_shared = gl.allocate_shared_memory(dtype, [STAGES * 2, 64, D], SHARED)
    stats_shared = gl.allocate_shared_memory(gl.float32, [2, 1, 64], STATS_SHARED)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    kv_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    kv_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    init_barriers(kv_full, STAGES, 1)
    init_barriers(kv_empty, STAGES, 2)
    fence_async_shared()

    gl.warp_specialize(
        [
            (_consume, (
                dq_desc, dk_desc, dv_desc, q_shared, k_shared, v_shared, do_shared, stats_shared, q_full,
                q_empty, kv_full, kv_empty, num_items, sequence_list, cu_q, cu_k, seeds, scale, dq_scale, dv_scale,
                rows, 0, HEADS, BROADCAST, D, STAGES, ACTIVATION,
            )),
            (_consume, (
                dq_desc, dk_desc, dv_desc, q_shared, k_shared, v_shared, do_shared, stats_shared, q_full,
                q_empty, kv_full, kv_empty, num_items, sequence_list, cu_q, cu_k, seeds, scale, dq_scale, dv_scale,
                rows, 1, HEADS, BROADCAST, D, STAGES, ACTIVATION,
            )),
            (_produce, (
                q_desc, k_desc, v_desc, do_desc, stats_desc, q_shared, k_shared, v_shared, do_shared, stats_shared,
                q_full, q_empty, kv_full, kv_empty, num_items, sequence_list, cu_q, cu_k, seeds, HEADS, BROADCAST, D,
                STAGES, ACTIVATION == "",
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
