# mypy: allow-untyped-defs
"""Zeroes the rows that belong to no sequence; programs without such rows return at once."""

import triton
import triton.language as tl
from torch import Tensor

from lightning_gem.kernels.launch import on_device


@triton.jit(do_not_specialize=["rows"])
def zero_slack_kernel(x, end, rows, dim, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.load(end).to(tl.int64)
    last_row = (tl.program_id(0).to(tl.int64) + 1) * ROWS
    if last_row > first:
        for r in range(ROWS):
            row = last_row - ROWS + r
            if (row >= first) & (row < rows):
                for start in range(0, dim, BLOCK):
                    column = start + tl.arange(0, BLOCK)
                    tl.store(x + row * dim + column, tl.zeros([BLOCK], x.dtype.element_ty), column < dim)


def zero_slack_(x: Tensor, cu_seqlens: Tensor) -> None:
    """Zeroes the rows of the contiguous ``x`` (N, D) from ``cu_seqlens[-1]`` on."""
    if x.numel():
        with on_device(x):
            zero_slack_kernel[(triton.cdiv(len(x), 64),)](x, cu_seqlens[-1:], len(x), x.shape[1], ROWS=64, BLOCK=512)
