# mypy: ignore-errors
"""Portable forward kernel: one program per tile of queries and head, a loop over the keys it sees.

Pointer loads and plain ``tl.dot``: any GPU that Triton knows, and its interpreter. Method: FlashAttention-2
(https://arxiv.org/abs/2307.08691) for softmax; without softmax the loop needs no statistics.
"""

import triton
import triton.language as tl

from lightning_gem.kernels.attention.triton_common import (
    LN_2,
    LOG2_E,
    load_rows,
    sequence_range,
    store_rows,
    visible_keys,
    visible_range,
)
from lightning_gem.kernels.attention.triton_head_activations import activate_head
from lightning_gem.kernels.triton_activations import tanh

RUNTIME = ["num_rows", "num_sequences", "left", "right", "contextual", "stride_lse", "capacity"]


@triton.jit
def _add_keys(
    accumulator,
    maximum,
    denominator,
    query,
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
    """Adds the contribution of the keys from start to end to the state of a tile of queries."""
    for first in range(start, end, BLOCK_N):
        columns = first + tl.arange(0, BLOCK_N)
        key = load_rows(key_base, columns, stride_kn, length_k, DIM, BLOCK_D, MASKED)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if SOFTMAX:
            if HAS_CAP:
                scores = (softcap * LOG2_E) * tanh(scores * (scale / softcap), FAST)
            else:
                scores = scores * (scale * LOG2_E)
            if HAS_BIAS:
                pointers = bias_base + rows[:, None].to(tl.int64) * stride_bias_m + columns[None, :] * stride_bias_n
                inside = (rows[:, None] < length_q) & (columns[None, :] < length_k)
                scores += tl.load(pointers, mask=inside, other=0.0).to(tl.float32) * LOG2_E
        else:
            scores = activate_head(scores * scale, codes, head, CODES, PER_HEAD, FAST)
        # Without softmax absent keys are zeros, and so are their weights: only a window needs a mask.
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
            scores = tl.where(visible, scores, float("-inf") if SOFTMAX else 0.0)
        if SOFTMAX:
            new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
            # A row that has seen no key yet has no maximum to subtract.
            shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            weights = tl.exp2(scores - shift[:, None])
            decay = tl.exp2(maximum - shift)
            denominator = denominator * decay + tl.sum(weights, axis=1)
            accumulator = accumulator * decay[:, None]
            maximum = new_maximum
        else:
            weights = scores
        value = load_rows(value_base, columns, stride_vn, length_k, DIM_V, BLOCK_DV, MASKED)
        accumulator = tl.dot(weights.to(value.dtype), value, accumulator, input_precision=PRECISION)
    return accumulator, maximum, denominator


@triton.jit(do_not_specialize=RUNTIME)
def attention_forward_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    out_ptr,
    lse_ptr,
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
    stride_om,
    stride_oh,
    stride_lse,
    stride_bias_b,
    stride_bias_h,
    stride_bias_m,
    stride_bias_n,
    num_rows,
    num_sequences,
    capacity,
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
    """``num_rows`` counts the rows of the output; with BROADCAST, those of the shared queries."""
    item = tl.program_id(0) // HEADS
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    num_tiles = tl.load(schedule_ptr + 2 * capacity)
    tile_rows = tl.arange(0, BLOCK_M)
    if item >= num_tiles:
        if not BROADCAST:  # spare programs write the zeros of the slack rows
            slack_start = tl.load(offsets_q + num_sequences).to(tl.int64)
            slack = num_rows - slack_start
            rows = (item - num_tiles) * BLOCK_M + tile_rows
            out_base = out_ptr + slack_start * stride_om + head * stride_oh
            store_rows(out_base, rows, stride_om, slack, tl.zeros([BLOCK_M, BLOCK_DV], tl.float32), DIM_V, BLOCK_DV)
            if SOFTMAX:
                pointers = lse_ptr + head * stride_lse + slack_start + rows
                tl.store(pointers, tl.zeros([BLOCK_M], tl.float32), mask=rows < slack)
    else:
        sequence = tl.load(schedule_ptr + item)
        first = tl.load(schedule_ptr + capacity + item) * BLOCK_M
        start_k, length_k = sequence_range(offsets_k, sequence)
        if BROADCAST:
            start_q = 0
            length_q = num_rows
            start_out = sequence.to(tl.int64) * num_rows
        else:
            start_q, length_q = sequence_range(offsets_q, sequence)
            start_out = start_q
        num_targets = 0
        if HAS_TARGETS:
            num_targets = tl.load(targets_ptr + sequence).to(tl.int32)
        head_kv = head // GROUP
        rows = first + tile_rows
        query_base = query_ptr + start_q * stride_qm + head * stride_qh
        key_base = key_ptr + start_k * stride_kn + head_kv * stride_kh
        value_base = value_ptr + start_k * stride_vn + head_kv * stride_vh
        bias_base = bias_ptr
        if HAS_BIAS:
            bias_base += sequence.to(tl.int64) * stride_bias_b + head * stride_bias_h
        query = load_rows(query_base, rows, stride_qm, length_q, DIM, BLOCK_D, True)

        last = tl.minimum(first + BLOCK_M, length_q) - 1
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
        if HAS_ROLES:  # all tiles are masked; context sees everything, and any other token nothing behind itself
            start = 0
            inner_start = 0
            inner_end = 0
            end = tl.where(first < contextual, length_k, tl.minimum(last + 1, length_k))
        accumulator = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
        denominator = tl.zeros([BLOCK_M], tl.float32)
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
                accumulator, maximum, denominator = _add_keys(
                    accumulator,
                    maximum,
                    denominator,
                    query,
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
        if SOFTMAX:
            seen = maximum > float("-inf")
            accumulator = accumulator / tl.where(seen, denominator, 1.0)[:, None]
            lse = tl.where(seen, (maximum + tl.log2(tl.where(seen, denominator, 1.0))) * LN_2, float("-inf"))
            pointers = lse_ptr + head * stride_lse + start_out + rows
            tl.store(pointers, lse, mask=rows < length_q)
        else:
            accumulator = accumulator * out_scale
        out_base = out_ptr + start_out * stride_om + head * stride_oh
        store_rows(out_base, rows, stride_om, length_q, accumulator, DIM_V, BLOCK_DV)
