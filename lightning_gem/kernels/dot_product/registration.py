"""Custom ops of generalised dot-product attention, with their fake kernels, autograd and FLOP formulas."""

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
    has_targets: bool,
    activation: str,
    scale: float,
    out_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    contextual_seqlen: int,
    broadcast_query: bool,
) -> AttentionSpec:
    """``activation`` is one name, or one per head, separated by commas."""
    names = tuple(activation.split(","))
    return AttentionSpec(
        activation=names[0] if len(set(names)) == 1 else names,
        scale=scale,
        out_scale=out_scale,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        broadcast_query=broadcast_query,
        contextual_seqlen=contextual_seqlen,
        has_targets=has_targets,
    )


@custom_op("gdpa")
def forward_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    num_targets: Tensor | None,
    schedule: Tensor | None,
    schedule_block: int,
    share_schedule: bool,
    backend: str,
    activation: str,
    scale: float,
    out_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    contextual_seqlen: int,
    broadcast_query: bool,
) -> Tensor:
    """The output of ``gdpa``."""
    check_values(query, key, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    spec = _spec(
        num_targets is not None,
        activation,
        scale,
        out_scale,
        causal,
        window_left,
        window_right,
        contextual_seqlen,
        broadcast_query,
    )
    schedules = make_schedules(query, key, cu_seqlens_q, cu_seqlens_k, schedule, schedule_block, share_schedule)
    offsets = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return dispatch.forward(spec, query, key, value, *offsets, None, num_targets, schedules, backend)[0]


@register_fake(forward_op)
def _forward_fake(query: Tensor, key: Tensor, value: Tensor, *args: Any) -> Tensor:
    return fake_forward(_spec(args[4] is not None, *args[9:]), query, value, args[1])[0]


@custom_op("gdpa_backward")
def backward_op(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    num_targets: Tensor | None,
    schedule: Tensor | None,
    schedule_block: int,
    share_schedule: bool,
    backend: str,
    activation: str,
    scale: float,
    out_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    contextual_seqlen: int,
    broadcast_query: bool,
    needs_query: bool,
    needs_key_value: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; those not needed are empty."""
    spec = _spec(
        num_targets is not None,
        activation,
        scale,
        out_scale,
        causal,
        window_left,
        window_right,
        contextual_seqlen,
        broadcast_query,
    )
    schedules = make_schedules(query, key, cu_seqlens_q, cu_seqlens_k, schedule, schedule_block, share_schedule)
    gradients = dispatch.backward(
        spec,
        grad_out,
        None,
        query,
        key,
        value,
        None,
        None,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        None,
        num_targets,
        schedules,
        needs_query,
        needs_key_value,
        False,
        backend,
    )
    grad_query, grad_key, grad_value = dense_gradients(gradients[:3], query)
    return grad_query, grad_key, grad_value


@register_fake(backward_op)
def _backward_fake(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any) -> tuple[Tensor, ...]:
    needs_query, needs_key_value = args[-2:]
    return fake_gradients((query, needs_query, query), (key, needs_key_value, query), (value, needs_key_value, query))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, num_targets, schedule, *rest = inputs
    ctx.save_for_backward(query, key, value, cu_seqlens_q, cu_seqlens_k, num_targets, schedule)
    ctx.max_seqlens, ctx.rest = (max_seqlen_q, max_seqlen_k), rest


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, num_targets, schedule = ctx.saved_tensors
    needs_query, needs_key, needs_value = ctx.needs_input_grad[:3]
    grad_query, grad_key, grad_value = backward_op(
        grad_out,
        *tensors,
        *ctx.max_seqlens,
        num_targets,
        schedule,
        *ctx.rest,
        needs_query,
        needs_key or needs_value,
    )
    return (
        grad_query if needs_query else None,
        grad_key if needs_key else None,
        grad_value if needs_value else None,
        *[None] * (6 + len(ctx.rest)),
    )


register_autograd(forward_op, _backward, _setup_context)
register_autograd(backward_op, no_second_derivative)


@register_flop_formula(torch.ops.lightning_gem.gdpa, get_raw=True)
def _forward_flops(query: Tensor, key: Tensor, value: Tensor, *args: Any, out_val: Any = None) -> int:
    spec = _spec(args[4] is not None, *args[9:])
    return flops.forward_flops(spec, query, key, value, *args[:5])


@register_flop_formula(torch.ops.lightning_gem.gdpa_backward, get_raw=True)
def _backward_flops(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, out_val: Any = None
) -> int:
    spec = _spec(args[4] is not None, *args[9:-2])
    return flops.backward_flops(spec, query, key, value, *args[:5], *args[-2:])
