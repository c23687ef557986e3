"""Attention forward for Hopper (sm_90), in Gluon: one producer warp, two consumer warpgroups, persistent.

Each program walks a list of (sequence, query tile, head) items. Its producer warp streams keys and values of the item
through shared memory with the copy engine while two warpgroups, 64 queries each, keep two matrix products in flight:
the scores of the next key tile are computed while the present tile is multiplied with the values (FlashAttention-3,
Shah et al., 2024, https://arxiv.org/abs/2407.08608). Softmax is the online one; an activation needs no statistics.
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
    in_window,
    init_barriers,
    item_index,
    load_rows,
    own_tiles,
    release_staging,
    segment_of,
    skip_tiles,
    store_rows,
)


@gluon.jit
def _item(
    index, sequence_list, tile_list, cu_q, cu_k, seeds, window_left, window_right,
    HEADS: gl.constexpr, BROADCAST: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """What one work item covers: rows of queries and outputs, and the range [low, high) of visible keys."""
    head = index % HEADS
    sequence = gl.load(sequence_list + index // HEADS)
    row = gl.load(tile_list + index // HEADS) * BLOCK_M
    start_k, length_k = segment_of(cu_k, sequence)
    if BROADCAST:
        start_q, length_q = 0, seeds
        start_o = sequence * seeds
    else:
        start_q, length_q = segment_of(cu_q, sequence)
        start_o = start_q
    shift = length_k - length_q  # the last query stands at the position of the last key
    low, high = 0, length_k
    if HAS_LEFT:
        low = gl.maximum(row + shift - window_left, 0)
    if HAS_RIGHT:
        high = gl.minimum(gl.minimum(row + BLOCK_M, length_q) + shift + window_right, length_k)
    tiles = gl.maximum(gl.cdiv(high - low, BLOCK_N), 0)
    return head, sequence, row, start_q, length_q, start_o, start_k, length_k, shift, low, tiles


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, q_shared, k_shared, v_shared,
    q_full, q_empty, k_full, k_empty, v_full, v_empty,
    num_tiles, sequence_list, tile_list, cu_q, cu_k, seeds, window_left, window_right,
    HEADS: gl.constexpr, GROUP: gl.constexpr, BROADCAST: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    num_items = gl.load(num_tiles) * HEADS
    rounds = gl.cdiv(num_items, gl.num_programs(0))
    step = 0
    done = 0
    for r in range(rounds):
        index = item_index(r, num_items)
        if index < num_items:
            head, sequence, row, start_q, length_q, start_o, start_k, length_k, shift, low, tiles = _item(
                index, sequence_list, tile_list, cu_q, cu_k, seeds, window_left, window_right,
                HEADS, BROADCAST, HAS_LEFT, HAS_RIGHT, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            head_k = head // GROUP
            set_ = done % 2
            mbarrier.wait(q_empty.index(set_), (done // 2 & 1) ^ 1)
            mbarrier.expect(q_full.index(set_), BLOCK_M * D * 2)
            for half in gl.static_range(2):
                load_rows(q_desc, start_q, length_q, row + half * (BLOCK_M // 2), head * D, q_full.index(set_),
                          q_shared.index(set_ * 2 + half))  # fmt: skip
            for j in range(tiles):
                column = low + (tiles - 1 - j) * BLOCK_N  # the last, partial tile comes first
                stage = step % STAGES
                phase = (step // STAGES) & 1
                mbarrier.wait(k_empty.index(stage), phase ^ 1)
                mbarrier.expect(k_full.index(stage), BLOCK_N * D * 2)
                load_rows(k_desc, start_k, length_k, column, head_k * D, k_full.index(stage), k_shared.index(stage))
                mbarrier.wait(v_empty.index(stage), phase ^ 1)
                mbarrier.expect(v_full.index(stage), BLOCK_N * D * 2)
                load_rows(v_desc, start_k, length_k, column, head_k * D, v_full.index(stage), v_shared.index(stage))
                step += 1
            done += 1


@gluon.jit
def _mask(scores, hidden, row, column, length_k, shift, window_left, window_right,
          HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """Replaces what stands between a query and a key it may not see by ``hidden``; tiles without any are left alone."""
    M: gl.constexpr = scores.shape[0]
    N: gl.constexpr = scores.shape[1]
    on_edge = column + N > length_k
    if HAS_LEFT:
        on_edge = on_edge | (column < row + M - 1 + shift - window_left)
    if HAS_RIGHT:
        on_edge = on_edge | (column + N - 1 > row + shift + window_right)
    if on_edge:
        columns = gl.arange(0, N, layout=gl.SliceLayout(0, LAYOUT))[None, :]
        visible = columns < length_k - column
        if HAS_LEFT or HAS_RIGHT:
            rows = (gl.arange(0, M, layout=gl.SliceLayout(1, LAYOUT)) + (row + shift - column))[:, None]
            visible = visible & in_window(columns, rows, window_left, window_right, HAS_LEFT, HAS_RIGHT)
        scores = gl.where(visible, scores, hidden)
    return scores


@gluon.jit
def _consume(
    o_desc, lse, q_shared, k_shared, v_shared,
    q_full, q_empty, k_full, k_empty, v_full, v_empty,
    num_tiles, sequence_list, tile_list, cu_q, cu_k, seeds, window_left, window_right, scale, out_scale, total_o,
    WARPGROUP: gl.constexpr, HEADS: gl.constexpr, BROADCAST: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 queries of every item. ``ACTIVATION`` "" is softmax, with ``scale`` in units of log2(e)."""
    SOFTMAX: gl.constexpr = ACTIVATION == ""
    MASKED: gl.constexpr = HAS_LEFT or HAS_RIGHT
    ROWS: gl.constexpr = BLOCK_M // 2
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    dtype: gl.constexpr = q_shared.dtype
    empty_scores = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)

    num_items = gl.load(num_tiles) * HEADS
    rounds = gl.cdiv(num_items, gl.num_programs(0))
    step = 0
    done = 0
    for r in range(rounds):
        index = item_index(r, num_items)
        if index < num_items:
            head, sequence, row, start_q, length_q, start_o, start_k, length_k, shift, low, tiles = _item(
                index, sequence_list, tile_list, cu_q, cu_k, seeds, window_left, window_right,
                HEADS, BROADCAST, HAS_LEFT, HAS_RIGHT, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            row += WARPGROUP * ROWS
            acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
            maximum = gl.full([ROWS], float("-inf"), gl.float32, ROW_LAYOUT)
            total = gl.zeros([ROWS], gl.float32, ROW_LAYOUT)
            set_ = done % 2
            q = q_shared.index(set_ * 2 + WARPGROUP)
            mbarrier.wait(q_full.index(set_), done // 2 & 1)
            first, last = own_tiles(row + shift - window_left, row + ROWS - 1 + shift + window_right, low, tiles,
                                    BLOCK_N, HAS_LEFT, HAS_RIGHT)  # fmt: skip
            step = skip_tiles(step, tiles - last, k_full, k_empty, v_full, v_empty, STAGES)
            if last > first:
                # The first tile: scores and probabilities, before there is anything to overlap them with.
                stage = step % STAGES
                mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
                scores = warpgroup_mma(q, k_shared.index(stage).permute((1, 0)), empty_scores, use_acc=False)
                mbarrier.arrive(k_empty.index(stage), count=1)
                column = low + (last - 1) * BLOCK_N
                if SOFTMAX:
                    scores = _mask(scores, float("-inf"), row, column, length_k, shift, window_left, window_right,
                                   HAS_LEFT, HAS_RIGHT, S_LAYOUT)  # fmt: skip
                    maximum = gl.max(scores, 1) * scale
                    base = gl.where(maximum == float("-inf"), 0.0, maximum) if MASKED else maximum
                    weights = gl.exp2(scores * scale - base[:, None])
                    total = gl.sum(weights, 1)
                else:
                    weights = activate(scores, scale, ACTIVATION)
                    if MASKED:
                        weights = _mask(weights, 0.0, row, column, length_k, shift, window_left, window_right,
                                        HAS_LEFT, HAS_RIGHT, S_LAYOUT)  # fmt: skip
                p = gl.convert_layout(weights.to(dtype), P_LAYOUT)
                release_staging(q_empty, done)

                for _ in range(1, last - first):
                    next_stage = (step + 1) % STAGES
                    mbarrier.wait(k_full.index(next_stage), ((step + 1) // STAGES) & 1)
                    scores = warpgroup_mma(q, k_shared.index(next_stage).permute((1, 0)), empty_scores, use_acc=False,
                                           is_async=True)  # fmt: skip
                    mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
                    acc = warpgroup_mma(p, v_shared.index(stage), acc, is_async=True)
                    scores = warpgroup_mma_wait(1, deps=[scores])
                    mbarrier.arrive(k_empty.index(next_stage), count=1)
                    column -= BLOCK_N
                    if SOFTMAX:
                        if MASKED:
                            scores = _mask(scores, float("-inf"), row, column, length_k, shift, window_left,
                                           window_right, HAS_LEFT, HAS_RIGHT, S_LAYOUT)  # fmt: skip
                        new_maximum = gl.maximum(maximum, gl.max(scores, 1) * scale)
                        base = gl.where(new_maximum == float("-inf"), 0.0, new_maximum) if MASKED else new_maximum
                        rescale = gl.exp2(maximum - base)
                        weights = gl.exp2(scores * scale - base[:, None])
                        total = total * rescale + gl.sum(weights, 1)
                        maximum = new_maximum
                    else:
                        weights = activate(scores, scale, ACTIVATION)
                        if MASKED:
                            weights = _mask(weights, 0.0, row, column, length_k, shift, window_left, window_right,
                                            HAS_LEFT, HAS_RIGHT, S_LAYOUT)  # fmt: skip
                    acc = warpgroup_mma_wait(0, deps=[acc])
                    mbarrier.arrive(v_empty.index(stage), count=1)
                    if SOFTMAX:
                        acc = acc * gl.convert_layout(rescale, OUT_ROW)[:, None]
                    p = gl.convert_layout(weights.to(dtype), P_LAYOUT)
                    stage = next_stage
                    step += 1

                mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
                acc = warpgroup_mma(p, v_shared.index(stage), acc)
                mbarrier.arrive(v_empty.index(stage), count=1)
                step += 1
            else:
                release_staging(q_empty, done)
            step = skip_tiles(step, first, k_full, k_empty, v_full, v_empty, STAGES)

            if SOFTMAX:
                inverse = gl.where(total > 0.0, out_scale / total, 0.0)
                acc = acc * gl.convert_layout(inverse, OUT_ROW)[:, None]
                rows = row + gl.arange(0, ROWS, layout=ROW_LAYOUT)
                log_total = maximum * 0.6931471805599453 + gl.log(total)
                log_total = gl.where(total > 0.0, log_total, float("-inf"))
                place = lse + head.to(gl.int64) * total_o + start_o + rows
                gl.store(place, log_total, mask=rows < length_q)
            else:
                acc = acc * out_scale
            q.store(acc.to(dtype))  # the queries have served; their place takes the output
            fence_async_shared()
            store_rows(o_desc, start_o, length_q, row, head * D, q)
            done += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["seeds", "window_left", "window_right", "total_o"])
def attention_forward(
    q_desc, k_desc, v_desc, o_desc, lse, num_tiles, sequence_list, tile_list, cu_q, cu_k,
    seeds, window_left, window_right, scale, out_scale, total_o,
    HEADS: gl.constexpr, GROUP: gl.constexpr, BROADCAST: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Packed attention; see the module. The grid is any number of programs."""
    dtype: gl.constexpr = q_desc.dtype
    Q_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M // 2, D], dtype)
    K_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, D], dtype)
    q_shared = gl.allocate_shared_memory(dtype, [4, BLOCK_M // 2, D], Q_SHARED)
    k_shared = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], K_SHARED)
    v_shared = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], K_SHARED)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    init_barriers(q_full, 2, 1)
    init_barriers(q_empty, 2, 2)
    init_barriers(k_full, STAGES, 1)
    init_barriers(k_empty, STAGES, 2)
    init_barriers(v_full, STAGES, 1)
    init_barriers(v_empty, STAGES, 2)
    fence_async_shared()

    gl.warp_specialize(
        [
            (_consume, (
                o_desc, lse, q_shared, k_shared, v_shared, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                num_tiles, sequence_list, tile_list, cu_q, cu_k, seeds, window_left, window_right, scale, out_scale,
                total_o, 0, HEADS, BROADCAST, HAS_LEFT, HAS_RIGHT, D, BLOCK_M, BLOCK_N, STAGES, ACTIVATION,
            )),
            (_consume, (
                o_desc, lse, q_shared, k_shared, v_shared, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                num_tiles, sequence_list, tile_list, cu_q, cu_k, seeds, window_left, window_right, scale, out_scale,
                total_o, 1, HEADS, BROADCAST, HAS_LEFT, HAS_RIGHT, D, BLOCK_M, BLOCK_N, STAGES, ACTIVATION,
            )),
            (_produce, (
                q_desc, k_desc, v_desc, q_shared, k_shared, v_shared, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                num_tiles, sequence_list, tile_list, cu_q, cu_k, seeds, window_left, window_right,
                HEADS, GROUP, BROADCAST, HAS_LEFT, HAS_RIGHT, D, BLOCK_M, BLOCK_N, STAGES,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
