"""Attention backward for Hopper (sm_90) with at most 128 keys a sequence: all three gradients in one pass.

One key tile is a whole sequence, so that the program that walks its queries holds every term of dQ as well: five matrix
products, each input read once. dK and dV stay in the registers of two warpgroups with 64 keys each; for dQ, which sums
over keys, they exchange their halves of dS through shared memory, and each computes half of the columns.
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
def _item(index, sequence_list, cu_q, cu_k, seeds, HEADS_K: gl.constexpr, BROADCAST: gl.constexpr):
    sequence = gl.load(sequence_list + index // HEADS_K)
    start_k, length_k = segment_of(cu_k, sequence)
    if BROADCAST:
        start_q, length_q = 0, seeds
        start_o = sequence * seeds
    else:
        start_q, length_q = segment_of(cu_q, sequence)
        start_o = start_q
    return index % HEADS_K, sequence, start_q, length_q, start_o, start_k, length_k


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, do_desc, stats_desc, q_shared, k_shared, v_shared, do_shared, stats_shared,
    kv_full, kv_empty, q_full, q_empty, do_full, do_empty, num_items, sequence_list, cu_q, cu_k, seeds,
    HEADS_K: gl.constexpr, GROUP: gl.constexpr, BROADCAST: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr, SOFTMAX: gl.constexpr,
):  # fmt: skip
    STATS: gl.constexpr = BLOCK_M * 4 if SOFTMAX else 0
    rounds = gl.cdiv(num_items, gl.num_programs(0))
    step = 0
    done = 0
    for r in range(rounds):
        index = item_index(r, num_items)
        if index < num_items:
            head_k, sequence, start_q, length_q, start_o, start_k, length_k = _item(
                index, sequence_list, cu_q, cu_k, seeds, HEADS_K, BROADCAST
            )
            set_ = done % 2
            mbarrier.wait(kv_empty.index(set_), (done // 2 & 1) ^ 1)
            mbarrier.expect(kv_full.index(set_), 4 * 64 * D * 2)
            for half in gl.static_range(2):
                place = set_ * 2 + half
                load_rows(k_desc, start_k, length_k, half * 64, head_k * D, kv_full.index(set_), k_shared.index(place))
                load_rows(v_desc, start_k, length_k, half * 64, head_k * D, kv_full.index(set_), v_shared.index(place))
            tiles = gl.cdiv(length_q, BLOCK_M)
            for i in range(GROUP * tiles):
                head = head_k if GROUP == 1 else head_k * GROUP + i // tiles
                row = (i if GROUP == 1 else i % tiles) * BLOCK_M
                stage = step % STAGES
                phase = (step // STAGES) & 1
                mbarrier.wait(q_empty.index(stage), phase ^ 1)
                mbarrier.expect(q_full.index(stage), BLOCK_M * D * 2 + STATS)
                load_rows(q_desc, start_q, length_q, row, head * D, q_full.index(stage), q_shared.index(stage))
                if SOFTMAX:
                    entry = stats_start(start_o, sequence) + row
                    load_stats(stats_desc, head, entry, q_full.index(stage), stats_shared.index(stage))
                mbarrier.wait(do_empty.index(stage), phase ^ 1)
                mbarrier.expect(do_full.index(stage), BLOCK_M * D * 2 + STATS)
                load_rows(do_desc, start_o, length_q, row, head * D, do_full.index(stage), do_shared.index(stage))
                if SOFTMAX:
                    load_stats(stats_desc, GROUP * HEADS_K + head, entry, do_full.index(stage),
                               stats_shared.index(STAGES + stage))  # fmt: skip
                step += 1
            done += 1


@gluon.jit
def _consume(
    dq_desc, dk_desc, dv_desc, q_shared, k_shared, v_shared, do_shared, stats_shared, ds_shared, dq_shared,
    kv_full, kv_empty, q_full, q_empty, do_full, do_empty, ds_full, ds_empty,
    num_items, sequence_list, cu_q, cu_k, seeds, scale, dq_scale, dv_scale,
    WARPGROUP: gl.constexpr, HEADS_K: gl.constexpr, GROUP: gl.constexpr, BROADCAST: gl.constexpr, D: gl.constexpr,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """One warpgroup: dK and dV of 64 keys, and half of the columns of dQ, of every item."""
    SOFTMAX: gl.constexpr = ACTIVATION == ""
    HALF: gl.constexpr = D // 2
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, 2)
    dtype: gl.constexpr = q_shared.dtype
    zeros = gl.zeros([64, BLOCK_M], gl.float32, S_LAYOUT)
    dq_zeros = gl.zeros([BLOCK_M, HALF], gl.float32, DQ_LAYOUT)
    own_ds = ds_shared.index(WARPGROUP)
    staging = dq_shared.index(WARPGROUP)

    rounds = gl.cdiv(num_items, gl.num_programs(0))
    step = 0
    done = 0
    for r in range(rounds):
        index = item_index(r, num_items)
        if index < num_items:
            head_k, sequence, start_q, length_q, start_o, start_k, length_k = _item(
                index, sequence_list, cu_q, cu_k, seeds, HEADS_K, BROADCAST
            )
            set_ = done % 2
            k = k_shared.index(set_ * 2 + WARPGROUP)
            v = v_shared.index(set_ * 2 + WARPGROUP)
            dk = gl.zeros([64, D], gl.float32, D_LAYOUT)
            dv = gl.zeros([64, D], gl.float32, D_LAYOUT)
            tiles = gl.cdiv(length_q, BLOCK_M)
            mbarrier.wait(kv_full.index(set_), done // 2 & 1)
            for i in range(GROUP * tiles):
                head = head_k if GROUP == 1 else head_k * GROUP + i // tiles
                row = (i if GROUP == 1 else i % tiles) * BLOCK_M
                stage = step % STAGES
                phase = (step // STAGES) & 1
                mbarrier.wait(q_full.index(stage), phase)
                scores = warpgroup_mma(k, q_shared.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
                mbarrier.wait(do_full.index(stage), phase)
                dp = warpgroup_mma(v, do_shared.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
                scores = warpgroup_mma_wait(1, deps=[scores])
                if SOFTMAX:
                    column_lse = read_stats(stats_shared.index(stage), gl.SliceLayout(0, S_LAYOUT))
                    weights = gl.exp2(scores * scale - column_lse[None, :])
                    slopes = weights
                else:
                    weights, slopes = activate_with_derivative(scores, scale, ACTIVATION)
                p = gl.convert_layout(weights.to(dtype), OPERAND)
                dv = warpgroup_mma(p, do_shared.index(stage), dv, is_async=True)
                dp = warpgroup_mma_wait(1, deps=[dp])
                if SOFTMAX:
                    column_delta = read_stats(stats_shared.index(STAGES + stage), gl.SliceLayout(0, S_LAYOUT))
                ds = (slopes * (dp - column_delta[None, :]) if SOFTMAX else slopes * dp).to(dtype)
                dk = warpgroup_mma(gl.convert_layout(ds, OPERAND), q_shared.index(stage), dk, is_async=True)
                dv = warpgroup_mma_wait(1, deps=[dv])
                mbarrier.arrive(do_empty.index(stage), count=1)
                mbarrier.wait(ds_empty, (step & 1) ^ 1)
                own_ds.store(ds)
                fence_async_shared()
                mbarrier.arrive(ds_full, count=1)
                mbarrier.wait(ds_full, step & 1)
                dq = dq_zeros
                for half in gl.static_range(2):
                    columns = k_shared.index(set_ * 2 + half).slice(WARPGROUP * HALF, HALF, dim=1)
                    dq = warpgroup_mma(ds_shared.index(half).permute((1, 0)), columns, dq, use_acc=half > 0,
                                       is_async=True)  # fmt: skip
                dk, dq = warpgroup_mma_wait(0, deps=[dk, dq])
                mbarrier.arrive(q_empty.index(stage), count=1)
                mbarrier.arrive(ds_empty, count=1)
                tma.store_wait(0)
                if (i == 0) & (done > 0):
                    mbarrier.arrive(kv_empty.index((done - 1) % 2), count=1)
                staging.store((dq * dq_scale).to(dtype))
                fence_async_shared()
                store_rows(dq_desc, start_o, length_q, row, head * D + WARPGROUP * HALF, staging)
                step += 1
            if (tiles == 0) & (done > 0):
                tma.store_wait(0)
                mbarrier.arrive(kv_empty.index((done - 1) % 2), count=1)
            mbarrier.wait(ds_empty, (step & 1) ^ 1)  # the other warpgroup has read these keys for the last time
            k.store((dk * dq_scale).to(dtype))
            v.store((dv * dv_scale).to(dtype))
            fence_async_shared()
            store_rows(dk_desc, start_k, length_k, WARPGROUP * 64, head_k * D, k)
            store_rows(dv_desc, start_k, length_k, WARPGROUP * 64, head_k * D, v)
            done += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_items", "seeds"])
def attention_backward_short_key(
    q_desc, k_desc, v_desc, do_desc, dq_desc, dk_desc, dv_desc, stats_desc, num_items, sequence_list, cu_q, cu_k, seeds,
    scale, dq_scale, dv_scale,
    HEADS_K: gl.constexpr, GROUP: gl.constexpr, BROADCAST: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr, ACTIVATION: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """dQ, dK and dV; ``sequence_list`` names every sequence once, in the order of the work."""
    dtype: gl.constexpr = q_desc.dtype
    Q_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, D], dtype)
    K_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], dtype)
    DS_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_M], dtype)
    DQ_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, D // 2], dtype)
    q_shared = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D], Q_SHARED)
    do_shared = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D], Q_SHARED)
    k_shared = gl.allocate_shared_memory(dtype, [4, 64, D], K_SHARED)
    v_shared = gl.allocate_shared_memory(dtype, [4, 64, D], K_SHARED)
    ds_shared = gl.allocate_shared_memory(dtype, [2, 64, BLOCK_M], DS_SHARED)
    dq_shared = gl.allocate_shared_memory(dtype, [2, BLOCK_M, D // 2], DQ_SHARED)
    STATS_SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    stats_shared = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1, BLOCK_M], STATS_SHARED)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    kv_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    do_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    ds_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    ds_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    init_barriers(kv_full, 2, 1)
    init_barriers(kv_empty, 2, 2)
    init_barriers(q_full, STAGES, 1)
    init_barriers(q_empty, STAGES, 2)
    init_barriers(do_full, STAGES, 1)
    init_barriers(do_empty, STAGES, 2)
    mbarrier.init(ds_full, count=2)
    mbarrier.init(ds_empty, count=2)
    fence_async_shared()

    gl.warp_specialize(
        [
            (_consume, (
                dq_desc, dk_desc, dv_desc, q_shared, k_shared, v_shared, do_shared, stats_shared, ds_shared, dq_shared,
                kv_full, kv_empty, q_full, q_empty, do_full, do_empty, ds_full, ds_empty, num_items, sequence_list,
                cu_q, cu_k, seeds, scale, dq_scale, dv_scale, 0, HEADS_K, GROUP, BROADCAST, D, BLOCK_M,
                STAGES, ACTIVATION,
            )),
            (_consume, (
                dq_desc, dk_desc, dv_desc, q_shared, k_shared, v_shared, do_shared, stats_shared, ds_shared, dq_shared,
                kv_full, kv_empty, q_full, q_empty, do_full, do_empty, ds_full, ds_empty, num_items, sequence_list,
                cu_q, cu_k, seeds, scale, dq_scale, dv_scale, 1, HEADS_K, GROUP, BROADCAST, D, BLOCK_M,
                STAGES, ACTIVATION,
            )),
            (_produce, (
                q_desc, k_desc, v_desc, do_desc, stats_desc, q_shared, k_shared, v_shared, do_shared, stats_shared,
                kv_full, kv_empty, q_full,
                q_empty, do_full, do_empty, num_items, sequence_list, cu_q, cu_k, seeds, HEADS_K, GROUP, BROADCAST, D,
                BLOCK_M, STAGES, ACTIVATION == "",
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
