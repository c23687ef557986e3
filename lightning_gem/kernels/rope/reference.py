"""Rotary embedding in plain PyTorch: the definition in complex numbers, and the version in use."""

import torch
from torch import Tensor


def rotary_complex(x: Tensor, angle: Tensor) -> Tensor:
    """The definition: pair (j, j + D/2) is one complex number, turned by its angle (N, D/2)."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)


def rotary_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same in real numbers, in float32 or better."""
    precise = torch.promote_types(x.dtype, torch.float32)
    first, second = x.to(precise).chunk(2, dim=-1)
    cos, sin = cos.to(precise)[:, None], sin.to(precise)[:, None]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)
