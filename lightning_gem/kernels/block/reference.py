"""Block-diagonal attention in plain PyTorch: the definition as a loop, and the offsets that make it linear."""

import torch
from torch import Tensor

from lightning_gem.kernels.dot_product.activations import activate
from lightning_gem.kernels.dot_product.reference import gdpa_bucketed
from lightning_gem.kernels.flash.reference import attention_bucketed
from lightning_gem.kernels.rope.reference import rotary_halves


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


def block_attention_bucketed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    block_size: int,
    scale: float,
    activation: str | None,
    causal: bool,
    rotate_value: bool,
) -> Tensor:
    """The vectorised version, on any device and differentiable in all its inputs; arguments as those of the op."""
    if cos is not None and sin is not None:
        query, key = _rotate_tokens(query, cu_seqlens, cos, sin), _rotate_tokens(key, cu_seqlens, cos, sin)
        if rotate_value:
            value = _rotate_tokens(value, cu_seqlens, cos, sin)
    blocks = block_offsets(cu_seqlens, block_size)
    if activation is None:
        return attention_bucketed(query, key, value, blocks, blocks, softmax_scale=scale, causal=causal)[0]
    return gdpa_bucketed(query, key, value, blocks, blocks, activation=activation, scale=scale, causal=causal)


def _rotate_tokens(x: Tensor, cu_seqlens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the rows of sequences; those of slack may hold anything, in x and in the angles, and become zero."""
    num_tokens = int(cu_seqlens[-1])
    turned = rotary_halves(x[:num_tokens], cos[:num_tokens], sin[:num_tokens])
    slack = len(x) - num_tokens
    return torch.cat([turned, turned.new_zeros(slack, *turned.shape[1:])]) if slack else turned


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
