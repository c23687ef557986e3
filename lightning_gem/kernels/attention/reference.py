"""The vectorised references behind one interface, for dispatch."""

import torch
from torch import Tensor

from lightning_gem.kernels.attention.spec import AttentionSpec
from lightning_gem.kernels.bucketing import Bucket, bucket_qkv, pad_queries, unpad_keys, unpad_queries
from lightning_gem.kernels.masking import role_mask, softmax_mask, window_mask


def forward(
    spec: AttentionSpec,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor,
    attn_bias: Tensor | None,
    num_targets: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Differentiable ``(out, lse)``; lse is None where not asked for, or without softmax."""
    # Imported late: the packages of the ops import this one.
    from lightning_gem.kernels.dot_product.reference import gdpa_bucketed
    from lightning_gem.kernels.flash.reference import attention_bucketed

    offsets = None if spec.broadcast_query else cu_seqlens_q
    with torch.autocast(query.device.type, enabled=False):
        if spec.activation is None:
            return attention_bucketed(
                query,
                key,
                value,
                offsets,
                cu_seqlens_k,
                softmax_scale=spec.scale,
                causal=spec.causal,
                window_size=spec.window_size,
                attn_bias=attn_bias,
                softcap=spec.softcap,
                return_lse=return_lse,
            )
        out = gdpa_bucketed(
            query,
            key,
            value,
            offsets,
            cu_seqlens_k,
            activation=spec.activation,
            scale=spec.scale,
            out_scale=spec.out_scale,
            causal=spec.causal,
            window_size=spec.window_size,
            num_targets=num_targets,
            contextual_seqlen=spec.contextual_seqlen,
        )
        return out, None


def backward(
    spec: AttentionSpec,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor,
    attn_bias: Tensor | None,
    num_targets: Tensor | None,
    needs_query: bool,
    needs_key_value: bool,
    needs_bias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of query, key, value and bias, from scores that are computed again.

    Written out, because autograd does not record inside a custom op.
    """
    precise = torch.promote_types(query.dtype, torch.float32)
    q_all, k_all, v_all = (x.to(precise) for x in (query, key, value))
    offsets = None if spec.broadcast_query else cu_seqlens_q
    plan, parts = bucket_qkv(q_all, k_all, v_all, offsets, cu_seqlens_k)
    num_rows = len(plan.slots_q) if offsets is None else len(query)
    if grad_out is None:
        grad_out = query.new_zeros(num_rows, query.shape[1], value.shape[2])
    grads_out = pad_queries(plan, grad_out.to(precise))
    no_grads_lse = [None] * len(parts)
    grads_lse = no_grads_lse if grad_lse is None else pad_queries(plan, grad_lse.to(precise).T.unsqueeze(-1))
    grad_bias = None if attn_bias is None or not needs_bias else torch.zeros_like(attn_bias, dtype=precise)
    grads_q, grads_k, grads_v = [], [], []
    for (bucket, q, k, v), grad, lse_grad in zip(parts, grads_out, grads_lse, strict=True):
        scores = spec.scale * q @ k.transpose(-1, -2)
        grad_weights = spec.out_scale * grad @ v.transpose(-1, -2)
        if spec.activation is None:
            weights, grad_scores, grad_raw = _softmax_gradients(spec, bucket, scores, grad_weights, lse_grad, attn_bias)
            if grad_bias is not None:
                _add_bias_gradient(grad_bias, bucket, grad_scores)
        else:
            weights, grad_raw = _activation_gradients(spec, bucket, scores, grad_weights, num_targets)
        grads_v.append(spec.out_scale * weights.transpose(-1, -2) @ grad)
        grads_q.append(spec.scale * grad_raw @ k)
        grads_k.append(spec.scale * grad_raw.transpose(-1, -2) @ q)
    result_q = result_k = result_v = None
    if needs_query:
        if offsets is None:
            result_q = torch.stack([grad.sum(0) for grad in grads_q]).sum(0).transpose(0, 1).to(query.dtype)
        else:
            result_q = unpad_queries(plan, grads_q, len(query)).to(query.dtype)
    if needs_key_value:
        groups = (key.shape[1], query.shape[1] // key.shape[1])
        result_k, result_v = (
            unpad_keys(plan, grads, len(key)).unflatten(1, groups).sum(2).to(key.dtype) for grads in (grads_k, grads_v)
        )
    return result_q, result_k, result_v, None if grad_bias is None or attn_bias is None else grad_bias.to(attn_bias)


def _softmax_gradients(
    spec: AttentionSpec,
    bucket: Bucket,
    scores: Tensor,
    grad_weights: Tensor,
    grad_lse: Tensor | None,
    attn_bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, and gradients of the scores after and before the cap."""
    capped = spec.softcap * torch.tanh(scores / spec.softcap) if spec.softcap else scores
    mask, blind = softmax_mask(bucket, spec.causal, spec.window_size, attn_bias)
    masked = capped
    if mask is not None:
        masked = capped.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else capped + mask
    weights = masked.softmax(-1)
    if blind is not None:
        weights = weights.masked_fill(blind, 0.0)
    shift = (weights * grad_weights).sum(-1, keepdim=True)
    if grad_lse is not None:
        shift = shift - grad_lse
    grad_scores = weights * (grad_weights - shift)
    return weights, grad_scores, grad_scores * (1 - (capped / spec.softcap) ** 2) if spec.softcap else grad_scores


def _activation_gradients(
    spec: AttentionSpec, bucket: Bucket, scores: Tensor, grad_weights: Tensor, num_targets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Weights and gradients of the scores."""
    from lightning_gem.kernels.dot_product.activations import activate, activation_derivative

    assert spec.activation is not None
    if spec.has_roles:
        visible: Tensor | None = role_mask(bucket, num_targets, spec.contextual_seqlen, spec.window_left)
    else:
        visible = window_mask(bucket, spec.causal, spec.window_size)
    weights = activate(scores, spec.activation)
    grad_scores = grad_weights * activation_derivative(scores, spec.activation)
    if visible is not None:
        weights, grad_scores = weights.masked_fill(~visible, 0.0), grad_scores.masked_fill(~visible, 0.0)
    return weights, grad_scores


def _add_bias_gradient(grad_bias: Tensor, bucket: Bucket, grad_scores: Tensor) -> None:
    """Adds the gradients of a bucket's scores to those of a bias that may be shared by sequences and heads."""
    if grad_bias.shape[1] == 1:
        grad_scores = grad_scores.sum(1, keepdim=True)
    if len(grad_bias) == 1:
        grad_bias[:, :, : bucket.size_q, : bucket.size_k] += grad_scores.sum(0, keepdim=True)
    else:
        grad_bias[:, :, : bucket.size_q, : bucket.size_k].index_copy_(0, bucket.sequences, grad_scores)
