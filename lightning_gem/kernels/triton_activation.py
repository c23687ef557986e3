# mypy: allow-untyped-defs
"""Activations and their derivatives inside Triton kernels, in float32; NaN stays NaN."""

import triton
import triton.language as tl


@triton.jit
def _gelu_tanh_slope(z):
    # 0.5 (1 + tanh(u)) = sigmoid(2u)
    return 1.5957691216057308 * z * (1.0 + 0.044715 * z * z)


@triton.jit
def activate(z, NAME: tl.constexpr):
    """``act(z)``."""
    if NAME == "identity":
        out = z
    elif NAME == "relu":
        out = tl.where(z < 0, 0.0, z)
    elif NAME == "relu_squared":
        out = tl.where(z < 0, 0.0, z) * tl.where(z < 0, 0.0, z)
    elif NAME == "leaky_relu":
        out = tl.where(z < 0, 0.01 * z, z)
    elif NAME == "gelu":
        out = 0.5 * z * (1.0 + tl.math.erf(0.7071067811865476 * z))
    elif NAME == "gelu_tanh":
        out = z * tl.sigmoid(_gelu_tanh_slope(z))
    elif NAME == "silu":
        out = z * tl.sigmoid(z)
    elif NAME == "hardswish":
        out = z * tl.minimum(tl.maximum(z + 3.0, 0.0), 6.0) * (1.0 / 6.0)
    else:
        tl.static_assert(NAME == "sigmoid", "unknown activation")
        out = tl.sigmoid(z)
    return out


@triton.jit
def derivative(z, NAME: tl.constexpr):
    """``act'(z)``."""
    if NAME == "identity":
        out = z * 0.0 + 1.0
    elif NAME == "relu":
        out = tl.where(z > 0, 1.0, 0.0)
    elif NAME == "relu_squared":
        out = 2.0 * tl.where(z < 0, 0.0, z)
    elif NAME == "leaky_relu":
        out = tl.where(z > 0, 1.0, 0.01)
    elif NAME == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * z * z)
        out = 0.5 * (1.0 + tl.math.erf(0.7071067811865476 * z)) + z * density
    elif NAME == "gelu_tanh":
        s = tl.sigmoid(_gelu_tanh_slope(z))
        out = s + z * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * z * z)
    elif NAME == "silu":
        s = tl.sigmoid(z)
        out = s * (1.0 + z * (1.0 - s))
    elif NAME == "hardswish":
        out = tl.where(z <= -3.0, 0.0, tl.where(z < 3.0, z * (1.0 / 3.0) + 0.5, 1.0))
    else:
        tl.static_assert(NAME == "sigmoid", "unknown activation")
        s = tl.sigmoid(z)
        out = s * (1.0 - s)
    return out
