"""Generalised dot-product attention (GDPA): an activation in place of the softmax."""

from lightning_gem.kernels.dot_product.op import gdpa

__all__ = ["gdpa"]
