# mypy: ignore-errors
"""Activations and their derivatives inside Triton kernels, in float32; they also run in Triton's interpreter.

A kernel gets the code of its activation as a constant. NaN stays NaN.
"""

import triton
import triton.language as tl

from lightning_gem.kernels.dot_product.activations import ACTIVATIONS, GELU_POLY_BOUND, GELU_POLY_COEFFICIENTS

CODES = {name: code for code, name in enumerate([*ACTIVATIONS, "sigmoid"])}

IDENTITY = tl.constexpr(CODES["identity"])
_RELU = tl.constexpr(CODES["relu"])
_RELU_SQUARED = tl.constexpr(CODES["relu_squared"])
_LEAKY_RELU = tl.constexpr(CODES["leaky_relu"])
_GELU = tl.constexpr(CODES["gelu"])
_GELU_TANH = tl.constexpr(CODES["gelu_tanh"])
_GELU_POLY = tl.constexpr(CODES["gelu_poly"])
_SILU = tl.constexpr(CODES["silu"])
_HARDSWISH = tl.constexpr(CODES["hardswish"])
_SIGMOID = tl.constexpr(CODES["sigmoid"])

_POLY_LIMIT = tl.constexpr(GELU_POLY_BOUND**2)
_POLY_1 = tl.constexpr(GELU_POLY_COEFFICIENTS[0])
_POLY_2 = tl.constexpr(GELU_POLY_COEFFICIENTS[1])
_POLY_3 = tl.constexpr(GELU_POLY_COEFFICIENTS[2])
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_INVERSE_SQRT_2PI = tl.constexpr(0.3989422804014327)
_SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
_CUBIC = tl.constexpr(0.044715)


@triton.jit
def tanh(x, FAST: tl.constexpr):
    """FAST is one instruction of NVIDIA GPUs, exact to about 11 bits."""
    if FAST:
        y = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = 2 * tl.sigmoid(2 * x) - 1
    return y


@triton.jit
def _sigmoid(x, FAST: tl.constexpr):
    if FAST:
        y = 0.5 + 0.5 * tanh(0.5 * x, FAST)
    else:
        y = tl.sigmoid(x)
    return y


@triton.jit
def activate(x, CODE: tl.constexpr, FAST: tl.constexpr):
    """The activation; FAST takes the hardware's tanh."""
    if CODE == _RELU:
        y = tl.where(x < 0, 0.0, x)
    elif CODE == _RELU_SQUARED:
        positive = tl.where(x < 0, 0.0, x)
        y = positive * positive
    elif CODE == _LEAKY_RELU:
        y = tl.maximum(x, 0.01 * x)
    elif CODE == _GELU:
        y = 0.5 * x * (1 + tl.math.erf(x * _SQRT_HALF))
    elif CODE == _GELU_TANH:
        half = 0.5 * x
        y = half + half * tanh(x * (_SQRT_2_OVER_PI + _SQRT_2_OVER_PI * _CUBIC * x * x), FAST)
    elif CODE == _GELU_POLY:
        square = tl.minimum(x * x, _POLY_LIMIT)
        y = 0.5 * x + square * (_POLY_1 + square * (_POLY_2 + square * _POLY_3))
    elif CODE == _SILU:
        y = x * _sigmoid(x, FAST)
    elif CODE == _HARDSWISH:
        y = x * tl.minimum(tl.maximum(x + 3, 0.0), 6.0) * (1.0 / 6.0)
    elif CODE == _SIGMOID:
        y = _sigmoid(x, FAST)
    else:
        tl.static_assert(CODE == IDENTITY)
        y = x
    return y


@triton.jit
def activate_with_derivative(x, CODE: tl.constexpr, FAST: tl.constexpr):
    """The activation and its derivative; what is not used costs nothing."""
    if CODE == _RELU:
        y = tl.where(x < 0, 0.0, x)
        slope = tl.where(x > 0, 1.0, 0.0)
    elif CODE == _RELU_SQUARED:
        positive = tl.where(x < 0, 0.0, x)
        y = positive * positive
        slope = 2 * positive
    elif CODE == _LEAKY_RELU:
        y = tl.maximum(x, 0.01 * x)
        slope = tl.where(x > 0, 1.0, 0.01)
    elif CODE == _GELU:
        share = 0.5 + 0.5 * tl.math.erf(x * _SQRT_HALF)
        y = x * share
        slope = share + x * _INVERSE_SQRT_2PI * tl.exp(-0.5 * x * x)
    elif CODE == _GELU_TANH:
        share = 0.5 + 0.5 * tanh(x * (_SQRT_2_OVER_PI + _SQRT_2_OVER_PI * _CUBIC * x * x), FAST)
        y = x * share
        # With t = 2 share - 1, x (1 - t^2) / 2 is 2 y (1 - share).
        slope = share + (y - y * share) * (2 * _SQRT_2_OVER_PI + 6 * _SQRT_2_OVER_PI * _CUBIC * x * x)
    elif CODE == _GELU_POLY:
        square = x * x
        clamped = tl.minimum(square, _POLY_LIMIT)
        y = 0.5 * x + clamped * (_POLY_1 + clamped * (_POLY_2 + clamped * _POLY_3))
        bend = x * (2 * _POLY_1 + clamped * (4 * _POLY_2 + clamped * (6 * _POLY_3)))
        slope = 0.5 + tl.where(square <= _POLY_LIMIT, bend, 0.0)
    elif CODE == _SILU:
        gate = _sigmoid(x, FAST)
        y = x * gate
        slope = gate + y * (1 - gate)
    elif CODE == _HARDSWISH:
        y = x * tl.minimum(tl.maximum(x + 3, 0.0), 6.0) * (1.0 / 6.0)
        slope = tl.where(x <= -3, 0.0, tl.where(x < 3, x * (1.0 / 3.0) + 0.5, 1.0))
    elif CODE == _SIGMOID:
        y = _sigmoid(x, FAST)
        slope = y * (1 - y)
    else:
        tl.static_assert(CODE == IDENTITY)
        y = x
        slope = tl.full(x.shape, 1.0, tl.float32)
    return y, slope
