"""Operands of attention in MXFP8: numbers of the format in the tensor's own type, for any attention on any device.

Queries and keys are blocked along the head's dimension, which the scores contract. Probabilities and values are not
quantised: their product contracts the tokens, and blocks along those would share scales between requests and with the
future. The gradient passes through unchanged, as for any rounding.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_gem.kernels import rotary as rotate
from lightning_gem.precision.mx import Format, mx_dequantize, mx_quantize


def mx_fake_quantize(x: Tensor, axis: int = -1, fmt: Format = "e4m3") -> Tensor:
    """``x`` as MXFP8 numbers in its own type, exact in bfloat16; the gradient is that of the identity."""
    out: Tensor = _FakeQuantize.apply(x, axis, fmt)
    return out


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, fmt: Format) -> Tensor:
        return mx_dequantize(mx_quantize(x, axis, fmt), x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


def with_low_precision_scores(attention: Callable[..., Any], fmt: Format = "e4m3") -> Callable[..., Any]:
    """An attention op of ``lightning_gem.kernels`` with queries and keys in MXFP8::

        low_precision_gdpa = with_low_precision_scores(gdpa)

    Block attention's rotation happens before, outside of its kernel.

    Args:
        attention: ``jagged_flash_attention``, ``gdpa``, ``block_attention`` or ``pma_attention``.
        fmt: Format of queries and keys.
    """

    @functools.wraps(attention)
    def call(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        angles = kwargs.pop("rotary", None)
        if angles is not None:
            query, key = rotate(query, *angles), rotate(key, *angles)
            value = rotate(value, *angles) if kwargs.pop("rotate_value", False) else value
        return attention(mx_fake_quantize(query, -1, fmt), mx_fake_quantize(key, -1, fmt), value, *args, **kwargs)

    return call
