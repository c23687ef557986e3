"""Public ops: offsets, concatenation, pooling and broadcasts of jagged tensors."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gem.kernels.checks import check_cu_seqlens
from lightning_gem.kernels.custom_op import custom_op, register_autograd, register_fake
from lightning_gem.kernels.jagged import reference
from lightning_gem.kernels.launch import runs_triton

_INT32_MAX = 2**31 - 1


def lengths_to_cu_seqlens(lengths: Tensor) -> Tensor:
    """Turns lengths (B,) into offsets (B+1,): 0, then the running total; dtype and device stay.

    Args:
        lengths: int32 or int64, none negative.

    Returns:
        Offsets in the dtype of ``lengths``.

    Raises:
        ValueError: For another dtype or shape; on a CPU also for a negative length, and for a total beyond int32.
    """
    if lengths.ndim != 1 or lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"lengths must be int32 or int64 of shape (B,), got {lengths.dtype} {tuple(lengths.shape)}: "
            "pass one length per sequence"
        )
    total = torch.cat([lengths.new_zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    if lengths.device.type == "cpu" and not torch.compiler.is_compiling():
        if (lengths < 0).any():
            raise ValueError(f"lengths must not be negative, got {int(lengths.min())}: an empty sequence has length 0")
        if lengths.dtype == torch.int32 and total[-1] > _INT32_MAX:
            raise ValueError(f"lengths add up to {int(total[-1])}, beyond int32: pass them as int64")
    return total.to(lengths.dtype)


def jagged_sum_pool(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sums the rows of each sequence: (total_tokens, ...) to (B, ...); an empty sequence gives 0.

    Rows from ``cu_seqlens[-1]`` on belong to no sequence: they count nowhere and receive gradient 0.

    Args:
        x: (total_tokens, ...), floating point; sums are kept in float32 or better.
        cu_seqlens: Offsets (B+1,), int32 or int64.

    Returns:
        (B, ...) in the dtype of ``x``.

    Raises:
        ValueError: For offsets that cannot describe ``x`` (values are read on a CPU only), or x that is not floating.
    """
    return _pool(x, cu_seqlens, "sum")


