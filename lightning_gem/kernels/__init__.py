"""Jagged attention and its helpers, on packed (total_tokens, num_heads, head_dim) tensors with ``cu_seqlens`` offsets.

On NVIDIA GPUs softmax attention and GDPA run as Triton kernels (``kernel_info`` says which); everything runs on any
device through vectorised PyTorch references, and is differentiable by autograd. This package imports torch, and Triton
when a kernel is first launched; it can be used on its own. Pair counts for FLOP accounting are in
``lightning_gem.kernels.pairs``.

The attention ops are custom ops to torch (``torch.ops.lightning_gem.jagged_flash_attention``, ``gdpa``, and their
``_backward``): ``torch.compile`` and selective checkpointing see them as one node each, and ``FlopCounterMode`` counts
their real pairs. On a CPU in eager mode the reference itself is differentiated instead, unless a dispatch mode watches.

Norms, gates, jagged operations, ``norm_linear`` and ``fused_linear_bce`` are custom ops with Triton kernels likewise.

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
from lightning_gem.kernels.info import kernel_info
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
from lightning_gem.kernels.schedule import TileSchedule, build_tile_schedule

__all__ = [
    "TileSchedule",
    "block_attention",
    "build_tile_schedule",
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
    "kernel_info",
    "lengths_to_cu_seqlens",
    "norm_linear",
    "pffn",
    "pma_attention",
    "rotary",
    "swiglu",
]
