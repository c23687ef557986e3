# mypy: allow-untyped-defs
"""``value * act(scores)`` over rows with any row stride, and both gradients in one pass."""

import triton
import triton.language as tl
from torch import Tensor

from lightning_gem.kernels.launch import on_device
from lightning_gem.kernels.triton_activations import CODES, activate, activate_with_derivative


@triton.jit(do_not_specialize=["rows"])
def forward_kernel(
    value,
    scores,
    out,
    rows,
    dim,
    value_stride,
    scores_stride,
    out_stride,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    across = tl.cdiv(dim, BLOCK)
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)[None, :]
    valid = (row < rows) & (column < dim)
    v = tl.load(value + row * value_stride + column, valid, 0.0).to(tl.float32)
    s = tl.load(scores + row * scores_stride + column, valid, 0.0).to(tl.float32)
    tl.store(out + row * out_stride + column, (v * activate(s, ACTIVATION, False)).to(out.dtype.element_ty), valid)


@triton.jit(do_not_specialize=["rows"])
def backward_kernel(
    grad_out,
    value,
    scores,
    grad_value,
    grad_scores,
    rows,
    dim,
    out_stride,
    value_stride,
    scores_stride,
    grad_value_stride,
    grad_scores_stride,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    across = tl.cdiv(dim, BLOCK)
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)[None, :]
    valid = (row < rows) & (column < dim)
    g = tl.load(grad_out + row * out_stride + column, valid, 0.0).to(tl.float32)
    v = tl.load(value + row * value_stride + column, valid, 0.0).to(tl.float32)
    s = tl.load(scores + row * scores_stride + column, valid, 0.0).to(tl.float32)
    weight, slope = activate_with_derivative(s, ACTIVATION, False)
    dv = g * weight
    ds = g * v * slope
    tl.store(grad_value + row * grad_value_stride + column, dv.to(grad_value.dtype.element_ty), valid)
    tl.store(grad_scores + row * grad_scores_stride + column, ds.to(grad_scores.dtype.element_ty), valid)


def tile(dim: int, elements: int = 4096) -> tuple[int, int]:
    """Rows and columns of a tile: columns that divide the width where they can."""
    block = min(dim & -dim, 1024)
    if block < 64:
        block = min(max(triton.next_power_of_2(dim), 16), 1024)
    return max(elements // block, 1), block


def forward(value: Tensor, scores: Tensor, out: Tensor, activation: str) -> None:
    """Fills ``out``; all are (rows, dim) with a last stride of 1."""
    num_rows, dim = out.shape
    rows, block = tile(dim)
    with on_device(out):
        forward_kernel[(triton.cdiv(num_rows, rows) * triton.cdiv(dim, block),)](
            value,
            scores,
            out,
            num_rows,
            dim,
            value.stride(0),
            scores.stride(0),
            out.stride(0),
            ACTIVATION=CODES[activation],
            ROWS=rows,
            BLOCK=block,
            num_warps=4,
        )


def backward(
    grad_out: Tensor, value: Tensor, scores: Tensor, grad_value: Tensor, grad_scores: Tensor, activation: str
) -> None:
    """Fills both gradients; all are (rows, dim) with a last stride of 1."""
    num_rows, dim = grad_out.shape
    rows, block = tile(dim, 2048)
    with on_device(grad_out):
        backward_kernel[(triton.cdiv(num_rows, rows) * triton.cdiv(dim, block),)](
            grad_out,
            value,
            scores,
            grad_value,
            grad_scores,
            num_rows,
            dim,
            grad_out.stride(0),
            value.stride(0),
            scores.stride(0),
            grad_value.stride(0),
            grad_scores.stride(0),
            ACTIVATION=CODES[activation],
            ROWS=rows,
            BLOCK=block,
            num_warps=4,
        )
