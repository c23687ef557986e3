# mypy: ignore-errors
"""Block attention in Triton. One tile holds whole blocks of one sequence, so nothing is carried between tiles.

The work is bound by memory: every program reads its rows of query, key and value once and writes its results once. So
a program asks for all its rows at once, before it computes anything, and is small enough for several of them to share
a multiprocessor. Features are multiplied in two halves, because that is what a rotation mixes.

Tiles are found without asking the CPU: a list with one slot per possible tile is built on the device.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gem.kernels.rope.triton_kernels import rotate
from lightning_gem.kernels.triton_activations import CODES, activate, activate_with_derivative

_LOG2_E = tl.constexpr(1.4426950408889634)
_SLOTS_PER_PROGRAM = 128


@triton.jit(do_not_specialize=["num_sequences", "num_rows", "num_steps", "num_slots"])
def tiles_kernel(
    cu_seqlens, tiles, num_sequences, num_rows, num_steps, num_slots, STEP: tl.constexpr, SLOTS: tl.constexpr
):
    """Writes (first row, number of rows) of every slot; rows of slack count negatively, and no rows are 0.

    Slots of sequence b begin at cu_seqlens[b] // STEP + b. This leaves every sequence enough of them, without sums over
    the tiles of all sequences before it. The slack behind the last sequence is one more sequence.
    """
    slot = (tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)).to(tl.int64)
    low = tl.zeros([SLOTS], dtype=tl.int64)
    high = low + num_sequences
    for _ in range(num_steps):
        middle = (low + high + 1) // 2
        begun = tl.load(cu_seqlens + middle).to(tl.int64) // STEP + middle <= slot
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, middle - 1)
    start = tl.load(cu_seqlens + low).to(tl.int64)
    is_sequence = low < num_sequences
    end = tl.load(cu_seqlens + low + 1, mask=is_sequence, other=0).to(tl.int64)
    end = tl.where(is_sequence, tl.minimum(end, num_rows), num_rows)
    first = start + (slot - (start // STEP + low)) * STEP
    count = tl.maximum(tl.minimum(end - first, STEP), 0)
    tl.store(tiles + 2 * slot, first, mask=slot < num_slots)
    tl.store(tiles + 2 * slot + 1, tl.where(is_sequence, count, -count), mask=slot < num_slots)


@triton.jit
def _load_part(base, rows, stride, is_loaded, START: tl.constexpr, END: tl.constexpr, PART: tl.constexpr):
    """Features START to END of some rows, (len(rows), PART); zero elsewhere. They are read once: no need to cache."""
    columns = START + tl.arange(0, PART)
    pointers = base + rows[:, None] * stride + columns[None, :]
    if START + PART <= END:
        part = tl.load(pointers, mask=is_loaded[:, None], other=0.0, cache_modifier=".cg")
    else:
        mask = is_loaded[:, None] & (columns < END)[None, :]
        part = tl.load(pointers, mask=mask, other=0.0, cache_modifier=".cg")
    return part


@triton.jit
def _store_part(base, rows, stride, is_stored, part, START: tl.constexpr, END: tl.constexpr, PART: tl.constexpr):
    columns = START + tl.arange(0, PART)
    pointers = base + rows[:, None] * stride + columns[None, :]
    part = part.to(base.dtype.element_ty)
    if START + PART <= END:
        tl.store(pointers, part, mask=is_stored[:, None])
    else:
        tl.store(pointers, part, mask=is_stored[:, None] & (columns < END)[None, :])


@triton.jit
def _load(base, rows, stride, is_loaded, SHAPE: tl.constexpr):
    """Both halves of the features. SHAPE is (features, features of the first half, padded size of a half)."""
    first = _load_part(base, rows, stride, is_loaded, 0, SHAPE[1], SHAPE[2])
    second = _load_part(base, rows, stride, is_loaded, SHAPE[1], SHAPE[0], SHAPE[2])
    return first, second


@triton.jit
def _store(base, rows, stride, is_stored, first, second, SHAPE: tl.constexpr):
    _store_part(base, rows, stride, is_stored, first, 0, SHAPE[1], SHAPE[2])
    _store_part(base, rows, stride, is_stored, second, SHAPE[1], SHAPE[0], SHAPE[2])


@triton.jit
def _load_angles(base, rows, stride, is_loaded, SHAPE: tl.constexpr):
    """Cosines or sines of some rows. All heads use them, and so does the other end of a backward: they are cached."""
    pointers = base + rows[:, None] * stride + tl.arange(0, SHAPE[2])[None, :]
    return tl.load(pointers, mask=is_loaded[:, None], other=0.0)


@triton.jit
def _turn(first, second, cos, sin):
    """The rotation of ``rotary``, in float32."""
    x, y = first.to(tl.float32), second.to(tl.float32)
    cos, sin = cos.to(tl.float32), sin.to(tl.float32)
    return (x * cos - y * sin).to(first.dtype), (x * sin + y * cos).to(first.dtype)


@triton.jit
def _dot_transposed(x0, x1, y0, y1, PRECISION: tl.constexpr):
    """x times y transposed, both in halves."""
    product = tl.dot(x0, tl.trans(y0), input_precision=PRECISION)
    return tl.dot(x1, tl.trans(y1), product, input_precision=PRECISION)


@triton.jit
def _visible(count, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, CAUSAL: tl.constexpr):
    """Pairs of a tile with ``count`` tokens that see each other, (TILE, TILE)."""
    query = tl.arange(0, TILE)[:, None]
    key = tl.arange(0, TILE)[None, :]
    visible = key < count
    if BLOCK_SIZE < TILE:
        visible = visible & (query // BLOCK_SIZE == key // BLOCK_SIZE)
    if CAUSAL:
        visible = visible & (key <= query)
    return visible


@triton.jit
def _softmax(scores, count, scale, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, CAUSAL: tl.constexpr):
    """Weights before division, and the factors of the rows. Rows that are no tokens see everything and stay finite."""
    visible = _visible(count, TILE, BLOCK_SIZE, CAUSAL) | (tl.arange(0, TILE) >= count)[:, None]
    scores = tl.where(visible, scores * (scale * _LOG2_E), -float("inf"))
    weights = tl.exp2(scores - tl.max(scores, axis=1)[:, None])
    return weights, 1.0 / tl.sum(weights, axis=1)


@triton.jit
def forward_kernel(
    query,
    key,
    value,
    out,
    cos,
    sin,
    tiles,
    scale,
    stride_qn,
    stride_qh,
    stride_kn,
    stride_kh,
    stride_vn,
    stride_vh,
    stride_on,
    stride_oh,
    stride_cos,
    stride_sin,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SHAPE: tl.constexpr,
    SHAPE_V: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CAUSAL: tl.constexpr,
    ROTATE: tl.constexpr,
    ROTATE_VALUE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of one query head. The heads of a tile run together: in memory their rows lie side by side."""
    slot = tl.program_id(0) // NUM_HEADS
    head = (tl.program_id(0) % NUM_HEADS).to(tl.int64)
    first_row = tl.load(tiles + 2 * slot)
    size = tl.load(tiles + 2 * slot + 1).to(tl.int32)
    if size != 0:
        local = tl.arange(0, TILE)
        rows = first_row + local
        count = tl.maximum(size, 0)  # slack has no tokens, only zeros to write
        loaded = local < count
        value += head // GROUP * stride_vh
        q0, q1 = _load(query + head * stride_qh, rows, stride_qn, loaded, SHAPE)
        k0, k1 = _load(key + head // GROUP * stride_kh, rows, stride_kn, loaded, SHAPE)
        if ROTATE:  # beside angles, there are too few registers for the values as well
            c = _load_angles(cos, rows, stride_cos, loaded, SHAPE)
            s = _load_angles(sin, rows, stride_sin, loaded, SHAPE)
            q0, q1 = _turn(q0, q1, c, s)
            k0, k1 = _turn(k0, k1, c, s)
        else:
            v0, v1 = _load(value, rows, stride_vn, loaded, SHAPE_V)
        scores = _dot_transposed(q0, q1, k0, k1, PRECISION)
        if ROTATE:
            v0, v1 = _load(value, rows, stride_vn, loaded, SHAPE_V)
            if ROTATE_VALUE:
                v0, v1 = _turn(v0, v1, c, s)
        if ACTIVATION is None:
            weights, factor = _softmax(scores, count, scale, TILE, BLOCK_SIZE, CAUSAL)
        else:
            weights = activate(scores * scale, ACTIVATION, False)
            if CAUSAL or BLOCK_SIZE < TILE:
                weights = tl.where(_visible(count, TILE, BLOCK_SIZE, CAUSAL), weights, 0.0)
        weights = weights.to(value.dtype.element_ty)
        first = tl.dot(weights, v0, input_precision=PRECISION)
        second = tl.dot(weights, v1, input_precision=PRECISION)
        if ACTIVATION is None:
            first *= factor[:, None]
            second *= factor[:, None]
        _store(out + head * stride_oh, rows, stride_on, local < tl.abs(size), first, second, SHAPE_V)


@triton.jit
def _weights_and_score_gradient(
    scores,
    grad_weights,
    count,
    scale,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    if ACTIVATION is None:
        weights, factor = _softmax(scores, count, scale, TILE, BLOCK_SIZE, CAUSAL)
        weights *= factor[:, None]
        grad = weights * (grad_weights - tl.sum(weights * grad_weights, axis=1)[:, None]) * scale
    else:
        weights, slope = activate_with_derivative(scores * scale, ACTIVATION, False)
        grad = grad_weights * slope * scale
        if CAUSAL or BLOCK_SIZE < TILE:
            visible = _visible(count, TILE, BLOCK_SIZE, CAUSAL)
            weights = tl.where(visible, weights, 0.0)
            grad = tl.where(visible, grad, 0.0)
    return weights, grad


@triton.jit
def backward_kernel(
    grad_out,
    query,
    key,
    value,
    grad_query,
    grad_key,
    grad_value,
    cos,
    sin,
    tiles,
    scale,
    stride_gn,
    stride_gh,
    stride_qn,
    stride_qh,
    stride_kn,
    stride_kh,
    stride_vn,
    stride_vh,
    stride_dqn,
    stride_dqh,
    stride_dkn,
    stride_dkh,
    stride_dvn,
    stride_dvh,
    stride_cos,
    stride_sin,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SHAPE: tl.constexpr,
    SHAPE_V: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CAUSAL: tl.constexpr,
    ROTATE: tl.constexpr,
    ROTATE_VALUE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of one query head: computes the weights again and stores all gradients. Nothing is summed in memory."""
    slot = tl.program_id(0) // NUM_HEADS
    head = (tl.program_id(0) % NUM_HEADS).to(tl.int64)
    first_row = tl.load(tiles + 2 * slot)
    size = tl.load(tiles + 2 * slot + 1).to(tl.int32)
    if size != 0:
        local = tl.arange(0, TILE)
        rows = first_row + local
        count = tl.maximum(size, 0)  # slack has no tokens, only zeros to write
        loaded = local < count
        stored = local < tl.abs(size)
        dtype = query.dtype.element_ty
        key += head // GROUP * stride_kh
        value += head // GROUP * stride_vh
        grad_key += head * stride_dkh
        grad_value += head * stride_dvh
        q0, q1 = _load(query + head * stride_qh, rows, stride_qn, loaded, SHAPE)
        k0, k1 = _load(key, rows, stride_kn, loaded, SHAPE)
        grad_out += head * stride_gh
        if ROTATE:
            c = _load_angles(cos, rows, stride_cos, loaded, SHAPE)
            s = _load_angles(sin, rows, stride_sin, loaded, SHAPE)
            q0, q1 = _turn(q0, q1, c, s)
            k0, k1 = _turn(k0, k1, c, s)
        else:
            v0, v1 = _load(value, rows, stride_vn, loaded, SHAPE_V)
            g0, g1 = _load(grad_out, rows, stride_gn, loaded, SHAPE_V)
        scores = _dot_transposed(q0, q1, k0, k1, PRECISION)
        if ROTATE:
            v0, v1 = _load(value, rows, stride_vn, loaded, SHAPE_V)
            g0, g1 = _load(grad_out, rows, stride_gn, loaded, SHAPE_V)
            if ROTATE_VALUE:
                v0, v1 = _turn(v0, v1, c, s)
        grad_weights = _dot_transposed(g0, g1, v0, v1, PRECISION)
        weights, grad_scores = _weights_and_score_gradient(
            scores, grad_weights, count, scale, TILE, BLOCK_SIZE, ACTIVATION, CAUSAL
        )
        if ROTATE:  # once more, from the cache: they would occupy too many registers in between
            c = _load_angles(cos, rows, stride_cos, loaded, SHAPE)
            s = -_load_angles(sin, rows, stride_sin, loaded, SHAPE)
        weights = tl.trans(weights.to(dtype))
        first = tl.dot(weights, g0, input_precision=PRECISION)
        if ROTATE_VALUE:
            second = tl.dot(weights, g1, input_precision=PRECISION)
            first, second = _turn(first, second, c, s)
            _store(grad_value, rows, stride_dvn, stored, first, second, SHAPE_V)
        else:
            _store_part(grad_value, rows, stride_dvn, stored, first, 0, SHAPE_V[1], SHAPE_V[2])
            second = tl.dot(weights, g1, input_precision=PRECISION)
            _store_part(grad_value, rows, stride_dvn, stored, second, SHAPE_V[1], SHAPE_V[0], SHAPE_V[2])
        grad_scores = grad_scores.to(dtype)
        first = tl.dot(grad_scores, k0, input_precision=PRECISION)
        second = tl.dot(grad_scores, k1, input_precision=PRECISION)
        if ROTATE:
            first, second = _turn(first, second, c, s)
        _store(grad_query + head * stride_dqh, rows, stride_dqn, stored, first, second, SHAPE)
        grad_scores = tl.trans(grad_scores)
        first = tl.dot(grad_scores, q0, input_precision=PRECISION)
        second = tl.dot(grad_scores, q1, input_precision=PRECISION)
        if ROTATE:
            first, second = _turn(first, second, c, s)
        _store(grad_key, rows, stride_dkn, stored, first, second, SHAPE)


def halves(dim: int) -> tuple[int, int, int]:
    """(features, features of the first half, padded size of a half); a power of two falls into equal halves."""
    half = min(dim, max(16, triton.next_power_of_2(dim) // 2))
    return dim, half, max(16, triton.next_power_of_2(half))


def fuses_rotation(dim: int) -> bool:
    """Whether the kernels rotate heads of this size; others are rotated in a pass of their own."""
    return dim in (32, 64, 128, 256)


def configuration(query: Tensor, value: Tensor, block_size: int) -> dict[str, Any]:
    """Sizes of tiles and the number of warps, from shapes and dtypes alone."""
    tile = 64 if block_size <= 64 else 128
    narrow = query.element_size() == 2 and tile == 64 and max(query.shape[2], value.shape[2]) <= 128
    return {
        "tile": tile,
        "step": tile // block_size * block_size,
        "num_warps": 4 if narrow else 8,
    }


def list_tiles(cu_seqlens: Tensor, num_rows: int, step: int) -> Tensor:
    """The tiles of a batch, (slots, 2): first row, and number of rows as in ``tiles_kernel``. Nothing waits."""
    num_sequences = len(cu_seqlens) - 1
    num_slots = num_rows // step + num_sequences + 1
    tiles = torch.empty(num_slots, 2, dtype=torch.int64, device=cu_seqlens.device)
    tiles_kernel[(triton.cdiv(num_slots, _SLOTS_PER_PROGRAM),)](
        cu_seqlens,
        tiles,
        num_sequences,
        num_rows,
        num_sequences.bit_length(),
        num_slots,
        STEP=step,
        SLOTS=_SLOTS_PER_PROGRAM,
    )
    return tiles


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    block_size: int,
    scale: float,
    activation: str | None,
    causal: bool,
    rotate_value: bool,
) -> Tensor:
    """Block attention of tensors on the current device; arguments as those of the custom op."""
    query, key, value, cos, sin, rotate_value = _prepare(query, key, value, cu_seqlens, cos, sin, rotate_value)
    out = query.new_empty(*query.shape[:2], value.shape[2])
    if not out.numel():
        return out
    config = configuration(query, value, block_size)
    tiles = list_tiles(cu_seqlens, len(query), config["step"])
    num_heads = query.shape[1]
    forward_kernel[(len(tiles) * num_heads,)](
        query,
        key,
        value,
        out,
        cos,
        sin,
        tiles,
        scale,
        *_strides(query, key, value, out),
        *_row_strides(cos, sin),
        NUM_HEADS=num_heads,
        GROUP=num_heads // key.shape[1],
        SHAPE=halves(query.shape[2]),
        SHAPE_V=halves(value.shape[2]),
        TILE=config["tile"],
        BLOCK_SIZE=block_size,
        ACTIVATION=None if activation is None else CODES[activation],
        CAUSAL=causal,
        ROTATE=cos is not None,
        ROTATE_VALUE=rotate_value,
        PRECISION=_precision(query),
        num_warps=config["num_warps"],
        num_stages=1,
    )
    return out


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    block_size: int,
    scale: float,
    activation: str | None,
    causal: bool,
    rotate_value: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; arguments as those of the custom op."""
    angles, values_turned = (cos, sin), rotate_value
    query, key, value, cos, sin, rotate_value = _prepare(query, key, value, cu_seqlens, cos, sin, rotate_value)
    grad_out = _with_dense_rows(grad_out)
    num_heads, group = query.shape[1], query.shape[1] // key.shape[1]
    gradients = [x.new_empty(x.shape) for x in (query, key, value)]
    if not query.numel() or not value.numel():
        return tuple(gradient.zero_() for gradient in gradients)
    config = configuration(query, value, block_size)
    tiles = list_tiles(cu_seqlens, len(query), config["step"])
    if group > 1:  # what every query head contributes to its key head
        gradients[1:] = [
            torch.empty(len(x), num_heads, x.shape[2], dtype=torch.float32, device=x.device) for x in (key, value)
        ]
    backward_kernel[(len(tiles) * num_heads,)](
        grad_out,
        query,
        key,
        value,
        *gradients,
        cos,
        sin,
        tiles,
        scale,
        *_strides(grad_out, query, key, value, *gradients),
        *_row_strides(cos, sin),
        NUM_HEADS=num_heads,
        GROUP=group,
        SHAPE=halves(query.shape[2]),
        SHAPE_V=halves(value.shape[2]),
        TILE=config["tile"],
        BLOCK_SIZE=block_size,
        ACTIVATION=None if activation is None else CODES[activation],
        CAUSAL=causal,
        ROTATE=cos is not None,
        ROTATE_VALUE=rotate_value,
        PRECISION=_precision(query),
        num_warps=config["num_warps"],
        num_stages=1,
    )
    if group > 1:
        gradients[1:] = [x.unflatten(1, (-1, group)).sum(2).to(query.dtype) for x in gradients[1:]]
    if angles[0] is not None and cos is None:
        num_turned = 3 if values_turned else 2
        gradients[:num_turned] = [rotate(x, *angles, True, cu_seqlens) for x in gradients[:num_turned]]
    return tuple(gradients)


def _prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    rotate_value: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, bool]:
    """Operands as the kernels take them; no angles where the rotation has happened already."""
    if cos is not None and not fuses_rotation(query.shape[2]):
        query, key = (rotate(x, cos, sin, False, cu_seqlens) for x in (query, key))
        value = rotate(value, cos, sin, False, cu_seqlens) if rotate_value else value
        cos, sin, rotate_value = None, None, False
    if cos is not None and query.dtype == torch.bfloat16 and cos.dtype == sin.dtype == torch.float32:
        # Float16 angles are eight times as exact as bfloat16 tokens. Half of the bytes also means half of the
        # registers, which pays for the conversion.
        cos, sin = cos.half(), sin.half()
    if cos is not None:
        query, key, value, cos, sin = (_with_aligned_rows(x) for x in (query, key, value, cos, sin))
    return *(_with_dense_rows(x) for x in (query, key, value)), cos, sin, rotate_value


def _precision(query: Tensor) -> str:
    """How float32 products are taken: three times in TF32 is nearly as exact as float32 itself."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 or query.element_size() == 2 else "tf32x3"


def _with_dense_rows(x: Tensor | None) -> Tensor | None:
    """The features of one row must lie side by side; rows and heads may lie anywhere."""
    return x if x is None or x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _with_aligned_rows(x: Tensor) -> Tensor:
    """Operands of fused rotations: Triton 3.6 gave wrong results where it could not load rows in 16-byte pieces."""
    aligned = x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in x.stride()[:-1])
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:2]]


def _row_strides(*tensors: Tensor | None) -> list[int]:
    return [0 if x is None else x.stride(0) for x in tensors]
