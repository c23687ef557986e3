"""Jagged softmax attention."""

from lightning_gem.kernels.flash.op import jagged_flash_attention

__all__ = ["jagged_flash_attention"]
