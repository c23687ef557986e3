"""Pooling of jagged tensors in plain PyTorch: the definition as a loop, and a vectorised version of it."""

import torch
from torch import Tensor


def sum_pool_loop(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The definition, one sequence at a time."""
    offsets = cu_seqlens.tolist()
    sums = [x[start:end].sum(0) for start, end in zip(offsets[:-1], offsets[1:], strict=True)]
    return torch.stack(sums) if sums else x.new_zeros(0, *x.shape[1:])


def sum_pool(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Vectorised, without a synchronisation, in float32 or better; the result keeps that precision."""
    num_sequences = len(cu_seqlens) - 1
    # Slack rows fall into one more, last sequence, which is dropped.
    sequence = torch.bucketize(torch.arange(len(x), device=x.device), cu_seqlens[1:].to(torch.int64), right=True)
    precise = x.to(torch.promote_types(x.dtype, torch.float32))
    return precise.new_zeros(num_sequences + 1, *x.shape[1:]).index_add(0, sequence, precise)[:num_sequences]
