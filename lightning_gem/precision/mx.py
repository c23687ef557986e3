"""MXFP8: numbers in blocks that share a power-of-two scale, bit for bit.

A block is 32 elements along one axis, or a square of 32 x 32, each one byte (E4M3 or E5M2), with one scale byte (E8M0:
``2 ** (byte - 127)``, 255 is NaN). Plain torch operations on integers and float32, the same in eager mode, under
``torch.compile`` and on every device. Format: OCP Microscaling Formats v1.0; rounding scales up (``rceil``) after
arXiv 2506.08027.

What is defined beyond the format: an Inf or NaN makes its whole block NaN (scale 255, every element 0x7F); a block of
zeros has scale byte 0 and keeps the signs of its zeros; amplitudes too small for scale byte 0 are scaled by it exactly.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 32
NAN_SCALE = 255
NAN_ELEMENT = 0x7F

Format = Literal["e4m3", "e5m2"]
ScaleMode = Literal["rceil", "floor", "ceil", "even"]
Rounding = Literal["nearest", "stochastic"]


@dataclass(frozen=True)
class ElementFormat:
    """An 8-bit float: torch's type, largest value, exponent of the largest power of two, mantissa bits, bias."""

    dtype: torch.dtype
    largest: float
    max_exponent: int
    mantissa_bits: int
    bias: int


FORMATS = {
    "e4m3": ElementFormat(torch.float8_e4m3fn, 448.0, 8, 3, 7),
    "e5m2": ElementFormat(torch.float8_e5m2, 57344.0, 15, 2, 15),
}


@dataclass(frozen=True)
class MXBlocks:
    """A quantised tensor.

    Attributes:
        data: uint8 codes. The blocked axis has moved to the end (what a GEMM contracts over lies contiguous) and is
            padded with zeros to a multiple of 32; square blocks pad the last two dimensions and move nothing.
        scale: uint8 scale bytes: ``data``'s shape with the blocked dimensions divided by 32.
        fmt: Format of the codes.
        shape: Shape of the tensor that was quantised.
        axis: The blocked axis of that shape, counted from the front; of square blocks the last.
        square: Whether a block is 32 x 32.
    """

    data: Tensor
    scale: Tensor
    fmt: Format
    shape: tuple[int, ...]
    axis: int
    square: bool = False

    def transposed(self) -> "MXBlocks":
        """Square blocks of the transposed matrix: the same numbers, no new rounding."""
        if not self.square:
            raise ValueError("only square blocks can be transposed: use mx_requantize to block another axis")
        shape = (*self.shape[:-2], self.shape[-1], self.shape[-2])
        data, scale = (
            x.transpose(-1, -2).clone(memory_format=torch.contiguous_format) for x in (self.data, self.scale)
        )
        return MXBlocks(data, scale, self.fmt, shape, self.axis, True)

    def as_rows(self) -> "MXBlocks":
        """Square blocks as blocks of 1 x 32 along the last axis, each row with its own copy of the scale."""
        if not self.square:
            return self
        rows = self.shape[-2]
        scale = self.scale.repeat_interleave(BLOCK, dim=-2).narrow(-2, 0, rows)
        return MXBlocks(self.data.narrow(-2, 0, rows), scale, self.fmt, self.shape, self.axis)


