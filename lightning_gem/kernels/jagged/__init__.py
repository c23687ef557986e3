"""Offsets, concatenation, pooling and broadcasts of jagged tensors."""

from lightning_gem.kernels.jagged.op import (
    jagged_concat,
    jagged_dense_add,
    jagged_dense_mul,
    jagged_max_pool,
    jagged_mean_pool,
    jagged_split,
    jagged_sum_pool,
    lengths_to_cu_seqlens,
)

__all__ = [
    "jagged_concat",
    "jagged_dense_add",
    "jagged_dense_mul",
    "jagged_max_pool",
    "jagged_mean_pool",
    "jagged_split",
    "jagged_sum_pool",
    "lengths_to_cu_seqlens",
]
