"""What a format does to a tensor, and to the products that it takes part in."""

import torch
from torch import Tensor

from lightning_gem.precision.mx import Format, ScaleMode, mx_dequantize, mx_quantize
from lightning_gem.precision.recipes import Kind
from lightning_gem.precision.scaled import TILE, dequantize, quantize_rows, quantize_tensor, quantize_tiles

BEST = 120.0  # decibels of an exact result
LARGEST_CODE = {"e4m3": 0x7E, "e5m2": 0x7B}


def signal_to_noise(exact: Tensor, approximate: Tensor) -> Tensor:
    """Decibels of signal over error, at most 120; NaN where either tensor is not finite."""
    noise = (exact - approximate).square().sum(dtype=torch.float64)
    signal = exact.square().sum(dtype=torch.float64)
    decibels = (10 * torch.log10(signal / noise)).clamp(max=BEST)
    return torch.where(noise == 0, BEST, decibels).to(torch.float32)


def round_trip(
    x: Tensor, axis: int, fmt: Format = "e4m3", scale: ScaleMode = "rceil", kind: Kind = "mx"
) -> tuple[Tensor, Tensor]:
    """Codes and float32 numbers of an operand that is contracted along an axis."""
    if kind == "mx":
        blocks = mx_quantize(x, axis, fmt, scale)
        return blocks.data.narrow(-1, 0, x.shape[axis]).movedim(-1, axis), mx_dequantize(blocks)
    moved = x.movedim(axis, -1)
    if kind == "block":
        low = quantize_tiles(moved, 1, TILE, fmt, scale)
    else:
        low = (quantize_tensor if kind == "tensor" else quantize_rows)(moved, fmt, scale)
    return low.data.view(torch.uint8).movedim(-1, axis), dequantize(low).movedim(-1, axis)


def operand_statistics(
    x: Tensor, axis: int, fmt: Format = "e4m3", scale: ScaleMode = "rceil", kind: Kind = "mx"
) -> Tensor:
    """Signal to noise in decibels, and the fractions of the non-zeros that become zero or saturate: ``(3,)``."""
    exact = x.to(torch.float32)
    codes, back = round_trip(x, axis, fmt, scale, kind)
    codes = codes & 0x7F
    nonzero = (exact != 0).sum().clamp(min=1)
    flushed = ((back == 0) & (exact != 0)).sum() / nonzero
    saturated = ((codes == LARGEST_CODE[fmt]) & (exact.abs() > back.abs())).sum() / nonzero
    return torch.stack([signal_to_noise(exact, back), flushed, saturated])


def product_statistics(
    a: Tensor, axis_a: int, b: Tensor, axis_b: int, fmt_a: Format, fmt_b: Format, kind: Kind = "mx"
) -> Tensor:
    """Signal to noise in decibels of a product contracted over these axes (of the last two) of both operands."""

    def product(left: Tensor, right: Tensor) -> Tensor:
        return left.movedim(axis_a, -1) @ right.movedim(axis_b, -1).mT

    low = product(round_trip(a, axis_a, fmt_a, kind=kind)[1], round_trip(b, axis_b, fmt_b, kind=kind)[1])
    return signal_to_noise(product(a.to(torch.float32), b.to(torch.float32)), low)
