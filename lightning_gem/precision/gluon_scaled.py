# mypy: allow-untyped-defs
"""FP8 GEMM for Hopper with a scale per row of both operands, and one over tokens in parts.

One warp copies tiles, two warpgroups multiply 64 rows each (as in ``kernels/lazy_norm``). A GEMM over the tokens has
few tiles and a long sum: its tokens are cut into parts, each with accumulators of its own, which are added in float32.
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

DEPTH = 128


@gluon.jit
def _place(unit, rows, outs, dim, COLS: gl.constexpr, DEPTH: gl.constexpr, PARTS: gl.constexpr):
    """First row, first column, and the steps of a unit: tiles of one block of rows and one part follow each other."""
    across = gl.cdiv(outs, COLS)
    tiles = gl.cdiv(rows, 128) * across
    part = unit // tiles
    tile = unit % tiles
    steps = gl.cdiv(dim, DEPTH)
    per_part = gl.cdiv(steps, PARTS)
    begin = part * per_part
    end = gl.minimum(begin + per_part, steps)
    return tile // across * 128, tile % across * COLS, part, begin, end


@gluon.jit
def _copy(a_desc, b_desc, first_rows, second_rows, columns, full, empty, rows, outs, dim, PARTS: gl.constexpr):
    STAGES: gl.constexpr = columns.shape[0]
    COLS: gl.constexpr = columns.shape[1]
    DEPTH: gl.constexpr = columns.shape[2]
    BYTES: gl.constexpr = (128 + COLS) * DEPTH
    step = 0
    units = gl.cdiv(rows, 128) * gl.cdiv(outs, COLS) * PARTS
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row, column, part, begin, end = _place(unit, rows, outs, dim, COLS, DEPTH, PARTS)
        for k in range(begin, end):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, BYTES)
            tma.async_copy_global_to_shared(a_desc, [row, k * DEPTH], ready, first_rows.index(stage))
            tma.async_copy_global_to_shared(a_desc, [row + 64, k * DEPTH], ready, second_rows.index(stage))
            tma.async_copy_global_to_shared(b_desc, [column, k * DEPTH], ready, columns.index(stage))
            step += 1


@gluon.jit
def _multiply(
    out_desc,
    own_rows,
    columns,
    full,
    empty,
    staging,
    out,
    scale_a,
    scale_b,
    rows,
    outs,
    dim,
    HALF: gl.constexpr,
    PARTS: gl.constexpr,
    PARTIAL: gl.constexpr,
):
    STAGES: gl.constexpr = columns.shape[0]
    COLS: gl.constexpr = columns.shape[1]
    DEPTH: gl.constexpr = columns.shape[2]
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLS, 32])
    step = 0
    units = gl.cdiv(rows, 128) * gl.cdiv(outs, COLS) * PARTS
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row, column, part, begin, end = _place(unit, rows, outs, dim, COLS, DEPTH, PARTS)
        row += HALF * 64
        own = row + gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
        at = column + gl.arange(0, COLS, layout=gl.SliceLayout(0, mma))
        if not PARTIAL:
            factor = gl.load(scale_a + own, mask=own < rows, other=0.0)
        product = gl.zeros([64, COLS], gl.float32, mma)
        for _ in range(begin, end):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            product = warpgroup_mma(own_rows.index(stage), columns.index(stage).permute((1, 0)), product, is_async=True)
            product = warpgroup_mma_wait(num_outstanding=0, deps=(product,))
            mbarrier.arrive(empty.index(stage), count=1)
            step += 1
        if PARTIAL:
            place = (part.to(gl.int64) * rows + own.to(gl.int64))[:, None] * outs + at[None, :]
            gl.store(out + place, product, mask=(own < rows)[:, None] & (at < outs)[None, :])
        else:
            product = product * factor[:, None]
            product = product * gl.load(scale_b + at, mask=at < outs, other=0.0)[None, :]
            tma.store_wait(0)
            staging.store(product.to(staging.dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(out_desc, [row, column], staging)
    if not PARTIAL:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows", "dim"])
def scaled_kernel(
    a_desc,
    b_desc,
    out_desc,
    out,
    scale_a,
    scale_b,
    rows,
    outs,
    dim,
    PARTS: gl.constexpr,
    PARTIAL: gl.constexpr,
    STAGES: gl.constexpr,
):
    COLS: gl.constexpr = b_desc.block_type.shape[0]
    DEPTH: gl.constexpr = b_desc.block_type.shape[1]
    dtype: gl.constexpr = a_desc.dtype
    first_rows = gl.allocate_shared_memory(dtype, [STAGES, 64, DEPTH], a_desc.layout)
    second_rows = gl.allocate_shared_memory(dtype, [STAGES, 64, DEPTH], a_desc.layout)
    columns = gl.allocate_shared_memory(b_desc.dtype, [STAGES, COLS, DEPTH], b_desc.layout)
    first_out = gl.allocate_shared_memory(out_desc.dtype, [64, COLS], out_desc.layout)
    second_out = gl.allocate_shared_memory(out_desc.dtype, [64, COLS], out_desc.layout)
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
                    out_desc, first_rows, columns, full, empty, first_out, out, scale_a, scale_b, rows, outs, dim,
                    0, PARTS, PARTIAL,
                ),
            ),
            (
                _multiply,
                (
                    out_desc, second_rows, columns, full, empty, second_out, out, scale_a, scale_b, rows, outs, dim,
                    1, PARTS, PARTIAL,
                ),
            ),
            (_copy, (a_desc, b_desc, first_rows, second_rows, columns, full, empty, rows, outs, dim, PARTS)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


_DTYPES = {torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5}
# Columns of a tile, stages.
CONFIG = (256, 3)


def layouts(cols: int, dtype: gl.dtype) -> tuple[gl.NVMMASharedLayout, ...]:
    """Shared memory layouts of the tiles of both operands and the result."""
    return (
        gl.NVMMASharedLayout.get_default_for([64, DEPTH], dtype),
        gl.NVMMASharedLayout.get_default_for([cols, DEPTH], dtype),
        gl.NVMMASharedLayout.get_default_for([64, cols], gl.bfloat16),
    )


def _launch(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor, parts: int, config: tuple[int, int]
) -> None:
    (rows, dim), outs = a.shape, len(b)
    cols, stages = config
    a_layout, b_layout, out_layout = layouts(cols, _DTYPES[a.dtype])
    partial = out.ndim == 3
    units = triton.cdiv(rows, 128) * triton.cdiv(outs, cols) * parts
    # The unused descriptor of a result in parts must describe something.
    written = out if not partial else a.new_empty(64, cols, dtype=torch.bfloat16)
    with on_device(a):
        scaled_kernel[(min(units, multiprocessors(a)),)](
            TensorDescriptor.from_tensor(a, [64, DEPTH], a_layout),
            TensorDescriptor.from_tensor(b, [cols, DEPTH], b_layout),
            TensorDescriptor.from_tensor(written, [64, cols], out_layout),
            out,
            scale_a,
            scale_b,
            rows,
            outs,
            dim,
            PARTS=parts,
            PARTIAL=partial,
            STAGES=stages,
            num_warps=4,
        )


def matmul_rows(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, config: tuple[int, int] = CONFIG) -> Tensor:
    """``(A scale_a) (B scale_b)^T`` as bfloat16 (m, n); a (m, k), b (n, k), scales (m,) and (n,)."""
    out = torch.empty(len(a), len(b), dtype=torch.bfloat16, device=a.device)
    _launch(a, b, scale_a, scale_b, out, 1, config)
    return out


def matmul_parts(a: Tensor, b: Tensor, part: int = 16384, config: tuple[int, int] = CONFIG) -> Tensor:
    """``A B^T`` as float32 (m, n), summed over parts of the contracted dimension."""
    steps = triton.cdiv(a.shape[1], DEPTH)
    parts = triton.cdiv(steps, max(part // DEPTH, 1))
    parts = triton.cdiv(steps, triton.cdiv(steps, parts))  # none is empty
    out = torch.empty(parts, len(a), len(b), dtype=torch.float32, device=a.device)
    _launch(a, b, out, out, out, parts, config)
    return out.sum(0)
