"""Operations without parameters that several layers share."""

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor) -> Tensor:
    """Root-mean-square norm over the last dimension, without affine parameters."""
    return F.rms_norm(x, x.shape[-1:], eps=1e-5)


def layer_norm(x: Tensor) -> Tensor:
    """Layer norm over the last dimension, without affine parameters."""
    return F.layer_norm(x, x.shape[-1:], eps=1e-5)


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