def scale_bytes(largest: Tensor, fmt: Format = "e4m3", mode: ScaleMode = "rceil") -> Tensor:
    """Scale byte of blocks from the bits of their largest magnitudes.

    Integers only: the float32 logarithm and the cast to E8M0 round where the rule must not.

    Args:
        largest: int32 bits of the float32 magnitudes; Inf and NaN give 255.
        fmt: Format of the elements.
        mode: ``rceil``: the largest element is at most the largest code (never saturates). ``floor``: the format's own
            rule, which saturates up to 1/8 of a binade. ``ceil``: never saturates, wastes up to a binade. ``even``: as
            ``floor`` after rounding the magnitude to the mantissa of an element.

    Returns:
        int32 scale bytes of the same shape.
    """
    element = FORMATS[fmt]
    exponent, mantissa = largest >> 23, largest & 0x7FFFFF
    if mode == "rceil":
        # Both largest codes are 1.75 times a power of two. At the smallest scale the quotient of magnitude and largest
        # code is subnormal in float32 and may round down to the scale itself: what float32 gives is the rule.
        threshold = torch.where(exponent == element.max_exponent, 0x600001, 0x600000)
        exponent = exponent + (mantissa > threshold).to(torch.int32)
    elif mode == "ceil":
        exponent = exponent + (mantissa != 0).to(torch.int32)
    elif mode == "even":
        exponent = (largest + (1 << (22 - element.mantissa_bits))) >> 23
    elif mode != "floor":
        raise ValueError(f"scale mode {mode!r} is unknown: use one of {', '.join(get_args(ScaleMode))}")
    byte = (exponent - element.max_exponent).clamp(min=0)
    return torch.where(largest >= 0x7F800000, NAN_SCALE, byte)