def jagged_mean_pool(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Averages the rows of each sequence: ``jagged_sum_pool`` divided by length; an empty sequence gives 0."""
    return _pool(x, cu_seqlens, "mean")


def jagged_max_pool(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Largest row of each sequence per feature; an empty sequence gives 0, NaN wins, and see ``jagged_sum_pool``.

    The gradient goes to the first row that reaches the maximum (where NaN wins, to some row).
    """
    return _pool(x, cu_seqlens, "max")


def jagged_dense_add(x: Tensor, dense: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Adds to every packed row the dense row of its sequence, (B, ...), or of its sequence and position, (B, L, ...).

    Args:
        x: (total_tokens, ...), floating point.
        dense: (B, ...) with the trailing shape of ``x``, or (B, L, ...): then no sequence may be longer than L (checked
            on a CPU only; on a GPU, ``dense`` counts as 0 beyond L).
        cu_seqlens: Offsets (B+1,), int32 or int64.

    Returns:
        Shape of ``x`` in the common dtype; rows from ``cu_seqlens[-1]`` on are 0 and receive gradient 0.

    Raises:
        ValueError: For shapes or offsets that do not fit together.
    """
    return _broadcast(x, dense, cu_seqlens, "add")


def jagged_dense_mul(x: Tensor, dense: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Multiplies every packed row by its dense row; arguments, slack and errors as in ``jagged_dense_add``."""
    return _broadcast(x, dense, cu_seqlens, "multiply")


def jagged_concat(tensors: Sequence[Tensor], cu_seqlens: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Joins n jagged tensors sequence by sequence, in one launch: sequence b holds the rows of each tensor's b.

    Args:
        tensors: n packed tensors (total_i, ...) of one trailing shape, dtype and device; rows may be strided.
        cu_seqlens: Offsets (B+1,) of each, int32 or int64.

    Returns:
        The rows (sum of total_i, ...), where slack of the parts follows the last sequence as zeros, and its offsets.

    Raises:
        ValueError: For an empty list, or parts that do not fit together.
    """
    tensors, cu_seqlens = list(tensors), list(cu_seqlens)
    if not tensors or len(tensors) != len(cu_seqlens):
        raise ValueError(f"give as many offsets as tensors, and at least one, got {len(cu_seqlens)} and {len(tensors)}")
    first = tensors[0]
    for tensor, cu in zip(tensors, cu_seqlens, strict=True):
        if tensor.ndim == 0 or tensor.shape[1:] != first.shape[1:] or tensor.dtype != first.dtype:
            raise ValueError(
                f"all tensors must be (total_i, ...) of one trailing shape and dtype, got {tensor.dtype} "
                f"{tuple(tensor.shape)} beside {first.dtype} {tuple(first.shape)}"
            )
        check_cu_seqlens("cu_seqlens", cu, tensor, None)
    joined = _joined_offsets(cu_seqlens)
    if not (runs_triton(first) and first[:1].numel() and len(cu_seqlens[0]) > 1):
        return reference.concat(tensors, cu_seqlens), joined
    out: Tensor = torch.ops.lightning_gem.jagged_concat([_flat(t) for t in tensors], cu_seqlens)
    return out.view(-1, *first.shape[1:]), joined


def jagged_split(x: Tensor, cu_seqlens: Sequence[Tensor], totals: Sequence[int] | None = None) -> list[Tensor]:
    """Undoes ``jagged_concat``: takes each sequence of ``x`` apart into n parts.

    Args:
        x: (total_tokens, ...), floating point.
        cu_seqlens: Offsets (B+1,) of each part; their sums are the offsets of ``x``.
        totals: Rows of each part; rows of a part beyond its offsets come back as zeros. None reads the offsets' ends,
            which waits for the GPU.

    Returns:
        n packed tensors (total_i, ...).

    Raises:
        ValueError: For an empty list, or parts that do not fit together.
    """
    cu_seqlens = list(cu_seqlens)
    if not cu_seqlens:
        raise ValueError("cu_seqlens is empty: give the offsets of at least one part")
    check_cu_seqlens("the sum of cu_seqlens", _joined_offsets(cu_seqlens), x, None)
    rows = [int(cu[-1]) for cu in cu_seqlens] if totals is None else list(totals)
    if len(rows) != len(cu_seqlens):
        raise ValueError(f"totals must have one number per part, got {len(rows)} for {len(cu_seqlens)} parts")
    if not (runs_triton(x) and x[:1].numel() and len(cu_seqlens[0]) > 1):
        return reference.split(x, cu_seqlens, rows)
    parts = torch.ops.lightning_gem.jagged_split(_flat(x), cu_seqlens, rows)
    return [part.view(-1, *x.shape[1:]) for part in parts]


def _joined_offsets(cu_seqlens: list[Tensor]) -> Tensor:
    if any(cu.shape != cu_seqlens[0].shape for cu in cu_seqlens):
        raise ValueError(
            f"all offsets must describe the same sequences, got {[len(cu) - 1 for cu in cu_seqlens]} of them: "
            "give a sequence that has no rows length 0"
        )
    joined = cu_seqlens[0]
    for cu in cu_seqlens[1:]:
        joined = joined + cu
    return joined


def _pool(x: Tensor, cu_seqlens: Tensor, mode: str) -> Tensor:
    if x.ndim == 0 or not x.is_floating_point():
        raise ValueError(
            f"x must be floating point (total_tokens, ...), got {x.dtype} {tuple(x.shape)}: convert it with x.float()"
        )
    check_cu_seqlens("cu_seqlens", cu_seqlens, x, None)
    if not (runs_triton(x) and x.numel()):
        return _reference_pool(x, cu_seqlens, mode)[0]
    out, _ = torch.ops.lightning_gem.jagged_pool(_flat(x), cu_seqlens, mode)
    return out.view(-1, *x.shape[1:])


def _broadcast(x: Tensor, dense: Tensor, cu_seqlens: Tensor, mode: str) -> Tensor:
    if x.ndim == 0 or not x.is_floating_point() or not dense.is_floating_point() or x.device != dense.device:
        raise ValueError(
            f"x and dense must be floating point on one device, got {x.dtype} {tuple(x.shape)} on {x.device} and "
            f"{dense.dtype} {tuple(dense.shape)} on {dense.device}"
        )
    check_cu_seqlens("cu_seqlens", cu_seqlens, x, None)
    per_position = dense.ndim == x.ndim + 1
    trailing = dense.shape[2:] if per_position else dense.shape[1:]
    if dense.ndim == 0 or len(dense) != len(cu_seqlens) - 1 or trailing != x.shape[1:]:
        raise ValueError(
            f"dense must be (B, ...) or (B, L, ...) with B = {len(cu_seqlens) - 1} and the trailing shape "
            f"{tuple(x.shape[1:])} of x, got {tuple(dense.shape)}"
        )
    readable = x.device.type == "cpu" and not torch.compiler.is_compiling()
    if per_position and readable and (cu_seqlens.diff() > dense.shape[1]).any():
        raise ValueError(
            f"the longest sequence has {int(cu_seqlens.diff().max())} rows, but dense only {dense.shape[1]} positions"
        )
    if not (runs_triton(x) and runs_triton(dense) and x.numel() and dense.numel()):
        function = reference.dense_add if mode == "add" else reference.dense_mul
        return function(x, dense, cu_seqlens, per_position)
    flat = dense.reshape(*dense.shape[: 1 + per_position], -1).contiguous()
    out: Tensor = torch.ops.lightning_gem.jagged_broadcast(_flat(x), flat, cu_seqlens, mode)
    return out.view(x.shape)


def _flat(x: Tensor) -> Tensor:
    """(N, D) with a last stride of 1."""
    rows = x.reshape(x.shape[0], math.prod(x.shape[1:]))
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _reference_pool(x: Tensor, cu_seqlens: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    if mode == "max":
        return reference.max_pool(x, cu_seqlens)
    out = reference.sum_pool(x, cu_seqlens)
    if mode == "mean":
        out = out / cu_seqlens.diff().clamp(min=1).view(-1, *[1] * (x.ndim - 1))
    return out.to(x.dtype), torch.empty(0, dtype=torch.int32, device=x.device)


@custom_op("jagged_pool")
def _pool_forward(x: Tensor, cu_seqlens: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """(B, D) and, for the maximum, its position in the sequence; ``x`` is (N, D)."""
    if not runs_triton(x):
        return _reference_pool(x, cu_seqlens, mode)
    from lightning_gem.kernels.jagged import triton_jagged

    out, index = triton_jagged.pool(_flat(x), None, cu_seqlens, mode, x.dtype)
    return out.contiguous(), index.contiguous()


@register_fake(_pool_forward)
def _(x: Tensor, cu_seqlens: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    shape = (cu_seqlens.shape[0] - 1, x.shape[1])
    return torch.empty(shape, dtype=x.dtype, device=x.device), torch.empty(
        shape if mode == "max" else (0,), dtype=torch.int32, device=x.device
    )


@custom_op("jagged_pool_backward")
def _pool_backward(grad_out: Tensor, index: Tensor, cu_seqlens: Tensor, num_rows: int, mode: str) -> Tensor:
    grad_out = grad_out.contiguous()
    if not runs_triton(grad_out):
        grad, real = reference.rows_of_dense(grad_out, cu_seqlens, num_rows, False)
        if mode == "mean":
            grad = grad / reference.rows_of_dense(cu_seqlens.diff()[:, None], cu_seqlens, num_rows, False)[0].clamp(
                min=1
            )
        if mode == "max" and len(index):
            chosen, _ = reference.rows_of_dense(index, cu_seqlens, num_rows, False)
            start, _ = reference.rows_of_dense(cu_seqlens[:-1, None], cu_seqlens, num_rows, False)
            position = torch.arange(num_rows, device=grad.device)[:, None] - start
            grad = torch.where(real[:, None] & (chosen == position), grad, 0)
        return grad.to(grad_out.dtype)
    from lightning_gem.kernels.jagged import triton_jagged

    if mode == "max":
        grad_x = grad_out.new_zeros(num_rows, grad_out.shape[1])
        triton_jagged.scatter(grad_out, index, cu_seqlens, grad_x)
    else:
        grad_x = grad_out.new_empty(num_rows, grad_out.shape[1])
        triton_jagged.broadcast(None, grad_out, cu_seqlens, grad_x, "copy" if mode == "sum" else "mean")
    return grad_x


@register_fake(_pool_backward)
def _(grad_out: Tensor, index: Tensor, cu_seqlens: Tensor, num_rows: int, mode: str) -> Tensor:
    return torch.empty(num_rows, grad_out.shape[1], dtype=grad_out.dtype, device=grad_out.device)


def _pool_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, cu_seqlens, ctx.mode = inputs
    ctx.num_rows = x.shape[0]
    ctx.save_for_backward(output[1], cu_seqlens)
    ctx.mark_non_differentiable(output[1])


def _pool_autograd(ctx: Any, grad_out: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    index, cu_seqlens = ctx.saved_tensors
    grad = torch.ops.lightning_gem.jagged_pool_backward(grad_out, index, cu_seqlens, ctx.num_rows, ctx.mode)
    return grad, None, None


register_autograd(_pool_forward, _pool_autograd, _pool_context)


@custom_op("jagged_broadcast")
def _broadcast_forward(x: Tensor, dense: Tensor, cu_seqlens: Tensor, mode: str) -> Tensor:
    """``x`` is (N, D), ``dense`` (B, D) or (B, L, D)."""
    if not runs_triton(x):
        function = reference.dense_add if mode == "add" else reference.dense_mul
        return function(x, dense, cu_seqlens, dense.ndim == 3)
    from lightning_gem.kernels.jagged import triton_jagged

    out = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, dense.dtype), device=x.device)
    triton_jagged.broadcast(_flat(x), dense.contiguous(), cu_seqlens, out, mode)
    return out


@register_fake(_broadcast_forward)
def _(x: Tensor, dense: Tensor, cu_seqlens: Tensor, mode: str) -> Tensor:
    return torch.empty(x.shape, dtype=torch.promote_types(x.dtype, dense.dtype), device=x.device)


@custom_op("jagged_broadcast_backward")
def _broadcast_backward(
    grad_out: Tensor, x: Tensor, dense: Tensor, cu_seqlens: Tensor, mode: str
) -> tuple[Tensor, Tensor]:
    if not runs_triton(x):
        return reference.broadcast_backward(grad_out, x, dense, cu_seqlens, mode)
    from lightning_gem.kernels.jagged import triton_jagged
    from lightning_gem.kernels.triton_slack import zero_slack_

    grad_out = _flat(grad_out)
    other = _flat(x) if mode == "multiply" else None
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if dense.ndim == 2:  # one pass, by sequence
        factor = dense.contiguous() if mode == "multiply" else None
        grad_dense, _ = triton_jagged.pool(grad_out, other, cu_seqlens, "sum", dense.dtype, factor, grad_x)
        zero_slack_(grad_x, cu_seqlens)
        return grad_x, grad_dense.contiguous()
    # The gradient of a sum is that of its terms, except that slack gets none: multiply by dense rows, or by ones.
    factor = dense if mode == "multiply" else torch.ones_like(dense[:, 0])
    triton_jagged.broadcast(grad_out, factor.contiguous(), cu_seqlens, grad_x, "multiply")
    grad_dense = torch.empty(dense.shape, dtype=dense.dtype, device=x.device)
    triton_jagged.pad(grad_out, other, cu_seqlens, grad_dense)
    return grad_x, grad_dense


@register_fake(_broadcast_backward)
def _(grad_out: Tensor, x: Tensor, dense: Tensor, cu_seqlens: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    grad_x, grad_dense = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, dense))
    return grad_x, grad_dense


def _broadcast_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, dense, cu_seqlens, ctx.mode = inputs
    ctx.save_for_backward(x, dense, cu_seqlens)


def _broadcast_autograd(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    return (*torch.ops.lightning_gem.jagged_broadcast_backward(grad_out, *ctx.saved_tensors, ctx.mode), None, None)


register_autograd(_broadcast_forward, _broadcast_autograd, _broadcast_context)


@custom_op("jagged_concat")
def _concat_forward(tensors: list[Tensor], cu_seqlens: list[Tensor]) -> Tensor:
    """Tensors are (total_i, D)."""
    if not runs_triton(tensors[0]):
        return reference.concat(tensors, cu_seqlens)
    from lightning_gem.kernels.jagged import triton_jagged

    out = tensors[0].new_empty(sum(len(t) for t in tensors), tensors[0].shape[1])
    triton_jagged.concat([_flat(t) for t in tensors], cu_seqlens, out, False, True)
    return out


@register_fake(_concat_forward)
def _(tensors: list[Tensor], cu_seqlens: list[Tensor]) -> Tensor:
    return tensors[0].new_empty(sum(t.shape[0] for t in tensors), tensors[0].shape[1])


@custom_op("jagged_split")
def _split_forward(x: Tensor, cu_seqlens: list[Tensor], rows: list[int]) -> list[Tensor]:
    if not runs_triton(x):
        return [part.clone() for part in reference.split(x, cu_seqlens, rows)]
    from lightning_gem.kernels.jagged import triton_jagged

    parts = [x.new_empty(n, x.shape[1]) for n in rows]
    triton_jagged.concat(parts, cu_seqlens, _flat(x), True, False)
    return parts


@register_fake(_split_forward)
def _(x: Tensor, cu_seqlens: list[Tensor], rows: list[int]) -> list[Tensor]:
    return [x.new_empty(n, x.shape[1]) for n in rows]


@custom_op("jagged_split_backward")
def _split_backward(grads: list[Tensor], cu_seqlens: list[Tensor], num_rows: int) -> Tensor:
    total = sum(len(g) for g in grads)
    if not runs_triton(grads[0]):
        joined = reference.concat(grads, cu_seqlens)
        return torch.cat([joined, joined.new_zeros(max(num_rows - total, 0), joined.shape[1])])[:num_rows].clone()
    from lightning_gem.kernels.jagged import triton_jagged

    slack = num_rows == total
    out = (grads[0].new_empty if slack else grads[0].new_zeros)(num_rows, grads[0].shape[1])
    triton_jagged.concat([_flat(g) for g in grads], cu_seqlens, out, False, slack)
    return out


@register_fake(_split_backward)
def _(grads: list[Tensor], cu_seqlens: list[Tensor], num_rows: int) -> Tensor:
    return grads[0].new_empty(num_rows, grads[0].shape[1])


def _concat_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors, cu_seqlens = inputs
    ctx.rows = [t.shape[0] for t in tensors]
    ctx.save_for_backward(*cu_seqlens)


def _concat_autograd(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    parts = torch.ops.lightning_gem.jagged_split(grad, list(ctx.saved_tensors), ctx.rows)
    return parts, [None] * len(parts)


def _split_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, cu_seqlens, _ = inputs
    ctx.num_rows = x.shape[0]
    ctx.save_for_backward(*cu_seqlens)


def _split_autograd(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    cu_seqlens = list(ctx.saved_tensors)
    grad = torch.ops.lightning_gem.jagged_split_backward(list(grads), cu_seqlens, ctx.num_rows)
    return grad, [None] * len(cu_seqlens), None


register_autograd(_concat_forward, _concat_autograd, _concat_context)
register_autograd(_split_forward, _split_autograd, _split_context)
