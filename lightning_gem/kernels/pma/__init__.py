"""Pooling by multi-head attention."""

from lightning_gem.kernels.pma.op import pma_attention

__all__ = ["pma_attention"]
