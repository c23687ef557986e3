"""Jagged softmax attention in plain PyTorch: the definition as a loop, and a vectorised version of it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_gem.kernels.bucketing import bucket_qkv, unpad_queries
from lightning_gem.kernels.masking import softmax_mask, visible_pairs


def attention_loop(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    softmax_scale: float,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attn_bias: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The definition, one sequence at a time: (out, lse) as in ``jagged_flash_attention``."""
    group = query.shape[1] // key.shape[1]
    out = query.new_zeros(*query.shape[:2], value.shape[2])
    lse = query.new_zeros(query.shape[1], len(query))
    for b in range(len(cu_seqlens_q) - 1):
        rows = torch.arange(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]))
        columns = torch.arange(int(cu_seqlens_k[b]), int(cu_seqlens_k[b + 1]))
        k, v = (x[columns].repeat_interleave(group, dim=1) for x in (key, value))
        scores = _cap(softmax_scale * torch.einsum("qhd,khd->hqk", query[rows], k), softcap)
        if attn_bias is not None:
            scores = scores + attn_bias[b if len(attn_bias) > 1 else 0, :, : len(rows), : len(columns)]
        visible = visible_pairs(len(rows), len(columns), causal, window_size)
        scores = scores.masked_fill(~visible, -torch.inf)
        lse[:, rows] = -torch.inf
        sees = visible.any(-1)  # a query that sees no key keeps its zero output
        lse[:, rows[sees]] = scores[:, sees].logsumexp(-1)
        out[rows[sees]] = torch.einsum("hqk,khd->qhd", scores[:, sees].softmax(-1), v)
    return out, lse


def attention_bucketed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor,
    *,
    softmax_scale: float,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attn_bias: Tensor | None = None,
    softcap: float = 0.0,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Vectorised over buckets of similar length; ``cu_seqlens_q=None`` means a query shared by every sequence.

    A window hides keys but saves no work here.
    """
    dtype = query.dtype
    if attn_bias is not None:  # a float mask must have the dtype of the query, and half precision would round it
        precise = torch.promote_types(dtype, torch.float32)
        query, key, value, attn_bias = (x.to(precise) for x in (query, key, value, attn_bias))
    plan, parts = bucket_qkv(query, key, value, cu_seqlens_q, cu_seqlens_k)
    outs, lses = [], []
    for bucket, q, k, v in parts:
        mask, blind = softmax_mask(bucket, causal, window_size, attn_bias)
        if softcap:
            out = _capped_attention(q, k, v, mask, softmax_scale, softcap)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=softmax_scale)
        outs.append(out if blind is None else out.masked_fill(blind, 0.0))
        if return_lse:
            lse = _scores(q, k, mask, softmax_scale, softcap).logsumexp(-1)
            lses.append(lse if blind is None else lse.masked_fill(blind.squeeze(-1), -torch.inf))
    num_rows = len(plan.slots_q) if cu_seqlens_q is None else len(query)
    out = unpad_queries(plan, outs, num_rows).to(dtype)
    return out, unpad_queries(plan, lses, num_rows).T if return_lse else None


def _capped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softmax_scale: float, softcap: float
) -> Tensor:
    """``scaled_dot_product_attention`` with capped scores, which torch's lacks."""
    weights = _scores(query, key, mask, softmax_scale, softcap).softmax(-1)
    return (weights @ value.to(weights.dtype)).to(value.dtype)


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, softmax_scale: float, softcap: float) -> Tensor:
    """Masked scores (n, H, size_q, size_k), in float32 or better."""
    precise = torch.promote_types(query.dtype, torch.float32)
    scores = _cap(softmax_scale * query.to(precise) @ key.to(precise).transpose(-1, -2), softcap)
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask


def _cap(scores: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(scores / softcap) if softcap else scores
