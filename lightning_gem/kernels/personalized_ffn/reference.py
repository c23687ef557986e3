"""PFFN in plain PyTorch: the definition as a loop. The op itself is ``gdpa`` with dense keys."""

import torch
from torch import Tensor

from lightning_gem.kernels.dot_product.activations import activate


def pffn_loop(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, *, activation: str, scale: float, out_scale: float
) -> Tensor:
    """The definition, one sample at a time, for keys (B, N, H, D) and equal numbers of heads."""
    out = query.new_zeros(*query.shape[:2], value.shape[3])
    for b, (start, end) in enumerate(zip(cu_seqlens_q.tolist(), cu_seqlens_q.tolist()[1:], strict=False)):
        hidden = activate(scale * torch.einsum("qhd,nhd->hqn", query[start:end], key[b]), activation)
        out[start:end] = out_scale * torch.einsum("hqn,nhd->qhd", hidden, value[b])
    return out
