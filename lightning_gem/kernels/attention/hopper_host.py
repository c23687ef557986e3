"""Host side of the Hopper kernels: descriptors and launches."""

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lightning_gem.kernels.attention.hopper_forward import attention_forward

_ROW_LIMIT = 1 << 30
_GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def segment_descriptor(x: Tensor, block_rows: int) -> TensorDescriptor:
    """Describes (rows, heads, dim) to the copy engine as (rows, heads * dim), bounded by any segment of rows.

    The copy engine checks coordinates against the shape of a tensor, not of a sequence in it. Two more dimensions mend
    that: their strides are s and 2^34 - s for a row stride of s, so that the coordinates (2^30, start + length,
    2^30 - length + row) address row ``start + row`` modulo 2^64, while the third reaches the end of its dimension, 2^30,
    exactly where the segment ends. (The idea of ``triton.tools.ragged_tma``.)
    """
    rows, heads, dim = x.shape
    stride = x.stride(0)
    block = [1, 1, block_rows, dim]
    layout = gl.NVMMASharedLayout.get_default_for(block, _GLUON_DTYPES[x.dtype])
    shape = [0x7FFF0000, 0x7FFF0000, _ROW_LIMIT, heads * dim]
    return TensorDescriptor(x, shape, [2**34 - stride, stride, stride, 1], block, layout)


def stats_descriptor(stats: Tensor, block: int) -> TensorDescriptor:
    """Describes the row statistics (2, H, entries) as (2 * H, entries), in runs of ``block`` entries."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor.from_tensor(stats.flatten(0, 1), [1, block], layout)
