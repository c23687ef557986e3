"""Activations that may stand in place of the softmax. Each has act(0) = 0, so that hidden keys count as zero scores."""

import math
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


# Even part of GELU, x/2 erf(x/sqrt(2)), as a polynomial in x^2 without constant: least maximal error on |x| <= 2.
GELU_POLY_BOUND = 2.0
GELU_POLY_COEFFICIENTS = (0.3926063, -0.05570319, 0.00431978)


def _gelu_poly(scores: Tensor) -> Tensor:
    """GELU within 1.2e-3 for |x| <= 2, where normed queries and keys stay; a straight line of slope 1/2 beyond.

    It needs multiplications alone, which GPUs have more of than exponentials (the idea is that of Meta's GDPA kernels).
    """
    square = scores.square().clamp(max=GELU_POLY_BOUND**2)
    first, second, third = GELU_POLY_COEFFICIENTS
    return 0.5 * scores + square * (first + square * (second + square * third))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": _identity,
    "relu": F.relu,
    "relu_squared": _relu_squared,
    "leaky_relu": F.leaky_relu,  # slope 0.01
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "gelu_poly": _gelu_poly,
    "silu": F.silu,
    "hardswish": F.hardswish,
}


def _gelu_derivative(x: Tensor) -> Tensor:
    density = torch.exp(-0.5 * x.square()) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * density


def _gelu_tanh_derivative(x: Tensor) -> Tensor:
    slope, cubic = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(slope * (x + cubic * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t.square()) * slope * (1 + 3 * cubic * x.square())


def _gelu_poly_derivative(x: Tensor) -> Tensor:
    square = x.square()
    first, second, third = GELU_POLY_COEFFICIENTS
    inner = 0.5 + x * (2 * first + square * (4 * second + 6 * third * square))
    return torch.where(square <= GELU_POLY_BOUND**2, inner, 0.5)


def _silu_derivative(x: Tensor) -> Tensor:
    gate = torch.sigmoid(x)
    return gate * (1 + x * (1 - gate))


def _hardswish_derivative(x: Tensor) -> Tensor:
    return torch.where(x <= -3, 0.0, torch.where(x < 3, x / 3 + 0.5, 1.0))


# For references that must not rely on autograd: what it would give.
DERIVATIVES: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": torch.ones_like,
    "relu": lambda x: (x > 0).to(x.dtype),
    "relu_squared": lambda x: 2 * F.relu(x),
    "leaky_relu": lambda x: 1 - 0.99 * (x <= 0).to(x.dtype),
    "gelu": _gelu_derivative,
    "gelu_tanh": _gelu_tanh_derivative,
    "gelu_poly": _gelu_poly_derivative,
    "silu": _silu_derivative,
    "hardswish": _hardswish_derivative,
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
    return _per_head(ACTIVATIONS, scores, activation)


def activation_derivative(scores: Tensor, activation: str | Sequence[str]) -> Tensor:
    """The derivative of :func:`activate` at scores (..., H, q, k)."""
    return _per_head(DERIVATIVES, scores, activation)


def _per_head(functions: dict[str, Callable[[Tensor], Tensor]], scores: Tensor, names: str | Sequence[str]) -> Tensor:
    if isinstance(names, str):
        return functions[names](scores)
    heads = scores.split(1, dim=-3)
    return torch.cat([functions[name](head) for name, head in zip(names, heads, strict=True)], dim=-3)
