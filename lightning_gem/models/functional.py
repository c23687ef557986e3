"""Operations without parameters that several layers share."""

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_gem.kernels import jagged_layer_norm, jagged_rms_norm


def rms_norm(x: Tensor, residual: Tensor | None = None, skip: Tensor | None = None) -> Tensor:
    """``norm(x + residual) + skip``: root-mean-square norm over the last dimension, without affine parameters."""
    return jagged_rms_norm(x, eps=1e-5, residual=residual, skip=skip)


def layer_norm(x: Tensor) -> Tensor:
    """Layer norm over the last dimension, without affine parameters."""
    return jagged_layer_norm(x, eps=1e-5)


def activate(x: Tensor, name: str) -> Tensor:
    """Applies an activation by its kernel name."""
    if name == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    function = {"hardswish": F.hardswish, "silu": F.silu, "relu": F.relu}[name]
    return function(x)


def log_age(timestamps: Tensor, now: Tensor, time_scale: float) -> Tensor:
    """``log(1 + age / time_scale)`` of times in seconds, in float32; times after ``now`` count as now."""
    age = (now - timestamps).clamp(min=0).to(torch.float32)
    return torch.log1p(age / time_scale)
