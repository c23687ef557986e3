"""Linear heads and binary cross-entropy in plain PyTorch."""

import torch
from torch import Tensor
from torch.nn import functional as F


def linear_bce(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    mask: Tensor | None,
    task_weight: Tensor | None,
    pos_weight: Tensor | None,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    """The total loss and the loss of every task, in float32 or better; differentiable by autograd."""
    precise = torch.promote_types(x.dtype, torch.float32)
    logits = F.linear(x, weight.to(x.dtype)).to(precise)
    if bias is not None:
        logits = logits + bias.to(precise)
    target = target.to(precise)
    share = torch.ones_like(target) if mask is None else mask.to(precise)
    share = torch.where(target.isnan(), 0.0, share)
    loss = F.binary_cross_entropy_with_logits(
        logits, target.nan_to_num(), reduction="none", pos_weight=None if pos_weight is None else pos_weight.to(precise)
    )
    # A row without weight counts nothing, whatever its logit.
    loss = torch.where(share == 0, 0.0, share * loss).sum(0)
    if reduction == "mean":
        loss = loss / share.sum(0).clamp(min=torch.finfo(torch.float32).tiny)
    return (loss if task_weight is None else loss * task_weight.to(precise)).sum(), loss


def linear_bce_with_gradients(
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
    """The maths of the kernel: total, losses, and the gradients of x, weight and bias (empty where there is none)."""
    reduction = "mean" if mean else "sum"
    total, losses = linear_bce(x, weight, bias, target, mask, task_weight, pos_weight, reduction)
    losses = losses.clone()
    if not needs_grad:
        return total, losses, x.new_empty(0), x.new_empty(0), x.new_empty(0)
    precise = torch.promote_types(x.dtype, torch.float32)
    logits = F.linear(x, weight.to(x.dtype)).to(precise)
    logits = logits if bias is None else logits + bias.to(precise)
    target = target.to(precise)
    share = torch.ones_like(target) if mask is None else mask.to(precise)
    share = torch.where(target.isnan(), 0.0, share)
    y = target.nan_to_num()
    positive = 1.0 if pos_weight is None else pos_weight.to(precise)
    slope = torch.sigmoid(logits) * (1 - y + positive * y) - positive * y
    if mean:
        share = share / share.sum(0).clamp(min=torch.finfo(torch.float32).tiny)
    if task_weight is not None:
        share = share * task_weight.to(precise)
    grad = torch.where(share == 0, 0.0, share * slope)
    low = grad.to(x.dtype)
    grad_bias = x.new_empty(0) if bias is None else grad.sum(0).to(bias.dtype)
    return total, losses, low @ weight.to(x.dtype), (low.t() @ x).to(weight.dtype), grad_bias