def mx_quantize(
    x: Tensor,
    axis: int = -1,
    fmt: Format = "e4m3",
    scale: ScaleMode = "rceil",
    inf: Literal["poison", "saturate"] = "poison",
    rounding: Rounding = "nearest",
    generator: torch.Generator | None = None,
) -> MXBlocks:
    """Quantises to blocks of 32 along one axis.

    Args:
        x: bfloat16, float16 or float32, at least one dimension; empty is legal.
        axis: The axis that blocks run along.
        fmt: ``e4m3`` or ``e5m2``.
        scale: As in :func:`scale_bytes`.
        inf: ``poison``: Inf makes its block NaN. ``saturate``: the block gets scale byte 254, Inf the largest code,
            and the rest is flushed to zero, as the conversion instruction of NVIDIA's GPUs does.
        rounding: ``nearest`` (ties to even) or ``stochastic`` (unbiased below the largest code).
        generator: Random numbers of stochastic rounding.

    Returns:
        The blocks, exact to the bit.

    Raises:
        ValueError: For another dtype, format, mode or axis.
    """
    _check(x, fmt, 1)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis {axis} is out of range for shape {tuple(x.shape)}: use {-x.ndim} to {x.ndim - 1}")
    axis %= x.ndim
    moved = x.movedim(axis, -1)
    padded = F.pad(moved, (0, -moved.shape[-1] % BLOCK))
    blocks = padded.unflatten(-1, (padded.shape[-1] // BLOCK, BLOCK))
    codes, byte = _quantize_blocks(blocks, (-1,), fmt, scale, inf, rounding, generator)
    return MXBlocks(codes.flatten(-2), byte.squeeze(-1), fmt, tuple(x.shape), axis)


def mx_quantize_2d(
    x: Tensor,
    fmt: Format = "e4m3",
    scale: ScaleMode = "rceil",
    inf: Literal["poison", "saturate"] = "poison",
    rounding: Rounding = "nearest",
    generator: torch.Generator | None = None,
) -> MXBlocks:
    """Quantises the last two dimensions to squares of 32 x 32, so that a matrix and its transpose are the same numbers.

    Args:
        x: bfloat16, float16 or float32, at least two dimensions; leading dimensions are a batch.
        fmt: As in :func:`mx_quantize`; so are all other arguments.
        scale: See ``fmt``.
        inf: See ``fmt``.
        rounding: See ``fmt``.
        generator: See ``fmt``.

    Returns:
        Square blocks.

    Raises:
        ValueError: As :func:`mx_quantize`.
    """
    _check(x, fmt, 2)
    rows, columns = x.shape[-2:]
    padded = F.pad(x, (0, -columns % BLOCK, 0, -rows % BLOCK))
    tall, wide = padded.shape[-2] // BLOCK, padded.shape[-1] // BLOCK
    blocks = padded.reshape(*x.shape[:-2], tall, BLOCK, wide, BLOCK)
    codes, byte = _quantize_blocks(blocks, (-3, -1), fmt, scale, inf, rounding, generator)
    return MXBlocks(codes.reshape(padded.shape), byte.squeeze(-1).squeeze(-2), fmt, tuple(x.shape), x.ndim - 1, True)


def mx_dequantize(blocks: MXBlocks, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers that blocks stand for, in the original shape.

    Exact in float32 for scale bytes to 246 and in bfloat16 for 3 to 246; beyond, the largest codes become Inf and
    bfloat16 flushes the smallest numbers.

    Args:
        blocks: Of any kind.
        dtype: Floating type of the result.
    """
    values = decode(blocks.data, blocks.scale, blocks.fmt, blocks.square)
    if blocks.square:
        return values.narrow(-2, 0, blocks.shape[-2]).narrow(-1, 0, blocks.shape[-1]).to(dtype)
    return values.narrow(-1, 0, blocks.shape[blocks.axis]).movedim(-1, blocks.axis).to(dtype)


def decode(data: Tensor, scale: Tensor, fmt: Format = "e4m3", square: bool = False) -> Tensor:
    """float32 numbers of codes ``(..., n)`` with scales ``(..., n / 32)``, or ``(..., m / 32, n / 32)`` of squares."""
    values = data.view(FORMATS[fmt].dtype).to(torch.float32)
    factor = power_of_two(scale)
    if square:
        tall, wide = scale.shape[-2:]
        values = values.reshape(*scale.shape[:-2], tall, BLOCK, wide, BLOCK) * factor.unsqueeze(-1).unsqueeze(-3)
    else:
        values = values.unflatten(-1, (scale.shape[-1], BLOCK)) * factor.unsqueeze(-1)
    return values.reshape(data.shape)


def power_of_two(scale: Tensor) -> Tensor:
    """float32 value of scale bytes: byte 0 is the subnormal ``2**-127``, 255 is NaN."""
    byte = scale.to(torch.int32)
    bits = torch.where(byte == 0, 0x00400000, byte << 23)
    return torch.where(byte == NAN_SCALE, 0x7FC00000, bits).view(torch.float32)


def mx_requantize(blocks: MXBlocks, axis: int, scale: ScaleMode = "rceil") -> MXBlocks:
    """Blocks along another axis, from the quantised numbers: powers of two as scales make it almost lossless."""
    return mx_quantize(mx_dequantize(blocks), axis, blocks.fmt, scale)


def hadamard_matrix(seed: int | None = None, device: torch.device | str = "cpu") -> Tensor:
    """Orthonormal float32 Hadamard matrix (32, 32), its rows with random signs if a seed is given."""
    matrix = torch.ones(1, 1)
    while len(matrix) < BLOCK:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        matrix = matrix * (torch.randint(0, 2, (BLOCK, 1), generator=generator) * 2 - 1)
    return (matrix * BLOCK**-0.5).to(device)


def random_hadamard(x: Tensor, matrix: Tensor, axis: int = -1, inverse: bool = False) -> Tensor:
    """Multiplies blocks of 32 along an axis by an orthonormal matrix, which spreads outliers over their block.

    Both operands of a GEMM, transformed along the contracted axis, have the product that they had. Method: random
    Hadamard transform as in QuaRot (arXiv 2404.00456), in blocks.

    Args:
        x: Floating; the axis is a multiple of 32 long.
        matrix: From :func:`hadamard_matrix`.
        axis: The axis.
        inverse: Undo it.

    Returns:
        float32, of x's shape.

    Raises:
        ValueError: If the axis is no multiple of 32.
    """
    if x.shape[axis] % BLOCK:
        raise ValueError(f"axis {axis} of {tuple(x.shape)} must be a multiple of {BLOCK}: pad it with zeros")
    moved = x.movedim(axis, -1).to(torch.float32)
    blocks = moved.unflatten(-1, (moved.shape[-1] // BLOCK, BLOCK))
    return (blocks @ (matrix.T if inverse else matrix)).flatten(-2).movedim(-1, axis)


def mx_to_blocked(scale: Tensor) -> Tensor:
    """Scale bytes ``(rows, columns)`` in the tiles of 128 x 4 that block-scaled GEMMs read, flat, padded with zeros.

    Byte ``(r, c)`` of ``C`` padded columns lands at ``((r // 128) * (C / 4) + c // 4) * 512 + (r % 32) * 16 +
    ((r % 128) // 32) * 4 + c % 4``: the 32x4x4 layout of cuBLAS.
    """
    rows, columns = scale.shape
    padded = F.pad(scale, (0, -columns % 4, 0, -rows % 128))
    tiles = padded.unflatten(1, (padded.shape[1] // 4, 4)).unflatten(0, (padded.shape[0] // 128, 4, 32))
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def mx_from_blocked(blocked: Tensor, rows: int, columns: int) -> Tensor:
    """Scale bytes ``(rows, columns)`` from their tiles: the inverse of :func:`mx_to_blocked`."""
    tall, wide = -(-rows // 128), -(-columns // 4)
    tiles = blocked.view(tall, wide, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(tall * 128, wide * 4)[:rows, :columns]


def _check(x: Tensor, fmt: str, min_dim: int) -> None:
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"x must be bfloat16, float16 or float32, got {x.dtype}: cast it with x.float()")
    if x.ndim < min_dim:
        raise ValueError(f"x must have at least {min_dim} dimension(s), got shape {tuple(x.shape)}: reshape it")
    if fmt not in FORMATS:
        raise ValueError(f"format {fmt!r} is unknown: use one of {', '.join(FORMATS)}")


def _quantize_blocks(
    blocks: Tensor,
    dims: tuple[int, ...],
    fmt: Format,
    mode: ScaleMode,
    inf: str,
    rounding: str,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """uint8 codes in the shape of ``blocks`` and uint8 scales with ones at ``dims``, the dimensions of a block."""
    if inf not in ("poison", "saturate") or rounding not in ("nearest", "stochastic"):
        raise ValueError(
            f"inf={inf!r}, rounding={rounding!r}: use 'poison' or 'saturate', and 'nearest' or 'stochastic'"
        )
    values = blocks.to(torch.float32)
    # Magnitudes of floats are ordered as their bits, NaN above all.
    magnitude = values.view(torch.int32) & 0x7FFFFFFF
    largest = magnitude.amax(dims, keepdim=True)
    byte = scale_bytes(largest, fmt, mode)
    if inf == "saturate":
        byte = torch.where(largest == 0x7F800000, 254, byte)
    bits = 254 - byte
    factor = torch.where(bits <= 0, 0x00400000, bits << 23).view(torch.float32)
    element = FORMATS[fmt]
    # Never left to the cast, which saturates or not depending on format, version and device.
    scaled = (values * factor).clamp(-element.largest, element.largest)
    if rounding == "stochastic":
        scaled = _round_stochastically(scaled, element, generator)
    codes = scaled.to(element.dtype).view(torch.uint8)
    return torch.where(byte == NAN_SCALE, NAN_ELEMENT, codes).to(torch.uint8), byte.to(torch.uint8)


def _round_stochastically(scaled: Tensor, element: ElementFormat, generator: torch.Generator | None) -> Tensor:
    """Numbers of the format, up or down with the odds that make the mean right."""
    exponent = ((scaled.view(torch.int32) >> 23) & 0xFF).clamp(min=128 - element.bias)
    step_bits = (exponent - element.mantissa_bits) << 23
    step = step_bits.view(torch.float32)
    steps = scaled.abs() / step
    whole = steps.floor()
    noise = torch.rand(scaled.shape, generator=generator, device=scaled.device)
    rounded = (whole + (noise < steps - whole).to(torch.float32)) * step
    return rounded.clamp(max=element.largest).copysign(scaled)
