# mypy: allow-untyped-defs
"""Triton kernels of FP8 with a scale per row: quantise, also after a norm, and write what Hopper's GEMMs need.

Hopper's FP8 tensor cores contract along contiguous memory only, so a GEMM over the tokens needs transposed operands.
Four codes of neighbouring rows are packed into one word first: words, not bytes, are moved across threads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gem.kernels.launch import interpreted, on_device
from lightning_gem.kernels.triton_activations import CODES, activate
from lightning_gem.precision.mx import FORMATS, Format
from lightning_gem.precision.triton_quantize import encode, scale_byte

MAX_DIM = 16384


@triton.jit
def _row_byte(largest, MAX_EXPONENT: tl.constexpr, MANTISSA_BITS: tl.constexpr):
    return scale_byte(largest, 0, MAX_EXPONENT, MANTISSA_BITS)


@triton.jit
def _scale(byte):
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["rows"])
def norm_rows_kernel(
    x,
    weight,
    bias,
    codes,
    scales,
    rows,
    dim,
    x_stride,
    eps,
    NORM: tl.constexpr,
    LAYER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_E5M2: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    valid = (row < rows)[:, None] & (column < dim)
    h = tl.load(x + row[:, None] * x_stride + column, valid, 0.0).to(tl.float32)
    if NORM:
        if LAYER:
            h = tl.where(valid, h - (tl.sum(h, 1) / dim)[:, None], 0.0)
        h = h * tl.rsqrt(tl.sum(h * h, 1) / dim + eps)[:, None]
    if HAS_WEIGHT:
        h = h * tl.load(weight + column, column < dim, 0.0).to(tl.float32)
    if HAS_BIAS:
        h = h + tl.load(bias + column, column < dim, 0.0).to(tl.float32)
    h = activate(h, ACTIVATION, False)
    largest = tl.max(tl.where(valid, h, 0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    byte = _row_byte(largest, MAX_EXPONENT, MANTISSA_BITS)
    out = encode(h, byte[:, None], LARGEST, IS_E5M2, ROUND_FIRST)
    tl.store(codes + row[:, None] * dim + column, out, valid)
    tl.store(scales + row, _scale(byte), row < rows)


@triton.jit
def _largest(x, row, column, rows, dim, x_stride):
    valid = (row < rows)[:, None] & (column < dim)[None, :]
    part = tl.load(x + row.to(tl.int64)[:, None] * x_stride + column[None, :], valid, 0.0).to(tl.float32)
    return part.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _codes(
    x, codes, row, column, byte, rows, dim, x_stride, LARGEST: tl.constexpr, IS_E5M2: tl.constexpr, ROUND: tl.constexpr
):
    valid = (row < rows)[:, None] & (column < dim)[None, :]
    part = tl.load(x + row.to(tl.int64)[:, None] * x_stride + column[None, :], valid, 0.0).to(tl.float32)
    out = encode(part, byte[:, None], LARGEST, IS_E5M2, ROUND)
    tl.store(codes + row.to(tl.int64)[:, None] * dim + column[None, :], out, valid)
    return tl.where((row < rows)[:, None], out.to(tl.int32), 0)


@triton.jit
def _store_words(transposed, words, word, column, dim, words_per_column):
    at = column.to(tl.int64)[:, None] * words_per_column + word[None, :]
    tl.store(transposed + at, tl.trans(words), (column < dim)[:, None] & (word < words_per_column)[None, :])


@triton.jit(do_not_specialize=["rows"])
def rows_both_kernel(
    x,
    codes,
    scales,
    transposed,
    rows,
    dim,
    x_stride,
    words_per_column,
    MAX_EXPONENT: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_E5M2: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Codes by row and by column of ``4 WORDS`` rows: the second pass over the rows finds them in the cache."""
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    row = word * 4
    big0 = tl.zeros([WORDS, BLOCK], tl.int32)
    big1 = tl.zeros([WORDS, BLOCK], tl.int32)
    big2 = tl.zeros([WORDS, BLOCK], tl.int32)
    big3 = tl.zeros([WORDS, BLOCK], tl.int32)
    for first in range(0, dim, BLOCK):
        column = first + tl.arange(0, BLOCK)
        big0 = tl.maximum(big0, _largest(x, row, column, rows, dim, x_stride))
        big1 = tl.maximum(big1, _largest(x, row + 1, column, rows, dim, x_stride))
        big2 = tl.maximum(big2, _largest(x, row + 2, column, rows, dim, x_stride))
        big3 = tl.maximum(big3, _largest(x, row + 3, column, rows, dim, x_stride))
    byte0 = _row_byte(tl.max(big0, 1), MAX_EXPONENT, MANTISSA_BITS)
    byte1 = _row_byte(tl.max(big1, 1), MAX_EXPONENT, MANTISSA_BITS)
    byte2 = _row_byte(tl.max(big2, 1), MAX_EXPONENT, MANTISSA_BITS)
    byte3 = _row_byte(tl.max(big3, 1), MAX_EXPONENT, MANTISSA_BITS)
    tl.store(scales + row, _scale(byte0), row < rows)
    tl.store(scales + row + 1, _scale(byte1), row + 1 < rows)
    tl.store(scales + row + 2, _scale(byte2), row + 2 < rows)
    tl.store(scales + row + 3, _scale(byte3), row + 3 < rows)
    for first in range(0, dim, BLOCK):
        column = first + tl.arange(0, BLOCK)
        words = _codes(x, codes, row, column, byte0, rows, dim, x_stride, LARGEST, IS_E5M2, ROUND_FIRST)
        words |= _codes(x, codes, row + 1, column, byte1, rows, dim, x_stride, LARGEST, IS_E5M2, ROUND_FIRST) << 8
        words |= _codes(x, codes, row + 2, column, byte2, rows, dim, x_stride, LARGEST, IS_E5M2, ROUND_FIRST) << 16
        words |= _codes(x, codes, row + 3, column, byte3, rows, dim, x_stride, LARGEST, IS_E5M2, ROUND_FIRST) << 24
        _store_words(transposed, words, word, column, dim, words_per_column)


