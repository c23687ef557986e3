"""Offsets and pooling of jagged tensors."""

from lightning_gem.kernels.jagged.op import jagged_mean_pool, jagged_sum_pool, lengths_to_cu_seqlens

__all__ = ["jagged_mean_pool", "jagged_sum_pool", "lengths_to_cu_seqlens"]
