"""Public op: linear heads of several tasks and their binary cross-entropy."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lightning_gem.kernels.bce import reference
from lightning_gem.kernels.custom_op import custom_op, register_autograd, register_fake
from lightning_gem.kernels.launch import interpreted, runs_triton

_MAX_DIM, _MAX_TASKS = 1024, 64


def _fits(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel takes these: a tile of ``x`` must fit into shared memory, and rows begin at 16 bytes."""
    return (
        runs_triton(x)
        and (x.dtype != torch.float32 or interpreted())
        and x.numel() > 0
        and 0 < len(weight) <= _MAX_TASKS
        and x.shape[1] <= _MAX_DIM
        and x.shape[1] * x.element_size() % 16 == 0
    )


def fused_linear_bce(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    mask: Tensor | None = None,
    task_weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: str = "mean",
) -> tuple[Tensor, Tensor]:
    """Binary cross-entropy of T linear heads on hidden states, without logits in memory.

    ``loss_t = sum_n mask_nt * bce(x_n W_t + b_t, target_nt)``, divided by ``sum_n mask_nt`` for ``"mean"``; the total
    is ``sum_t task_weight_t * loss_t``. On a GPU, one pass over ``x`` gives the loss and all gradients: they are made
    in the forward where they are needed, and the backward only multiplies them, in place, by the gradient of the total
    (nothing to do where that is 1, so put constant factors into ``task_weight``). A second backward through the same
    graph therefore raises an error of autograd. Sums are in float32 and deterministic. The kernel takes bfloat16 and
    float16 with D up to 1024 (a multiple of 8) and up to 64 tasks; anything else runs the same maths unfused.

    Args:
        x: Hidden states (N, D), bfloat16, float16, float32 or float64.
        weight: (T, D) in any of these dtypes; products are taken in the dtype of ``x``.
        bias: (T,), or None.
        target: (N, T) in [0, 1]; NaN where the label is missing.
        mask: (N, T), bool or weights of the labels; 0 where the label does not count.
        task_weight: (T,) factors in the total.
        pos_weight: (T,) factors of the positive term, as in ``binary_cross_entropy_with_logits``.
        reduction: ``"mean"`` (weighted, over the labels that are there) or ``"sum"``.

    Returns:
        The total, and the losses (T,) before ``task_weight``, detached; both float32 (float64 for float64 inputs).

    Raises:
        ValueError: For shapes or dtypes that do not fit together, or another reduction.
    """
    _check(x, weight, bias, target, mask, task_weight, pos_weight, reduction)
    if not _fits(x, weight):
        total, losses = reference.linear_bce(x, weight, bias, target, mask, task_weight, pos_weight, reduction)
        return total, losses.detach()
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    total, losses, *_ = torch.ops.lightning_gem.linear_bce(
        x, weight, bias, target, mask, task_weight, pos_weight, reduction == "mean", needs_grad
    )
    return total, losses


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    mask: Tensor | None,
    task_weight: Tensor | None,
    pos_weight: Tensor | None,
    reduction: str,
) -> None:
    if x.ndim != 2 or not x.is_floating_point():
        raise ValueError(f"x must be floating point (N, D), got {x.dtype} {tuple(x.shape)}: flatten it")
    if weight.ndim != 2 or weight.shape[1] != x.shape[1]:
        raise ValueError(f"weight must be (T, {x.shape[1]}) to fit x, got {tuple(weight.shape)}")
    shape = (x.shape[0], weight.shape[0])
    for name, labels in (("target", target), ("mask", mask)):
        if labels is not None and (tuple(labels.shape) != shape or labels.device != x.device):
            raise ValueError(
                f"{name} must be (N, T) = {shape} on {x.device}, got {tuple(labels.shape)} on {labels.device}"
            )
    for name, vector in (("bias", bias), ("task_weight", task_weight), ("pos_weight", pos_weight)):
        if vector is not None and (tuple(vector.shape) != shape[1:] or vector.device != x.device):
            raise ValueError(
                f"{name} must be (T,) = {shape[1:]} on {x.device}, got {tuple(vector.shape)} on {vector.device}"
            )
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}: one pass needs to know its gradient")


@custom_op("linear_bce")
def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    mask: Tensor | None,
    task_weight: Tensor | None,
    pos_weight: Tensor | None,
    mean: bool,
    needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Total, losses, and the gradients of x, weight and bias, empty where there is none."""
    empty = x.new_empty(0)
    if not _fits(x, weight):
        return reference.linear_bce_with_gradients(
            x, weight, bias, target, mask, task_weight, pos_weight, mean, needs_grad
        )
    from lightning_gem.kernels.bce import triton_bce

    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs_grad else None
    losses, grad_weight, grad_bias = triton_bce.forward(
        x, weight, bias, target, mask, task_weight, pos_weight, mean, grad_x
    )
    total = (losses if task_weight is None else losses * task_weight).sum()
    return (
        total,
        losses,
        empty if grad_x is None else grad_x,
        empty if grad_weight is None else grad_weight.to(weight.dtype),
        x.new_empty(0) if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
    )


@register_fake(_forward)
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    mask: Tensor | None,
    task_weight: Tensor | None,
    pos_weight: Tensor | None,
    mean: bool,
    needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    precise = torch.promote_types(x.dtype, torch.float32)
    return (
        x.new_empty((), dtype=precise),
        x.new_empty(len(weight), dtype=precise),
        torch.empty(x.shape if needs_grad else (0,), dtype=x.dtype, device=x.device),
        torch.empty(weight.shape if needs_grad else (0,), dtype=weight.dtype, device=x.device)
        if needs_grad
        else x.new_empty(0),
        x.new_empty(0)
        if bias is None or not needs_grad
        else torch.empty(bias.shape, dtype=bias.dtype, device=x.device),
    )


@torch.library.custom_op("lightning_gem::scale_", mutates_args=("x",))
def _scale(x: Tensor, factor: Tensor) -> None:
    """Multiplies in place by a scalar on the device, without reading or writing where it is 1."""
    if runs_triton(x):
        from lightning_gem.kernels.bce import triton_bce

        triton_bce.scale_(x, factor)
    else:
        x.mul_(factor)


@_scale.register_fake
def _(x: Tensor, factor: Tensor) -> None:
    return None


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.has_bias, ctx.needs_grad = inputs[2] is not None, inputs[8]
    ctx.save_for_backward(*output[2:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None or not ctx.needs_grad:
        return (None,) * 9
    grad_x, grad_weight, grad_bias = ctx.saved_tensors
    if type(grad_x) is not Tensor:  # traced by a compiler, which can fuse the product into what follows
        grad_x = grad_x * grad.to(grad_x.dtype)
    elif ctx.needs_input_grad[0]:
        torch.ops.lightning_gem.scale_(grad_x, grad)
    return (
        grad_x if ctx.needs_input_grad[0] else None,
        grad_weight * grad.to(grad_weight.dtype),
        grad_bias * grad.to(grad_bias.dtype) if ctx.has_bias else None,
        *(None,) * 6,
    )


register_autograd(_forward, _autograd, _setup_context)


@register_flop_formula(torch.ops.lightning_gem.linear_bce)
def _flops(x_shape: Any, weight_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """One product for the loss; three with the gradients of x and weight, which the same pass computes."""
    needs_grad = args[-1] if args else kwargs["needs_grad"]
    return 2 * x_shape[0] * x_shape[1] * weight_shape[0] * (3 if needs_grad else 1)