@triton.jit
def _shifted(
    codes, ratio, row, column, rows, dim, LARGEST: tl.constexpr, IS_E5M2: tl.constexpr, ROUND_FIRST: tl.constexpr
):
    inside = row < rows
    at = row.to(tl.int64)[:, None] * dim + column[None, :]
    part = tl.load(codes + at, inside[:, None] & (column < dim)[None, :], 0)
    if IS_E5M2:
        numbers = part.to(tl.float8e5, bitcast=True).to(tl.float32)
    else:
        numbers = part.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    factor = tl.load(ratio + row, inside, 0.0)
    # Byte 127 stands for the factor 1.
    byte = tl.where(factor == factor, 127, 255)[:, None] + tl.zeros_like(part).to(tl.int32)
    out = encode(numbers * factor[:, None], byte, LARGEST, IS_E5M2, ROUND_FIRST)
    return tl.where(inside[:, None], out.to(tl.int32), 0)


@triton.jit(do_not_specialize=["rows"])
def shift_transposed_kernel(
    codes,
    ratio,
    transposed,
    rows,
    dim,
    words_per_column,
    LARGEST: tl.constexpr,
    IS_E5M2: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Codes times a power of two per row, transposed."""
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = word * 4
    words = _shifted(codes, ratio, row, column, rows, dim, LARGEST, IS_E5M2, ROUND_FIRST)
    words |= _shifted(codes, ratio, row + 1, column, rows, dim, LARGEST, IS_E5M2, ROUND_FIRST) << 8
    words |= _shifted(codes, ratio, row + 2, column, rows, dim, LARGEST, IS_E5M2, ROUND_FIRST) << 16
    words |= _shifted(codes, ratio, row + 3, column, rows, dim, LARGEST, IS_E5M2, ROUND_FIRST) << 24
    _store_words(transposed, words, word, column, dim, words_per_column)


def _format(fmt: Format) -> dict[str, object]:
    element = FORMATS[fmt]
    return {
        "LARGEST": element.largest,
        "IS_E5M2": fmt == "e5m2",
        "ROUND_FIRST": not isinstance(shift_transposed_kernel, triton.JITFunction),
    }


def _rounding(fmt: Format) -> dict[str, object]:
    element = FORMATS[fmt]
    return {"MAX_EXPONENT": element.max_exponent, "MANTISSA_BITS": element.mantissa_bits, **_format(fmt)}


def norm_tile(dim: int) -> tuple[int, int, int]:
    """Rows and columns of a tile, and warps."""
    block = triton.next_power_of_2(dim)
    return max(4096 // block, 1), block, min(max(block // 512, 4), 16)


# Words (of four rows) and columns of a tile, warps.
BOTH_TILE = (8, 128, 4)
SHIFT_TILE = (32, 64, 4)


def _columns(rows: int) -> int:
    """Length of a transposed row: GEMMs want multiples of 16 bytes."""
    return -(-rows // 16) * 16


def quantize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: str | None,
    eps: float,
    activation: str,
    fmt: Format = "e4m3",
    tile: tuple[int, int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes (M, K) and scales (M, 1) of ``act(norm(x) * weight + bias)``; norm ``rms``, ``layer`` or None."""
    rows, dim = x.shape
    codes = torch.empty(rows, dim, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block_rows, block, warps = tile or norm_tile(dim)
    if rows and dim:
        with on_device(x):
            norm_rows_kernel[(triton.cdiv(rows, block_rows),)](
                x,
                weight,
                bias,
                codes,
                scales,
                rows,
                dim,
                x.stride(0),
                eps,
                NORM=norm is not None,
                LAYER=norm == "layer",
                ACTIVATION=CODES[activation],
                HAS_WEIGHT=weight is not None,
                HAS_BIAS=bias is not None,
                **_rounding(fmt),
                ROWS=block_rows,
                BLOCK=block,
                num_warps=warps,
            )
    return codes.view(FORMATS[fmt].dtype), scales


def quantize_both(
    x: Tensor, fmt: Format = "e4m3", tile: tuple[int, int, int] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (M, K), scales (M, 1) and transposed codes (K, M), M padded with zeros to a multiple of 16."""
    rows, dim = x.shape
    padded = _columns(rows)
    codes = torch.empty(rows, dim, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    transposed = torch.empty(dim, padded // 4, dtype=torch.int32, device=x.device)
    words, block, warps = tile or BOTH_TILE
    if interpreted() and tile is None:
        words, block = 8, 32
    if rows and dim:
        with on_device(x):
            rows_both_kernel[(triton.cdiv(padded // 4, words),)](
                x,
                codes,
                scales,
                transposed,
                rows,
                dim,
                x.stride(0),
                padded // 4,
                **_rounding(fmt),
                WORDS=words,
                BLOCK=block,
                num_warps=warps,
            )
    dtype = FORMATS[fmt].dtype
    return codes.view(dtype), scales, transposed.view(dtype)


def shift_transposed(
    codes: Tensor, ratio: Tensor, fmt: Format = "e4m3", tile: tuple[int, int, int] | None = None
) -> Tensor:
    """``codes * ratio`` (M, K) with a power of two per row (M, 1), as codes (K, M), M padded to a multiple of 16."""
    rows, dim = codes.shape
    padded = _columns(rows)
    transposed = torch.empty(dim, padded // 4, dtype=torch.int32, device=codes.device)
    words, block, warps = tile or SHIFT_TILE
    if rows and dim:
        with on_device(codes):
            shift_transposed_kernel[(triton.cdiv(padded // 4, words), triton.cdiv(dim, block))](
                codes.view(torch.uint8),
                ratio,
                transposed,
                rows,
                dim,
                padded // 4,
                **_format(fmt),
                WORDS=words,
                BLOCK=block,
                num_warps=warps,
            )
    return transposed.view(FORMATS[fmt].dtype)
