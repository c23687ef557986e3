"""Grouped matrix product as a loop over the groups."""

import torch
from torch import Tensor


def grouped_mm(x: Tensor, weight: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The definition, one expert at a time; it reads the offsets. Slack rows are 0."""
    offsets = cu_seqlens.tolist()
    parts = [x[start:end] @ w for start, end, w in zip(offsets[:-1], offsets[1:], weight, strict=True)]
    return torch.cat([*parts, x.new_zeros(len(x) - offsets[-1], weight.shape[2])])


def grouped_mm_backward(grad_out: Tensor, x: Tensor, weight: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the rows and of the matrices."""
    offsets = cu_seqlens.tolist()
    slices = [slice(start, end) for start, end in zip(offsets[:-1], offsets[1:], strict=True)]
    grad_weight = torch.stack([x[s].t() @ grad_out[s] for s in slices])
    return grouped_mm(grad_out, weight.transpose(1, 2), cu_seqlens), grad_weight
