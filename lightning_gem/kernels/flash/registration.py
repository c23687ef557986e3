"""Custom ops of jagged softmax attention: forward and backward, with their fake kernels, autograd and FLOP formulas."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lightning_gem.kernels.attention import dispatch, flops
from lightning_gem.kernels.attention.registration import (
    check_values,
    dense_gradients,
    fake_forward,
    fake_gradients,
    make_schedules,
    no_second_derivative,
)
from lightning_gem.kernels.attention.spec import AttentionSpec
from lightning_gem.kernels.custom_op import custom_op, register_autograd, register_fake


def _spec(
    scale: float, softcap: float, causal: bool, window_left: int, window_right: int, broadcast_query: bool
) -> AttentionSpec:
    return AttentionSpec(
        activation=None,
        scale=scale,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        broadcast_query=broadcast_query,
        softcap=softcap,
    )


@custom_op("jagged_flash_attention")
def forward_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    attn_bias: Tensor | None,
    schedule: Tensor | None,
    schedule_block: int,
    share_schedule: bool,
    backend: str,
    scale: float,
    softcap: float,
    causal: bool,
    window_left: int,
    window_right: int,
    broadcast_query: bool,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of ``jagged_flash_attention``."""
    check_values(query, key, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    spec = _spec(scale, softcap, causal, window_left, window_right, broadcast_query)
    schedules = make_schedules(query, key, cu_seqlens_q, cu_seqlens_k, schedule, schedule_block, share_schedule)
    offsets = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out, lse = dispatch.forward(spec, query, key, value, *offsets, attn_bias, None, schedules, backend)
    assert lse is not None
    return out, lse


@register_fake(forward_op)
def _forward_fake(query: Tensor, key: Tensor, value: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return fake_forward(_spec(*args[9:]), query, value, args[1])


@custom_op("jagged_flash_attention_backward")
def backward_op(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    attn_bias: Tensor | None,
    schedule: Tensor | None,
    schedule_block: int,
    share_schedule: bool,
    backend: str,
    scale: float,
    softcap: float,
    causal: bool,
    window_left: int,
    window_right: int,
    broadcast_query: bool,
    needs_query: bool,
    needs_key_value: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and attn_bias; those not needed are empty."""
    spec = _spec(scale, softcap, causal, window_left, window_right, broadcast_query)
    schedules = make_schedules(query, key, cu_seqlens_q, cu_seqlens_k, schedule, schedule_block, share_schedule)
    gradients = dispatch.backward(
        spec,
        grad_out,
        grad_lse,
        query,
        key,
        value,
        out,
        lse,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        attn_bias,
        None,
        schedules,
        needs_query,
        needs_key_value,
        needs_bias,
        backend,
    )
    grad_query, grad_key, grad_value, grad_bias = dense_gradients(gradients, query)
    return grad_query, grad_key, grad_value, grad_bias


@register_fake(backward_op)
def _backward_fake(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
) -> tuple[Tensor, ...]:
    needs_query, needs_key_value, needs_bias = args[-3:]
    return fake_gradients(
        (query, needs_query, query),
        (key, needs_key_value, query),
        (value, needs_key_value, query),
        (args[4], needs_bias, query),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, attn_bias, schedule, *rest = inputs
    ctx.save_for_backward(*output, query, key, value, cu_seqlens_q, cu_seqlens_k, attn_bias, schedule)
    ctx.max_seqlens, ctx.rest = (max_seqlen_q, max_seqlen_k), rest
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, attn_bias, schedule = ctx.saved_tensors
    needs_query, needs_key, needs_value = ctx.needs_input_grad[:3]
    needs_key_value, needs_bias = needs_key or needs_value, ctx.needs_input_grad[7]
    grad_query, grad_key, grad_value, grad_bias = backward_op(
        grad_out,
        grad_lse,
        *tensors,
        *ctx.max_seqlens,
        attn_bias,
        schedule,
        *ctx.rest,
        needs_query,
        needs_key_value,
        needs_bias,
    )
    return (
        grad_query if needs_query else None,
        grad_key if needs_key else None,
        grad_value if needs_value else None,
        *[None] * 4,
        grad_bias if needs_bias else None,
        *[None] * (1 + len(ctx.rest)),
    )


register_autograd(forward_op, _backward, _setup_context)
register_autograd(backward_op, no_second_derivative)


@register_flop_formula(torch.ops.lightning_gem.jagged_flash_attention, get_raw=True)
def _forward_flops(query: Tensor, key: Tensor, value: Tensor, *args: Any, out_val: Any = None) -> int:
    return flops.forward_flops(_spec(*args[9:]), query, key, value, *args[:4])


@register_flop_formula(torch.ops.lightning_gem.jagged_flash_attention_backward, get_raw=True)
def _backward_flops(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    out_val: Any = None,
) -> int:
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = args[:4]
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, None)
    return flops.backward_flops(_spec(*args[9:-3]), query, key, value, *lengths, *args[-3:-1])
