"""Jagged attention and its helpers, on packed (total_tokens, num_heads, head_dim) tensors with ``cu_seqlens`` offsets.

Every op runs on any device through a vectorised PyTorch reference and is differentiable by autograd. Norms, gates,
jagged operations, ``norm_linear`` and ``fused_linear_bce`` run Triton kernels on a GPU (float64 excepted), as custom
ops that torch.compile does not break on. This package imports torch and, for a kernel, Triton, and can be used on its
own. Pair counts for FLOP accounting are in ``lightning_gem.kernels.pairs``.

Conventions of all attention ops: sequences may be empty; a query that sees no key returns 0 and receives gradient 0;
rows from ``cu_seqlens[-1]`` on ("slack") belong to no sequence, are never read, and are 0 in outputs and gradients;
query head h reads key head h // (num_heads / num_kv_heads); under autocast, inputs are cast as in torch's attention.
"""

from lightning_gem.kernels.bce import fused_linear_bce
from lightning_gem.kernels.block import block_attention
from lightning_gem.kernels.dot_product import gdpa
from lightning_gem.kernels.flash import jagged_flash_attention
from lightning_gem.kernels.gate import gated, hard_swish_gate, swiglu
from lightning_gem.kernels.grouped import grouped_mm
from lightning_gem.kernels.jagged import (
    jagged_concat,
    jagged_dense_add,
    jagged_dense_mul,
    jagged_max_pool,
    jagged_mean_pool,
    jagged_split,
    jagged_sum_pool,
    lengths_to_cu_seqlens,
)
from lightning_gem.kernels.lazy_norm import norm_linear
from lightning_gem.kernels.norm import jagged_layer_norm, jagged_rms_norm
from lightning_gem.kernels.personalized_ffn import pffn
from lightning_gem.kernels.pma import pma_attention
from lightning_gem.kernels.rope import rotary

__all__ = [
    "block_attention",
    "fused_linear_bce",
    "gated",
    "gdpa",
    "grouped_mm",
    "hard_swish_gate",
    "jagged_concat",
    "jagged_dense_add",
    "jagged_dense_mul",
    "jagged_flash_attention",
    "jagged_layer_norm",
    "jagged_max_pool",
    "jagged_mean_pool",
    "jagged_rms_norm",
    "jagged_split",
    "jagged_sum_pool",
    "lengths_to_cu_seqlens",
    "norm_linear",
    "pffn",
    "pma_attention",
    "rotary",
    "swiglu",
]
