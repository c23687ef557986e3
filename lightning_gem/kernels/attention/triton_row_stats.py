"""Beside the Hopper kernels, in plain Triton: row statistics for the backward of softmax."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gem.kernels.schedule import TileSchedule

# Every sequence is followed by 128 entries that stand for queries which see nothing, so that kernels read whole tiles
# without masks, and starts at a multiple of 16 bytes: a copy from elsewhere is an illegal instruction
# (gluon_device.stats_start).
PADDING = 128
ALIGNMENT = 4
_BLOCK = 64


def row_stats(
    out: Tensor, grad_out: Tensor, lse: Tensor, grad_lse: Tensor | None, cu_seqlens: Tensor, schedule: TileSchedule
) -> Tensor:
    """Row statistics of softmax attention: float32 (2, H, entries), LSE / log(2) and rowsum(dO * O) - dLSE.

    Args:
        out: (rows, H, Dv).
        grad_out: Like ``out``.
        lse: (H, rows) float32, natural logarithm.
        grad_lse: Gradient of ``lse``, or None.
        cu_seqlens: Offsets of the rows (B+1,).
        schedule: Tiles of 128 rows.
    """
    rows, heads, dim = out.shape
    entries = -(-rows // ALIGNMENT) * ALIGNMENT + (PADDING + ALIGNMENT) * len(cu_seqlens)
    stats = torch.empty(2, heads, entries, dtype=torch.float32, device=out.device)
    if grad_lse is not None:
        grad_lse = grad_lse.contiguous()
    _row_stats[(schedule.capacity * heads,)](
        out,
        grad_out,
        lse,
        lse if grad_lse is None else grad_lse,
        stats,
        cu_seqlens,
        schedule.sequence,
        schedule.tile,
        schedule.num_tiles,
        out.stride(0),
        out.stride(1),
        grad_out.stride(0),
        grad_out.stride(1),
        lse.stride(0),
        entries,
        HEADS=heads,
        DIM=dim,
        BLOCK=_BLOCK,
        PADDING=PADDING,
        ALIGNMENT=ALIGNMENT,
        HAS_GRAD_LSE=grad_lse is not None,
    )
    return stats


@triton.jit(do_not_specialize=["lse_head", "stats_head"])
def _row_stats(
    out, grad_out, lse, grad_lse, stats, cu_seqlens, sequences, tiles, num_tiles,
    out_row, out_head, grad_row, grad_head, lse_head, stats_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, PADDING: tl.constexpr, ALIGNMENT: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % HEADS
    item = tl.program_id(0) // HEADS
    if item >= tl.load(num_tiles):
        return
    sequence = tl.load(sequences + item)
    start = tl.load(cu_seqlens + sequence).to(tl.int64)
    length = (tl.load(cu_seqlens + sequence + 1) - start).to(tl.int32)
    first = tl.load(tiles + item) * 128
    columns = tl.arange(0, DIM)[None, :]
    place = stats + head.to(tl.int64) * stats_head + start // ALIGNMENT * ALIGNMENT
    place += sequence.to(tl.int64) * (PADDING + ALIGNMENT)
    for half in tl.static_range(128 // BLOCK):
        rows = first + half * BLOCK + tl.arange(0, BLOCK)
        real = rows < length
        at = (start + rows)[:, None]
        o = tl.load(out + at * out_row + head * out_head + columns, mask=real[:, None], other=0.0)
        g = tl.load(grad_out + at * grad_row + head * grad_head + columns, mask=real[:, None], other=0.0)
        delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
        row_of_lse = head.to(tl.int64) * lse_head + start + rows
        if HAS_GRAD_LSE:
            delta -= tl.load(grad_lse + row_of_lse, mask=real, other=0.0)
        log_total = tl.load(lse + row_of_lse, mask=real, other=float("-inf"))
        log_total = tl.where(log_total == float("-inf"), float("inf"), log_total * 1.4426950408889634)
        tl.store(place + rows, log_total)
        tl.store(place + HEADS * stats_head + rows, delta)
    if first + 128 >= length:  # the padding behind the sequence, as far as no tile has written it
        beyond = first + 128 + tl.arange(0, PADDING)
        tl.store(place + beyond, float("inf"), mask=beyond < length + PADDING)
        tl.store(place + HEADS * stats_head + beyond, 0.0, mask=beyond < length + PADDING)
