"""Linear layers whose three GEMMs run in low precision, with gradients; those of MXFP8 themselves.

Every operand is blocked along the axis that its GEMM contracts: activations and weights along the input features in the
forward pass, gradients and weights along the output features for the gradient of the activations, gradients and
activations along the tokens for the gradient of the weight. Tokens share a scale in the last of them only, which sums
over tokens anyway: no output depends on another token.

The functions are plain autograd over torch operations and not custom ops: a compiler can fuse the quantisation, and
FLOP counters and selective checkpointing see the GEMMs themselves.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from lightning_gem.precision import dispatch
from lightning_gem.precision.matmul import Backend, choose_backend, mx_matmul
from lightning_gem.precision.mx import MXBlocks, mx_dequantize, mx_quantize, mx_quantize_2d, mx_requantize
from lightning_gem.precision.recipes import PrecisionRecipe, get_recipe
from lightning_gem.precision.scaled_linear import scaled_product


def low_precision_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    recipe: str | PrecisionRecipe = "mxfp8",
    backend: Backend = "auto",
) -> Tensor:
    """``x W^T + b`` with operands in the recipe's format; like ``torch.nn.functional.linear`` otherwise.

    Args:
        x: (..., K) bfloat16, float16 or float32. No rows are legal; NaN or Inf in a row makes that row of
            the result NaN.
        weight: (N, K). Sizes that are no multiple of 32 are padded with zeros.
        bias: (N,) or None, added in float32.
        recipe: A recipe or its name.
        backend: ``auto`` (by capability), ``native`` or ``emulated``.

    Returns:
        (..., N) in the dtype of ``x``; under autocast, in its dtype.

    Raises:
        ValueError: For shapes that do not fit, unsupported dtypes, and ``native`` where the device has none.
    """
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit: weight must be (N, K) and x (..., K)"
        )
    rows = x.reshape(-1, x.shape[-1])
    return _product(rows, weight, bias, recipe, backend).reshape(*x.shape[:-1], len(weight))


def low_precision_batched_linear(
    x: Tensor, weight: Tensor, recipe: str | PrecisionRecipe = "mxfp8", backend: Backend = "auto"
) -> Tensor:
    """``x_e W_e^T`` of every expert, with operands in the recipe's format.

    Args:
        x: (E, M, K), as in :func:`low_precision_linear`.
        weight: (E, N, K).
        recipe: A recipe or its name.
        backend: As in :func:`low_precision_linear`.

    Returns:
        (E, M, N).

    Raises:
        ValueError: As :func:`low_precision_linear`.
    """
    if weight.ndim != 3 or x.ndim != 3 or x.shape[::2] != weight.shape[::2]:
        raise ValueError(
            f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit: they must be (E, M, K) and (E, N, K)"
        )
    return _product(x, weight, None, recipe, backend)


def low_precision_grouped_linear(
    x: Tensor,
    weight: Tensor,
    sizes: Sequence[int],
    recipe: str | PrecisionRecipe = "mxfp8",
    backend: Backend = "auto",
) -> Tensor:
    """``x_e W_e^T`` of experts with unequal numbers of rows, one product each: no block spans two experts.

    Args:
        x: (M, K), the rows of expert 0, then of expert 1, and so on.
        weight: (E, N, K).
        sizes: Rows of every expert; 0 is legal and gives its weight the gradient 0.
        recipe: A recipe or its name.
        backend: As in :func:`low_precision_linear`.

    Returns:
        (M, N).

    Raises:
        ValueError: If the sizes are not one per expert with the sum M, and as :func:`low_precision_linear`.
    """
    if len(sizes) != len(weight) or sum(sizes) != len(x) or min(sizes, default=0) < 0:
        raise ValueError(
            f"sizes must be {len(weight)} numbers of rows with the sum {len(x)}, got {list(sizes)}: one per expert"
        )
    parts = [
        low_precision_linear(rows, matrix, None, recipe, backend)
        for rows, matrix in zip(x.split(list(sizes)), weight, strict=True)
    ]
    return torch.cat(parts)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: str | PrecisionRecipe, backend: Backend) -> Tensor:
    chosen = get_recipe(recipe)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    if chosen.kind == "auto":
        dispatched = dispatch.choose(x.shape[-2], weight, x.device)
        if dispatched is None:
            return _high_precision(x, weight, bias)
        chosen = dispatched
    on = choose_backend(x.device, backend, chosen.kind)
    # Row-scaled GEMMs of Hopper write bfloat16 only.
    out_dtype = x.dtype if bias is None or (on == "native" and chosen.kind != "mx") else torch.float32
    if chosen.kind == "mx":
        out = _Linear.apply(x, weight, chosen, on, out_dtype)
    else:
        out = scaled_product(x, weight, chosen, on, out_dtype)
    return out if bias is None else (out + bias.to(torch.float32)).to(x.dtype)


def _high_precision(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    bias = None if bias is None else bias.to(x.dtype)
    if weight.ndim == 2:
        return functional.linear(x, weight.to(x.dtype), bias)
    return torch.matmul(x, weight.to(x.dtype).mT)


class _Linear(torch.autograd.Function):
    """``x W^T`` over batches of matrices."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, recipe: PrecisionRecipe, backend: Backend, out_dtype: torch.dtype
    ) -> Tensor:
        rows = mx_quantize(x, -1, recipe.fmt, recipe.scale)
        if recipe.compact:
            square = mx_quantize_2d(weight, recipe.fmt, recipe.scale)
            out = mx_matmul(rows, square.as_rows(), out_dtype, backend)
            ctx.save_for_backward(rows.data, rows.scale, square.data, square.scale)
        else:
            out = mx_matmul(rows, mx_quantize(weight, -1, recipe.fmt, recipe.scale), out_dtype, backend)
            ctx.save_for_backward(x, weight)
        ctx.recipe, ctx.backend = recipe, backend
        ctx.x_shape, ctx.x_dtype = tuple(x.shape), x.dtype
        ctx.weight_shape, ctx.weight_dtype = tuple(weight.shape), weight.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        recipe: PrecisionRecipe = ctx.recipe
        last = len(ctx.x_shape) - 1
        if recipe.compact:
            x_data, x_scale, weight_data, weight_scale = ctx.saved_tensors
            saved = MXBlocks(x_data, x_scale, recipe.fmt, ctx.x_shape, last)
            square = MXBlocks(weight_data, weight_scale, recipe.fmt, ctx.weight_shape, last, True)
        else:
            x, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            rows = mx_quantize(grad, -1, recipe.grad_fmt, recipe.scale)
            if recipe.compact:
                columns = square.transposed().as_rows()
            else:
                columns = mx_quantize(weight, -2, recipe.fmt, recipe.scale)
            grad_x = mx_matmul(rows, columns, ctx.x_dtype, ctx.backend)
        if ctx.needs_input_grad[1]:
            if recipe.high_precision_weight_gradient:
                wide = mx_dequantize(saved, ctx.x_dtype) if recipe.compact else x
                grad_weight = torch.matmul(grad.transpose(-1, -2).to(wide.dtype), wide).to(ctx.weight_dtype)
            else:
                outer = mx_quantize(grad, -2, recipe.grad_fmt, recipe.scale)
                if recipe.compact:
                    inner = mx_requantize(saved, -2, recipe.scale)
                else:
                    inner = mx_quantize(x, -2, recipe.fmt, recipe.scale)
                grad_weight = mx_matmul(outer, inner, ctx.weight_dtype, ctx.backend)
        return grad_x, grad_weight, None, None, None
