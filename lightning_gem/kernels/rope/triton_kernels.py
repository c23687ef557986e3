# mypy: ignore-errors
"""Rotation of packed tokens in Triton: all heads of all tokens in one launch, every feature read and written once."""

import triton
import triton.language as tl
from torch import Tensor

_ROWS = 32


@triton.jit(do_not_specialize=["num_sequences", "num_rows"])
def rotary_kernel(
    x,
    cos,
    sin,
    out,
    cu_seqlens,
    num_sequences,
    num_rows,
    stride_n,
    stride_h,
    stride_d,
    stride_cos,
    stride_sin,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PART: tl.constexpr,
    INVERSE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS tokens of one head. The heads of these tokens run together, so that their angles are still in the cache."""
    head = (tl.program_id(0) % NUM_HEADS).to(tl.int64)
    rows = (tl.program_id(0) // NUM_HEADS).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, PART)[None, :]
    stored = rows < num_rows
    loaded = stored
    if cu_seqlens is not None:
        loaded = rows < tl.minimum(tl.load(cu_seqlens + num_sequences).to(tl.int64), num_rows)
    if HALF < PART:
        stored = stored & (columns < HALF)
        loaded = loaded & (columns < HALF)
    source = x + head * stride_h + rows * stride_n + columns * stride_d
    target = out + (rows * NUM_HEADS + head) * (2 * HALF) + columns
    first = tl.load(source, mask=loaded, other=0.0).to(tl.float32)
    second = tl.load(source + HALF * stride_d, mask=loaded, other=0.0).to(tl.float32)
    c = tl.load(cos + rows * stride_cos + columns, mask=loaded, other=0.0).to(tl.float32)
    s = tl.load(sin + rows * stride_sin + columns, mask=loaded, other=0.0).to(tl.float32)
    if INVERSE:
        s = -s
    dtype = out.dtype.element_ty
    tl.store(target, (first * c - second * s).to(dtype), mask=stored)
    tl.store(target + HALF, (first * s + second * c).to(dtype), mask=stored)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool, cu_seqlens: Tensor | None = None) -> Tensor:
    """Rotates tokens (N, H, D) of any strides on the current device; with offsets, slack is not read and becomes 0."""
    out = x.new_empty(x.shape)
    if not out.numel():
        return out
    num_rows, num_heads, dim = x.shape
    cos, sin = (angles if angles.stride(1) == 1 else angles.contiguous() for angles in (cos, sin))
    half = dim // 2
    rotary_kernel[(triton.cdiv(num_rows, _ROWS) * num_heads,)](
        x,
        cos,
        sin,
        out,
        cu_seqlens,
        0 if cu_seqlens is None else len(cu_seqlens) - 1,
        num_rows,
        *x.stride(),
        cos.stride(0),
        sin.stride(0),
        NUM_HEADS=num_heads,
        HALF=half,
        PART=triton.next_power_of_2(half),
        INVERSE=inverse,
        ROWS=_ROWS,
    )
    return out
