"""Public ops: layer norm and RMS norm of packed rows, with residual, activation and skip in the same pass."""

from typing import Any, Literal, overload

import torch
from torch import Tensor

from lightning_gem.kernels.custom_op import custom_op, register_autograd, register_fake
from lightning_gem.kernels.dot_product.activations import ACTIVATIONS
from lightning_gem.kernels.launch import runs_triton
from lightning_gem.kernels.norm import reference


@overload
def jagged_layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    skip: Tensor | None = None,
    return_sum: Literal[False] = False,
) -> Tensor: ...


@overload
def jagged_layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    skip: Tensor | None = None,
    return_sum: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def jagged_layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    skip: Tensor | None = None,
    return_sum: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Layer norm of every row: ``act(norm(x + residual) * weight + bias) + skip``, in one pass over memory.

    A pre-norm stream needs the normed rows and the new stream: ``normed, x = jagged_rms_norm(update, residual=x,
    return_sum=True)``. A post-norm block is ``jagged_rms_norm(update, skip=x)``. Statistics are in float32 and all
    gradients are deterministic: those of weight and bias are summed in two stages of fixed order. Rows know nothing of
    sequences, so slack rows that hold zeros stay zero as long as there is no bias.

    Args:
        x: (..., D), bfloat16, float16, float32 or float64; a slice of a fused projection needs no copy.
        weight: (D,) in any of these dtypes, or None.
        bias: (D,), or None.
        eps: Added to the variance.
        activation: identity, relu, relu_squared, leaky_relu, gelu, gelu_tanh, silu, hardswish or None.
        residual: Shape of ``x``, added before the norm and rounded to the common dtype, as unfused code would.
        skip: Shape of ``x``, added to the result.
        return_sum: Also return ``x + residual``.

    Returns:
        The result in the common dtype of ``x``, ``residual`` and ``skip``; with ``return_sum`` also the sum.

    Raises:
        ValueError: For shapes that do not fit, an unknown activation, or ``return_sum`` without ``residual``.
    """
    return _norm(x, weight, bias, eps, True, activation, residual, skip, return_sum)


@overload
def jagged_rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    skip: Tensor | None = None,
    return_sum: Literal[False] = False,
) -> Tensor: ...


@overload
def jagged_rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    skip: Tensor | None = None,
    return_sum: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def jagged_rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    skip: Tensor | None = None,
    return_sum: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Root-mean-square norm of every row, ``act(norm(x + residual) * weight) + skip``; see ``jagged_layer_norm``."""
    return _norm(x, weight, None, eps, False, activation, residual, skip, return_sum)


def _norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    layer: bool,
    activation: str | None,
    residual: Tensor | None,
    skip: Tensor | None,
    return_sum: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    activation = activation or "identity"
    _check(x, weight, bias, activation, residual, skip, return_sum)
    if runs_triton(x) and 0 < x.shape[-1] <= _MAX_DIM:
        out, total = torch.ops.lightning_gem.norm(x, residual, weight, bias, skip, eps, layer, activation, return_sum)
    else:
        out, total = reference.norm(x, residual, weight, bias, skip, eps, layer, activation)
    return (out, total) if return_sum else out


_MAX_DIM = 16384


def _check(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    skip: Tensor | None,
    return_sum: bool,
) -> None:
    if x.ndim == 0 or not x.is_floating_point():
        raise ValueError(
            f"x must be floating point (..., D), got {x.dtype} {tuple(x.shape)}: convert it with x.float()"
        )
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and (vector.shape != x.shape[-1:] or vector.device != x.device):
            raise ValueError(
                f"{name} must be ({x.shape[-1]},) on {x.device} like the last dimension of x, "
                f"got {tuple(vector.shape)} on {vector.device}"
            )
    for name, rows in (("residual", residual), ("skip", skip)):
        if rows is not None and (rows.shape != x.shape or rows.device != x.device or not rows.is_floating_point()):
            raise ValueError(
                f"{name} must be floating point {tuple(x.shape)} on {x.device} like x, "
                f"got {rows.dtype} {tuple(rows.shape)} on {rows.device}"
            )
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is unknown: use one of {', '.join(ACTIVATIONS)}")
    if return_sum and residual is None:
        raise ValueError("return_sum=True needs a residual: without one the sum is x itself")


