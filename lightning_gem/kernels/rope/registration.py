"""The rotation as a custom op. Its backward is the same op with the angles negated."""

from typing import Any

import torch
from torch import Tensor

from lightning_gem.kernels.custom_op import custom_op, register_autograd, register_fake
from lightning_gem.kernels.launch import on_device
from lightning_gem.kernels.rope.reference import rotary_halves


@custom_op("rotary")
def rotary_op(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """Rotates by the angles, or back; the angles are constants."""
    if not x.is_cuda or x.dtype == torch.float64:
        return rotary_halves(x, cos, -sin if inverse else sin).contiguous()
    from lightning_gem.kernels.rope import triton_kernels

    with on_device(x):
        return triton_kernels.rotate(x, cos, sin, inverse)


@register_fake(rotary_op)
def _(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:3])
    ctx.inverse = inputs[3]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return rotary_op(grad, *ctx.saved_tensors, not ctx.inverse), None, None, None


register_autograd(rotary_op, _backward, _setup_context)
