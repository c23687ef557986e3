# mypy: ignore-errors
"""Activations and their derivatives inside Triton kernels; they also run in Triton's interpreter."""

import triton
import triton.language as tl

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_INVERSE_SQRT_2PI = tl.constexpr(0.3989422804014327)
_TWICE_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)
_CUBIC = tl.constexpr(0.044715)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation of that name."""
    y, _ = activate_with_derivative(x, ACTIVATION)
    return y


@triton.jit
def activate_with_derivative(x, ACTIVATION: tl.constexpr):
    """The activation of that name, and its derivative; what is not used costs nothing."""
    if ACTIVATION == "relu":
        y = tl.maximum(x, 0.0)
        slope = tl.where(x > 0, 1.0, 0.0)
    elif ACTIVATION == "relu_squared":
        positive = tl.maximum(x, 0.0)
        y = positive * positive
        slope = 2 * positive
    elif ACTIVATION == "leaky_relu":
        y = tl.maximum(x, 0.01 * x)
        slope = tl.where(x > 0, 1.0, 0.01)
    elif ACTIVATION == "gelu":
        share = 0.5 + 0.5 * tl.math.erf(x * _SQRT_HALF)
        y = x * share
        slope = share + x * _INVERSE_SQRT_2PI * tl.exp(-0.5 * x * x)
    elif ACTIVATION == "gelu_tanh":
        # x (1 + tanh u) / 2 is x sigmoid(2 u).
        share = tl.sigmoid(x * (_TWICE_SQRT_2_OVER_PI + _TWICE_SQRT_2_OVER_PI * _CUBIC * x * x))
        y = x * share
        slope = share + y * (1 - share) * (_TWICE_SQRT_2_OVER_PI + 3 * _TWICE_SQRT_2_OVER_PI * _CUBIC * x * x)
    elif ACTIVATION == "silu":
        share = tl.sigmoid(x)
        y = x * share
        slope = share + y * (1 - share)
    elif ACTIVATION == "hardswish":
        y = x * tl.minimum(tl.maximum(x + 3, 0.0), 6.0) * (1.0 / 6.0)
        slope = tl.where(x < -3, 0.0, tl.where(x <= 3, x * (1.0 / 3.0) + 0.5, 1.0))
    else:
        tl.static_assert(ACTIVATION == "identity")
        y = x
        slope = tl.full(x.shape, 1.0, tl.float32)
    return y, slope
