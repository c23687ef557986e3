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
