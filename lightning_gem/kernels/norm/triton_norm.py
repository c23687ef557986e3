# mypy: allow-untyped-defs
"""Layer and RMS norm with everything around them in one pass: ``act(norm(x + residual) * w + b) + skip``."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gem.kernels.launch import multiprocessors, on_device, row_layout
from lightning_gem.kernels.triton_activations import CODES, IDENTITY, activate, activate_with_derivative

MAX_DIM = 16384


@triton.jit
def _offsets(row, INNER: tl.constexpr, inner, outer_stride, inner_stride):
    row = row.to(tl.int64)
    if INNER:
        return row // inner * outer_stride + row % inner * inner_stride
    return row * outer_stride


@triton.jit
def _normalise(h, valid, dim, eps, LAYER: tl.constexpr):
    """The normed rows and the reciprocal deviation (ROWS, 1); columns beyond ``dim`` stay 0."""
    if LAYER:
        mean = tl.sum(h, 1) / dim
        h = tl.where(valid, h - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(h * h, 1) / dim + eps)[:, None]
    return h * rstd, rstd


@triton.jit(do_not_specialize=["rows"])
def forward_kernel(
    x,
    residual,
    weight,
    bias,
    skip,
    out,
    total,
    rows,
    dim,
    inner,
    x_outer,
    x_inner,
    residual_outer,
    residual_inner,
    skip_outer,
    skip_inner,
    eps,
    LAYER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    WRITE_TOTAL: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    valid = (row < rows)[:, None] & (column < dim)
    place = row[:, None] * dim + column
    h = tl.load(x + _offsets(row, INNER, inner, x_outer, x_inner)[:, None] + column, valid, 0.0).to(tl.float32)
    if HAS_RESIDUAL:
        at = _offsets(row, INNER, inner, residual_outer, residual_inner)[:, None] + column
        # The sum is rounded to the dtype that it is stored in, as in unfused code.
        h = (h + tl.load(residual + at, valid, 0.0).to(tl.float32)).to(total.dtype.element_ty)
        if WRITE_TOTAL:
            tl.store(total + place, h, valid)
        h = h.to(tl.float32)
    z, _ = _normalise(h, valid, dim, eps, LAYER)
    if HAS_WEIGHT:
        z = z * tl.load(weight + column, column < dim, 0.0).to(tl.float32)
    if HAS_BIAS:
        z = z + tl.load(bias + column, column < dim, 0.0).to(tl.float32)
    z = activate(z, ACTIVATION, False)
    if HAS_SKIP:
        at = _offsets(row, INNER, inner, skip_outer, skip_inner)[:, None] + column
        z = z + tl.load(skip + at, valid, 0.0).to(tl.float32)
    tl.store(out + place, z.to(out.dtype.element_ty), valid)


@triton.jit(do_not_specialize=["rows"])
def backward_kernel(
    grad_out,
    grad_total,
    x,
    residual,
    weight,
    bias,
    grad_x,
    grad_weight,
    grad_bias,
    normed,
    rows,
    dim,
    inner,
    out_outer,
    out_inner,
    total_outer,
    total_inner,
    x_outer,
    x_inner,
    residual_outer,
    residual_inner,
    eps,
    LAYER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_GRAD_TOTAL: tl.constexpr,
    WRITE_NORMED: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Statistics are recomputed from the rows, which must be read anyway. Weight gradients: one partial per program."""
    column = tl.arange(0, BLOCK)[None, :]
    if HAS_WEIGHT:
        w = tl.load(weight + column, column < dim, 0.0).to(tl.float32)
        weight_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    if HAS_BIAS:
        b = tl.load(bias + column, column < dim, 0.0).to(tl.float32)
        bias_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tl.full([], ROWS, tl.int64) * tile + tl.arange(0, ROWS)
        valid = (row < rows)[:, None] & (column < dim)
        place = row[:, None] * dim + column
        h = tl.load(x + _offsets(row, INNER, inner, x_outer, x_inner)[:, None] + column, valid, 0.0).to(tl.float32)
        at = _offsets(row, INNER, inner, out_outer, out_inner)[:, None] + column
        g = tl.load(grad_out + at, valid, 0.0).to(tl.float32)
        if HAS_RESIDUAL:
            at = _offsets(row, INNER, inner, residual_outer, residual_inner)[:, None] + column
            h = (h + tl.load(residual + at, valid, 0.0).to(tl.float32)).to(grad_x.dtype.element_ty).to(tl.float32)
        n, rstd = _normalise(h, valid, dim, eps, LAYER)
        if WRITE_NORMED:
            tl.store(normed + place, n.to(normed.dtype.element_ty), valid)
        if ACTIVATION != IDENTITY:
            z = n
            if HAS_WEIGHT:
                z = z * w
            if HAS_BIAS:
                z = z + b
            _, slope = activate_with_derivative(z, ACTIVATION, False)
            g = g * slope
        if HAS_BIAS:
            bias_sum += g
        if HAS_WEIGHT:
            weight_sum += g * n
            g = g * w
        dx = g - n * (tl.sum(g * n, 1) / dim)[:, None]
        if LAYER:
            dx -= (tl.sum(g, 1) / dim)[:, None]
        dx *= rstd
        if HAS_GRAD_TOTAL:
            at = _offsets(row, INNER, inner, total_outer, total_inner)[:, None] + column
            dx += tl.load(grad_total + at, valid, 0.0).to(tl.float32)
        tl.store(grad_x + place, dx.to(grad_x.dtype.element_ty), valid)
    partial = tl.program_id(0) * dim + tl.arange(0, BLOCK)
    if HAS_WEIGHT:
        tl.store(grad_weight + partial, tl.sum(weight_sum, 0), tl.arange(0, BLOCK) < dim)
    if HAS_BIAS:
        tl.store(grad_bias + partial, tl.sum(bias_sum, 0), tl.arange(0, BLOCK) < dim)


