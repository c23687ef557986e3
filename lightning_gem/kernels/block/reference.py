"""Block-diagonal attention in plain PyTorch: the definition as a loop, and the offsets that make it linear."""

import torch
from torch import Tensor

from lightning_gem.kernels.dot_product.activations import activate


def block_attention_loop(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    block_size: int,
    scale: float,
    activation: str | None = None,
    causal: bool = False,
) -> Tensor:
    """The definition, one sequence at a time, for equal numbers of heads."""
    out = query.new_zeros(*query.shape[:2], value.shape[2])
    for start, end in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False):
        position = torch.arange(end - start)
        visible = position[:, None] // block_size == position // block_size
        if causal:
            visible &= position <= position[:, None]
        scores = scale * torch.einsum("qhd,khd->hqk", query[start:end], key[start:end])
        if activation is None:
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        else:
            weights = activate(scores, activation) * visible
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, value[start:end])
    return out


def block_offsets(cu_seqlens: Tensor, block_size: int) -> Tensor:
    """Offsets (num_blocks+1,) that treat every block of every sequence as a short sequence of its own.

    Blocks are counted from their own sequence's start, so the last one of a sequence may be short. Tokens stay where
    they are. The result is on the CPU, where the reference plans its buckets.
    """
    offsets = cu_seqlens.to("cpu", torch.int64)
    blocks = (offsets.diff() + block_size - 1) // block_size
    sequence = torch.repeat_interleave(blocks)
    block = torch.arange(len(sequence)) - (blocks.cumsum(0) - blocks)[sequence]
    return torch.cat([offsets[sequence] + block * block_size, offsets[-1:]])
