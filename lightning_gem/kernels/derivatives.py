"""Derivatives of the activations, for references that must not rely on autograd."""

import math

import torch
from torch import Tensor


def derivative(z: Tensor, name: str) -> Tensor:
    """``act'(z)``, as autograd would give it."""
    if name == "identity":
        return torch.ones_like(z)
    if name == "relu":
        return (z > 0).to(z.dtype)
    if name == "relu_squared":
        return 2 * z.clamp(min=0)
    if name == "leaky_relu":
        return torch.where(z > 0, 1.0, 0.01).to(z.dtype)
    if name == "gelu":
        density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        return 0.5 * (1 + torch.erf(z / math.sqrt(2))) + z * density
    if name == "gelu_tanh":
        inner = math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)
        slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * z * z)
        t = torch.tanh(inner)
        return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * slope
    if name == "hardswish":
        return torch.where(z <= -3, 0.0, torch.where(z < 3, z / 3 + 0.5, 1.0)).to(z.dtype)
    s = torch.sigmoid(z)
    return s * (1 - s) if name == "sigmoid" else s * (1 + z * (1 - s))
