# mypy: allow-untyped-defs
"""Multi-task linear heads with binary cross-entropy: loss and all gradients from one read of the hidden states.

A program walks over row tiles. A tile of ``x`` stays in shared memory for three products: logits ``x W^T``, the
gradient ``d W`` of the rows, and the gradient ``x^T d`` of the weights, which stays in registers until the end. Every
program writes one partial sum; they are added in fixed order.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lightning_gem.kernels.launch import interpreted, multiprocessors, on_device

MAX_DIM = 1024
MAX_TASKS = 64


@triton.jit(do_not_specialize=["rows"])
def share_kernel(target, mask, partial, rows, tasks, HAS_MASK: tl.constexpr, ROWS: tl.constexpr, TASKS: tl.constexpr):
    """Sums the weights of the labels that are there: one partial (TASKS,) per program."""
    task = tl.arange(0, TASKS)[None, :]
    total = tl.zeros([ROWS, TASKS], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.full([], ROWS, tl.int64) * tile + tl.arange(0, ROWS)[:, None]
        valid = (row < rows) & (task < tasks)
        y = tl.load(target + row * tasks + task, valid, float("nan")).to(tl.float32)
        share = valid.to(tl.float32)
        if HAS_MASK:
            share = tl.load(mask + row * tasks + task, valid, 0).to(tl.float32)
        total += tl.where(y == y, share, 0.0)
    tl.store(partial + tl.program_id(0) * TASKS + tl.arange(0, TASKS), tl.sum(total, 0))


@triton.jit(do_not_specialize=["rows"])
def loss_kernel(
    x_tiles,
    grad_tiles,
    weight,
    bias,
    target,
    mask,
    task_weight,
    pos_weight,
    scale,
    loss_partial,
    weight_partial,
    bias_partial,
    rows,
    dim,
    tasks,
    weight_stride,
    HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_TASK_WEIGHT: tl.constexpr,
    HAS_POS_WEIGHT: tl.constexpr,
    GRAD: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    TASKS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``scale`` (TASKS,) is one over the sum of the weights, or one."""
    task = tl.arange(0, TASKS)
    column = tl.arange(0, BLOCK)
    known = task < tasks
    w = tl.load(
        weight + task[None, :] * weight_stride + column[:, None], known[None, :] & (column < dim)[:, None], 0.0
    ).to(x_tiles.dtype)
    chunks = ()
    if GRAD:
        for start in tl.static_range(0, BLOCK, CHUNK):
            part = start + tl.arange(0, CHUNK)
            source = weight + task[:, None] * weight_stride + part[None, :]
            chunks = chunks + (tl.load(source, known[:, None] & (part < dim)[None, :], 0.0).to(x_tiles.dtype),)  # type: ignore[assignment]
    shift = tl.zeros([TASKS], tl.float32)
    if HAS_BIAS:
        shift = tl.load(bias + task, known, 0.0).to(tl.float32)
    positive = tl.full([TASKS], 1.0, tl.float32)
    if HAS_POS_WEIGHT:
        positive = tl.load(pos_weight + task, known, 0.0).to(tl.float32)
    factor = tl.load(scale + task, known, 0.0)
    slope = factor
    if HAS_TASK_WEIGHT:
        slope *= tl.load(task_weight + task, known, 0.0).to(tl.float32)
    losses = tl.zeros([ROWS, TASKS], tl.float32)
    grad_bias = tl.zeros([ROWS, TASKS], tl.float32)
    grad_weight = tl.zeros([BLOCK, TASKS], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tl.full([], ROWS, tl.int64) * tile + tl.arange(0, ROWS)
        inside = row < rows
        rows_of_x = x_tiles.load([tile * ROWS, 0])
        z = tl.dot(rows_of_x, w, input_precision=PRECISION) + shift[None, :]
        at = row[:, None] * tasks + task[None, :]
        valid = inside[:, None] & known[None, :]
        y = tl.load(target + at, valid, float("nan")).to(tl.float32)
        share = valid.to(tl.float32)
        if HAS_MASK:
            share = tl.load(mask + at, valid, 0).to(tl.float32)
        counts = (y == y) & (share != 0)
        y = tl.where(counts, y, 0.0)
        share = tl.where(counts, share, 0.0)
        decay = tl.exp(-tl.abs(z))
        # log(1 + e) without loss where e is small, after Kahan.
        one_plus = 1.0 + decay
        log_one_plus = tl.where(one_plus == 1.0, decay, tl.log(one_plus) * (decay / (one_plus - 1.0)))
        softplus = tl.where(z > 0, 0.0, -z) + log_one_plus
        loss = (1.0 - y) * z + (1.0 + (positive[None, :] - 1.0) * y) * softplus
        losses += tl.where(counts, share * loss, 0.0)
        if GRAD:
            p = tl.where(z > 0, 1.0, decay) / one_plus
            d = p * (1.0 - y + positive[None, :] * y) - positive[None, :] * y
            d = tl.where(counts, share * d * slope[None, :], 0.0)
            grad_bias += d
            low = d.to(x_tiles.dtype)
            grad_weight = tl.dot(tl.trans(rows_of_x), low, grad_weight, input_precision=PRECISION)
            for c in tl.static_range(BLOCK // CHUNK):
                dx = tl.dot(low, chunks[c], input_precision=PRECISION)
                grad_tiles.store([tile * ROWS, c * CHUNK], dx.to(grad_tiles.dtype))
    program = tl.program_id(0).to(tl.int64)
    tl.store(loss_partial + program * TASKS + task, tl.sum(losses, 0) * factor)
    if GRAD:
        tl.store(bias_partial + program * TASKS + task, tl.sum(grad_bias, 0))
        tl.store(
            weight_partial + (program * TASKS + task[None, :]) * dim + column[:, None],
            grad_weight,
            (column < dim)[:, None],
        )


@triton.jit(do_not_specialize=["size"])
def scale_kernel(x, factor, size, BLOCK: tl.constexpr):
    """Multiplies in place by a scalar on the device; a factor of 1 costs no memory traffic."""
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        for tile in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
            place = tl.full([], BLOCK, tl.int64) * tile + tl.arange(0, BLOCK)
            values = tl.load(x + place, place < size).to(tl.float32)
            tl.store(x + place, (values * by).to(x.dtype.element_ty), place < size)


def config(dim: int, tasks: int) -> dict[str, int]:
    """Tile, warps, stages and programs per multiprocessor that fit the registers and shared memory of Hopper."""
    block, padded_tasks = max(triton.next_power_of_2(dim), 16), max(triton.next_power_of_2(tasks), 16)
    few = padded_tasks == 16
    return {
        "ROWS": 16 if interpreted() else 64 if few and block <= 256 else 32,
        "TASKS": padded_tasks,
        "BLOCK": block,
        "CHUNK": min(block, 128),
        "STAGES": 2,
        "num_warps": 4 if few and block <= 512 else 8,
        "resident": 2 if few and block <= 512 else 1,
    }


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    mask: Tensor | None,
    task_weight: Tensor | None,
    pos_weight: Tensor | None,
    mean: bool,
    grad_x: Tensor | None,
    override: dict[str, int] | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Fills ``grad_x``; returns the losses (T,) and the gradients of weight and bias in float32."""
    (num_rows, dim), tasks = x.shape, len(weight)
    choice = {**config(dim, tasks), **(override or {})}
    rows, padded, block, chunk = (choice[name] for name in ("ROWS", "TASKS", "BLOCK", "CHUNK"))
    resident = choice.pop("resident")
    if x.stride(1) != 1 or x.stride(0) * x.element_size() % 16 or x.data_ptr() % 16:
        x = x.contiguous()
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    target = target.contiguous()
    mask = None if mask is None else mask.contiguous()
    if mask is not None and mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    float32: dict[str, Any] = {"dtype": torch.float32, "device": x.device}
    processors = multiprocessors(x)
    with on_device(x):
        scale = torch.ones(tasks, **float32)
        if mean:
            programs = max(min(triton.cdiv(num_rows, 256), processors * 4), 1)
            shares = torch.empty(programs, padded, **float32)
            share_kernel[(programs,)](
                target, mask, shares, num_rows, tasks, HAS_MASK=mask is not None, ROWS=256, TASKS=padded
            )
            scale = 1 / shares[:, :tasks].sum(0).clamp(min=torch.finfo(torch.float32).tiny)
        programs = min(triton.cdiv(num_rows, rows), processors * resident)
        grad = grad_x is not None
        losses = torch.empty(programs, padded, **float32)
        grad_bias = torch.empty(programs, padded, **float32) if grad else None
        grad_weight = torch.empty(programs, padded, dim, **float32) if grad else None
        loss_kernel[(programs,)](
            TensorDescriptor.from_tensor(x, [rows, block]),
            None if grad_x is None else TensorDescriptor.from_tensor(grad_x, [rows, chunk]),
            weight,
            bias,
            target,
            mask,
            task_weight,
            pos_weight,
            scale,
            losses,
            grad_weight,
            grad_bias,
            num_rows,
            dim,
            tasks,
            weight.stride(0),
            HAS_BIAS=bias is not None,
            HAS_MASK=mask is not None,
            HAS_TASK_WEIGHT=task_weight is not None,
            HAS_POS_WEIGHT=pos_weight is not None,
            GRAD=grad,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            **choice,
        )
    return (
        losses.sum(0)[:tasks],
        None if grad_weight is None else grad_weight[:, :tasks].sum(0),
        None if grad_bias is None else grad_bias.sum(0)[:tasks],
    )


def scale_(x: Tensor, factor: Tensor) -> None:
    """Multiplies a contiguous tensor in place by a scalar tensor."""
    if x.numel():
        with on_device(x):
            programs = min(triton.cdiv(x.numel(), 4096), 16 * multiprocessors(x))
            scale_kernel[(programs,)](x, factor, x.numel(), BLOCK=4096)
