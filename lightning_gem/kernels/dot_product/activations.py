"""Activations that may stand in place of the softmax. Each has act(0) = 0, so that hidden keys count as zero scores."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def _identity(scores: Tensor) -> Tensor:
    return scores


def _relu_squared(scores: Tensor) -> Tensor:
    return F.relu(scores).square()


def _gelu_tanh(scores: Tensor) -> Tensor:
    return F.gelu(scores, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": _identity,
    "relu": F.relu,
    "relu_squared": _relu_squared,
    "leaky_relu": F.leaky_relu,  # slope 0.01
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": F.silu,
    "hardswish": F.hardswish,
}


def check_activation(activation: str | Sequence[str], num_heads: int) -> None:
    """Raises ValueError for an unknown name, or for a list that is not one name per query head."""
    names = [activation] if isinstance(activation, str) else list(activation)
    unknown = [name for name in names if name not in ACTIVATIONS]
    if unknown:
        raise ValueError(f"activation {unknown[0]!r} is unknown: use one of {', '.join(ACTIVATIONS)}")
    if not isinstance(activation, str) and len(names) != num_heads:
        raise ValueError(f"activation lists {len(names)} names for {num_heads} query heads: give one name per head")


def activate(scores: Tensor, activation: str | Sequence[str]) -> Tensor:
    """Applies one activation, or one per head, to scores (..., H, q, k)."""
    if isinstance(activation, str):
        return ACTIVATIONS[activation](scores)
    heads = scores.split(1, dim=-3)
    return torch.cat([ACTIVATIONS[name](head) for name, head in zip(activation, heads, strict=True)], dim=-3)
