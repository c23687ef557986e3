"""Norms with residual, activation and skip in plain PyTorch: what CPU tensors run, differentiable by autograd."""

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_gem.kernels.dot_product.activations import ACTIVATIONS


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
