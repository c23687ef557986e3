# mypy: ignore-errors
"""Self-attention over short sequences, several of them in one tile: no program works on a tile that is mostly empty.

A tile holds whole sequences, so its rows are all the queries and all the keys that its rows need: every tensor is read
once, there is no loop over keys, and one backward kernel has all three gradients. Pairs of different sequences are
masked by the row at which the sequences of both start, which ``packing_kernel`` lists for all rows, once per batch.

A weight of 0 does not keep infinities and NaN of one sequence out of sums for another. So what products sum over is
made finite, and the weights of the pairs that it belongs to are made NaN instead.
"""

import triton
import triton.language as tl

from lightning_gem.kernels.attention.triton_common import LN_2, LOG2_E, load_rows, store_rows
from lightning_gem.kernels.triton_activations import activate, activate_with_derivative

RUNTIME = ["num_rows", "num_sequences", "num_chunks", "capacity", "left", "right", "stride_lse"]


@triton.jit(do_not_specialize=["num_sequences", "capacity"])
def packing_kernel(
    offsets,
    packing_ptr,
    num_sequences,
    capacity,
    BLOCK: tl.constexpr,
    STARTS: tl.constexpr,
    LONGEST: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """Packs SEQUENCES sequences into tiles, each as full as it gets, and lists where the sequence of every row starts.

    All tiles of a program but its last have at least STARTS rows, so that the entry of its first follows from the rows
    before it. Entries that are not needed are empty, and those behind the last program's are for slack rows.
    """
    chunk = tl.program_id(0)
    index = chunk * SEQUENCES + tl.arange(0, SEQUENCES)
    inside = index < num_sequences
    base = tl.load(offsets + chunk * SEQUENCES).to(tl.int32)
    last = tl.load(offsets + tl.minimum((chunk + 1) * SEQUENCES, num_sequences)).to(tl.int32)
    start = tl.load(offsets + index, mask=inside, other=0).to(tl.int32)
    end = tl.load(offsets + index + 1, mask=inside, other=0).to(tl.int32)

    rows = start[:, None] + tl.arange(0, LONGEST)[None, :]
    starts = tl.broadcast_to(start[:, None], rows.shape)
    tl.store(packing_ptr + 2 * capacity + rows, starts, mask=rows < end[:, None])

    entry = base // STARTS + chunk
    next_entry = last // STARTS + chunk + 1
    while (base < last) & (entry < next_entry):
        whole = tl.max(tl.where(end <= base + BLOCK, end, 0), axis=0)
        # Nothing fits only if a sequence is longer than promised: what is behind it is still right.
        beyond = tl.min(tl.where(end > base, end, last), axis=0)
        tile_end = tl.where(whole > base, whole, beyond)
        tl.store(packing_ptr + entry, base)
        tl.store(packing_ptr + capacity + entry, tl.minimum(tile_end, base + BLOCK))
        base = tile_end
        entry += 1
    while entry < next_entry:
        tl.store(packing_ptr + entry, 0)
        tl.store(packing_ptr + capacity + entry, 0)
        entry += 1


@triton.jit
def _tile(
    packing_ptr,
    offsets,
    entry,
    num_rows,
    num_sequences,
    num_chunks,
    capacity,
    BLOCK: tl.constexpr,
    STARTS: tl.constexpr,
):
    """First row (int64), rows to write, and rows to read: entries behind the last tile stand for slack rows."""
    total = tl.load(offsets + num_sequences).to(tl.int64)
    start = tl.load(packing_ptr + entry).to(tl.int64)
    end = tl.load(packing_ptr + capacity + entry).to(tl.int64)
    spare = entry - (total // STARTS + num_chunks)
    is_slack = spare >= 0
    start = tl.where(is_slack, total + spare * BLOCK, start)
    end = tl.where(is_slack, tl.minimum(start + BLOCK, num_rows), end)
    written = (end - start).to(tl.int32)
    return start, written, tl.where(is_slack, 0, written)


@triton.jit
def _visible(starts_base, count, left, right, BLOCK: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Which rows of a tile (first axis) see which; rows behind its end see each other, so that none sees nothing."""
    rows = tl.arange(0, BLOCK)
    starts = tl.load(starts_base + rows, mask=rows < count, other=-1)
    visible = starts[:, None] == starts[None, :]
    distance = rows[None, :] - rows[:, None]
    if HAS_LEFT:
        visible = visible & (distance >= -left)
    if HAS_RIGHT:
        visible = visible & (distance <= right)
    return visible


@triton.jit
def _finite(tile):
    """The tile with zeros for what is not finite, and per row 0, or NaN if there was any."""
    rest = tile - tile
    return tl.where(rest == 0, tile, 0.0).to(tile.dtype), tl.sum(rest.to(tl.float32), axis=1)


@triton.jit
def _forward_head(
    query_ptr,
    key_ptr,
    value_ptr,
    out_ptr,
    lse_ptr,
    start,
    written,
    count,
    head,
    visible,
    stride_qm,
    stride_qh,
    stride_kn,
    stride_kh,
    stride_vn,
    stride_vh,
    stride_om,
    stride_oh,
    stride_lse,
    scale,
    out_scale,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SOFTMAX: tl.constexpr,
    CODE: tl.constexpr,
    PRECISION: tl.constexpr,
    FAST: tl.constexpr,
):
    """One head of a tile."""
    rows = tl.arange(0, BLOCK)
    head_kv = head // GROUP
    query = load_rows(query_ptr + start * stride_qm + head * stride_qh, rows, stride_qm, count, DIM, BLOCK_D, True)
    key = load_rows(key_ptr + start * stride_kn + head_kv * stride_kh, rows, stride_kn, count, DIM, BLOCK_D, True)
    value_base = value_ptr + start * stride_vn + head_kv * stride_vh
    value = load_rows(value_base, rows, stride_vn, count, DIM_V, BLOCK_DV, True)
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    if SOFTMAX:
        scores = tl.where(visible, scores * (scale * LOG2_E), float("-inf"))
        maximum = tl.max(scores, axis=1)
        weights = tl.exp2(scores - maximum[:, None])
        denominator = tl.sum(weights, axis=1)
        lse = tl.where(rows < count, (maximum + tl.log2(denominator)) * LN_2, 0.0)
        tl.store(lse_ptr + head * stride_lse + start + rows, lse, mask=rows < written)
    else:
        weights = activate(scores * scale, CODE, FAST)
    value, poison = _finite(value)
    weights = tl.where(visible, weights + poison[None, :], 0.0)
    out = tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
    if SOFTMAX:
        out = out / denominator[:, None]
    else:
        out = out * out_scale
    store_rows(out_ptr + start * stride_om + head * stride_oh, rows, stride_om, written, out, DIM_V, BLOCK_DV)


@triton.jit(do_not_specialize=RUNTIME)
def packed_forward_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    out_ptr,
    lse_ptr,
    offsets,
    packing_ptr,
    stride_qm,
    stride_qh,
    stride_kn,
    stride_kh,
    stride_vn,
    stride_vh,
    stride_om,
    stride_oh,
    stride_lse,
    num_rows,
    num_sequences,
    num_chunks,
    capacity,
    scale,
    out_scale,
    left,
    right,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK: tl.constexpr,
    STARTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SOFTMAX: tl.constexpr,
    CODE: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    PRECISION: tl.constexpr,
    FAST: tl.constexpr,
):
    """One program per tile and head."""
    entry = tl.program_id(0) // HEADS
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    start, written, count = _tile(
        packing_ptr, offsets, entry, num_rows, num_sequences, num_chunks, capacity, BLOCK, STARTS
    )
    if written <= 0:
        return
    visible = _visible(packing_ptr + 2 * capacity + start, count, left, right, BLOCK, HAS_LEFT, HAS_RIGHT)
    _forward_head(
        query_ptr, key_ptr, value_ptr, out_ptr, lse_ptr, start, written, count, head, visible,
        stride_qm, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, stride_om, stride_oh, stride_lse,
        scale, out_scale, GROUP, DIM, DIM_V, BLOCK, BLOCK_D, BLOCK_DV, SOFTMAX, CODE, PRECISION, FAST,
    )  # fmt: skip


@triton.jit
def _backward_head(
    grad_key,
    grad_value,
    query_ptr,
    key_ptr,
    value_ptr,
    grad_out_ptr,
    lse_ptr,
    grad_lse_ptr,
    grad_query_ptr,
    start,
    written,
    count,
    head,
    visible,
    stride_qm,
    stride_qh,
    stride_kn,
    stride_kh,
    stride_vn,
    stride_vh,
    stride_gm,
    stride_gh,
    stride_gqm,
    stride_gqh,
    stride_lse,
    scale,
    out_scale,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SOFTMAX: tl.constexpr,
    CODE: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
    FAST: tl.constexpr,
):
    """Stores the gradient of the queries of a head, and adds to those of its keys and values; see ``_forward_head``."""
    rows = tl.arange(0, BLOCK)
    head_kv = head // GROUP
    query = load_rows(query_ptr + start * stride_qm + head * stride_qh, rows, stride_qm, count, DIM, BLOCK_D, True)
    key = load_rows(key_ptr + start * stride_kn + head_kv * stride_kh, rows, stride_kn, count, DIM, BLOCK_D, True)
    value_base = value_ptr + start * stride_vn + head_kv * stride_vh
    value = load_rows(value_base, rows, stride_vn, count, DIM_V, BLOCK_DV, True)
    grad_base = grad_out_ptr + start * stride_gm + head * stride_gh
    grad = load_rows(grad_base, rows, stride_gm, count, DIM_V, BLOCK_DV, True)
    query, query_poison = _finite(query)
    key, key_poison = _finite(key)
    grad, grad_poison = _finite(grad)
    poison = (query_poison + grad_poison)[:, None] + key_poison[None, :]
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    grad_weights = tl.dot(grad, tl.trans(value), input_precision=PRECISION)
    if SOFTMAX:
        stats = head * stride_lse + start + rows
        lse = tl.load(lse_ptr + stats, mask=rows < count, other=0.0) * LOG2_E
        weights = tl.where(visible, tl.exp2(scores * (scale * LOG2_E) - lse[:, None]) + poison, 0.0)
        grad_weights = tl.where(visible, grad_weights, 0.0)
        delta = tl.sum(weights * grad_weights, axis=1)
        if HAS_GRAD_LSE:
            delta -= tl.load(grad_lse_ptr + stats, mask=rows < count, other=0.0)
        grad_scores = tl.where(visible, weights * (grad_weights - delta[:, None]), 0.0)
    else:
        weights, slope = activate_with_derivative(scores * scale, CODE, FAST)
        weights = tl.where(visible, weights + poison, 0.0)
        grad_scores = tl.where(visible, grad_weights * slope + poison, 0.0)
    weights = weights.to(grad.dtype)
    grad_scores = grad_scores.to(grad.dtype)
    grad_value = tl.dot(tl.trans(weights), grad, grad_value, input_precision=PRECISION)
    grad_key = tl.dot(tl.trans(grad_scores), query, grad_key, input_precision=PRECISION)
    grad_query = tl.dot(grad_scores, key, input_precision=PRECISION)
    query_base = grad_query_ptr + start * stride_gqm + head * stride_gqh
    factor = scale if SOFTMAX else scale * out_scale
    store_rows(query_base, rows, stride_gqm, written, grad_query * factor, DIM, BLOCK_D)
    return grad_key, grad_value


@triton.jit
def _backward_group(
    query_ptr, key_ptr, value_ptr, grad_out_ptr, lse_ptr, grad_lse_ptr, grad_query_ptr, grad_key_ptr, grad_value_ptr,
    start, written, count, head_kv, visible, stride_qm, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh,
    stride_gm, stride_gh, stride_gqm, stride_gqh, stride_gkn, stride_gkh, stride_gvn, stride_gvh, stride_lse,
    scale, out_scale, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, SOFTMAX: tl.constexpr, CODE: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """All gradients of a head of keys and the heads of queries that read it."""
    rows = tl.arange(0, BLOCK)
    grad_key = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    grad_value = tl.zeros([BLOCK, BLOCK_DV], tl.float32)
    for member in range(GROUP):
        head = head_kv * GROUP + member
        grad_key, grad_value = _backward_head(
            grad_key, grad_value, query_ptr, key_ptr, value_ptr, grad_out_ptr, lse_ptr, grad_lse_ptr, grad_query_ptr,
            start, written, count, head, visible, stride_qm, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh,
            stride_gm, stride_gh, stride_gqm, stride_gqh, stride_lse, scale, out_scale,
            GROUP, DIM, DIM_V, BLOCK, BLOCK_D, BLOCK_DV, SOFTMAX, CODE, HAS_GRAD_LSE, PRECISION, FAST,
        )  # fmt: skip
    key_base = grad_key_ptr + start * stride_gkn + head_kv * stride_gkh
    value_base = grad_value_ptr + start * stride_gvn + head_kv * stride_gvh
    factor = scale if SOFTMAX else scale * out_scale
    store_rows(key_base, rows, stride_gkn, written, grad_key * factor, DIM, BLOCK_D)
    store_rows(
        value_base, rows, stride_gvn, written, grad_value if SOFTMAX else grad_value * out_scale, DIM_V, BLOCK_DV
    )


@triton.jit(do_not_specialize=RUNTIME)
def packed_backward_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    grad_out_ptr,
    lse_ptr,
    grad_lse_ptr,
    grad_query_ptr,
    grad_key_ptr,
    grad_value_ptr,
    offsets,
    packing_ptr,
    stride_qm,
    stride_qh,
    stride_kn,
    stride_kh,
    stride_vn,
    stride_vh,
    stride_gm,
    stride_gh,
    stride_gqm,
    stride_gqh,
    stride_gkn,
    stride_gkh,
    stride_gvn,
    stride_gvh,
    stride_lse,
    num_rows,
    num_sequences,
    num_chunks,
    capacity,
    scale,
    out_scale,
    left,
    right,
    HEADS_KV: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK: tl.constexpr,
    STARTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SOFTMAX: tl.constexpr,
    CODE: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
    FAST: tl.constexpr,
):
    """One program per tile and head of keys. Neither outputs nor their inner products with gradients are read.

    A tile has all weights w of a row and their gradients g at once, and so the sum of w * g that stands for them.
    """
    entry = tl.program_id(0) // HEADS_KV
    head_kv = (tl.program_id(0) % HEADS_KV).to(tl.int64)
    start, written, count = _tile(
        packing_ptr, offsets, entry, num_rows, num_sequences, num_chunks, capacity, BLOCK, STARTS
    )
    if written <= 0:
        return
    visible = _visible(packing_ptr + 2 * capacity + start, count, left, right, BLOCK, HAS_LEFT, HAS_RIGHT)
    _backward_group(
        query_ptr, key_ptr, value_ptr, grad_out_ptr, lse_ptr, grad_lse_ptr, grad_query_ptr, grad_key_ptr,
        grad_value_ptr, start, written, count, head_kv, visible,
        stride_qm, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh,
        stride_gm, stride_gh, stride_gqm, stride_gqh, stride_gkn, stride_gkh, stride_gvn, stride_gvh, stride_lse,
        scale, out_scale, GROUP, DIM, DIM_V, BLOCK, BLOCK_D, BLOCK_DV, SOFTMAX, CODE, HAS_GRAD_LSE, PRECISION,
        FAST,
    )  # fmt: skip
