"""Pooling by multi-head attention: the definition as a loop. The op itself is attention with a broadcast query."""

import torch
from torch import Tensor


def pma_loop(seeds: Tensor, key: Tensor, value: Tensor, cu_seqlens_k: Tensor, *, softmax_scale: float) -> Tensor:
    """The definition (softmax), one sequence at a time, for equal numbers of heads."""
    out = seeds.new_zeros(len(cu_seqlens_k) - 1, *seeds.shape[:2], value.shape[2])
    for b, (start, end) in enumerate(zip(cu_seqlens_k.tolist(), cu_seqlens_k.tolist()[1:], strict=False)):
        if start < end:
            weights = (softmax_scale * torch.einsum("shd,khd->hsk", seeds, key[start:end])).softmax(-1)
            out[b] = torch.einsum("hsk,khd->shd", weights, value[start:end])
    return out
