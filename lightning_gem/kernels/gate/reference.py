"""Gates in plain PyTorch."""

import torch
from torch import Tensor

from lightning_gem.kernels.dot_product.activations import ACTIVATIONS

GATES = {**ACTIVATIONS, "sigmoid": torch.sigmoid}


def gate(value: Tensor, scores: Tensor, activation: str) -> Tensor:
    """``value * act(scores)``."""
    return GATES[activation](scores) * value
