"""Personalised feed-forward network (PFFN)."""

from lightning_gem.kernels.personalized_ffn.op import pffn

__all__ = ["pffn"]
