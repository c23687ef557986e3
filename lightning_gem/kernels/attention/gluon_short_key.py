"""Attention forward for Hopper (sm_90) with few keys: the keys stay in shared memory while the queries stream by.

With 128 or 256 keys a query tile meets all of them in one or two products, and reloading keys and values for every
query tile costs more than the arithmetic. So the loops are swapped: a work item is (sequence, run of query tiles,
head), and the roles are as in ``gluon_forward``: one producer warp, two warpgroups of 64 queries, the scores of the
next step in flight while the present one is multiplied with the values.
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
    activate,
    init_barriers,
    item_index,
    load_rows,
    segment_of,
    store_rows,
)
from lightning_gem.kernels.attention.gluon_forward import _mask


@gluon.jit
def _item(
    index, sequence_list, run_list, cu_q, cu_k, seeds,
    HEADS: gl.constexpr, BROADCAST: gl.constexpr, BLOCK_M: gl.constexpr, RUN: gl.constexpr,
):  # fmt: skip
    head = index % HEADS
    sequence = gl.load(sequence_list + index // HEADS)
    row = gl.load(run_list + index // HEADS) * (BLOCK_M * RUN)
    start_k, length_k = segment_of(cu_k, sequence)
    if BROADCAST:
        start_q, length_q = 0, seeds
        start_o = sequence * seeds
    else:
        start_q, length_q = segment_of(cu_q, sequence)
        start_o = start_q
    tiles = gl.minimum(gl.cdiv(length_q - row, BLOCK_M), RUN)
    return head, row, start_q, length_q, start_o, start_k, length_k, tiles


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, q_shared, k_shared, v_shared, q_full, q_empty, kv_full, kv_empty,
    num_runs, sequence_list, run_list, cu_q, cu_k, seeds,
    HEADS: gl.constexpr, GROUP: gl.constexpr, BROADCAST: gl.constexpr, D: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, PARTS: gl.constexpr, SETS: gl.constexpr, STAGES: gl.constexpr,
    RUN: gl.constexpr,
):  # fmt: skip
    num_items = gl.load(num_runs) * HEADS
    rounds = gl.cdiv(num_items, gl.num_programs(0))
    step = 0
    done = 0
    for r in range(rounds):
        index = item_index(r, num_items)
        if index < num_items:
            head, row, start_q, length_q, start_o, start_k, length_k, tiles = _item(
                index, sequence_list, run_list, cu_q, cu_k, seeds, HEADS, BROADCAST, BLOCK_M, RUN
            )
            head_k = head // GROUP
            set_ = done % SETS
            mbarrier.wait(kv_empty.index(set_), ((done // SETS) & 1) ^ 1)
            mbarrier.expect(kv_full.index(set_), PARTS * BLOCK_N * 2 * D * 2)
            for part in gl.static_range(PARTS):
                place = set_ * PARTS + part
                load_rows(k_desc, start_k, length_k, part * BLOCK_N, head_k * D, kv_full.index(set_),
                          k_shared.index(place))  # fmt: skip
                load_rows(v_desc, start_k, length_k, part * BLOCK_N, head_k * D, kv_full.index(set_),
                          v_shared.index(place))  # fmt: skip
            for t in range(tiles):
                stage = step % STAGES
                mbarrier.wait(q_empty.index(stage), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(q_full.index(stage), BLOCK_M * D * 2)
                for half in gl.static_range(2):
                    half_row = row + t * BLOCK_M + half * (BLOCK_M // 2)
                    load_rows(q_desc, start_q, length_q, half_row, head * D, q_full.index(stage),
                              q_shared.index(stage * 2 + half))  # fmt: skip
                step += 1
            done += 1


@gluon.jit
def _store(o_desc, lse, o, acc, maximum, total, row, head, start_o, length_q, out_scale, total_o,
           SOFTMAX: gl.constexpr, D: gl.constexpr):  # fmt: skip
    """Normalises a finished tile and starts its copy to the output."""
    ROWS: gl.constexpr = acc.shape[0]
    if SOFTMAX:
        inverse = gl.where(total > 0.0, out_scale / total, 0.0)
        acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, acc.type.layout))[:, None]
        rows = row + gl.arange(0, ROWS, layout=total.type.layout)
        log_total = gl.where(total > 0.0, maximum * 0.6931471805599453 + gl.log(total), float("-inf"))
        gl.store(lse + head.to(gl.int64) * total_o + start_o + rows, log_total, mask=rows < length_q)
    else:
        acc = acc * out_scale
    tma.store_wait(0)
    o.store(acc.to(o.dtype))
    fence_async_shared()
    store_rows(o_desc, start_o, length_q, row, head * D, o)


@gluon.jit
def _consume(
    o_desc, lse, q_shared, k_shared, v_shared, o_shared, q_full, q_empty, kv_full, kv_empty,
    num_runs, sequence_list, run_list, cu_q, cu_k, seeds, scale, out_scale, total_o,
    WARPGROUP: gl.constexpr, HEADS: gl.constexpr, BROADCAST: gl.constexpr, D: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, PARTS: gl.constexpr, SETS: gl.constexpr, STAGES: gl.constexpr,
    RUN: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    SOFTMAX: gl.constexpr = ACTIVATION == ""
    ROWS: gl.constexpr = BLOCK_M // 2
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    dtype: gl.constexpr = q_shared.dtype
    o = o_shared.index(WARPGROUP)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)

    num_items = gl.load(num_runs) * HEADS
    rounds = gl.cdiv(num_items, gl.num_programs(0))
    step = 0
    done = 0
    for r in range(rounds):
        index = item_index(r, num_items)
        if index < num_items:
            head, row, start_q, length_q, start_o, start_k, length_k, tiles = _item(
                index, sequence_list, run_list, cu_q, cu_k, seeds, HEADS, BROADCAST, BLOCK_M, RUN
            )
            row += WARPGROUP * ROWS
            set_ = done % SETS
            acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
            p = gl.zeros([ROWS, BLOCK_N], dtype, P_LAYOUT)
            maximum = gl.zeros([ROWS], gl.float32, ROW_LAYOUT)
            total = gl.zeros([ROWS], gl.float32, ROW_LAYOUT)
            mbarrier.wait(kv_full.index(set_), (done // SETS) & 1)
            for s in range(tiles * PARTS):
                part = s % PARTS
                stage = step % STAGES
                if part == 0:
                    mbarrier.wait(q_full.index(stage), (step // STAGES) & 1)
                scores = warpgroup_mma(q_shared.index(stage * 2 + WARPGROUP),
                                       k_shared.index(set_ * PARTS + part).permute((1, 0)), zeros,
                                       use_acc=False, is_async=True)  # fmt: skip
                # The product of the step before; ahead of the first step it multiplies zeros.
                before = (part + PARTS - 1) % PARTS
                acc = warpgroup_mma(p, v_shared.index(set_ * PARTS + before), acc, use_acc=before > 0, is_async=True)
                scores = warpgroup_mma_wait(1, deps=[scores])
                if part == PARTS - 1:
                    mbarrier.arrive(q_empty.index(stage), count=1)
                    step += 1
                if SOFTMAX:
                    scores = _mask(scores, float("-inf"), 0, part * BLOCK_N, length_k, 0, 0, 0,
                                   False, False, S_LAYOUT)  # fmt: skip
                    highest = gl.max(scores, 1) * scale
                    if PARTS > 1:
                        reached = gl.where(part == 0, float("-inf"), maximum)
                        highest = gl.maximum(highest, reached)
                    base = gl.where(highest == float("-inf"), 0.0, highest)
                    weights = gl.exp2(scores * scale - base[:, None])
                    row_sum = gl.sum(weights, 1)
                else:
                    weights = activate(scores, scale, ACTIVATION)
                next_p = gl.convert_layout(weights.to(dtype), P_LAYOUT)
                acc = warpgroup_mma_wait(0, deps=[acc])
                if (part == 0) & (s > 0):
                    _store(o_desc, lse, o, acc, maximum, total, row + (s // PARTS - 1) * BLOCK_M, head, start_o,
                           length_q, out_scale, total_o, SOFTMAX, D)  # fmt: skip
                if SOFTMAX:
                    if PARTS > 1:
                        rescale = gl.exp2(reached - base)
                        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, O_LAYOUT))[:, None]
                        row_sum += total * rescale
                    total = row_sum
                    maximum = highest
                p = next_p
            acc = warpgroup_mma(p, v_shared.index(set_ * PARTS + PARTS - 1), acc, use_acc=PARTS > 1)
            mbarrier.arrive(kv_empty.index(set_), count=1)
            _store(o_desc, lse, o, acc, maximum, total, row + (tiles - 1) * BLOCK_M, head, start_o, length_q, out_scale,
                   total_o, SOFTMAX, D)  # fmt: skip
            done += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["seeds", "total_o"])
def attention_forward_short_key(
    q_desc, k_desc, v_desc, o_desc, lse, num_runs, sequence_list, run_list, cu_q, cu_k, seeds, scale, out_scale,
    total_o,
    HEADS: gl.constexpr, GROUP: gl.constexpr, BROADCAST: gl.constexpr, D: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, PARTS: gl.constexpr, SETS: gl.constexpr, STAGES: gl.constexpr,
    RUN: gl.constexpr, ACTIVATION: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Packed attention over at most ``PARTS * BLOCK_N`` keys a sequence, without window."""
    dtype: gl.constexpr = q_desc.dtype
    Q_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M // 2, D], dtype)
    K_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, D], dtype)
    q_shared = gl.allocate_shared_memory(dtype, [STAGES * 2, BLOCK_M // 2, D], Q_SHARED)
    k_shared = gl.allocate_shared_memory(dtype, [SETS * PARTS, BLOCK_N, D], K_SHARED)
    v_shared = gl.allocate_shared_memory(dtype, [SETS * PARTS, BLOCK_N, D], K_SHARED)
    o_shared = gl.allocate_shared_memory(dtype, [2, BLOCK_M // 2, D], Q_SHARED)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    kv_full = gl.allocate_shared_memory(gl.int64, [SETS, 1], BARRIER)
    kv_empty = gl.allocate_shared_memory(gl.int64, [SETS, 1], BARRIER)
    init_barriers(q_full, STAGES, 1)
    init_barriers(q_empty, STAGES, 2)
    init_barriers(kv_full, SETS, 1)
    init_barriers(kv_empty, SETS, 2)
    fence_async_shared()

    gl.warp_specialize(
        [
            (_consume, (
                o_desc, lse, q_shared, k_shared, v_shared, o_shared, q_full, q_empty, kv_full, kv_empty, num_runs,
                sequence_list, run_list, cu_q, cu_k, seeds, scale, out_scale, total_o, 0, HEADS, BROADCAST, D,
                BLOCK_M, BLOCK_N, PARTS, SETS, STAGES, RUN, ACTIVATION,
            )),
            (_consume, (
                o_desc, lse, q_shared, k_shared, v_shared, o_shared, q_full, q_empty, kv_full, kv_empty, num_runs,
                sequence_list, run_list, cu_q, cu_k, seeds, scale, out_scale, total_o, 1, HEADS, BROADCAST, D,
                BLOCK_M, BLOCK_N, PARTS, SETS, STAGES, RUN, ACTIVATION,
            )),
            (_produce, (
                q_desc, k_desc, v_desc, q_shared, k_shared, v_shared, q_full, q_empty, kv_full, kv_empty, num_runs,
                sequence_list, run_list, cu_q, cu_k, seeds, HEADS, GROUP, BROADCAST, D, BLOCK_M, BLOCK_N, PARTS,
                SETS, STAGES, RUN,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
