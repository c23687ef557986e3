"""Block-diagonal attention."""

from lightning_gem.kernels.block.op import block_attention

__all__ = ["block_attention"]
