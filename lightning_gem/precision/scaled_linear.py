"""The three GEMMs of a linear layer in FP8 with a scale per row, per block of 128 or per tensor.

Per row: activations, gradients and weights have one scale per row of each GEMM's operand. The gradient of the weight
sums over tokens, so their scales cannot leave that GEMM as factors of its result; they move into the codes of the
activations instead (``token_scales``), and one quantised copy of the gradients, and one of the activations, serves both
GEMMs that read it.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_gem.precision.mx import FORMATS
from lightning_gem.precision.recipes import PrecisionRecipe
from lightning_gem.precision.scaled import (
    TILE,
    Scaled,
    dequantize,
    matmul,
    quantize_rows,
    quantize_tensor,
    quantize_tiles,
    token_scales,
    transposed,
)

Chosen = Literal["native", "emulated"]


def scaled_product(
    x: Tensor,
    weight: Tensor,
    recipe: PrecisionRecipe,
    backend: Chosen,
    out_dtype: torch.dtype,
) -> Tensor:
    """``x W^T`` of (..., m, k) and (..., n, k), with gradients."""
    if backend == "native" and x.ndim == 3:
        parts = [scaled_product(one, matrix, recipe, backend, out_dtype) for one, matrix in zip(x, weight, strict=True)]
        return torch.stack(parts)
    out: Tensor = _ScaledLinear.apply(x, weight, recipe, backend, out_dtype)
    return out


def quantize(x: Tensor, recipe: PrecisionRecipe, backend: Chosen, gradient: bool = False) -> Scaled:
    """Activations or gradients, contracted along their last dimension."""
    fmt = recipe.grad_fmt if gradient else recipe.fmt
    if recipe.kind == "block":
        return quantize_tiles(x, 1, TILE, fmt, recipe.scale)
    if recipe.kind == "tensor":
        return quantize_tensor(x, fmt, recipe.scale)
    if backend == "native":
        from lightning_gem.precision import hopper

        return hopper.quantize_rows(x, fmt)
    return quantize_rows(x, fmt, recipe.scale)


def quantize_weight(weight: Tensor, recipe: PrecisionRecipe, backend: Chosen) -> Scaled:
    """A weight, contracted along its last dimension."""
    if recipe.kind == "block":
        return quantize_tiles(weight, TILE, TILE, recipe.fmt, recipe.scale)
    return quantize(weight, recipe, backend)


def gradients(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    grad: Tensor,
    recipe: PrecisionRecipe,
    backend: Chosen,
    needed: tuple[bool, bool],
    dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the activations, in ``dtype``, and of the weight.

    Args:
        x: What the forward pass saved: FP8 codes, or the activations themselves (then ``x_scale`` is not read).
        x_scale: Scales of the codes.
        weight: (..., n, k).
        grad: (..., m, n).
        recipe: The recipe.
        backend: What multiplies.
        needed: Which of the two are.
        dtype: Of the activations.
    """
    grad_x = grad_weight = None
    low_x = needed[0] and not recipe.high_precision_input_gradient
    low_weight = needed[1] and not recipe.high_precision_weight_gradient
    if recipe.kind == "row" and backend == "native" and (low_x or low_weight):
        from lightning_gem.precision import hopper

        low = hopper.gradients(Scaled(x, x_scale, 1, x.shape[-1]), weight, grad, recipe, (low_x, low_weight), dtype)
        grad_x, grad_weight = low
    elif low_x or low_weight:
        rows = quantize(grad, recipe, backend, True)
        if low_x:
            if recipe.kind == "row":
                columns = quantize_rows(weight.mT, recipe.fmt, recipe.scale)
            else:
                columns = transposed(quantize_weight(weight, recipe, backend))
            grad_x = matmul(rows, columns, dtype, backend)
        if low_weight:
            outer, inner = _over_tokens(x, x_scale, grad, rows, recipe)
            grad_weight = matmul(outer, inner, weight.dtype, backend)
    if needed[0] and not low_x:
        grad_x = torch.matmul(grad.to(weight.dtype), weight).to(dtype)
    if needed[1] and not low_weight:
        grad_weight = torch.matmul(grad.mT.to(x.dtype), x).to(weight.dtype)
    return grad_x, grad_weight


def _over_tokens(
    x: Tensor, x_scale: Tensor, grad: Tensor, rows: Scaled, recipe: PrecisionRecipe
) -> tuple[Scaled, Scaled]:
    """Gradients and activations, contracted over the tokens."""
    if recipe.kind == "block":
        # The saved codes have scales along the features; powers of two make another rounding almost lossless.
        activations = dequantize(Scaled(x, x_scale, 1, TILE))
        return (
            quantize_tiles(grad.mT, 1, TILE, recipe.grad_fmt, recipe.scale),
            quantize_tiles(activations.mT, 1, TILE, recipe.fmt, recipe.scale),
        )
    if recipe.kind == "tensor":
        return transposed(rows), transposed(Scaled(x, x_scale, *x.shape[-2:]))
    ratio, largest = token_scales(x_scale, rows.scale)
    shifted = (x.to(torch.float32) * ratio).to(FORMATS[recipe.fmt].dtype)
    one = torch.ones_like(largest)
    outer = Scaled(rows.data.mT, one, rows.data.shape[-1], rows.data.shape[-2])
    return outer, Scaled(shifted.mT, largest, shifted.shape[-1], shifted.shape[-2])


class _ScaledLinear(torch.autograd.Function):
    """``x W^T``; saves activations as FP8."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, recipe: PrecisionRecipe, backend: Chosen, out_dtype: torch.dtype
    ) -> Tensor:
        rows = quantize(x, recipe, backend)
        out = matmul(rows, quantize_weight(weight, recipe, backend), out_dtype, backend)
        if recipe.high_precision_weight_gradient:
            ctx.save_for_backward(x, rows.scale, weight)
        else:
            ctx.save_for_backward(rows.data, rows.scale, weight)
        ctx.recipe, ctx.backend, ctx.x_dtype = recipe, backend, x.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, x_scale, weight = ctx.saved_tensors
        needed = ctx.needs_input_grad[:2]
        return (
            *gradients(x, x_scale, weight, grad, ctx.recipe, ctx.backend, needed, ctx.x_dtype),
            None,
            None,
            None,
        )
