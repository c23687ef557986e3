"""FP8 with a scale per row, per block of 128 or per tensor: the numbers, and their products.

Scales are powers of two, rounded up as in MXFP8 (``scale_bytes``): FP8 has exponents of its own, so this costs no
accuracy, and a copy of the codes under another scale is the same numbers. Inf and NaN make what shares their scale NaN.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_gem.precision.mx import FORMATS, Format, ScaleMode, _quantize_blocks, power_of_two

TILE = 128
SMALLEST = 2.0**-126


@dataclass(frozen=True)
class Scaled:
    """A quantised matrix, or a batch of them.

    Attributes:
        data: FP8 codes ``(..., m, k)``.
        scale: float32 ``(..., m / tall, k / wide)`` where the last blocks may be cut off; ``(..., m, 1)`` of rows.
        tall: Rows that share a scale.
        wide: Columns that do.
    """

    data: Tensor
    scale: Tensor
    tall: int
    wide: int


def quantize_rows(x: Tensor, fmt: Format = "e4m3", mode: ScaleMode = "rceil") -> Scaled:
    """One scale per row.

    Args:
        x: (..., m, k) bfloat16, float16 or float32, k at least 1.
        fmt: Format of the codes.
        mode: How scales are rounded.
    """
    codes, byte = _quantize_blocks(x, (-1,), fmt, mode, "poison", "nearest", None)
    return Scaled(codes.view(FORMATS[fmt].dtype), power_of_two(byte), 1, x.shape[-1])


def quantize_tiles(x: Tensor, tall: int, wide: int, fmt: Format = "e4m3", mode: ScaleMode = "rceil") -> Scaled:
    """One scale per ``tall`` x ``wide`` numbers; the last ones may be cut off."""
    rows, columns = x.shape[-2:]
    padded = F.pad(x, (0, -columns % wide, 0, -rows % tall))
    blocks = padded.unflatten(-1, (padded.shape[-1] // wide, wide)).unflatten(-3, (padded.shape[-2] // tall, tall))
    codes, byte = _quantize_blocks(blocks, (-3, -1), fmt, mode, "poison", "nearest", None)
    codes = codes.reshape(padded.shape)[..., :rows, :columns]
    return Scaled(codes.view(FORMATS[fmt].dtype), power_of_two(byte).squeeze(-1).squeeze(-2), tall, wide)


def quantize_tensor(x: Tensor, fmt: Format = "e4m3", mode: ScaleMode = "rceil") -> Scaled:
    """One scale per matrix."""
    if x.numel() == 0:
        return Scaled(x.to(FORMATS[fmt].dtype), x.new_ones((*x.shape[:-2], 1, 1), dtype=torch.float32), *x.shape[-2:])
    codes, byte = _quantize_blocks(x, (-2, -1), fmt, mode, "poison", "nearest", None)
    return Scaled(codes.view(FORMATS[fmt].dtype), power_of_two(byte), *x.shape[-2:])


def dequantize(x: Scaled, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers that codes stand for: exact in float32, and in bfloat16 up to its range."""
    rows, columns = x.data.shape[-2:]
    scale = x.scale
    if scale.shape[-2] not in (1, rows):
        scale = scale.repeat_interleave(x.tall, -2)[..., :rows, :]
    if scale.shape[-1] not in (1, columns):
        scale = scale.repeat_interleave(x.wide, -1)[..., :columns]
    return (x.data.to(torch.float32) * scale).to(dtype)


def transposed(x: Scaled) -> Scaled:
    """The transposed matrix: the same numbers."""
    return Scaled(x.data.mT, x.scale.mT, x.wide, x.tall)


def token_scales(activations: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """What moves the scales of tokens out of a sum over them.

    ``sum_m (a_m A_m) (g_m G_m)`` of codes A, G with scales a, g is ``c sum_m (r_m A_m) G_m`` with ``c = max a g`` and
    ``r = a g / c``, a power of two that shifts A's exponents without rounding, unless it flushes: a token whose
    scales are 1,000 times smaller than the largest loses precision, where it adds next to nothing to the sum.

    Args:
        activations: (..., m, 1), scales.
        gradients: (..., m, 1), scales.

    Returns:
        ``r`` (..., m, 1) and ``c`` (..., 1, 1).
    """
    product = activations * gradients
    if product.shape[-2] == 0:
        return product, product.new_ones((*product.shape[:-2], 1, 1))
    largest = product.amax(-2, keepdim=True).clamp(min=SMALLEST)
    return product / largest, largest


def matmul(a: Scaled, b: Scaled, dtype: torch.dtype, backend: Literal["native", "emulated"]) -> Tensor:
    """``A B^T`` of quantised matrices, accumulated in float32.

    Args:
        a: ``data`` (..., m, k).
        b: ``data`` (..., n, k).
        dtype: Type of the result.
        backend: The two differ by the order and width of accumulation only.

    Returns:
        (..., m, n).
    """
    if backend == "native":
        from lightning_gem.precision.hopper import scaled_matmul

        return scaled_matmul(a, b, dtype)
    # The numbers fit bfloat16, whose tensor cores accumulate in float32. float32 is for results of more precision.
    exact = torch.bfloat16 if a.data.is_cuda and dtype == torch.bfloat16 else torch.float32
    left, right = dequantize(a, exact), dequantize(b, exact)
    with torch.autocast(a.data.device.type, enabled=False):
        return torch.matmul(left, right.mT).to(dtype)
