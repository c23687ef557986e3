"""Public ops: gates of two tensors, or of the two halves of one."""

from typing import Any

import torch
from torch import Tensor

from lightning_gem.kernels.custom_op import custom_op, register_autograd, register_fake
from lightning_gem.kernels.gate import reference
from lightning_gem.kernels.launch import runs_triton


def gated(value: Tensor, scores: Tensor, activation: str = "sigmoid") -> Tensor:
    """``value * act(scores)`` in one pass, its gradients in another.

    Args:
        value: (..., D), bfloat16, float16, float32 or float64.
        scores: Shape of ``value``; where dtypes differ, the result has the common one.
        activation: sigmoid, silu, hardswish, gelu, gelu_tanh, relu, relu_squared, leaky_relu or identity.

    Returns:
        (..., D); computed in float32 on a GPU.

    Raises:
        ValueError: For shapes or devices that differ, or an unknown activation.
    """
    if value.shape != scores.shape or value.ndim == 0 or value.device != scores.device:
        raise ValueError(
            f"value and scores must have one shape (..., D) and device, got {tuple(value.shape)} on {value.device} "
            f"and {tuple(scores.shape)} on {scores.device}"
        )
    _check(value, activation)
    if not (runs_triton(value) and runs_triton(scores)):
        return reference.gate(value, scores, activation)
    out: Tensor = torch.ops.lightning_gem.gate(value, scores, activation)
    return out


def swiglu(x: Tensor) -> Tensor:
    """Packed SwiGLU: of the halves ``value, scores = x.chunk(2, -1)``, ``value * silu(scores)``; (..., 2D) to (..., D).

    Its gradient is written in the packed layout too. Method: GLU variants (https://arxiv.org/abs/2002.05202).
    """
    return _packed(x, "silu")


def hard_swish_gate(x: Tensor) -> Tensor:
    """Packed gate with ``hardswish`` in place of ``silu``; see ``swiglu``."""
    return _packed(x, "hardswish")


def _packed(x: Tensor, activation: str) -> Tensor:
    if x.ndim == 0 or x.shape[-1] % 2:
        raise ValueError(f"x must be (..., 2D), value and scores side by side, got {tuple(x.shape)}")
    _check(x, activation)
    if not runs_triton(x):
        value, scores = x.chunk(2, -1)
        return reference.gate(value, scores, activation)
    out: Tensor = torch.ops.lightning_gem.packed_gate(x, activation)
    return out


def _check(x: Tensor, activation: str) -> None:
    if not x.is_floating_point():
        raise ValueError(f"a gate needs floating point inputs, got {x.dtype}: convert with .float()")
    if activation not in reference.GATES:
        raise ValueError(f"activation {activation!r} is unknown: use one of {', '.join(reference.GATES)}")


def _rows(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


@custom_op("gate")
def _forward(value: Tensor, scores: Tensor, activation: str) -> Tensor:
    if not runs_triton(value):
        return reference.gate(value, scores, activation).contiguous()
    from lightning_gem.kernels.gate import triton_gate

    out = torch.empty(value.shape, dtype=torch.promote_types(value.dtype, scores.dtype), device=value.device)
    if out.numel():
        triton_gate.forward(_rows(value), _rows(scores), _rows(out), activation)
    return out


@register_fake(_forward)
def _(value: Tensor, scores: Tensor, activation: str) -> Tensor:
    return torch.empty(value.shape, dtype=torch.promote_types(value.dtype, scores.dtype), device=value.device)


@custom_op("gate_backward")
def _backward(grad_out: Tensor, value: Tensor, scores: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    if not runs_triton(value):
        return reference.gate_backward(grad_out, value, scores, activation)
    from lightning_gem.kernels.gate import triton_gate

    grad_value, grad_scores = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (value, scores))
    if value.numel():
        triton_gate.backward(
            _rows(grad_out), _rows(value), _rows(scores), _rows(grad_value), _rows(grad_scores), activation
        )
    return grad_value, grad_scores


@register_fake(_backward)
def _(grad_out: Tensor, value: Tensor, scores: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    grad_value, grad_scores = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (value, scores))
    return grad_value, grad_scores


@custom_op("packed_gate")
def _packed_forward(x: Tensor, activation: str) -> Tensor:
    if not runs_triton(x):
        value, scores = x.chunk(2, -1)
        return reference.gate(value, scores, activation).contiguous()
    from lightning_gem.kernels.gate import triton_gate

    out = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype, device=x.device)
    if out.numel():
        value, scores = _rows(x).chunk(2, -1)
        triton_gate.forward(value, scores, _rows(out), activation)
    return out


@register_fake(_packed_forward)
def _(x: Tensor, activation: str) -> Tensor:
    return torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype, device=x.device)


@custom_op("packed_gate_backward")
def _packed_backward(grad_out: Tensor, x: Tensor, activation: str) -> Tensor:
    if not runs_triton(x):
        value, scores = x.chunk(2, -1)
        return torch.cat(reference.gate_backward(grad_out, value, scores, activation), -1)
    from lightning_gem.kernels.gate import triton_gate

    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        value, scores = _rows(x).chunk(2, -1)
        grad_value, grad_scores = _rows(grad_x).chunk(2, -1)
        triton_gate.backward(_rows(grad_out), value, scores, grad_value, grad_scores, activation)
    return grad_x


@register_fake(_packed_backward)
def _(grad_out: Tensor, x: Tensor, activation: str) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


def _autograd(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    return (*torch.ops.lightning_gem.gate_backward(grad_out, *ctx.saved_tensors, ctx.activation), None)


def _packed_autograd(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.lightning_gem.packed_gate_backward(grad_out, *ctx.saved_tensors, ctx.activation), None


register_autograd(_forward, _autograd, _setup_context)
register_autograd(_packed_forward, _packed_autograd, _setup_context)
