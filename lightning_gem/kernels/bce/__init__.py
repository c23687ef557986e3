"""Linear heads and their binary cross-entropy in one pass."""

from lightning_gem.kernels.bce.op import fused_linear_bce

__all__ = ["fused_linear_bce"]
