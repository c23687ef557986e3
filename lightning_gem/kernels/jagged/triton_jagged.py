# mypy: allow-untyped-defs
"""Jagged concatenation, pooling and broadcasts. The sequence of a row is found by a binary search of the offsets."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gem.kernels.launch import multiprocessors, on_device


@triton.jit
def _sequence_of(cu_seqlens, row, num_sequences, steps):
    """The sequence of each row, ``num_sequences`` for slack: how many sequences end at or before it."""
    low = tl.zeros_like(row).to(tl.int32)
    high = low + num_sequences
    for _ in range(steps):
        middle = (low + high) // 2
        searching = low < high
        ends = tl.load(cu_seqlens + middle + 1, searching, 0)
        after = searching & (ends <= row)
        high = tl.where(searching & (ends > row), middle, high)
        low = tl.where(after, middle + 1, low)
    return low


@triton.jit(do_not_specialize=["num_sequences", "steps"])
def concat_kernel(
    parts,
    cu_seqlens,
    part_rows,
    part_strides,
    whole,
    whole_stride,
    num_sequences,
    steps,
    dim,
    NUM_PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
    SLACK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies rows of all parts into the whole, or back (``SPLIT``).

    Row ``r`` of part ``i`` in sequence ``b`` lies at ``r`` plus the ends of ``b`` in the parts before and its starts in
    the parts after. Slack counts as one more sequence, of zeros; ``SLACK``: the whole has room for that of all parts.
    ``part_rows`` holds 2 n + 3 for n rows: neither 1 nor a multiple of 16, for which Triton would compile once more.
    """
    tile = tl.program_id(0)
    across = tl.cdiv(dim, BLOCK)
    for i in tl.static_range(NUM_PARTS):
        tiles = tl.cdiv(part_rows[i] // 2 - 1, ROWS) * across
        if (tile >= 0) & (tile < tiles):
            row = (tile // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
            column = tile % across * BLOCK + tl.arange(0, BLOCK)
            inside = row < part_rows[i] // 2 - 1
            sequence = _sequence_of(cu_seqlens[i], row, num_sequences, steps)
            real = sequence < num_sequences
            place = row
            for j in tl.static_range(NUM_PARTS):
                if j < i:
                    ends = tl.load(cu_seqlens[j] + sequence + 1, real & inside, 0).to(tl.int64)
                    place += tl.where(real, ends, part_rows[j] // 2 - 1)
                if j > i:
                    place += tl.load(cu_seqlens[j] + sequence, inside, 0).to(tl.int64)
            known = column < dim
            at_part = parts[i] + (row * part_strides[i])[:, None] + column[None, :]
            at_whole = whole + (place * whole_stride)[:, None] + column[None, :]
            take = (real & inside)[:, None] & known[None, :]
            if SPLIT:
                tl.store(at_part, tl.load(at_whole, take, 0.0), inside[:, None] & known[None, :])
            elif SLACK:
                tl.store(at_whole, tl.load(at_part, take, 0.0), inside[:, None] & known[None, :])
            else:
                tl.store(at_whole, tl.load(at_part, take, 0.0), take)
        tile -= tiles


@triton.jit(do_not_specialize=["splits"])
def pool_kernel(
    x,
    other,
    dense,
    cu_seqlens,
    out,
    index,
    copy,
    splits,
    dim,
    x_stride,
    other_stride,
    MODE: tl.constexpr,
    HAS_OTHER: tl.constexpr,
    COPY: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One part of one sequence: its sum, mean, or maximum with the row where it is first reached.

    ``HAS_OTHER``: sums products with other rows. ``COPY``: also writes the rows, times the dense row if there are
    others.
    """
    across = tl.cdiv(dim, BLOCK)
    program = tl.program_id(0)
    column = program % across * BLOCK + tl.arange(0, BLOCK)
    program = (program // across).to(tl.int64)
    sequence = program // splits
    start = tl.load(cu_seqlens + sequence).to(tl.int64)
    length = (tl.load(cu_seqlens + sequence + 1).to(tl.int64) - start).to(tl.int32)
    share = tl.cdiv(tl.cdiv(length, splits), ROWS) * ROWS
    first = (program % splits).to(tl.int32) * share
    last = tl.minimum(first + share, length)
    known = column < dim
    x += start * x_stride
    if HAS_OTHER:
        other += start * other_stride
    if COPY:
        copy += start * dim
        factor = tl.full([BLOCK], 1.0, tl.float32)
        if HAS_OTHER:
            factor = tl.load(dense + sequence * dim + column, known, 0.0).to(tl.float32)
    if MODE == "max":
        # Lanes without a row keep a position beyond all others.
        lane = first + tl.arange(0, ROWS)
        where = tl.where(lane < last, lane, 2147483647)[:, None] + tl.zeros([ROWS, BLOCK], tl.int32)
        empty = float("-inf")
        best = tl.full([ROWS, BLOCK], float("-inf"), tl.float32)
    else:
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        empty = 0.0
    for at in tl.range(first, last, ROWS, num_stages=STAGES):
        row = at + tl.arange(0, ROWS)
        valid = (row < last)[:, None] & known[None, :]
        far = row.to(tl.int64)[:, None]
        values = tl.load(x + far * x_stride + column[None, :], valid, empty).to(tl.float32)
        if COPY:
            tl.store(copy + far * dim + column[None, :], (values * factor[None, :]).to(copy.dtype.element_ty), valid)
        if HAS_OTHER:
            values *= tl.load(other + far * other_stride + column[None, :], valid, 0.0).to(tl.float32)
        if MODE == "max":
            # A later row must be larger. NaN stays, as in torch; which row then gets the gradient does not matter.
            where = tl.where(values > best, row[:, None], where)
            best = tl.maximum(best, values, propagate_nan=tl.PropagateNan.ALL)
        else:
            total += values
    place = program * dim + column
    if MODE == "max":
        nan = tl.max(tl.where(best != best, 1, 0), 0) > 0
        largest = tl.max(tl.where(best == best, best, float("-inf")), 0)
        wins = nan[None, :] | (best == largest[None, :])
        first_row = tl.min(tl.where(wins, where, 2147483647), 0)
        largest = tl.where(nan, float("nan"), tl.where(length > 0, largest, 0.0))
        tl.store(out + place, largest.to(out.dtype.element_ty), known)
        tl.store(index + place, first_row, known)
    else:
        result = tl.sum(total, 0)
        if MODE == "mean":
            result = result / tl.maximum(length, 1).to(tl.float32)
        tl.store(out + place, result.to(out.dtype.element_ty), known)


@triton.jit(do_not_specialize=["rows", "num_sequences", "steps", "max_len"])
def broadcast_kernel(
    x,
    dense,
    cu_seqlens,
    out,
    rows,
    num_sequences,
    steps,
    max_len,
    dim,
    x_stride,
    out_stride,
    MODE: tl.constexpr,
    PER_POSITION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gives every row its sequence's dense row: copied, divided by the length, added or multiplied."""
    across = tl.cdiv(dim, BLOCK)
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    sequence = _sequence_of(cu_seqlens, row, num_sequences, steps)
    real = inside & (sequence < num_sequences)
    known = column < dim
    start = tl.load(cu_seqlens + sequence, real, 0).to(tl.int64)
    source = sequence.to(tl.int64)
    has_dense = real
    if PER_POSITION:
        has_dense = real & (row - start < max_len)
        source = source * max_len + (row - start)
    at = (source * dim)[:, None] + column[None, :]
    values = tl.load(dense + at, has_dense[:, None] & known[None, :], 0.0).to(tl.float32)
    if MODE == "mean":
        end = tl.load(cu_seqlens + sequence + 1, real, 1).to(tl.int64)
        values = values / (end - start).to(tl.float32)[:, None]
    if MODE == "add" or MODE == "multiply":
        valid = real[:, None] & known[None, :]
        own = tl.load(x + (row * x_stride)[:, None] + column[None, :], valid, 0.0).to(tl.float32)
        values = own + values if MODE == "add" else own * values
    place = (row * out_stride)[:, None] + column[None, :]
    tl.store(out + place, values.to(out.dtype.element_ty), inside[:, None] & known[None, :])


@triton.jit(do_not_specialize=["size"])
def scatter_kernel(dense, index, cu_seqlens, out, size, dim, BLOCK: tl.constexpr):
    """Puts each element of (B, D) at its position in its sequence; the rest of ``out`` stays as it is."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(index + at, at < size, 2147483647)
    real = position < 2147483647
    row = tl.load(cu_seqlens + at // dim, real, 0).to(tl.int64) + position
    tl.store(out + row * dim + at % dim, tl.load(dense + at, real, 0.0), real)


@triton.jit(do_not_specialize=["total", "max_len"])
def pad_kernel(
    x,
    other,
    cu_seqlens,
    out,
    total,
    max_len,
    dim,
    x_stride,
    other_stride,
    HAS_OTHER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Packed rows to (B, L, D) with zeros behind the end of a sequence; times the other rows, if any."""
    across = tl.cdiv(dim, BLOCK)
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    inside = row < total
    sequence = row // max_len
    start = tl.load(cu_seqlens + sequence, inside, 0).to(tl.int64)
    end = tl.load(cu_seqlens + sequence + 1, inside, 0).to(tl.int64)
    source = start + row % max_len
    valid = (inside & (source < end))[:, None] & (column < dim)[None, :]
    values = tl.load(x + (source * x_stride)[:, None] + column[None, :], valid, 0.0).to(tl.float32)
    if HAS_OTHER:
        values *= tl.load(other + (source * other_stride)[:, None] + column[None, :], valid, 0.0).to(tl.float32)
    place = (row * dim)[:, None] + column[None, :]
    tl.store(out + place, values.to(out.dtype.element_ty), inside[:, None] & (column < dim)[None, :])


def tile(dim: int, elements: int = 8192, most: int = 512) -> tuple[int, int]:
    """Rows and columns of a tile: columns that divide the width where they can."""
    block = min(dim & -dim, most)
    if block < 64:
        block = min(max(triton.next_power_of_2(dim), 16), most)
    return max(elements // block, 1), block


def concat(parts: list[Tensor], cu_seqlens: list[Tensor], whole: Tensor, split: bool, slack: bool) -> None:
    """Copies between 2-dimensional parts and the whole; see ``concat_kernel``."""
    dim, num_sequences = whole.shape[1], len(cu_seqlens[0]) - 1
    rows, block = tile(dim)
    programs = sum(triton.cdiv(len(part), rows) for part in parts) * triton.cdiv(dim, block)
    if programs == 0 or num_sequences == 0:
        return
    with on_device(whole):
        concat_kernel[(programs,)](
            tuple(parts),
            tuple(cu_seqlens),
            tuple(2 * len(part) + 3 for part in parts),
            tuple(part.stride(0) for part in parts),
            whole,
            whole.stride(0),
            num_sequences,
            num_sequences.bit_length(),
            dim,
            NUM_PARTS=len(parts),
            SPLIT=split,
            SLACK=slack,
            ROWS=rows,
            BLOCK=block,
        )


def pool(
    x: Tensor,
    other: Tensor | None,
    cu_seqlens: Tensor,
    mode: str,
    out_dtype: torch.dtype,
    dense: Tensor | None = None,
    copy: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Pools 2-dimensional rows to (B, D); for ``max`` also the position of the maximum in its sequence, int32.

    With ``copy`` (contiguous) the rows are written too, times ``dense`` (B, D) if there are other rows; not its slack.
    """
    dim, num_sequences = x.shape[1], len(cu_seqlens) - 1
    for most in (512, 256, 128, 64):  # as wide as leaves enough programs to even out unequal lengths
        rows, block = tile(dim, 4096 if mode == "max" else 8192, most)
        across = triton.cdiv(dim, block)
        if num_sequences * across >= 24 * multiprocessors(x):
            break
    # Few sequences are pooled in parts, which are joined in fixed order.
    splits = max(min(16 * multiprocessors(x) // max(num_sequences * across, 1), triton.cdiv(len(x), 1024), 64), 1)
    partial_mode, dtype = (mode, out_dtype) if splits == 1 else ("sum" if mode == "mean" else mode, torch.float32)
    out = torch.empty(num_sequences, splits, dim, dtype=dtype, device=x.device)
    index = torch.empty(out.shape if mode == "max" else 0, dtype=torch.int32, device=x.device)
    if out.numel():
        with on_device(x):
            pool_kernel[(num_sequences * splits * across,)](
                x,
                other,
                dense,
                cu_seqlens,
                out,
                index,
                copy,
                splits,
                dim,
                x.stride(0),
                0 if other is None else other.stride(0),
                MODE=partial_mode,
                HAS_OTHER=other is not None,
                COPY=copy is not None,
                ROWS=rows,
                BLOCK=block,
                STAGES=3,
                num_warps=8,
            )
    if mode == "max":
        if splits == 1:
            return out[:, 0], index[:, 0]
        # Parts come in order, so that the first of equal parts holds the first row; an empty part holds none.
        values = torch.where(index == 2**31 - 1, -torch.inf, out)
        hit = (values == values.amax(1, keepdim=True)) | values.isnan()
        number = torch.arange(splits, device=x.device)[None, :, None]
        part = torch.where(hit, number, splits - 1).amin(1, keepdim=True)
        return out.gather(1, part)[:, 0].to(out_dtype), index.gather(1, part)[:, 0]
    if splits == 1:
        return out[:, 0], index
    total = out.sum(1)
    if mode == "mean":
        total = total / cu_seqlens.diff().clamp(min=1)[:, None]
    return total.to(out_dtype), index


def broadcast(x: Tensor | None, dense: Tensor, cu_seqlens: Tensor, out: Tensor, mode: str) -> None:
    """Fills the 2-dimensional ``out`` from a contiguous ``dense`` (B, D) or (B, L, D)."""
    dim, num_sequences = out.shape[1], len(cu_seqlens) - 1
    rows, block = tile(dim, 8192 if x is None else 4096)
    programs = triton.cdiv(len(out), rows) * triton.cdiv(dim, block)
    if programs == 0:
        return
    with on_device(out):
        broadcast_kernel[(programs,)](
            x,
            dense,
            cu_seqlens,
            out,
            len(out),
            num_sequences,
            num_sequences.bit_length(),
            dense.shape[1] if dense.ndim == 3 else 0,
            dim,
            0 if x is None else x.stride(0),
            out.stride(0),
            MODE=mode,
            PER_POSITION=dense.ndim == 3,
            ROWS=rows,
            BLOCK=block,
        )


def scatter(dense: Tensor, index: Tensor, cu_seqlens: Tensor, out: Tensor) -> None:
    """Puts each element of the contiguous ``dense`` (B, D) into the contiguous ``out`` (N, D), at its position."""
    if dense.numel():
        with on_device(out):
            scatter_kernel[(triton.cdiv(dense.numel(), 1024),)](
                dense, index, cu_seqlens, out, dense.numel(), dense.shape[1], BLOCK=1024
            )


def pad(x: Tensor, other: Tensor | None, cu_seqlens: Tensor, out: Tensor) -> None:
    """Fills the contiguous ``out`` (B, L, D) from packed rows, times the other rows if there are any."""
    num_sequences, max_len, dim = out.shape
    rows, block = tile(dim)
    if out.numel():
        with on_device(x):
            pad_kernel[(triton.cdiv(num_sequences * max_len, rows) * triton.cdiv(dim, block),)](
                x,
                other,
                cu_seqlens,
                out,
                num_sequences * max_len,
                max_len,
                dim,
                x.stride(0),
                0 if other is None else other.stride(0),
                HAS_OTHER=other is not None,
                ROWS=rows,
                BLOCK=block,
            )
