"""Jagged softmax attention in plain PyTorch: the definition as a loop, and a vectorised version of it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_gem.kernels.bucketing import Bucket, bucket_qkv, unpad_queries
from lightning_gem.kernels.masking import padding_mask, visible_pairs, window_mask


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
) -> tuple[Tensor, Tensor]:
    """The definition, one sequence at a time: (out, lse) as in ``jagged_flash_attention``."""
    group = query.shape[1] // key.shape[1]
    out = query.new_zeros(*query.shape[:2], value.shape[2])
    lse = query.new_zeros(query.shape[1], len(query))
    for b in range(len(cu_seqlens_q) - 1):
        rows = torch.arange(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]))
        columns = torch.arange(int(cu_seqlens_k[b]), int(cu_seqlens_k[b + 1]))
        k, v = (x[columns].repeat_interleave(group, dim=1) for x in (key, value))
        scores = softmax_scale * torch.einsum("qhd,khd->hqk", query[rows], k)
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
        mask, blind = _softmax_mask(bucket, causal, window_size, attn_bias)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=softmax_scale)
        outs.append(out if blind is None else out.masked_fill(blind, 0.0))
        if return_lse:
            lse = _logsumexp(q, k, softmax_scale, mask)
            lses.append(lse if blind is None else lse.masked_fill(blind.squeeze(-1), -torch.inf))
    num_rows = len(plan.slots_q) if cu_seqlens_q is None else len(query)
    out = unpad_queries(plan, outs, num_rows).to(dtype)
    return out, unpad_queries(plan, lses, num_rows).T if return_lse else None


def _softmax_mask(
    bucket: Bucket, causal: bool, window_size: tuple[int, int], attn_bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The mask of a bucket, and its blind queries, which see no key at all.

    Softmax over no keys is 0/0. A blind query is therefore shown every key, and the caller replaces what comes out.

    Returns:
        mask: Bool, or float where there is a bias, broadcastable to (n, H, size_q, size_k); None if nothing is hidden.
        blind: Bool, broadcastable to (n, H, size_q, 1); None if no query can be blind.
    """
    real, window = padding_mask(bucket), window_mask(bucket, causal, window_size)
    mask = window if real is None else real if window is None else real & window
    if attn_bias is None:
        if mask is None or not (bucket.may_lack_keys or window is not None):
            return mask, None
        blind = ~mask.any(-1, keepdim=True)
        return mask | blind, blind
    bias = attn_bias if len(attn_bias) == 1 else attn_bias.index_select(0, bucket.sequences)
    bias = bias[:, :, : bucket.size_q, : bucket.size_k]
    finite = bias > -torch.inf
    mask = finite if mask is None else mask & finite
    blind = ~mask.any(-1, keepdim=True)
    return bias.masked_fill(~mask, -torch.inf).masked_fill(blind, 0.0), blind


def _logsumexp(query: Tensor, key: Tensor, softmax_scale: float, mask: Tensor | None) -> Tensor:
    """Log of the softmax denominator (n, H, size_q), in float32 or better."""
    precise = torch.promote_types(query.dtype, torch.float32)
    scores = softmax_scale * query.to(precise) @ key.to(precise).transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.logsumexp(-1)
