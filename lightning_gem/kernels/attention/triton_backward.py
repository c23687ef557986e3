# mypy: ignore-errors
"""Portable backward kernels: keys and values, then queries, each by the programs that own their tiles.

The scores are computed twice, so seven matrix products stand for five; in return nothing is added up by atomics, and
every run gives the same bits. Method: FlashAttention-2 (https://arxiv.org/abs/2307.08691), split in two as Meta does
for many short problems (pytorch.org/blog, "Optimizing Jagged Flash Attention with TLX", 2026).
"""

import triton
import triton.language as tl

from lightning_gem.kernels.attention.triton_common import (
    LOG2_E,
    load_rows,
    sequence_range,
    store_rows,
    visible_keys,
    visible_range,
)
from lightning_gem.kernels.attention.triton_head_activations import activate_head_with_derivative
from lightning_gem.kernels.triton_activations import tanh

RUNTIME = ["num_rows", "num_sequences", "left", "right", "contextual", "stride_lse", "capacity", "num_splits", "num_q"]


@triton.jit(do_not_specialize=RUNTIME)
def delta_kernel(
    out_ptr,
    grad_out_ptr,
    grad_lse_ptr,
    delta_ptr,
    offsets_q,
    stride_om,
    stride_oh,
    stride_gm,
    stride_gh,
    stride_lse,
    num_rows,
    num_sequences,
    HEADS: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BROADCAST: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr,
):
    """Per row: the inner product of output and gradient, less the gradient of the log of the denominator."""
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    rows = (tl.program_id(0) // HEADS).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    end = num_rows
    if not BROADCAST:
        end = tl.load(offsets_q + num_sequences)
    out = load_rows(out_ptr + head * stride_oh, rows, stride_om, end, DIM_V, BLOCK_DV, True)
    grad = load_rows(grad_out_ptr + head * stride_gh, rows, stride_gm, end, DIM_V, BLOCK_DV, True)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), axis=1)
    if HAS_GRAD_LSE:
        delta -= tl.load(grad_lse_ptr + head * stride_lse + rows, mask=rows < end, other=0.0)
    tl.store(delta_ptr + head * stride_lse + rows, delta, mask=rows < end)


