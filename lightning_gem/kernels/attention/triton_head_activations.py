# mypy: ignore-errors
"""The activations of a kernel's heads: a set of activations as bits, and the code of each head if there are several."""

import triton
import triton.language as tl

from lightning_gem.kernels.triton_activations import CODES as _ALL
from lightning_gem.kernels.triton_activations import activate, activate_with_derivative

_NUM_CODES = tl.constexpr(len(_ALL))


@triton.jit
def activate_head(x, codes, head, CODES: tl.constexpr, PER_HEAD: tl.constexpr, FAST: tl.constexpr):
    """The activation of a head; CODES has a bit for every activation in use."""
    y = x
    mine = 0
    if PER_HEAD:
        mine = tl.load(codes + head)
    for code in tl.static_range(_NUM_CODES):
        if (CODES >> code) & 1:
            if PER_HEAD:
                y = tl.where(mine == code, activate(x, code, FAST), y)
            else:
                y = activate(x, code, FAST)
    return y


@triton.jit
def activate_head_with_derivative(x, codes, head, CODES: tl.constexpr, PER_HEAD: tl.constexpr, FAST: tl.constexpr):
    """The same, and its derivative."""
    y = x
    slope = x
    mine = 0
    if PER_HEAD:
        mine = tl.load(codes + head)
    for code in tl.static_range(_NUM_CODES):
        if (CODES >> code) & 1:
            one, one_slope = activate_with_derivative(x, code, FAST)
            if PER_HEAD:
                y = tl.where(mine == code, one, y)
                slope = tl.where(mine == code, one_slope, slope)
            else:
                y = one
                slope = one_slope
    return y, slope
