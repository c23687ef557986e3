"""What a format does to a tensor, and to the products that it takes part in."""

import torch
from torch import Tensor

from lightning_gem.precision.mx import Format, ScaleMode, mx_dequantize, mx_quantize

BEST = 120.0  # decibels of an exact result
LARGEST_CODE = {"e4m3": 0x7E, "e5m2": 0x7B}


def signal_to_noise(exact: Tensor, approximate: Tensor) -> Tensor:
    """Decibels of signal over error, at most 120; NaN where either tensor is not finite."""
    noise = (exact - approximate).square().sum(dtype=torch.float64)
    signal = exact.square().sum(dtype=torch.float64)
    decibels = (10 * torch.log10(signal / noise)).clamp(max=BEST)
    return torch.where(noise == 0, BEST, decibels).to(torch.float32)


def operand_statistics(x: Tensor, axis: int, fmt: Format = "e4m3", scale: ScaleMode = "rceil") -> Tensor:
    """Signal to noise in decibels, and the fractions of the non-zeros that become zero or saturate: ``(3,)``."""
    exact = x.to(torch.float32)
    blocks = mx_quantize(x, axis, fmt, scale)
    back = mx_dequantize(blocks)
    codes = blocks.data.narrow(-1, 0, x.shape[axis]).movedim(-1, axis) & 0x7F
    nonzero = (exact != 0).sum().clamp(min=1)
    flushed = ((back == 0) & (exact != 0)).sum() / nonzero
    saturated = ((codes == LARGEST_CODE[fmt]) & (exact.abs() > back.abs())).sum() / nonzero
    return torch.stack([signal_to_noise(exact, back), flushed, saturated])


def product_statistics(a: Tensor, axis_a: int, b: Tensor, axis_b: int, fmt_a: Format, fmt_b: Format) -> Tensor:
    """Signal to noise in decibels of a product contracted over these axes (of the last two) of both operands."""

    def product(left: Tensor, right: Tensor) -> Tensor:
        return left.movedim(axis_a, -1) @ right.movedim(axis_b, -1).mT

    low = product(mx_dequantize(mx_quantize(a, axis_a, fmt_a)), mx_dequantize(mx_quantize(b, axis_b, fmt_b)))
    return signal_to_noise(product(a.to(torch.float32), b.to(torch.float32)), low)
