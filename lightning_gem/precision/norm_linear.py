"""Norm, then a linear map in FP8: the normed rows are written once, as FP8."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lightning_gem.kernels import jagged_layer_norm, jagged_rms_norm
from lightning_gem.kernels.checks import autocast
from lightning_gem.kernels.dot_product.activations import ACTIVATIONS
from lightning_gem.kernels.norm import reference
from lightning_gem.precision import dispatch, hopper
from lightning_gem.precision.matmul import Backend, choose_backend
from lightning_gem.precision.recipes import PrecisionRecipe, get_recipe
from lightning_gem.precision.scaled import matmul, quantize_rows
from lightning_gem.precision.scaled_linear import Chosen, gradients, quantize_weight


def low_precision_norm_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    recipe: str | PrecisionRecipe = "fp8_rowwise",
    *,
    norm: str = "rms",
    eps: float = 1e-5,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    activation: str | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """``act(norm(x) * norm_weight + norm_bias) W^T + b`` with FP8 operands and a scale per row.

    One kernel reads ``x`` and writes its normed rows as FP8 with their scales; that is all the forward pass writes and
    saves beside the result. The backward pass recomputes the statistics.

    Args:
        x: (..., K), bfloat16, float16 or float32.
        weight: (N, K).
        bias: (N,) or None, added in float32.
        recipe: ``fp8_rowwise``, ``fp8_forward``, ``auto``, or one of kind ``row``.
        norm: ``rms`` or ``layer``.
        eps: Added to the mean square or the variance.
        norm_weight: (K,) or None.
        norm_bias: (K,) or None, of a layer norm.
        activation: Of the normed rows, one of the norm kernels' or None.
        backend: As in :func:`low_precision_linear`.

    Returns:
        (..., N) in the dtype of ``x``; under autocast, in its dtype.

    Raises:
        ValueError: For shapes, a norm, an activation or a kind of recipe that do not fit.
    """
    x, weight = autocast(x, weight)
    chosen = get_recipe(recipe)
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit: weight must be (N, K) and x (..., K)"
        )
    if chosen.kind not in ("row", "auto"):
        raise ValueError(f"recipe {chosen.name!r} has no scale per row: use fp8_rowwise, or norm and linear apart")
    if norm not in ("rms", "layer") or (activation or "identity") not in ACTIVATIONS:
        raise ValueError(f"norm {norm!r} must be 'rms' or 'layer', activation {activation!r} one of {ACTIVATIONS}")
    if norm == "rms" and norm_bias is not None:
        raise ValueError("an RMS norm has no norm_bias: leave it out, or use norm='layer'")
    rows = x.reshape(-1, x.shape[-1])
    if chosen.kind == "auto":
        dispatched = dispatch.choose(len(rows), weight, x.device)
        if dispatched is None:
            normed = _high_precision_norm(rows, norm, eps, norm_weight, norm_bias, activation)
            high = F.linear(normed, weight, None if bias is None else bias.to(weight.dtype))
            return high.view(*x.shape[:-1], len(weight))
        chosen = dispatched
    on = choose_backend(x.device, backend, "row")
    out: Tensor = _NormLinear.apply(
        rows, weight, norm_weight, norm_bias, norm == "layer", eps, activation or "identity", chosen, on
    )
    if bias is not None:
        out = (out + bias.to(torch.float32)).to(x.dtype)
    return out.view(*x.shape[:-1], len(weight))


def activated_norm(
    x: Tensor, norm: str, eps: float, weight: Tensor | None, bias: Tensor | None, activation: str
) -> Tensor:
    """The normed rows in float32; norm may be empty."""
    if not norm:
        return x
    wide = x.to(torch.float32)
    return reference.norm(wide, None, weight, bias, None, eps, norm == "layer", activation)[0].to(torch.float32)


def _high_precision_norm(
    x: Tensor, norm: str, eps: float, weight: Tensor | None, bias: Tensor | None, activation: str | None
) -> Tensor:
    if norm == "layer":
        return jagged_layer_norm(x, weight, bias, eps, activation=activation)
    return jagged_rms_norm(x, weight, eps, activation=activation)


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        layer: bool,
        eps: float,
        activation: str,
        recipe: PrecisionRecipe,
        backend: Chosen,
    ) -> Tensor:
        norm = "layer" if layer else "rms"
        if backend == "native":
            rows = hopper.normed_rows(x, norm, eps, norm_weight, norm_bias, activation, recipe.fmt)
        else:
            normed = activated_norm(x, norm, eps, norm_weight, norm_bias, activation)
            rows = quantize_rows(normed, recipe.fmt, recipe.scale)
        out = matmul(rows, quantize_weight(weight, recipe, backend), x.dtype, backend)
        codes: tuple[Tensor | None, Tensor | None] = (rows.data, rows.scale)
        if recipe.high_precision_weight_gradient:
            codes = (None, None)
        ctx.save_for_backward(x, weight, norm_weight, norm_bias, *codes)
        ctx.layer, ctx.eps, ctx.activation, ctx.recipe, ctx.backend = layer, eps, activation, recipe, backend
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, norm_weight, norm_bias, codes, scale = ctx.saved_tensors
        recipe: PrecisionRecipe = ctx.recipe
        needs_weight = ctx.needs_input_grad[1]
        plain = norm_weight is None and norm_bias is None and ctx.activation == "identity"
        if plain and recipe.high_precision_input_gradient and recipe.high_precision_weight_gradient:
            both = torch.ops.lightning_gem.norm_linear_backward(grad, x, weight, ctx.layer, ctx.eps)
            return (*both, *[None] * 7)
        if recipe.high_precision_weight_gradient:
            norm = "layer" if ctx.layer else "rms"
            codes = _high_precision_norm(x, norm, ctx.eps, norm_weight, norm_bias, ctx.activation)
        grad_normed, grad_weight = gradients(
            codes, scale, weight, grad, recipe, ctx.backend, (True, needs_weight), x.dtype
        )
        assert grad_normed is not None
        grad_x, grad_norm_weight, grad_norm_bias = torch.ops.lightning_gem.norm_backward(
            grad_normed, None, x, None, norm_weight, norm_bias, ctx.eps, ctx.layer, ctx.activation
        )
        return (
            grad_x,
            grad_weight,
            None if norm_weight is None else grad_norm_weight,
            None if norm_bias is None else grad_norm_bias,
            *[None] * 5,
        )
