"""Public op: a linear map of normed rows that never writes the normed rows."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lightning_gem.kernels.checks import autocast
from lightning_gem.kernels.custom_op import custom_op, register_autograd, register_fake
from lightning_gem.kernels.launch import runs_triton
from lightning_gem.kernels.lazy_norm import reference
from lightning_gem.kernels.norm.reference import norm as normalise
from lightning_gem.kernels.norm.reference import norm_backward


def norm_linear(x: Tensor, weight: Tensor, *, norm: str = "rms", eps: float = 1e-5) -> Tensor:
    """``norm(x) W^T`` as a GEMM whose rows are scaled afterwards: ``rstd (x W^T)``, the norm without affine parameters.

    For LayerNorm ``rstd (x W^T - mean rowsum(W))``. The normed rows are neither written nor rounded, so the result is
    closer to the exact one than norm and GEMM apart, as long as LayerNorm's rows are not mostly offset: the error grows
    with ``|mean| / deviation``, since both terms of the difference do, and is that of a float32 accumulation times this
    ratio. The backward writes the normed rows once, for the gradient of ``W``. Under autocast, inputs are cast.

    The fused kernel takes bfloat16 and float16 on a GPU, rows and weight aligned to 16 bytes; anything else runs a norm
    and a GEMM. Method: lazy pre-norm of
    https://pytorch.org/blog/towards-free-normalization-fusing-normalization-into-gemm-and-attention-kernels.

    Args:
        x: (..., K), bfloat16, float16, float32 or float64.
        weight: (O, K) in the dtype of ``x``.
        norm: ``"rms"`` or ``"layer"``.
        eps: Added to the mean square or the variance.

    Returns:
        (..., O) in the dtype of ``x``.

    Raises:
        ValueError: For shapes or dtypes that do not fit together, or another norm.
    """
    x, weight = autocast(x, weight)
    if x.ndim == 0 or weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"weight must be (O, K) with the K of x (..., K), got {tuple(weight.shape)} for {tuple(x.shape)}"
        )
    if not x.is_floating_point() or x.dtype != weight.dtype or x.device != weight.device:
        raise ValueError(
            f"x and weight must share a floating dtype and a device, got {x.dtype} on {x.device} and "
            f"{weight.dtype} on {weight.device}: cast the weight with weight.to(x)"
        )
    if norm not in ("rms", "layer"):
        raise ValueError(f"norm must be 'rms' or 'layer', got {norm!r}")
    if not runs_triton(x) or x.numel() == 0 or weight.numel() == 0:
        return reference.norm_linear(x, weight, norm == "layer", eps)
    rows = x.reshape(-1, x.shape[-1])
    out: Tensor = torch.ops.lightning_gem.norm_linear(rows, weight, norm == "layer", eps)
    return out.view(*x.shape[:-1], len(weight))


@custom_op("norm_linear")
def _forward(x: Tensor, weight: Tensor, layer: bool, eps: float) -> Tensor:
    if not runs_triton(x):
        return reference.norm_linear(x, weight, layer, eps)
    from lightning_gem.kernels.lazy_norm import triton_lazy_norm

    if not triton_lazy_norm.fits(x, weight):
        return reference.norm_linear(x, weight, layer, eps)
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    weight_sum = weight.sum(1, dtype=torch.float32) if layer else None
    if x.is_cuda and torch.cuda.get_device_capability(x.device) == (9, 0):
        from lightning_gem.kernels.lazy_norm import gluon_lazy_norm

        gluon_lazy_norm.forward(x, weight, weight_sum, out, eps)
    else:
        triton_lazy_norm.forward(x, weight, weight_sum, out, eps)
    return out


@register_fake(_forward)
def _(x: Tensor, weight: Tensor, layer: bool, eps: float) -> Tensor:
    return torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)


@custom_op("norm_linear_backward")
def _backward(grad_out: Tensor, x: Tensor, weight: Tensor, layer: bool, eps: float) -> tuple[Tensor, Tensor]:
    """With ``h = dy W`` one kernel reads ``x`` and ``h``, and writes the gradient of ``x`` and the rows for ``dW``."""
    if not runs_triton(x):
        grad_x, *_ = norm_backward(grad_out @ weight, None, x, None, None, None, eps, layer, "identity")
        normed, _ = normalise(x, None, None, None, None, eps, layer, "identity")
        return grad_x, grad_out.t() @ normed
    from lightning_gem.kernels.norm import triton_norm

    grad_normed = grad_out @ weight
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    normed = torch.empty_like(grad_x)
    triton_norm.backward(grad_normed, None, x, None, None, None, grad_x, normed, eps, layer, "identity")
    return grad_x, grad_out.t() @ normed


@register_fake(_backward)
def _(grad_out: Tensor, x: Tensor, weight: Tensor, layer: bool, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty(
        weight.shape, dtype=weight.dtype, device=x.device
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.layer, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _autograd(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    return (*torch.ops.lightning_gem.norm_linear_backward(grad_out, x, weight, ctx.layer, ctx.eps), None, None)


register_autograd(_forward, _autograd, _setup_context)


@register_flop_formula(torch.ops.lightning_gem.norm_linear)
def _flops(x_shape: Any, weight_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * x_shape[0] * x_shape[1] * weight_shape[0]


@register_flop_formula(torch.ops.lightning_gem.norm_linear_backward)
def _flops_backward(
    grad_shape: Any, x_shape: Any, weight_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    return 4 * x_shape[0] * x_shape[1] * weight_shape[0]
