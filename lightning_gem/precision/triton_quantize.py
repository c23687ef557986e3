"""Triton kernel that quantises to MXFP8: blocks along rows, along columns and squares, in one read of the matrix.

The same integers and float32 operations as ``mx.py``, and the same codes; the cast is the GPU's own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gem.precision.mx import BLOCK, FORMATS, Format, MXBlocks, ScaleMode, _check

MODES = {"rceil": 0, "floor": 1, "ceil": 2, "even": 3}
BLOCK_M, BLOCK_K, NUM_WARPS = 64, 64, 4


@triton.jit
def scale_byte(largest, MODE: tl.constexpr, MAX_EXPONENT: tl.constexpr, MANTISSA_BITS: tl.constexpr):
    exponent = largest >> 23
    mantissa = largest & 0x7FFFFF
    if MODE == 0:
        threshold = tl.where(exponent == MAX_EXPONENT, 0x600001, 0x600000)
        exponent = exponent + (mantissa > threshold).to(tl.int32)
    elif MODE == 2:
        exponent = exponent + (mantissa != 0).to(tl.int32)
    elif MODE == 3:
        exponent = (largest + (1 << (22 - MANTISSA_BITS))) >> 23
    byte = tl.maximum(exponent - MAX_EXPONENT, 0)
    return tl.where(largest >= 0x7F800000, 255, byte)


@triton.jit
def encode(x, byte, LARGEST: tl.constexpr, IS_E5M2: tl.constexpr, ROUND_FIRST: tl.constexpr):
    """uint8 codes of numbers with a scale byte each."""
    bits = 254 - byte
    factor = tl.where(bits <= 0, 0x00400000, bits << 23).to(tl.float32, bitcast=True)
    scaled = tl.minimum(tl.maximum(x * factor, -LARGEST), LARGEST)
    if ROUND_FIRST:
        # The interpreter's cast is wrong except for numbers of the format. Beside 1.5 * 2**23 of their steps, float32
        # rounds to them.
        magnitude = tl.abs(scaled)
        exponent = tl.maximum(magnitude.to(tl.int32, bitcast=True) >> 23, 113 if IS_E5M2 else 121)
        large = (((exponent + (21 if IS_E5M2 else 20)) << 23) | 0x400000).to(tl.float32, bitcast=True)
        rounded = (magnitude + large) - large
        sign = scaled.to(tl.int32, bitcast=True) & -2147483648
        scaled = (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    if IS_E5M2:
        codes = scaled.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        codes = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.where(byte == 255, 0x7F, codes.to(tl.int32)).to(tl.uint8)


@triton.jit
def encode_rows(
    x,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    MODE: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_E5M2: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
):
    """Codes (HEIGHT, WIDTH) and scale bytes (HEIGHT, WIDTH / 32) of blocks along the rows of x."""
    blocks = tl.reshape(x, (HEIGHT, WIDTH // 32, 32))
    largest = tl.max(blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2)
    byte = scale_byte(largest, MODE, MAX_EXPONENT, MANTISSA_BITS)
    codes = encode(blocks, byte[:, :, None], LARGEST, IS_E5M2, ROUND_FIRST)
    return tl.reshape(codes, (HEIGHT, WIDTH)), byte.to(tl.uint8)


@triton.jit
def quantize_kernel(
    x_ptr,
    row_data_ptr,
    row_scale_ptr,
    column_data_ptr,
    column_scale_ptr,
    square_data_ptr,
    square_scale_ptr,
    num_rows,
    num_columns,
    stride_m,
    stride_k,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SQUARE: tl.constexpr,
    MODE: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_E5M2: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    first_m = tl.program_id(0) * BLOCK_M
    first_k = tl.program_id(1) * BLOCK_K
    m = (first_m + tl.arange(0, BLOCK_M)).to(tl.int64)
    k = (first_k + tl.arange(0, BLOCK_K)).to(tl.int64)
    inside = (m < num_rows)[:, None] & (k < num_columns)[None, :]
    x = tl.load(x_ptr + m[:, None] * stride_m + k[None, :] * stride_k, mask=inside, other=0.0).to(tl.float32)
    row_blocks = tl.cdiv(num_columns, 32)
    column_blocks = tl.cdiv(num_rows, 32)
    block_m = (first_m // 32 + tl.arange(0, BLOCK_M // 32)).to(tl.int64)
    block_k = (first_k // 32 + tl.arange(0, BLOCK_K // 32)).to(tl.int64)
    if ROWS:
        codes, byte = encode_rows(x, BLOCK_M, BLOCK_K, MODE, MAX_EXPONENT, MANTISSA_BITS, LARGEST, IS_E5M2, ROUND_FIRST)
        mask = (m < num_rows)[:, None] & (k < row_blocks * 32)[None, :]
        tl.store(row_data_ptr + m[:, None] * (row_blocks * 32) + k[None, :], codes, mask=mask)
        mask = (m < num_rows)[:, None] & (block_k < row_blocks)[None, :]
        tl.store(row_scale_ptr + m[:, None] * row_blocks + block_k[None, :], byte, mask=mask)
    if COLUMNS:
        codes, byte = encode_rows(
            tl.trans(x), BLOCK_K, BLOCK_M, MODE, MAX_EXPONENT, MANTISSA_BITS, LARGEST, IS_E5M2, ROUND_FIRST
        )
        mask = (k < num_columns)[:, None] & (m < column_blocks * 32)[None, :]
        tl.store(column_data_ptr + k[:, None] * (column_blocks * 32) + m[None, :], codes, mask=mask)
        mask = (k < num_columns)[:, None] & (block_m < column_blocks)[None, :]
        tl.store(column_scale_ptr + k[:, None] * column_blocks + block_m[None, :], byte, mask=mask)
    if SQUARE:
        blocks = tl.reshape(x, (BLOCK_M // 32, 32, BLOCK_K // 32, 32))
        magnitude = blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        largest = tl.max(tl.max(magnitude, axis=3), axis=1)
        byte = scale_byte(largest, MODE, MAX_EXPONENT, MANTISSA_BITS)
        codes = tl.reshape(encode(blocks, byte[:, None, :, None], LARGEST, IS_E5M2, ROUND_FIRST), (BLOCK_M, BLOCK_K))
        mask = (m < column_blocks * 32)[:, None] & (k < row_blocks * 32)[None, :]
        tl.store(square_data_ptr + m[:, None] * (row_blocks * 32) + k[None, :], codes, mask=mask)
        mask = (block_m < column_blocks)[:, None] & (block_k < row_blocks)[None, :]
        tl.store(square_scale_ptr + block_m[:, None] * row_blocks + block_k[None, :], byte.to(tl.uint8), mask=mask)


def mx_quantize_triton(
    x: Tensor,
    *,
    rows: bool = True,
    columns: bool = False,
    square: bool = False,
    fmt: Format = "e4m3",
    scale: ScaleMode = "rceil",
) -> dict[str, MXBlocks]:
    """Quantises a matrix in every wanted way, reading it once.

    Args:
        x: (M, K) on a GPU of compute capability 8.9 or later (anywhere in Triton's interpreter), any strides.
        rows: Blocks along K, as ``mx_quantize(x, -1)``.
        columns: Blocks along M, as ``mx_quantize(x, 0)``.
        square: Blocks of 32 x 32, as ``mx_quantize_2d(x)``.
        fmt: As in ``mx_quantize``.
        scale: As in ``mx_quantize``.

    Returns:
        ``rows``, ``columns`` and ``square``, those wanted: the codes of ``mx_quantize`` and ``mx_quantize_2d``.

    Raises:
        ValueError: For x that is no matrix, and as ``mx_quantize``.
    """
    _check(x, fmt, 2)
    if x.ndim != 2 or scale not in MODES:
        raise ValueError(f"x {tuple(x.shape)} must be (M, K) and scale {scale!r} one of {', '.join(MODES)}")
    num_rows, num_columns = x.shape
    tall, wide = -(-num_rows // BLOCK), -(-num_columns // BLOCK)
    wanted = {"rows": rows, "columns": columns, "square": square}
    shapes = {
        "rows": ((num_rows, wide * BLOCK), (num_rows, wide)),
        "columns": ((num_columns, tall * BLOCK), (num_columns, tall)),
        "square": ((tall * BLOCK, wide * BLOCK), (tall, wide)),
    }
    axis = {"rows": 1, "columns": 0, "square": 1}
    out = {
        name: MXBlocks(
            x.new_empty(data, dtype=torch.uint8),
            x.new_empty(bytes_, dtype=torch.uint8),
            fmt,
            (num_rows, num_columns),
            axis[name],
            name == "square",
        )
        for name, (data, bytes_) in shapes.items()
        if wanted[name]
    }
    if x.numel() == 0:
        return out
    pointers = [tensor for name in wanted for tensor in ((out[name].data, out[name].scale) if name in out else (x, x))]
    element = FORMATS[fmt]
    grid = (triton.cdiv(num_rows, BLOCK_M), triton.cdiv(num_columns, BLOCK_K))
    quantize_kernel[grid](
        x,
        *pointers,
        num_rows,
        num_columns,
        *x.stride(),
        ROWS=rows,
        COLUMNS=columns,
        SQUARE=square,
        MODE=MODES[scale],
        MAX_EXPONENT=element.max_exponent,
        MANTISSA_BITS=element.mantissa_bits,
        LARGEST=element.largest,
        IS_E5M2=fmt == "e5m2",
        ROUND_FIRST=not isinstance(quantize_kernel, triton.JITFunction),
        BLOCK_M=BLOCK_M,
        BLOCK_K=BLOCK_K,
        num_warps=NUM_WARPS,
    )
    return out