@triton.jit
def _load_lse(lse_base, rows, length):
    """In base 2; infinite where a row sees nothing, so that its weights come out as 0."""
    lse = tl.load(lse_base + rows, mask=rows < length, other=float("inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)


@triton.jit
def _add_queries(
    grad_key,
    grad_value,
    key,
    value,
    columns,
    query_base,
    grad_base,
    lse_base,
    delta_base,
    bias_base,
    codes,
    head,
    start,
    end,
    length_q,
    length_k,
    num_targets,
    stride_qm,
    stride_gm,
    stride_bias_m,
    stride_bias_n,
    scale,
    softcap,
    left,
    right,
    contextual,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SOFTMAX: tl.constexpr,
    CODES: tl.constexpr,
    PER_HEAD: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_ROLES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    FAST: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds what the queries from start to end contribute to the gradients of a tile of keys and values."""
    for first in range(start, end, BLOCK_M):
        rows = first + tl.arange(0, BLOCK_M)
        query = load_rows(query_base, rows, stride_qm, length_q, DIM, BLOCK_D, MASKED)
        grad = load_rows(grad_base, rows, stride_gm, length_q, DIM_V, BLOCK_DV, MASKED)
        scores = tl.dot(key, tl.trans(query), input_precision=PRECISION)
        if SOFTMAX:
            if HAS_CAP:
                bent = tanh(scores * (scale / softcap), FAST)
                scores = (softcap * LOG2_E) * bent
            else:
                scores = scores * (scale * LOG2_E)
            if HAS_BIAS:
                pointers = bias_base + rows[None, :].to(tl.int64) * stride_bias_m + columns[:, None] * stride_bias_n
                inside = (rows[None, :] < length_q) & (columns[:, None] < length_k)
                scores += tl.load(pointers, mask=inside, other=0.0).to(tl.float32) * LOG2_E
            weights = tl.exp2(scores - _load_lse(lse_base, rows, length_q)[None, :])
        else:
            weights, slope = activate_head_with_derivative(scores * scale, codes, head, CODES, PER_HEAD, FAST)
        # Absent queries have no weight and no gradient, and absent keys are rows that are not stored.
        if MASKED and (HAS_LEFT or HAS_RIGHT or HAS_ROLES):
            visible = visible_keys(
                rows[None, :],
                columns[:, None],
                length_q,
                length_k,
                left,
                right,
                num_targets,
                contextual,
                HAS_LEFT,
                HAS_RIGHT,
                HAS_ROLES,
            )
            weights = tl.where(visible, weights, 0.0)
        grad_value = tl.dot(weights.to(grad.dtype), grad, grad_value, input_precision=PRECISION)
        grad_weights = tl.dot(value, tl.trans(grad), input_precision=PRECISION)
        if SOFTMAX:
            delta = tl.load(delta_base + rows, mask=rows < length_q, other=0.0)
            grad_scores = weights * (grad_weights - delta[None, :])
            if HAS_CAP:
                grad_scores = grad_scores * (1 - bent * bent)
        else:
            grad_scores = grad_weights * slope
            if MASKED and (HAS_LEFT or HAS_RIGHT or HAS_ROLES):
                grad_scores = tl.where(visible, grad_scores, 0.0)
        grad_key = tl.dot(grad_scores.to(query.dtype), query, grad_key, input_precision=PRECISION)
    return grad_key, grad_value


@triton.jit(do_not_specialize=RUNTIME)
def key_value_gradient_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    grad_out_ptr,
    lse_ptr,
    delta_ptr,
    grad_key_ptr,
    grad_value_ptr,
    bias_ptr,
    targets_ptr,
    codes_ptr,
    offsets_q,
    offsets_k,
    schedule_ptr,
    stride_qm,
    stride_qh,
    stride_kn,
    stride_kh,
    stride_vn,
    stride_vh,
    stride_gm,
    stride_gh,
    stride_gkn,
    stride_gkh,
    stride_gvn,
    stride_gvh,
    stride_lse,
    stride_bias_b,
    stride_bias_h,
    stride_bias_m,
    stride_bias_n,
    num_rows,
    num_q,
    num_sequences,
    capacity,
    scale,
    out_scale,
    softcap,
    left,
    right,
    contextual,
    HEADS_KV: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SOFTMAX: tl.constexpr,
    CODES: tl.constexpr,
    PER_HEAD: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_ROLES: tl.constexpr,
    HAS_TARGETS: tl.constexpr,
    BROADCAST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    FAST: tl.constexpr,
):
    """One program per tile of keys and their head: a loop over the queries that see it, of all heads that read it.

    ``num_rows`` counts keys; ``num_q`` counts the shared queries with BROADCAST.
    """
    item = tl.program_id(0) // HEADS_KV
    head_kv = (tl.program_id(0) % HEADS_KV).to(tl.int64)
    num_tiles = tl.load(schedule_ptr + 2 * capacity)
    tile_columns = tl.arange(0, BLOCK_N)
    grad_key = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    grad_value = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    if item >= num_tiles:  # spare programs write the zeros of the slack rows
        start_k = tl.load(offsets_k + num_sequences).to(tl.int64)
        length_k = (num_rows - start_k).to(tl.int32)
        columns = (item - num_tiles) * BLOCK_N + tile_columns
    else:
        sequence = tl.load(schedule_ptr + item)
        first = tl.load(schedule_ptr + capacity + item) * BLOCK_N
        start_k, length_k = sequence_range(offsets_k, sequence)
        if BROADCAST:
            start_q = 0
            length_q = num_q
            start_out = sequence.to(tl.int64) * num_q
        else:
            start_q, length_q = sequence_range(offsets_q, sequence)
            start_out = start_q
        num_targets = 0
        if HAS_TARGETS:
            num_targets = tl.load(targets_ptr + sequence).to(tl.int32)
        columns = first + tile_columns
        key_base = key_ptr + start_k * stride_kn + head_kv * stride_kh
        value_base = value_ptr + start_k * stride_vn + head_kv * stride_vh
        key = load_rows(key_base, columns, stride_kn, length_k, DIM, BLOCK_D, True)
        value = load_rows(value_base, columns, stride_vn, length_k, DIM_V, BLOCK_DV, True)
        last = tl.minimum(first + BLOCK_N, length_k) - 1
        start, inner_start, inner_end, end = visible_range(
            first,
            last,
            length_q - length_k,
            length_q,
            right,
            left,
            HAS_RIGHT,
            HAS_LEFT,
            BLOCK_M,
        )
        if HAS_ROLES:  # all tiles are masked; a token is seen by those behind it, and by context
            start = tl.where(contextual > 0, 0, first // BLOCK_M * BLOCK_M)
            inner_start = start
            inner_end = start
            end = length_q
        for member in range(GROUP):
            head = head_kv * GROUP + member
            query_base = query_ptr + start_q * stride_qm + head * stride_qh
            grad_base = grad_out_ptr + start_out * stride_gm + head * stride_gh
            lse_base = lse_ptr
            delta_base = delta_ptr
            if SOFTMAX:
                lse_base += head * stride_lse + start_out
                delta_base += head * stride_lse + start_out
            bias_base = bias_ptr
            if HAS_BIAS:
                bias_base += sequence.to(tl.int64) * stride_bias_b + head * stride_bias_h
            for part in tl.static_range(3):
                if part == 0:
                    part_start = start
                    part_end = inner_start
                elif part == 1:
                    part_start = inner_start
                    part_end = inner_end
                else:
                    part_start = inner_end
                    part_end = end
                if part > 0 or HAS_RIGHT:
                    grad_key, grad_value = _add_queries(
                        grad_key,
                        grad_value,
                        key,
                        value,
                        columns,
                        query_base,
                        grad_base,
                        lse_base,
                        delta_base,
                        bias_base,
                        codes_ptr,
                        head,
                        part_start,
                        part_end,
                        length_q,
                        length_k,
                        num_targets,
                        stride_qm,
                        stride_gm,
                        stride_bias_m,
                        stride_bias_n,
                        scale,
                        softcap,
                        left,
                        right,
                        contextual,
                        DIM,
                        DIM_V,
                        BLOCK_M,
                        BLOCK_D,
                        BLOCK_DV,
                        SOFTMAX,
                        CODES,
                        PER_HEAD,
                        HAS_LEFT,
                        HAS_RIGHT,
                        HAS_ROLES,
                        HAS_BIAS,
                        HAS_CAP,
                        PRECISION,
                        FAST,
                        part != 1,
                    )
    grad_key = grad_key * (scale * out_scale)
    grad_value = grad_value * out_scale
    grad_key_base = grad_key_ptr + start_k * stride_gkn + head_kv * stride_gkh
    grad_value_base = grad_value_ptr + start_k * stride_gvn + head_kv * stride_gvh
    store_rows(grad_key_base, columns, stride_gkn, length_k, grad_key, DIM, BLOCK_D)
    store_rows(grad_value_base, columns, stride_gvn, length_k, grad_value, DIM_V, BLOCK_DV)


@triton.jit
def _add_keys(
    grad_query,
    query,
    grad,
    lse,
    delta,
    rows,
    key_base,
    value_base,
    bias_base,
    codes,
    head,
    start,
    end,
    length_q,
    length_k,
    num_targets,
    stride_kn,
    stride_vn,
    stride_bias_m,
    stride_bias_n,
    scale,
    softcap,
    left,
    right,
    contextual,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SOFTMAX: tl.constexpr,
    CODES: tl.constexpr,
    PER_HEAD: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_ROLES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    FAST: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds what the keys from start to end contribute to the gradient of a tile of queries."""
    for first in range(start, end, BLOCK_N):
        columns = first + tl.arange(0, BLOCK_N)
        key = load_rows(key_base, columns, stride_kn, length_k, DIM, BLOCK_D, MASKED)
        value = load_rows(value_base, columns, stride_vn, length_k, DIM_V, BLOCK_DV, MASKED)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        grad_weights = tl.dot(grad, tl.trans(value), input_precision=PRECISION)
        if SOFTMAX:
            if HAS_CAP:
                bent = tanh(scores * (scale / softcap), FAST)
                scores = (softcap * LOG2_E) * bent
            else:
                scores = scores * (scale * LOG2_E)
            if HAS_BIAS:
                pointers = bias_base + rows[:, None].to(tl.int64) * stride_bias_m + columns[None, :] * stride_bias_n
                inside = (rows[:, None] < length_q) & (columns[None, :] < length_k)
                scores += tl.load(pointers, mask=inside, other=0.0).to(tl.float32) * LOG2_E
            weights = tl.exp2(scores - lse[:, None])
            grad_scores = weights * (grad_weights - delta[:, None])
            if HAS_CAP:
                grad_scores = grad_scores * (1 - bent * bent)
        else:
            _, slope = activate_head_with_derivative(scores * scale, codes, head, CODES, PER_HEAD, FAST)
            grad_scores = grad_weights * slope
        if MASKED and (SOFTMAX or HAS_LEFT or HAS_RIGHT or HAS_ROLES):
            visible = visible_keys(
                rows[:, None],
                columns[None, :],
                length_q,
                length_k,
                left,
                right,
                num_targets,
                contextual,
                HAS_LEFT,
                HAS_RIGHT,
                HAS_ROLES,
            )
            grad_scores = tl.where(visible, grad_scores, 0.0)
        grad_query = tl.dot(grad_scores.to(key.dtype), key, grad_query, input_precision=PRECISION)
    return grad_query


@triton.jit(do_not_specialize=RUNTIME)
def query_gradient_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    grad_out_ptr,
    lse_ptr,
    delta_ptr,
    grad_query_ptr,
    bias_ptr,
    targets_ptr,
    codes_ptr,
    offsets_q,
    offsets_k,
    schedule_ptr,
    stride_qm,
    stride_qh,
    stride_kn,
    stride_kh,
    stride_vn,
    stride_vh,
    stride_gm,
    stride_gh,
    stride_gqs,
    stride_gqm,
    stride_gqh,
    stride_lse,
    stride_bias_b,
    stride_bias_h,
    stride_bias_m,
    stride_bias_n,
    num_rows,
    num_sequences,
    capacity,
    num_splits,
    scale,
    out_scale,
    softcap,
    left,
    right,
    contextual,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SOFTMAX: tl.constexpr,
    CODES: tl.constexpr,
    PER_HEAD: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_ROLES: tl.constexpr,
    HAS_TARGETS: tl.constexpr,
    BROADCAST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    FAST: tl.constexpr,
):
    """One program per tile of queries and head: a loop over the keys it sees.

    With BROADCAST one program per tile of the shared queries, head, and split of the batch: a loop over the sequences
    of the split, whose sum is one of ``num_splits`` partial results. ``num_rows`` counts the (shared) queries.
    """
    item = tl.program_id(0) // HEADS
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    head_kv = head // GROUP
    num_tiles = 0
    if BROADCAST:
        split = item % num_splits
        first = item // num_splits * BLOCK_M
        start_q = tl.zeros([], tl.int64)
        length_q = num_rows
        grad_query_base = grad_query_ptr + split.to(tl.int64) * stride_gqs + head * stride_gqh
        sequence_start = split
        sequence_end = num_sequences
        sequence_step = num_splits
    else:
        num_tiles = tl.load(schedule_ptr + 2 * capacity)
        place = tl.minimum(item, capacity - 1)
        sequence_start = tl.load(schedule_ptr + place)
        first = tl.load(schedule_ptr + capacity + place) * BLOCK_M
        start_q, length_q = sequence_range(offsets_q, sequence_start)
        sequence_end = sequence_start + 1
        sequence_step = 1
        if item >= num_tiles:  # spare programs write the zeros of the slack rows
            start_q = tl.load(offsets_q + num_sequences).to(tl.int64)
            length_q = (num_rows - start_q).to(tl.int32)
            first = (item - num_tiles) * BLOCK_M
            sequence_end = sequence_start
        grad_query_base = grad_query_ptr + start_q * stride_gqm + head * stride_gqh
    rows = first + tl.arange(0, BLOCK_M)
    grad_query = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if sequence_start < sequence_end:
        query = load_rows(
            query_ptr + start_q * stride_qm + head * stride_qh, rows, stride_qm, length_q, DIM, BLOCK_D, True
        )
        last = tl.minimum(first + BLOCK_M, length_q) - 1
        for sequence in range(sequence_start, sequence_end, sequence_step):
            start_k, length_k = sequence_range(offsets_k, sequence)
            wide_sequence = tl.zeros([], tl.int64) + sequence
            start_out = start_q
            if BROADCAST:
                start_out = wide_sequence * num_rows
            num_targets = 0
            if HAS_TARGETS:
                num_targets = tl.load(targets_ptr + sequence).to(tl.int32)
            grad_base = grad_out_ptr + start_out * stride_gm + head * stride_gh
            grad = load_rows(grad_base, rows, stride_gm, length_q, DIM_V, BLOCK_DV, True)
            lse = tl.zeros([BLOCK_M], tl.float32)
            delta = tl.zeros([BLOCK_M], tl.float32)
            if SOFTMAX:
                lse = _load_lse(lse_ptr + head * stride_lse + start_out, rows, length_q)
                delta = tl.load(delta_ptr + head * stride_lse + start_out + rows, mask=rows < length_q, other=0.0)
            bias_base = bias_ptr
            if HAS_BIAS:
                bias_base += wide_sequence * stride_bias_b + head * stride_bias_h
            key_base = key_ptr + start_k * stride_kn + head_kv * stride_kh
            value_base = value_ptr + start_k * stride_vn + head_kv * stride_vh
            start, inner_start, inner_end, end = visible_range(
                first,
                last,
                length_k - length_q,
                length_k,
                left,
                right,
                HAS_LEFT,
                HAS_RIGHT,
                BLOCK_N,
            )
            if HAS_ROLES:
                start = 0
                inner_start = 0
                inner_end = 0
                end = tl.where(first < contextual, length_k, tl.minimum(last + 1, length_k))
            for part in tl.static_range(3):
                if part == 0:
                    part_start = start
                    part_end = inner_start
                elif part == 1:
                    part_start = inner_start
                    part_end = inner_end
                else:
                    part_start = inner_end
                    part_end = end
                if part > 0 or HAS_LEFT:
                    grad_query = _add_keys(
                        grad_query,
                        query,
                        grad,
                        lse,
                        delta,
                        rows,
                        key_base,
                        value_base,
                        bias_base,
                        codes_ptr,
                        head,
                        part_start,
                        part_end,
                        length_q,
                        length_k,
                        num_targets,
                        stride_kn,
                        stride_vn,
                        stride_bias_m,
                        stride_bias_n,
                        scale,
                        softcap,
                        left,
                        right,
                        contextual,
                        DIM,
                        DIM_V,
                        BLOCK_N,
                        BLOCK_D,
                        BLOCK_DV,
                        SOFTMAX,
                        CODES,
                        PER_HEAD,
                        HAS_LEFT,
                        HAS_RIGHT,
                        HAS_ROLES,
                        HAS_BIAS,
                        HAS_CAP,
                        PRECISION,
                        FAST,
                        part != 1,
                    )
    grad_query = grad_query * (scale * out_scale)
    store_rows(grad_query_base, rows, stride_gqm, length_q, grad_query, DIM, BLOCK_D)