def _dtypes(x: Tensor, residual: Tensor | None, skip: Tensor | None) -> tuple[torch.dtype, torch.dtype]:
    """Dtype of the sum and of the result."""
    total = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    return total, total if skip is None else torch.promote_types(total, skip.dtype)


@custom_op("norm")
def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    skip: Tensor | None,
    eps: float,
    layer: bool,
    activation: str,
    return_sum: bool,
) -> tuple[Tensor, Tensor]:
    total_dtype, out_dtype = _dtypes(x, residual, skip)
    if not runs_triton(x):
        out, total = reference.norm(x, residual, weight, bias, skip, eps, layer, activation)
        return out.clone(memory_format=torch.contiguous_format), total if return_sum else x.new_empty(0)
    from lightning_gem.kernels.norm import triton_norm

    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    total = torch.empty(x.shape if return_sum else 0, dtype=total_dtype, device=x.device)
    if x.numel():
        triton_norm.forward(
            x,
            residual,
            weight,
            bias,
            skip,
            total if return_sum else None,
            out,
            total_dtype,
            eps,
            layer,
            activation,
        )
    return out, total


@register_fake(_forward)
def _(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    skip: Tensor | None,
    eps: float,
    layer: bool,
    activation: str,
    return_sum: bool,
) -> tuple[Tensor, Tensor]:
    total_dtype, out_dtype = _dtypes(x, residual, skip)
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    return out, torch.empty(x.shape if return_sum else (0,), dtype=total_dtype, device=x.device)


@custom_op("norm_backward")
def _backward(
    grad_out: Tensor,
    grad_total: Tensor | None,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    layer: bool,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the sum, of weight and of bias; empty where there is none."""
    total_dtype, _ = _dtypes(x, residual, None)
    if not runs_triton(x):
        return reference.norm_backward(grad_out, grad_total, x, residual, weight, bias, eps, layer, activation)
    from lightning_gem.kernels.norm import triton_norm

    grad_x = torch.empty(x.shape, dtype=total_dtype, device=x.device)
    sums: list[Tensor | None] = [None if t is None else torch.zeros_like(t) for t in (weight, bias)]
    if x.numel():
        sums = list(
            triton_norm.backward(grad_out, grad_total, x, residual, weight, bias, grad_x, None, eps, layer, activation)
        )
    grads = (
        x.new_empty(0) if t is None or s is None else s.to(t.dtype, copy=True)
        for t, s in zip((weight, bias), sums, strict=True)
    )
    return grad_x, *grads  # type: ignore[return-value]


@register_fake(_backward)
def _(
    grad_out: Tensor,
    grad_total: Tensor | None,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    layer: bool,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x = torch.empty(x.shape, dtype=_dtypes(x, residual, None)[0], device=x.device)
    empty = x.new_empty(0)
    return (
        grad_x,
        empty if weight is None else torch.empty_like(weight),
        x.new_empty(0) if bias is None else torch.empty_like(bias),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, residual, weight, bias, skip, ctx.eps, ctx.layer, ctx.activation, ctx.return_sum = inputs
    ctx.dtypes = [None if t is None else t.dtype for t in (x, residual, skip)]
    if ctx.return_sum:  # the sum stands for both of its terms
        x, residual = output[1], None
    ctx.save_for_backward(x, residual, weight, bias)
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, grad_out: Tensor | None, grad_total: Tensor | None) -> tuple[Tensor | None, ...]:
    x, residual, weight, bias = ctx.saved_tensors
    if not ctx.return_sum:
        grad_total = None
    if grad_out is None:
        grad_out = torch.zeros_like(x)
    grad, grad_weight, grad_bias = torch.ops.lightning_gem.norm_backward(
        grad_out, grad_total, x, residual, weight, bias, ctx.eps, ctx.layer, ctx.activation
    )
    for_x, for_residual, for_skip = (
        None if dtype is None else g.to(dtype) for dtype, g in zip(ctx.dtypes, (grad, grad, grad_out), strict=True)
    )
    return (
        for_x,
        for_residual,
        None if weight is None else grad_weight,
        None if bias is None else grad_bias,
        for_skip,
        None,
        None,
        None,
        None,
    )


register_autograd(_forward, _autograd, _setup_context)
