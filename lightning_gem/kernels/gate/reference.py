"""Gates in plain PyTorch."""

import torch
from torch import Tensor

from lightning_gem.kernels.dot_product.activations import ACTIVATIONS, DERIVATIVES

GATES = {**ACTIVATIONS, "sigmoid": torch.sigmoid}
GATE_DERIVATIVES = {**DERIVATIVES, "sigmoid": lambda x: torch.sigmoid(x) * (1 - torch.sigmoid(x))}


def gate(value: Tensor, scores: Tensor, activation: str) -> Tensor:
    """``value * act(scores)``."""
    return GATES[activation](scores) * value


def gate_backward(grad_out: Tensor, value: Tensor, scores: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Gradients of value and scores, contiguous."""
    precise = torch.promote_types(grad_out.dtype, torch.float32)
    grad, v, s = (t.to(precise) for t in (grad_out, value, scores))
    grad_value, grad_scores = grad * GATES[activation](s), grad * v * GATE_DERIVATIVES[activation](s)
    return grad_value.to(value.dtype).contiguous(), grad_scores.to(scores.dtype).contiguous()
