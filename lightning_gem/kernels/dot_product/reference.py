"""GDPA in plain PyTorch: the definition as a loop, and a vectorised version of it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_gem.kernels.bucketing import bucket_qkv, unpad_queries
from lightning_gem.kernels.dot_product.activations import activate
from lightning_gem.kernels.masking import role_mask, visible_pairs, visible_roles, window_mask


def gdpa_loop(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    activation: str | Sequence[str],
    scale: float = 1.0,
    out_scale: float = 1.0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    num_targets: Tensor | None = None,
    contextual_seqlen: int = 0,
) -> Tensor:
    """The definition, one sequence at a time."""
    group = query.shape[1] // key.shape[1]
    out = query.new_zeros(*query.shape[:2], value.shape[2])
    for b in range(len(cu_seqlens_q) - 1):
        rows = slice(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]))
        columns = slice(int(cu_seqlens_k[b]), int(cu_seqlens_k[b + 1]))
        q, k, v = query[rows], *(x[columns].repeat_interleave(group, dim=1) for x in (key, value))
        weights = activate(scale * torch.einsum("qhd,khd->hqk", q, k), activation)
        if num_targets is None and not contextual_seqlen:
            visible = visible_pairs(len(q), len(k), causal, window_size)
        else:
            targets = 0 if num_targets is None else int(num_targets[b])
            visible = visible_roles(len(q), targets, contextual_seqlen, window_size[0])
        weights = weights * visible
        out[rows] = out_scale * torch.einsum("hqk,khd->qhd", weights, v)
    return out


def gdpa_bucketed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor,
    *,
    activation: str | Sequence[str],
    scale: float = 1.0,
    out_scale: float = 1.0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    num_targets: Tensor | None = None,
    contextual_seqlen: int = 0,
) -> Tensor:
    """Vectorised over buckets of similar length; ``cu_seqlens_q=None`` means a query shared by every sequence.

    A window hides keys but saves no work here.
    """
    dtype = query.dtype
    precise = torch.promote_types(dtype, torch.float32)
    query, key, value = scale * query.to(precise), key.to(precise), value.to(precise)
    plan, parts = bucket_qkv(query, key, value, cu_seqlens_q, cu_seqlens_k)
    outs = []
    for bucket, q, k, v in parts:
        scores = q @ k.transpose(-1, -2)
        if num_targets is None and not contextual_seqlen:
            visible = window_mask(bucket, causal, window_size)
        else:
            visible = role_mask(bucket, num_targets, contextual_seqlen, window_size[0])
        if visible is not None:
            scores = scores.masked_fill(~visible, 0.0)
        outs.append(activate(scores, activation) @ v)  # padded keys are zero, and act(0) = 0: they need no mask
    num_rows = len(plan.slots_q) if cu_seqlens_q is None else len(query)
    return (out_scale * unpad_queries(plan, outs, num_rows)).to(dtype)
