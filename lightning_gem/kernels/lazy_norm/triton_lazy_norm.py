# mypy: allow-untyped-defs
"""Norm and linear map in one GEMM: the rows are scaled after the product, and the normed rows never exist.

A program owns blocks of rows and walks over all columns of one block before the next. The statistics of a block are
summed from slices that ride along with the products of the block before, so they cost neither a pass over memory nor
time: the matrix units work meanwhile, and the slices bring the next rows into the cache. LayerNorm sums differences
from a row's first element, so that a large common offset does not cancel in the variance.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lightning_gem.kernels.launch import interpreted, multiprocessors, on_device


@triton.jit
def _load_slice(x, row, column, rows, dim, x_stride, SLICE: tl.constexpr):
    at = column + tl.arange(0, SLICE)
    valid = (row < rows)[:, None] & (at < dim)[None, :]
    return tl.load(x + (row.to(tl.int64) * x_stride)[:, None] + at[None, :], valid, 0.0)


@triton.jit
def _add_slice(total, squares, part, column, origin, dim, LAYER: tl.constexpr, SLICE: tl.constexpr):
    part = part.to(tl.float32)
    if LAYER:
        part = tl.where((column + tl.arange(0, SLICE) < dim)[None, :], part - origin[:, None], 0.0)
        total += part
    squares += part * part
    return total, squares


@triton.jit(do_not_specialize=["rows"])
def norm_linear_kernel(
    x_tiles,
    weight_tiles,
    out_tiles,
    x,
    weight_sum,
    rows,
    outs,
    dim,
    x_stride,
    eps,
    NORM: tl.constexpr,
    LAYER: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    SLICE: tl.constexpr,
    HEAD: tl.constexpr,
):
    """``SLICE`` times the number of products of a block must reach ``dim``."""
    across = tl.cdiv(outs, COLS)
    blocks = tl.cdiv(rows, ROWS)
    origin = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, SLICE], tl.float32)
    squares = tl.zeros([ROWS, SLICE], tl.float32)
    first_total = tl.zeros([ROWS], tl.float32)
    first_squares = tl.zeros([ROWS], tl.float32)
    if NORM:  # nothing precedes the first block of a program
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        if LAYER:
            origin = tl.load(x + row.to(tl.int64) * x_stride, row < rows, 0.0).to(tl.float32)
        for column in range(0, dim, HEAD):
            head = tl.zeros([ROWS, HEAD], tl.float32)
            part = _load_slice(x, row, column, rows, dim, x_stride, HEAD)
            head, head_squares = _add_slice(head, head, part, column, origin, dim, LAYER, HEAD)
            first_total += tl.sum(head, 1)
            first_squares += tl.sum(head_squares, 1)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        first_row = block * ROWS
        if NORM:
            variance = (first_squares + tl.sum(squares, 1)) / dim
            first_squares = tl.zeros([ROWS], tl.float32)
            row = first_row + tl.num_programs(0) * ROWS + tl.arange(0, ROWS)
            if LAYER:
                shift = (first_total + tl.sum(total, 1)) / dim
                first_total = tl.zeros([ROWS], tl.float32)
                variance -= shift * shift
                mean = origin + shift
                origin = tl.load(x + row.to(tl.int64) * x_stride, row < rows, 0.0).to(tl.float32)
                total = tl.zeros([ROWS, SLICE], tl.float32)
            rstd = tl.rsqrt(variance + eps)
            squares = tl.zeros([ROWS, SLICE], tl.float32)
            # A slice is added one product after it was asked for, so that nothing waits for memory.
            column = 0
            part = _load_slice(x, row, column, rows, dim, x_stride, SLICE)
        for tile in range(across):
            first_col = tile * COLS
            product = tl.zeros([ROWS, COLS], tl.float32)
            for k in range(0, dim, DEPTH):
                a = x_tiles.load([first_row, k])
                b = weight_tiles.load([first_col, k])
                product = tl.dot(a, b.T, product, input_precision=PRECISION)
                if NORM:
                    total, squares = _add_slice(total, squares, part, column, origin, dim, LAYER, SLICE)
                    column += SLICE
                    part = _load_slice(x, row, column, rows, dim, x_stride, SLICE)
            if NORM:
                if LAYER:
                    col = first_col + tl.arange(0, COLS)
                    product -= mean[:, None] * tl.load(weight_sum + col, col < outs, 0.0)[None, :]
                product *= rstd[:, None]
            out_tiles.store([first_row, first_col], product.to(out_tiles.dtype))


# Rows, columns and depth of a tile, warps, stages, programs per multiprocessor.
CONFIG = (128, 256, 64, 8, 3, 1)


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel takes both: two bytes an element, and contiguous rows that begin at multiples of 16 bytes."""
    return (x.dtype != torch.float32 or interpreted()) and all(
        t.stride(1) == 1 and t.stride(0) * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0 for t in (x, weight)
    )


def forward(
    x: Tensor,
    weight: Tensor,
    weight_sum: Tensor | None,
    out: Tensor,
    eps: float,
    norm: bool = True,
    config: tuple[int, ...] = CONFIG,
) -> None:
    """Fills ``out`` (N, O) from ``x`` (N, K) and ``weight`` (O, K); ``weight_sum`` (O,) selects LayerNorm."""
    (rows, dim), outs = x.shape, len(weight)
    block_rows, block_cols, depth, warps, stages, resident = config
    if interpreted():
        block_rows, block_cols, depth = 16, 32, 16
    across = triton.cdiv(outs, block_cols)
    slice_width = max(triton.next_power_of_2(triton.cdiv(depth, across)), 16)
    programs = min(triton.cdiv(rows, block_rows), multiprocessors(x) * resident)
    with on_device(x):
        norm_linear_kernel[(programs,)](
            TensorDescriptor.from_tensor(x, [block_rows, depth]),
            TensorDescriptor.from_tensor(weight, [block_cols, depth]),
            TensorDescriptor.from_tensor(out, [block_rows, block_cols]),
            x,
            weight_sum,
            rows,
            outs,
            dim,
            x.stride(0),
            eps,
            NORM=norm,
            LAYER=weight_sum is not None,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            ROWS=block_rows,
            COLS=block_cols,
            DEPTH=depth,
            SLICE=slice_width,
            HEAD=64,
            num_warps=warps,
            num_stages=stages,
        )
