"""Norm, then linear map, in plain PyTorch."""

from torch import Tensor
from torch.nn import functional as F


def norm_linear(x: Tensor, weight: Tensor, layer: bool, eps: float) -> Tensor:
    """``norm(x) W^T`` with the norm over the last dimension."""
    shape = x.shape[-1:]
    return F.linear(F.layer_norm(x, shape, eps=eps) if layer else F.rms_norm(x, shape, eps=eps), weight)
