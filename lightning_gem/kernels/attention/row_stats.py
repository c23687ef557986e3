"""What the backward of softmax attention needs of every query row, in one pass over the output and its gradient."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Every sequence is followed by this many entries that stand for queries which see nothing, so that kernels read whole
# tiles without masks (hopper_device.stats_start).
PADDING = 128
_BLOCK = 64


def row_stats(out: Tensor, grad_out: Tensor, lse: Tensor, cu_seqlens: Tensor, sequences: Tensor, tiles: Tensor,
              num_tiles: Tensor) -> Tensor:  # fmt: skip
    """Row statistics of softmax attention: float32 (2, H, rows + padding), LSE / log(2) and rowsum(dO * O).

    Args:
        out: (rows, H, Dv).
        grad_out: Like ``out``.
        lse: (H, rows) float32, natural logarithm.
        cu_seqlens: Offsets of the rows (B+1,).
        sequences: Sequence of every work item of 128 rows, see ``TileSchedule``.
        tiles: Its tile inside the sequence.
        num_tiles: Number of items (1,).
    """
    rows, heads, dim = out.shape
    entries = -(-(rows + PADDING * len(cu_seqlens)) // 4) * 4  # the copy engine wants rows of whole 16 bytes
    stats = torch.empty(2, heads, entries, dtype=torch.float32, device=out.device)
    grid = (len(sequences) * heads,)
    _row_stats[grid](
        out, grad_out, lse, stats, cu_seqlens, sequences, tiles, num_tiles,
        out.stride(0), out.stride(1), grad_out.stride(0), grad_out.stride(1), lse.stride(0), stats.stride(1),
        HEADS=heads, DIM=dim, BLOCK_D=triton.next_power_of_2(dim), BLOCK=_BLOCK, PADDING=PADDING,
    )  # fmt: skip
    return stats


@triton.jit
def _row_stats(
    out, grad_out, lse, stats, cu_seqlens, sequences, tiles, num_tiles,
    out_row, out_head, grad_row, grad_head, lse_head, stats_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % HEADS
    item = tl.program_id(0) // HEADS
    if item >= tl.load(num_tiles):
        return
    sequence = tl.load(sequences + item)
    start = tl.load(cu_seqlens + sequence).to(tl.int64)
    length = (tl.load(cu_seqlens + sequence + 1) - start).to(tl.int32)
    first = tl.load(tiles + item) * 128
    columns = tl.arange(0, BLOCK_D)
    place = stats + head.to(tl.int64) * stats_head + start + sequence.to(tl.int64) * PADDING
    for half in tl.static_range(128 // BLOCK):
        rows = first + half * BLOCK + tl.arange(0, BLOCK)
        real = rows < length
        inside = real[:, None] & (columns < DIM)[None, :]
        at = (start + rows)[:, None]
        o = tl.load(out + at * out_row + head * out_head + columns[None, :], mask=inside, other=0.0)
        g = tl.load(grad_out + at * grad_row + head * grad_head + columns[None, :], mask=inside, other=0.0)
        delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
        log_total = tl.load(lse + head.to(tl.int64) * lse_head + start + rows, mask=real, other=float("-inf"))
        log_total = tl.where(log_total == float("-inf"), float("inf"), log_total * 1.4426950408889634)
        tl.store(place + rows, log_total)
        tl.store(place + HEADS * stats_head + rows, delta)
    if first + 128 >= length:  # the padding behind the sequence, as far as no tile has written it
        beyond = first + 128 + tl.arange(0, PADDING)
        tl.store(place + beyond, float("inf"), mask=beyond < length + PADDING)
        tl.store(place + HEADS * stats_head + beyond, 0.0, mask=beyond < length + PADDING)
