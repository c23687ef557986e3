# mypy: allow-untyped-defs
"""Norm and linear map in one GEMM for Hopper, with warps specialised by hand.

One warp copies tiles, two warpgroups multiply 64 rows each, so that copies run on while results are scaled and written.
The statistics of a warpgroup's rows are summed from the tiles in shared memory while the matrix units work on them.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lightning_gem.kernels.launch import multiprocessors, on_device


@gluon.jit
def _copy(x_desc, w_desc, first_rows, second_rows, columns, full, empty, rows, outs, dim, PER_UNIT: gl.constexpr):
    STAGES: gl.constexpr = columns.shape[0]
    COLS: gl.constexpr = columns.shape[1]
    DEPTH: gl.constexpr = columns.shape[2]
    BYTES: gl.constexpr = 2 * (128 + COLS) * DEPTH
    across = gl.cdiv(outs, COLS)
    units = gl.cdiv(across, PER_UNIT)
    step = 0
    for unit in range(gl.program_id(0), gl.cdiv(rows, 128) * units, gl.num_programs(0)):
        row = unit // units * 128
        first = unit % units * PER_UNIT
        for tile in range(first, gl.minimum(first + PER_UNIT, across)):
            for k in range(0, dim, DEPTH):
                stage = step % STAGES
                mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
                ready = full.index(stage)
                mbarrier.expect(ready, BYTES)
                tma.async_copy_global_to_shared(x_desc, [row, k], ready, first_rows.index(stage))
                tma.async_copy_global_to_shared(x_desc, [row + 64, k], ready, second_rows.index(stage))
                tma.async_copy_global_to_shared(w_desc, [tile * COLS, k], ready, columns.index(stage))
                step += 1


@gluon.jit
def _tile(
    out_desc,
    own_rows,
    columns,
    full,
    empty,
    staging,
    weight_sum,
    step,
    row,
    tile,
    origin,
    mean,
    rstd,
    outs,
    dim,
    eps,
    FIRST: gl.constexpr,
    NORM: gl.constexpr,
    LAYER: gl.constexpr,
    RAGGED: gl.constexpr,
):
    STAGES: gl.constexpr = columns.shape[0]
    COLS: gl.constexpr = columns.shape[1]
    DEPTH: gl.constexpr = columns.shape[2]
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLS, 16])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    if LAYER:  # asked for early and kept small: two values a thread until they are needed
        column = tile * COLS + gl.arange(0, COLS, layout=flat)
        sums = gl.load(weight_sum + column, mask=column < outs, other=0.0)
    product = gl.zeros([64, COLS], gl.float32, mma)
    squares = gl.zeros([64, DEPTH], gl.float32, wide)
    total = gl.zeros([64, DEPTH], gl.float32, wide)
    for k in range(0, dim, DEPTH):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        a = own_rows.index(stage)
        product = warpgroup_mma(a, columns.index(stage).permute((1, 0)), product, is_async=True)
        if NORM and FIRST:
            part = a.load(wide).to(gl.float32)
            if LAYER:
                part = part - origin[:, None]
                if RAGGED:
                    inside = k + gl.arange(0, DEPTH, layout=gl.SliceLayout(0, wide)) < dim
                    part = gl.where(inside[None, :], part, 0.0)
                total += part
            squares += part * part
        product = warpgroup_mma_wait(num_outstanding=0, deps=(product,))
        mbarrier.arrive(empty.index(stage), count=1)
        step += 1
    if NORM:
        if FIRST:
            variance = gl.sum(squares, axis=1) / dim
            if LAYER:
                shift = gl.sum(total, axis=1) / dim
                variance -= shift * shift
                mean = gl.convert_layout(origin + shift, gl.SliceLayout(1, mma))
            rstd = gl.convert_layout(gl.rsqrt(variance + eps), gl.SliceLayout(1, mma))
        if LAYER:
            product = product - mean[:, None] * gl.convert_layout(sums, gl.SliceLayout(0, mma))[None, :]
        product = product * rstd[:, None]
    tma.store_wait(0)
    staging.store(product.to(staging.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [row, tile * COLS], staging)
    return step, mean, rstd


@gluon.jit
def _first_elements(x, unit, units, rows, x_stride, HALF: gl.constexpr, LAYOUT: gl.constexpr):
    own = unit // units * 128 + HALF * 64 + gl.arange(0, 64, layout=LAYOUT)
    return gl.load(x + own.to(gl.int64) * x_stride, mask=own < rows, other=0.0)


@gluon.jit
def _multiply(
    out_desc,
    own_rows,
    columns,
    full,
    empty,
    staging,
    x,
    weight_sum,
    rows,
    outs,
    dim,
    x_stride,
    eps,
    HALF: gl.constexpr,
    PER_UNIT: gl.constexpr,
    NORM: gl.constexpr,
    LAYER: gl.constexpr,
    RAGGED: gl.constexpr,
):
    COLS: gl.constexpr = columns.shape[1]
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLS, 16])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    across = gl.cdiv(outs, COLS)
    units = gl.cdiv(across, PER_UNIT)
    step = 0
    mean = gl.zeros([64], gl.float32, gl.SliceLayout(1, mma))
    rstd = gl.zeros([64], gl.float32, gl.SliceLayout(1, mma))
    origin = gl.zeros([64], gl.float32, gl.SliceLayout(1, wide))
    if LAYER:
        following = _first_elements(x, gl.program_id(0), units, rows, x_stride, HALF, gl.SliceLayout(1, wide))
    for unit in range(gl.program_id(0), gl.cdiv(rows, 128) * units, gl.num_programs(0)):
        row = unit // units * 128 + HALF * 64
        first = unit % units * PER_UNIT
        if LAYER:
            origin = following.to(gl.float32)
            coming = unit + gl.num_programs(0)
            following = _first_elements(x, coming, units, rows, x_stride, HALF, gl.SliceLayout(1, wide))
        step, mean, rstd = _tile(
            out_desc, own_rows, columns, full, empty, staging, weight_sum, step, row, first, origin, mean, rstd,
            outs, dim, eps, True, NORM, LAYER, RAGGED,
        )  # fmt: skip
        for tile in range(first + 1, gl.minimum(first + PER_UNIT, across)):
            step, mean, rstd = _tile(
                out_desc, own_rows, columns, full, empty, staging, weight_sum, step, row, tile, origin, mean, rstd,
                outs, dim, eps, False, NORM, LAYER, RAGGED,
            )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows"])
def norm_linear_kernel(
    x_desc,
    w_desc,
    out_desc,
    x,
    weight_sum,
    rows,
    outs,
    dim,
    x_stride,
    eps,
    NORM: gl.constexpr,
    LAYER: gl.constexpr,
    RAGGED: gl.constexpr,
    PER_UNIT: gl.constexpr,
    STAGES: gl.constexpr,
):
    """``PER_UNIT``: tiles of one block of rows that a program computes in a row, with one set of statistics."""
    COLS: gl.constexpr = w_desc.block_type.shape[0]
    DEPTH: gl.constexpr = w_desc.block_type.shape[1]
    dtype: gl.constexpr = x_desc.dtype
    first_rows = gl.allocate_shared_memory(dtype, [STAGES, 64, DEPTH], x_desc.layout)
    second_rows = gl.allocate_shared_memory(dtype, [STAGES, 64, DEPTH], x_desc.layout)
    columns = gl.allocate_shared_memory(dtype, [STAGES, COLS, DEPTH], w_desc.layout)
    first_out = gl.allocate_shared_memory(dtype, [64, COLS], out_desc.layout)
    second_out = gl.allocate_shared_memory(dtype, [64, COLS], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    out_desc, first_rows, columns, full, empty, first_out, x, weight_sum, rows, outs, dim, x_stride,
                    eps, 0, PER_UNIT, NORM, LAYER, RAGGED,
                ),
            ),
            (
                _multiply,
                (
                    out_desc, second_rows, columns, full, empty, second_out, x, weight_sum, rows, outs, dim, x_stride,
                    eps, 1, PER_UNIT, NORM, LAYER, RAGGED,
                ),
            ),
            (
                _copy,
                (x_desc, w_desc, first_rows, second_rows, columns, full, empty, rows, outs, dim, PER_UNIT),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


# Columns and depth of a tile, stages, tiles per unit.
CONFIG = (256, 64, 3, 2)


def layouts(cols: int, depth: int, dtype: gl.dtype) -> tuple[gl.NVMMASharedLayout, ...]:
    """Shared memory layouts of the tiles of x, weight and result."""
    return tuple(
        gl.NVMMASharedLayout.get_default_for(shape, dtype) for shape in ([64, depth], [cols, depth], [64, cols])
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
    cols, depth, stages, per_unit = config
    x_layout, w_layout, out_layout = layouts(cols, depth, _DTYPES[x.dtype])
    units = triton.cdiv(triton.cdiv(outs, cols), per_unit)
    programs = min(triton.cdiv(rows, 128) * units, multiprocessors(x))
    with on_device(x):
        norm_linear_kernel[(programs,)](
            TensorDescriptor.from_tensor(x, [64, depth], x_layout),
            TensorDescriptor.from_tensor(weight, [cols, depth], w_layout),
            TensorDescriptor.from_tensor(out, [64, cols], out_layout),
            x,
            weight_sum if weight_sum is not None else x,
            rows,
            outs,
            dim,
            x.stride(0),
            eps,
            NORM=norm,
            LAYER=weight_sum is not None,
            RAGGED=dim % depth != 0,
            PER_UNIT=per_unit,
            STAGES=stages,
            num_warps=4,
        )