def tile(dim: int) -> tuple[int, int, int]:
    """Rows of a tile, its padded width and its warps, as measured on an H200: 16 to 32 elements a thread."""
    block = max(triton.next_power_of_2(dim), 16)
    elements, per_warp = (4096, 512) if block <= 256 else (2048, 1024)
    rows = max(elements // block, 1)
    return rows, block, min(max(block * rows // per_warp, 1), 16)


def pipelined_tile(dim: int) -> tuple[int, int, int, int, int]:
    """The same for a backward with more to do per row, which loops, and programs per multiprocessor and stages."""
    block = max(triton.next_power_of_2(dim), 16)
    warps = min(max(block // 512, 1), 16)
    return max(512 * warps // block, 1), block, warps, max(16 // warps, 1), 3


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    skip: Tensor | None,
    total: Tensor | None,
    out: Tensor,
    total_dtype: torch.dtype,
    eps: float,
    layer: bool,
    activation: str,
) -> None:
    """Fills the contiguous ``out`` and, with a residual, ``total``."""
    dim = x.shape[-1]
    num_rows = x.numel() // dim
    inner, views = row_layout(x, *(t for t in (residual, skip) if t is not None))
    rest = iter(views[1:])
    empty = (x.new_empty(0, dtype=total_dtype), 0, 0)
    residual_rows = empty if residual is None else next(rest)
    skip_rows = empty if skip is None else next(rest)
    rows, block, warps = tile(dim)
    with on_device(x):
        forward_kernel[(triton.cdiv(num_rows, rows),)](
            views[0][0],
            residual_rows[0],
            weight,
            bias,
            skip_rows[0],
            out,
            empty[0] if total is None else total,
            num_rows,
            dim,
            inner,
            *views[0][1:],
            *residual_rows[1:],
            *skip_rows[1:],
            eps,
            LAYER=layer,
            ACTIVATION=CODES[activation],
            HAS_RESIDUAL=residual is not None,
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None,
            HAS_SKIP=skip is not None,
            WRITE_TOTAL=total is not None,
            INNER=inner > 1,
            ROWS=rows,
            BLOCK=block,
            num_warps=warps,
        )


def backward(
    grad_out: Tensor,
    grad_total: Tensor | None,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    grad_x: Tensor,
    normed: Tensor | None,
    eps: float,
    layer: bool,
    activation: str,
) -> tuple[Tensor | None, Tensor | None]:
    """Fills the contiguous ``grad_x`` (and ``normed``); gives the gradients of weight and bias, views in float32."""
    dim = x.shape[-1]
    num_rows = x.numel() // dim
    inner, views = row_layout(grad_out, x, *(t for t in (grad_total, residual) if t is not None))
    rest = iter(views[2:])
    empty = (grad_x, 0, 0)
    total_rows = empty if grad_total is None else next(rest)
    residual_rows = empty if residual is None else next(rest)
    rows, block, warps = tile(dim)
    programs, stages = triton.cdiv(num_rows, rows), 1
    if weight is not None or bias is not None or activation != "identity":
        rows, block, warps, resident, stages = pipelined_tile(dim)
        programs = min(triton.cdiv(num_rows, rows), multiprocessors(x) * resident)
    wanted = [t is not None for t in (weight, bias)]
    partial = x.new_empty(sum(wanted), programs, dim, dtype=torch.float32)  # one tensor, so that one launch adds it up
    grad_weight, grad_bias = (partial[0] if wanted[0] else None, partial[-1] if wanted[1] else None)
    with on_device(x):
        backward_kernel[(programs,)](
            views[0][0],
            total_rows[0],
            views[1][0],
            residual_rows[0],
            weight,
            bias,
            grad_x,
            grad_weight,
            grad_bias,
            normed,
            num_rows,
            dim,
            inner,
            *views[0][1:],
            *total_rows[1:],
            *views[1][1:],
            *residual_rows[1:],
            eps,
            LAYER=layer,
            ACTIVATION=CODES[activation],
            HAS_RESIDUAL=residual is not None,
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None,
            HAS_GRAD_TOTAL=grad_total is not None,
            WRITE_NORMED=normed is not None,
            INNER=inner > 1,
            ROWS=rows,
            BLOCK=block,
            STAGES=stages,
            num_warps=warps,
        )
    if not any(wanted):
        return None, None
    sums = partial.sum(1)
    return sums[0] if wanted[0] else None, sums[-1] if wanted[1] else None
