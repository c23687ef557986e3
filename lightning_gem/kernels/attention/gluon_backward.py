"""Attention backward for Hopper (sm_90), in Gluon: two deterministic kernels without atomics.

``attention_backward_query`` gives dQ of a query tile, looping over keys; ``attention_backward_key_value`` gives dK and
dV of a key tile, looping over queries. Scores are recomputed in both, seven matrix products in place of five, and in
exchange no two programs ever add to the same rows. Layout of the work as in ``gluon_forward``: persistent programs, one
producer warp, two consumer warpgroups of 64 rows each. dK and dV keep the probabilities in registers by computing the
transposed scores K Q^T (FlashAttention-3, Shah et al., 2024, https://arxiv.org/abs/2407.08608).
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
    derivative,
    hidden_score,
    in_window,
    init_barriers,
    item_index,
    load_rows,
    load_stats,
    own_tiles,
    read_stats,
    release_staging,
    segment_of,
    skip_tiles,
    stats_start,
    store_rows,
)
from lightning_gem.kernels.attention.gluon_forward import _item, _mask


@gluon.jit
def _produce_query(
    q_desc, k_desc, v_desc, do_desc, q_shared, k_shared, v_shared, do_shared,
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
            mbarrier.expect(q_full.index(set_), 2 * BLOCK_M * D * 2)
            for half in gl.static_range(2):
                place = set_ * 2 + half
                half_row = row + half * (BLOCK_M // 2)
                load_rows(q_desc, start_q, length_q, half_row, head * D, q_full.index(set_), q_shared.index(place))
                load_rows(do_desc, start_o, length_q, half_row, head * D, q_full.index(set_), do_shared.index(place))
            for j in range(tiles):
                column = low + j * BLOCK_N
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
def _consume_query(
    dq_desc, row_stats, q_shared, k_shared, v_shared, do_shared,
    q_full, q_empty, k_full, k_empty, v_full, v_empty,
    num_tiles, sequence_list, tile_list, cu_q, cu_k, seeds, window_left, window_right, scale, dq_scale, stats_stride,
    WARPGROUP: gl.constexpr, HEADS: gl.constexpr, BROADCAST: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """One warpgroup: dQ of 64 queries of every item."""
    SOFTMAX: gl.constexpr = ACTIVATION == ""
    MASKED: gl.constexpr = HAS_LEFT or HAS_RIGHT
    ROWS: gl.constexpr = BLOCK_M // 2
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    DS_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, DQ_LAYOUT, 2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    dtype: gl.constexpr = q_shared.dtype
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)

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
            rows = row + gl.arange(0, ROWS, layout=ROW_LAYOUT)
            if SOFTMAX:
                lse = row_stats + (head.to(gl.int64) * stats_stride + stats_start(start_o, sequence))
                row_lse = gl.load(lse + rows)
                row_delta = gl.load(lse + HEADS * stats_stride + rows)
            dq = gl.zeros([ROWS, D], gl.float32, DQ_LAYOUT)
            operand = gl.zeros([ROWS, BLOCK_N], dtype, DS_LAYOUT)
            set_ = done % 2
            q = q_shared.index(set_ * 2 + WARPGROUP)
            do = do_shared.index(set_ * 2 + WARPGROUP)
            mbarrier.wait(q_full.index(set_), done // 2 & 1)
            first, last = own_tiles(row + shift - window_left, row + ROWS - 1 + shift + window_right, low, tiles,
                                    BLOCK_N, HAS_LEFT, HAS_RIGHT)  # fmt: skip
            step = skip_tiles(step, first, k_full, k_empty, v_full, v_empty, STAGES)
            previous = step % STAGES
            for j in range(first, last):
                stage = step % STAGES
                phase = (step // STAGES) & 1
                mbarrier.wait(k_full.index(stage), phase)
                scores = warpgroup_mma(q, k_shared.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(stage), phase)
                dp = warpgroup_mma(do, v_shared.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
                # The first product multiplies zeros with the first keys.
                dq = warpgroup_mma(operand, k_shared.index(previous), dq, is_async=True)
                scores, dp = warpgroup_mma_wait(1, deps=[scores, dp])
                mbarrier.arrive(v_empty.index(stage), count=1)
                if SOFTMAX or MASKED:  # an activation of zero keys is zero, and so is its slope times their values
                    scores = _mask(scores, hidden_score(scale, ACTIVATION), row, low + j * BLOCK_N, length_k, shift,
                                   window_left, window_right, HAS_LEFT, HAS_RIGHT, S_LAYOUT)  # fmt: skip
                if SOFTMAX:
                    weights = gl.exp2(scores * scale - row_lse[:, None])
                else:
                    weights = derivative(scores, scale, ACTIVATION)
                ds = weights * (dp - row_delta[:, None]) if SOFTMAX else weights * dp
                dq = warpgroup_mma_wait(0, deps=[dq])
                if j > first:
                    mbarrier.arrive(k_empty.index(previous), count=1)
                operand = gl.convert_layout(ds.to(dtype), DS_LAYOUT)
                if j == first:
                    release_staging(q_empty, done)
                previous = stage
                step += 1
            if last > first:
                dq = warpgroup_mma(operand, k_shared.index(previous), dq)
                mbarrier.arrive(k_empty.index(previous), count=1)
            else:
                release_staging(q_empty, done)
            step = skip_tiles(step, tiles - last, k_full, k_empty, v_full, v_empty, STAGES)
            q.store((dq * dq_scale).to(dtype))  # the queries have served; their place takes the gradient
            fence_async_shared()
            store_rows(dq_desc, start_o, length_q, row, head * D, q)
            done += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["seeds", "window_left", "window_right", "stats_stride"])
def attention_backward_query(
    q_desc, k_desc, v_desc, do_desc, dq_desc, row_stats, num_tiles, sequence_list, tile_list, cu_q, cu_k,
    seeds, window_left, window_right, scale, dq_scale, stats_stride,
    HEADS: gl.constexpr, GROUP: gl.constexpr, BROADCAST: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """dQ, at the rows of the output: for broadcast queries one dQ per sequence, which the host sums."""
    dtype: gl.constexpr = q_desc.dtype
    Q_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M // 2, D], dtype)
    K_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, D], dtype)
    V_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, D], dtype)
    q_shared = gl.allocate_shared_memory(dtype, [4, BLOCK_M // 2, D], Q_SHARED)
    do_shared = gl.allocate_shared_memory(dtype, [4, BLOCK_M // 2, D], Q_SHARED)
    k_shared = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], K_SHARED)
    v_shared = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], V_SHARED)
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
            (_consume_query, (
                dq_desc, row_stats, q_shared, k_shared, v_shared, do_shared, q_full, q_empty, k_full,
                k_empty, v_full, v_empty, num_tiles, sequence_list, tile_list, cu_q, cu_k, seeds, window_left,
                window_right, scale, dq_scale, stats_stride, 0, HEADS, BROADCAST, HAS_LEFT, HAS_RIGHT, D, BLOCK_M,
                BLOCK_N, STAGES, ACTIVATION,
            )),
            (_consume_query, (
                dq_desc, row_stats, q_shared, k_shared, v_shared, do_shared, q_full, q_empty, k_full,
                k_empty, v_full, v_empty, num_tiles, sequence_list, tile_list, cu_q, cu_k, seeds, window_left,
                window_right, scale, dq_scale, stats_stride, 1, HEADS, BROADCAST, HAS_LEFT, HAS_RIGHT, D, BLOCK_M,
                BLOCK_N, STAGES, ACTIVATION,
            )),
            (_produce_query, (
                q_desc, k_desc, v_desc, do_desc, q_shared, k_shared, v_shared, do_shared, q_full, q_empty, k_full,
                k_empty, v_full, v_empty, num_tiles, sequence_list, tile_list, cu_q, cu_k, seeds, window_left,
                window_right, HEADS, GROUP, BROADCAST, HAS_LEFT, HAS_RIGHT, D, BLOCK_M, BLOCK_N, STAGES,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _key_item(
    index, sequence_list, tile_list, cu_q, cu_k, seeds, window_left, window_right,
    HEADS_K: gl.constexpr, BROADCAST: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """What one work item covers: rows of keys, and the range [low, high) of the queries that see them."""
    head_k = index % HEADS_K
    sequence = gl.load(sequence_list + index // HEADS_K)
    row = gl.load(tile_list + index // HEADS_K) * BLOCK_N
    start_k, length_k = segment_of(cu_k, sequence)
    if BROADCAST:
        start_q, length_q = 0, seeds
        start_o = sequence * seeds
    else:
        start_q, length_q = segment_of(cu_q, sequence)
        start_o = start_q
    shift = length_k - length_q
    low, high = 0, length_q
    if HAS_RIGHT:
        low = gl.maximum(row - shift - window_right, 0) & -4  # row statistics are copied from multiples of 16 bytes
    if HAS_LEFT:
        high = gl.minimum(gl.minimum(row + BLOCK_N, length_k) - shift + window_left, length_q)
    tiles = gl.maximum(gl.cdiv(high - low, BLOCK_M), 0)
    return head_k, sequence, row, start_q, length_q, start_o, start_k, length_k, shift, low, tiles


@gluon.jit
def _produce_key_value(
    q_desc, k_desc, v_desc, do_desc, stats_desc, q_shared, k_shared, v_shared, do_shared, stats_shared,
    kv_full, kv_empty, q_full, q_empty, do_full, do_empty,
    num_tiles, sequence_list, tile_list, cu_q, cu_k, seeds, window_left, window_right,
    HEADS_K: gl.constexpr, GROUP: gl.constexpr, BROADCAST: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, SOFTMAX: gl.constexpr,
):  # fmt: skip
    STATS: gl.constexpr = BLOCK_M * 4 if SOFTMAX else 0
    num_items = gl.load(num_tiles) * HEADS_K
    rounds = gl.cdiv(num_items, gl.num_programs(0))
    step = 0
    done = 0
    for r in range(rounds):
        index = item_index(r, num_items)
        if index < num_items:
            head_k, sequence, row, start_q, length_q, start_o, start_k, length_k, shift, low, tiles = _key_item(
                index, sequence_list, tile_list, cu_q, cu_k, seeds, window_left, window_right,
                HEADS_K, BROADCAST, HAS_LEFT, HAS_RIGHT, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            set_ = done % 2
            mbarrier.wait(kv_empty.index(set_), (done // 2 & 1) ^ 1)
            mbarrier.expect(kv_full.index(set_), 2 * BLOCK_N * D * 2)
            for half in gl.static_range(2):
                place = set_ * 2 + half
                half_row = row + half * (BLOCK_N // 2)
                load_rows(k_desc, start_k, length_k, half_row, head_k * D, kv_full.index(set_), k_shared.index(place))
                load_rows(v_desc, start_k, length_k, half_row, head_k * D, kv_full.index(set_), v_shared.index(place))
            for i in range(tiles * GROUP):
                head = head_k if GROUP == 1 else head_k * GROUP + i // tiles
                tile_row = low + (i if GROUP == 1 else i % tiles) * BLOCK_M
                stage = step % STAGES
                phase = (step // STAGES) & 1
                mbarrier.wait(q_empty.index(stage), phase ^ 1)
                mbarrier.expect(q_full.index(stage), BLOCK_M * D * 2 + STATS)
                load_rows(q_desc, start_q, length_q, tile_row, head * D, q_full.index(stage), q_shared.index(stage))
                if SOFTMAX:
                    entry = stats_start(start_o, sequence) + tile_row
                    load_stats(stats_desc, head, entry, q_full.index(stage), stats_shared.index(stage))
                mbarrier.wait(do_empty.index(stage), phase ^ 1)
                mbarrier.expect(do_full.index(stage), BLOCK_M * D * 2 + STATS)
                load_rows(do_desc, start_o, length_q, tile_row, head * D, do_full.index(stage),
                          do_shared.index(stage))  # fmt: skip
                if SOFTMAX:
                    load_stats(stats_desc, GROUP * HEADS_K + head, entry, do_full.index(stage),
                               stats_shared.index(STAGES + stage))  # fmt: skip
                step += 1
            done += 1


@gluon.jit
def _mask_transposed(scores, key, position, window_left, window_right, scale,
                     HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, ACTIVATION: gl.constexpr,
                     LAYOUT: gl.constexpr):  # fmt: skip
    """Hides scores between a key (rows, from ``key`` on) and a position (columns) that may not see it."""
    N: gl.constexpr = scores.shape[0]
    M: gl.constexpr = scores.shape[1]
    on_edge = False
    if HAS_LEFT:
        on_edge = on_edge | (key < position + M - 1 - window_left)
    if HAS_RIGHT:
        on_edge = on_edge | (key + N - 1 > position + window_right)
    if on_edge:
        rows = (gl.arange(0, N, layout=gl.SliceLayout(1, LAYOUT)) + (key - position))[:, None]
        columns = gl.arange(0, M, layout=gl.SliceLayout(0, LAYOUT))[None, :]
        visible = in_window(rows, columns, window_left, window_right, HAS_LEFT, HAS_RIGHT)
        scores = gl.where(visible, scores, hidden_score(scale, ACTIVATION))
    return scores


@gluon.jit
def _consume_key_value(
    dk_desc, dv_desc, q_shared, k_shared, v_shared, do_shared, stats_shared,
    kv_full, kv_empty, q_full, q_empty, do_full, do_empty,
    num_tiles, sequence_list, tile_list, cu_q, cu_k, seeds, window_left, window_right, scale, dk_scale, dv_scale,
    WARPGROUP: gl.constexpr, HEADS_K: gl.constexpr, GROUP: gl.constexpr, BROADCAST: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """One warpgroup: dK and dV of 64 keys of every item."""
    SOFTMAX: gl.constexpr = ACTIVATION == ""
    MASKED: gl.constexpr = HAS_LEFT or HAS_RIGHT
    ROWS: gl.constexpr = BLOCK_N // 2
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    DK_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    VALUE_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    COLUMN_LAYOUT: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    dtype: gl.constexpr = q_shared.dtype
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, S_LAYOUT)

    num_items = gl.load(num_tiles) * HEADS_K
    rounds = gl.cdiv(num_items, gl.num_programs(0))
    step = 0
    done = 0
    for r in range(rounds):
        index = item_index(r, num_items)
        if index < num_items:
            head_k, sequence, row, start_q, length_q, start_o, start_k, length_k, shift, low, tiles = _key_item(
                index, sequence_list, tile_list, cu_q, cu_k, seeds, window_left, window_right,
                HEADS_K, BROADCAST, HAS_LEFT, HAS_RIGHT, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            row += WARPGROUP * ROWS
            dk = gl.zeros([ROWS, D], gl.float32, DK_LAYOUT)
            dv = gl.zeros([ROWS, D], gl.float32, VALUE_LAYOUT)
            set_ = done % 2
            k = k_shared.index(set_ * 2 + WARPGROUP)
            v = v_shared.index(set_ * 2 + WARPGROUP)
            mbarrier.wait(kv_full.index(set_), done // 2 & 1)
            first, last = own_tiles(row - shift - window_right, row + ROWS - 1 - shift + window_left, low, tiles,
                                    BLOCK_M, HAS_RIGHT, HAS_LEFT)  # fmt: skip
            step = skip_tiles(step, first, q_full, q_empty, do_full, do_empty, STAGES)
            for i in range(GROUP * (last - first)):
                tile = first + i
                if GROUP > 1:
                    tile = first + i % (last - first)
                    if tile == first and i > 0:
                        step = skip_tiles(step, first + tiles - last, q_full, q_empty, do_full, do_empty, STAGES)
                tile_row = low + tile * BLOCK_M
                stage = step % STAGES
                phase = (step // STAGES) & 1
                mbarrier.wait(q_full.index(stage), phase)
                scores = warpgroup_mma(k, q_shared.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
                mbarrier.wait(do_full.index(stage), phase)
                dp = warpgroup_mma(v, do_shared.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
                scores = warpgroup_mma_wait(1, deps=[scores])
                if MASKED:  # queries and keys beyond the end are zeros and add nothing
                    scores = _mask_transposed(scores, row, tile_row + shift, window_left, window_right, scale,
                                              HAS_LEFT, HAS_RIGHT, ACTIVATION, S_LAYOUT)  # fmt: skip
                if SOFTMAX:
                    column_lse = read_stats(stats_shared.index(stage), COLUMN_LAYOUT)
                    weights = gl.exp2(scores * scale - column_lse[None, :])
                    slopes = weights
                else:
                    weights, slopes = activate_with_derivative(scores, scale, ACTIVATION)
                p = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, VALUE_LAYOUT, 2))
                dv = warpgroup_mma(p, do_shared.index(stage), dv, is_async=True)
                dp = warpgroup_mma_wait(1, deps=[dp])
                if SOFTMAX:
                    column_delta = read_stats(stats_shared.index(STAGES + stage), COLUMN_LAYOUT)
                ds = slopes * (dp - column_delta[None, :]) if SOFTMAX else slopes * dp
                ds_operand = gl.convert_layout(ds.to(dtype), gl.DotOperandLayout(0, DK_LAYOUT, 2))
                dk = warpgroup_mma(ds_operand, q_shared.index(stage), dk, is_async=True)
                dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
                mbarrier.arrive(q_empty.index(stage), count=1)
                mbarrier.arrive(do_empty.index(stage), count=1)
                if i == 0:
                    release_staging(kv_empty, done)
                step += 1
            if last <= first:
                release_staging(kv_empty, done)
            after = tiles - last if last > first else GROUP * tiles - first
            step = skip_tiles(step, after, q_full, q_empty, do_full, do_empty, STAGES)
            k.store((dk * dk_scale).to(dtype))  # keys and values have served; their places take the gradients
            v.store((dv * dv_scale).to(dtype))
            fence_async_shared()
            store_rows(dk_desc, start_k, length_k, row, head_k * D, k)
            store_rows(dv_desc, start_k, length_k, row, head_k * D, v)
            done += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["seeds", "window_left", "window_right"])
def attention_backward_key_value(
    q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, stats_desc, num_tiles, sequence_list, tile_list, cu_q, cu_k,
    seeds, window_left, window_right, scale, dk_scale, dv_scale,
    HEADS_K: gl.constexpr, GROUP: gl.constexpr, BROADCAST: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, ACTIVATION: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """dK and dV, summed over the query heads that share a key head."""
    dtype: gl.constexpr = q_desc.dtype
    Q_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, D], dtype)
    DO_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, D], dtype)
    K_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N // 2, D], dtype)
    q_shared = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D], Q_SHARED)
    do_shared = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D], DO_SHARED)
    k_shared = gl.allocate_shared_memory(dtype, [4, BLOCK_N // 2, D], K_SHARED)
    v_shared = gl.allocate_shared_memory(dtype, [4, BLOCK_N // 2, D], K_SHARED)
    STATS_SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    stats_shared = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1, BLOCK_M], STATS_SHARED)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    kv_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    do_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    init_barriers(kv_full, 2, 1)
    init_barriers(kv_empty, 2, 2)
    init_barriers(q_full, STAGES, 1)
    init_barriers(q_empty, STAGES, 2)
    init_barriers(do_full, STAGES, 1)
    init_barriers(do_empty, STAGES, 2)
    fence_async_shared()

    gl.warp_specialize(
        [
            (_consume_key_value, (
                dk_desc, dv_desc, q_shared, k_shared, v_shared, do_shared, stats_shared, kv_full,
                kv_empty, q_full, q_empty, do_full, do_empty, num_tiles, sequence_list, tile_list, cu_q, cu_k, seeds,
                window_left, window_right, scale, dk_scale, dv_scale, 0, HEADS_K, GROUP, BROADCAST, HAS_LEFT,
                HAS_RIGHT, D, BLOCK_M, BLOCK_N, STAGES, ACTIVATION,
            )),
            (_consume_key_value, (
                dk_desc, dv_desc, q_shared, k_shared, v_shared, do_shared, stats_shared, kv_full,
                kv_empty, q_full, q_empty, do_full, do_empty, num_tiles, sequence_list, tile_list, cu_q, cu_k, seeds,
                window_left, window_right, scale, dk_scale, dv_scale, 1, HEADS_K, GROUP, BROADCAST, HAS_LEFT,
                HAS_RIGHT, D, BLOCK_M, BLOCK_N, STAGES, ACTIVATION,
            )),
            (_produce_key_value, (
                q_desc, k_desc, v_desc, do_desc, stats_desc, q_shared, k_shared, v_shared, do_shared, stats_shared,
                kv_full, kv_empty, q_full,
                q_empty, do_full, do_empty, num_tiles, sequence_list, tile_list, cu_q, cu_k, seeds, window_left,
                window_right, HEADS_K, GROUP, BROADCAST, HAS_LEFT, HAS_RIGHT, D, BLOCK_M, BLOCK_N, STAGES,
                ACTIVATION == "",
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
