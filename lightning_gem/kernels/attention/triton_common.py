# mypy: ignore-errors
"""What the portable kernels share: loading tiles, masks, and the range of the other side that a tile can see."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_rows(base, rows, stride, num_rows, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, MASKED: tl.constexpr):
    """Rows of one head, (len(rows), BLOCK_DIM); zero beyond ``num_rows`` (only if MASKED) and beyond DIM."""
    columns = tl.arange(0, BLOCK_DIM)
    pointers = base + rows[:, None].to(tl.int64) * stride + columns[None, :]
    if MASKED:
        if DIM == BLOCK_DIM:
            tile = tl.load(pointers, mask=rows[:, None] < num_rows, other=0.0)
        else:
            tile = tl.load(pointers, mask=(rows[:, None] < num_rows) & (columns[None, :] < DIM), other=0.0)
    elif DIM == BLOCK_DIM:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=columns[None, :] < DIM, other=0.0)
    return tile


@triton.jit
def store_rows(base, rows, stride, num_rows, tile, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """The inverse of ``load_rows``."""
    columns = tl.arange(0, BLOCK_DIM)
    pointers = base + rows[:, None].to(tl.int64) * stride + columns[None, :]
    mask = (rows[:, None] < num_rows) & (columns[None, :] < DIM)
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def sequence_range(offsets, sequence):
    """First row (int64) and length (int32) of a sequence."""
    start = tl.load(offsets + sequence).to(tl.int64)
    end = tl.load(offsets + sequence + 1).to(tl.int64)
    return start, (end - start).to(tl.int32)


@triton.jit
def visible_keys(
    queries,
    keys,
    length_q,
    length_k,
    left,
    right,
    num_targets,
    contextual,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_ROLES: tl.constexpr,
):
    """The rules of ``masking.visible_pairs`` and ``visible_roles``, for index tensors that broadcast."""
    visible = (keys < length_k) & (queries < length_q)
    if HAS_ROLES:
        skipped = tl.maximum(contextual - 1, 0)
        last = tl.maximum(length_k - num_targets - skipped, 0)
        place_q = tl.minimum(tl.maximum(queries - skipped, 0), last)
        place_k = tl.minimum(tl.maximum(keys - skipped, 0), last)
        distance = place_q - place_k
        earlier = distance > 0
        if HAS_LEFT:
            earlier = earlier & (distance <= left)
        context = (queries < contextual) & (keys < length_k - num_targets)
        visible = visible & (earlier | context | (queries == keys))
    else:
        distance = keys - queries - (length_k - length_q)
        if HAS_LEFT:
            visible = visible & (distance >= -left)
        if HAS_RIGHT:
            visible = visible & (distance <= right)
    return visible


@triton.jit
def visible_range(
    first,
    last,
    shift,
    length,
    before,
    after,
    HAS_BEFORE: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Which rows of the other side some row of the tile [first, last] sees, in tiles of BLOCK.

    Row i sees the rows from i + shift - before to i + shift + after of the other side, which has ``length`` rows.

    Returns:
        start, inner_start, inner_end, end: tiles from start to end have visible pairs; those from inner_start to
        inner_end are full, without masks. All but end are multiples of BLOCK.
    """
    start = 0
    end = length
    inner_start = 0
    inner_end = length
    if HAS_BEFORE:
        start = tl.maximum(first + shift - before, 0)
        inner_start = tl.maximum(last + shift - before, 0)
    if HAS_AFTER:
        end = tl.maximum(tl.minimum(last + shift + after + 1, length), 0)
        inner_end = tl.maximum(tl.minimum(first + shift + after + 1, length), 0)
    limit = (end + BLOCK - 1) // BLOCK * BLOCK
    start = tl.minimum(start // BLOCK * BLOCK, limit)
    inner_start = tl.minimum(tl.maximum((inner_start + BLOCK - 1) // BLOCK * BLOCK, start), limit)
    inner_end = tl.maximum(inner_end // BLOCK * BLOCK, inner_start)
    return start, inner_start, inner_end, end
