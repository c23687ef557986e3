"""Norms with residual, activation and skip in plain PyTorch: what CPU tensors run, differentiable by autograd."""

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_gem.kernels.dot_product.activations import ACTIVATIONS, DERIVATIVES


def norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    skip: Tensor | None,
    eps: float,
    layer: bool,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """``act(norm(x + residual) * weight + bias) + skip``, and the sum ``x + residual``."""
    total = x if residual is None else x + residual
    shape = total.shape[-1:]
    if all(t is None or t.dtype == total.dtype for t in (weight, bias)):
        out = F.layer_norm(total, shape, weight, bias, eps) if layer else F.rms_norm(total, shape, weight, eps)
    else:
        dtype = torch.promote_types(total.dtype, torch.float32)
        w, b = (None if t is None else t.to(dtype) for t in (weight, bias))
        wide = total.to(dtype)
        out = F.layer_norm(wide, shape, w, b, eps) if layer else F.rms_norm(wide, shape, w, eps)
        out = out.to(total.dtype)
    if activation != "identity":
        out = ACTIVATIONS[activation](out)
    return (out if skip is None else out + skip), total


def norm_backward(
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
    """The maths of the backward kernel: gradients of the sum, of weight and of bias (empty where there is none)."""
    total = x if residual is None else x + residual
    precise = torch.promote_types(total.dtype, torch.float32)
    h = total.to(precise)
    if layer:
        h = h - h.mean(-1, keepdim=True)
    rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    normed = h * rstd
    z = normed if weight is None else normed * weight.to(precise)
    z = z if bias is None else z + bias.to(precise)
    grad = grad_out.to(precise)
    if activation != "identity":
        grad = grad * DERIVATIVES[activation](z)
    over = tuple(range(grad.ndim - 1))
    grad_bias = x.new_empty(0) if bias is None else grad.sum(over).to(bias.dtype)
    grad_weight = x.new_empty(0)
    if weight is not None:
        grad_weight = (grad * normed).sum(over).to(weight.dtype)
        grad = grad * weight.to(precise)
    grad_x = grad - normed * (grad * normed).mean(-1, keepdim=True)
    if layer:
        grad_x = grad_x - grad.mean(-1, keepdim=True)
    grad_x = grad_x * rstd
    if grad_total is not None:
        grad_x = grad_x + grad_total
    return grad_x.to(total.dtype).contiguous(), grad_weight, grad_bias
