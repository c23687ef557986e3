# mypy: ignore-errors
"""Block attention in Triton. One tile holds whole blocks of one sequence, so nothing is carried between tiles.

The work is bound by memory: every program reads its rows of query, key and value once and writes its results once.
What counts is how many programs a multiprocessor holds, so registers and shared memory are kept small: features are
multiplied in parts, and the backward drops the values before it loads queries and keys.

Parts come in pairs, one from the first half of the features and one from the second, because that is what a rotation
mixes. Tiles are found without asking the CPU: a list with one slot per possible tile, built on the device.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gem.kernels.block.triton_activations import activate, activate_with_derivative

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
    """Features START to END of some rows, (len(rows), PART); zero elsewhere."""
    columns = tl.arange(0, PART)
    pointers = base + rows[:, None] * stride + (START + columns)[None, :]
    # Nothing is read twice soon, so the first-level cache keeps the list of tiles instead (.cg).
    if START + PART <= END:
        part = tl.load(pointers, mask=is_loaded[:, None], other=0.0, cache_modifier=".cg")
    else:
        mask = is_loaded[:, None] & (START + columns < END)[None, :]
        part = tl.load(pointers, mask=mask, other=0.0, cache_modifier=".cg")
    return part


@triton.jit
def _store_part(base, rows, stride, is_stored, part, START: tl.constexpr, END: tl.constexpr, PART: tl.constexpr):
    columns = tl.arange(0, PART)
    pointers = base + rows[:, None] * stride + (START + columns)[None, :]
    part = part.to(base.dtype.element_ty)
    if START + PART <= END:
        tl.store(pointers, part, mask=is_stored[:, None])
    else:
        tl.store(pointers, part, mask=is_stored[:, None] & (START + columns < END)[None, :])


@triton.jit
def _turn(first, second, cos, sin):
    """The rotation of ``rotary``, in float32."""
    x, y = first.to(tl.float32), second.to(tl.float32)
    cos, sin = cos.to(tl.float32), sin.to(tl.float32)
    return (x * cos - y * sin).to(first.dtype), (x * sin + y * cos).to(first.dtype)


@triton.jit
def _load_angles(angles, rows, is_loaded, i: tl.constexpr, SHAPE: tl.constexpr):
    cos, sin, stride_cos, stride_sin = angles
    c = _load_part(cos, rows, stride_cos, is_loaded, i * SHAPE[2], SHAPE[1], SHAPE[2])
    s = _load_part(sin, rows, stride_sin, is_loaded, i * SHAPE[2], SHAPE[1], SHAPE[2])
    return c, s


@triton.jit
def _load_pairs(base, angles, rows, stride, is_loaded, SHAPE: tl.constexpr, ROTATE: tl.constexpr):
    """All parts, rotated where ROTATE: first and second of pair 0, of pair 1, and so on.

    SHAPE is (features, features of the first half, of a part, number of pairs).
    """
    parts = ()
    PAIRS: tl.constexpr = SHAPE[3]
    for i in tl.static_range(PAIRS):
        first = _load_part(base, rows, stride, is_loaded, i * SHAPE[2], SHAPE[1], SHAPE[2])
        second = _load_part(base, rows, stride, is_loaded, SHAPE[1] + i * SHAPE[2], SHAPE[0], SHAPE[2])
        if ROTATE:
            c, s = _load_angles(angles, rows, is_loaded, i, SHAPE)
            first, second = _turn(first, second, c, s)
        parts = parts + (first, second)
    return parts


@triton.jit
def _store_pair(
    base,
    angles,
    rows,
    stride,
    is_loaded,
    is_stored,
    first,
    second,
    i: tl.constexpr,
    SHAPE: tl.constexpr,
    TURN_BACK: tl.constexpr,
):
    if TURN_BACK:
        c, s = _load_angles(angles, rows, is_loaded, i, SHAPE)
        first, second = _turn(first, second, c, -s)
    _store_part(base, rows, stride, is_stored, first, i * SHAPE[2], SHAPE[1], SHAPE[2])
    _store_part(base, rows, stride, is_stored, second, SHAPE[1] + i * SHAPE[2], SHAPE[0], SHAPE[2])


@triton.jit
def _dot_pairs(x, y, SHAPE: tl.constexpr, PRECISION: tl.constexpr):
    """x times y transposed, both in parts."""
    product = tl.dot(x[0], tl.trans(y[0]), input_precision=PRECISION)
    PAIRS: tl.constexpr = SHAPE[3]
    for i in tl.static_range(1, 2 * PAIRS):
        product = tl.dot(x[i], tl.trans(y[i]), product, input_precision=PRECISION)
    return product


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
        stored = local < tl.abs(size)
        angles = (cos, sin, stride_cos, stride_sin)
        key_head = head // GROUP
        q = _load_pairs(query + head * stride_qh, angles, rows, stride_qn, loaded, SHAPE, ROTATE)
        k = _load_pairs(key + key_head * stride_kh, angles, rows, stride_kn, loaded, SHAPE, ROTATE)
        value += key_head * stride_vh
        if not ROTATE:  # all loads together; with angles as well, there would be too few registers
            v = _load_pairs(value, angles, rows, stride_vn, loaded, SHAPE_V, False)
        scores = _dot_pairs(q, k, SHAPE, PRECISION)
        if ROTATE:
            v = _load_pairs(value, angles, rows, stride_vn, loaded, SHAPE_V, ROTATE_VALUE)
        if ACTIVATION is None:
            weights, factor = _softmax(scores, count, scale, TILE, BLOCK_SIZE, CAUSAL)
        else:
            weights = activate(scores * scale, ACTIVATION)
            if CAUSAL or BLOCK_SIZE < TILE:
                weights = tl.where(_visible(count, TILE, BLOCK_SIZE, CAUSAL), weights, 0.0)
        weights = weights.to(value.dtype.element_ty)
        out += head * stride_oh
        PAIRS_V: tl.constexpr = SHAPE_V[3]
        for i in tl.static_range(PAIRS_V):
            first = tl.dot(weights, v[2 * i], input_precision=PRECISION)
            second = tl.dot(weights, v[2 * i + 1], input_precision=PRECISION)
            if ACTIVATION is None:
                first *= factor[:, None]
                second *= factor[:, None]
            _store_pair(out, angles, rows, stride_on, loaded, stored, first, second, i, SHAPE_V, False)


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
        weights, slope = activate_with_derivative(scores * scale, ACTIVATION)
        grad = grad_weights * slope * scale
        if CAUSAL or BLOCK_SIZE < TILE:
            visible = _visible(count, TILE, BLOCK_SIZE, CAUSAL)
            weights = tl.where(visible, weights, 0.0)
            grad = tl.where(visible, grad, 0.0)
    return weights, grad


@triton.jit
def _add_products(sums, weights, parts, SHAPE: tl.constexpr, PRECISION: tl.constexpr):
    new = ()
    PAIRS: tl.constexpr = SHAPE[3]
    for i in tl.static_range(2 * PAIRS):
        new = new + (tl.dot(weights, parts[i], sums[i], input_precision=PRECISION),)
    return new


@triton.jit
def _store_products(
    base,
    angles,
    rows,
    stride,
    loaded,
    stored,
    weights,
    parts,
    SHAPE: tl.constexpr,
    TURN_BACK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Stores ``weights`` times all parts, pair by pair, so that few sums are held at a time."""
    PAIRS: tl.constexpr = SHAPE[3]
    for i in tl.static_range(PAIRS):
        first = tl.dot(weights, parts[2 * i], input_precision=PRECISION)
        second = tl.dot(weights, parts[2 * i + 1], input_precision=PRECISION)
        _store_pair(base, angles, rows, stride, loaded, stored, first, second, i, SHAPE, TURN_BACK)


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
    NUM_KV_HEADS: tl.constexpr,
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
    SCORES_FIRST: tl.constexpr,
):
    """One tile of one key head: computes the weights again and stores all gradients. Nothing is summed in memory."""
    slot = tl.program_id(0) // NUM_KV_HEADS
    head = (tl.program_id(0) % NUM_KV_HEADS).to(tl.int64)
    first_row = tl.load(tiles + 2 * slot)
    size = tl.load(tiles + 2 * slot + 1).to(tl.int32)
    if size != 0:
        local = tl.arange(0, TILE)
        rows = first_row + local
        count = tl.maximum(size, 0)  # slack has no tokens, only zeros to write
        loaded = local < count
        stored = local < tl.abs(size)
        angles = (cos, sin, stride_cos, stride_sin)
        dtype = query.dtype.element_ty
        key += head * stride_kh
        value += head * stride_vh
        grad_key += head * stride_dkh
        grad_value += head * stride_dvh
        if GROUP == 1:
            query += head * stride_qh
            grad_out += head * stride_gh
            if SCORES_FIRST:
                q = _load_pairs(query, angles, rows, stride_qn, loaded, SHAPE, ROTATE)
                k = _load_pairs(key, angles, rows, stride_kn, loaded, SHAPE, ROTATE)
                scores = _dot_pairs(q, k, SHAPE, PRECISION)
            g = _load_pairs(grad_out, angles, rows, stride_gn, loaded, SHAPE_V, False)
            v = _load_pairs(value, angles, rows, stride_vn, loaded, SHAPE_V, ROTATE_VALUE)
            grad_weights = _dot_pairs(g, v, SHAPE_V, PRECISION)
            if not SCORES_FIRST:
                q = _load_pairs(query, angles, rows, stride_qn, loaded, SHAPE, ROTATE)
                k = _load_pairs(key, angles, rows, stride_kn, loaded, SHAPE, ROTATE)
                scores = _dot_pairs(q, k, SHAPE, PRECISION)
            weights, grad_scores = _weights_and_score_gradient(
                scores, grad_weights, count, scale, TILE, BLOCK_SIZE, ACTIVATION, CAUSAL
            )
            grad_scores = grad_scores.to(dtype)
            weights = tl.trans(weights.to(dtype))
            _store_products(
                grad_value, angles, rows, stride_dvn, loaded, stored, weights, g, SHAPE_V, ROTATE_VALUE, PRECISION
            )
            grad_query += head * stride_dqh
            _store_products(
                grad_query, angles, rows, stride_dqn, loaded, stored, grad_scores, k, SHAPE, ROTATE, PRECISION
            )
            grad_scores = tl.trans(grad_scores)
            _store_products(
                grad_key, angles, rows, stride_dkn, loaded, stored, grad_scores, q, SHAPE, ROTATE, PRECISION
            )
        else:
            v = _load_pairs(value, angles, rows, stride_vn, loaded, SHAPE_V, ROTATE_VALUE)
            k = _load_pairs(key, angles, rows, stride_kn, loaded, SHAPE, ROTATE)
            sums_k = ()
            PART: tl.constexpr = SHAPE[2]
            PAIRS: tl.constexpr = SHAPE[3]
            for _i in tl.static_range(2 * PAIRS):
                sums_k = sums_k + (tl.zeros([TILE, PART], dtype=tl.float32),)
            sums_v = ()
            PART_V: tl.constexpr = SHAPE_V[2]
            PAIRS_V: tl.constexpr = SHAPE_V[3]
            for _i in tl.static_range(2 * PAIRS_V):
                sums_v = sums_v + (tl.zeros([TILE, PART_V], dtype=tl.float32),)
            for member in tl.range(0, GROUP, num_stages=1):
                query_head = head * GROUP + member
                g = _load_pairs(grad_out + query_head * stride_gh, angles, rows, stride_gn, loaded, SHAPE_V, False)
                q = _load_pairs(query + query_head * stride_qh, angles, rows, stride_qn, loaded, SHAPE, ROTATE)
                weights, grad_scores = _weights_and_score_gradient(
                    _dot_pairs(q, k, SHAPE, PRECISION),
                    _dot_pairs(g, v, SHAPE_V, PRECISION),
                    count,
                    scale,
                    TILE,
                    BLOCK_SIZE,
                    ACTIVATION,
                    CAUSAL,
                )
                grad_scores = grad_scores.to(dtype)
                sums_v = _add_products(sums_v, tl.trans(weights.to(dtype)), g, SHAPE_V, PRECISION)
                _store_products(
                    grad_query + query_head * stride_dqh,
                    angles,
                    rows,
                    stride_dqn,
                    loaded,
                    stored,
                    grad_scores,
                    k,
                    SHAPE,
                    ROTATE,
                    PRECISION,
                )
                sums_k = _add_products(sums_k, tl.trans(grad_scores), q, SHAPE, PRECISION)
            for i in tl.static_range(PAIRS):
                first, second = sums_k[2 * i], sums_k[2 * i + 1]
                _store_pair(grad_key, angles, rows, stride_dkn, loaded, stored, first, second, i, SHAPE, ROTATE)
            for i in tl.static_range(PAIRS_V):
                first, second = sums_v[2 * i], sums_v[2 * i + 1]
                _store_pair(
                    grad_value, angles, rows, stride_dvn, loaded, stored, first, second, i, SHAPE_V, ROTATE_VALUE
                )


def part_shape(dim: int, rotated: bool) -> tuple[int, int, int, int]:
    """(features, of which in the first half, features of a part, number of pairs of parts).

    Rotated features fall into halves and smaller parts, because the angles take registers as well.
    """
    half = dim // 2 if rotated else min(dim, max(16, triton.next_power_of_2(dim) // 2))
    part = max(16, triton.next_power_of_2(half))
    if rotated and part > 32:
        part = max(32, part // 2)
    return dim, half, part, triton.cdiv(half, part)


def configuration(
    query: Tensor, key: Tensor, value: Tensor, block_size: int, rotate: bool, rotate_value: bool
) -> dict[str, Any]:
    """Sizes of tiles and parts, and compiler options; from shapes and dtypes alone.

    What counts on an H200 is the number of programs that a multiprocessor holds: 4 with 128 registers, 3 with 168. The
    backward frees the values before it needs the other operands, which makes room for a fourth program; with angles
    there are too few registers for that, and the other order needs fewer.
    """
    tile = 64 if block_size <= 64 else 128
    narrow = query.element_size() == 2 and tile == 64 and max(query.shape[2], value.shape[2]) <= 128
    grouped = key.shape[1] < query.shape[1]
    warps = 4 if narrow else 8
    return {
        "tile": tile,
        "step": tile // block_size * block_size,
        "shape": part_shape(query.shape[2], rotate),
        "shape_value": part_shape(value.shape[2], rotate_value),
        "forward": {"num_warps": warps, "maxnreg": 128 if narrow and rotate else None},
        "backward": {
            "SCORES_FIRST": rotate and narrow,
            "num_warps": 8 if grouped else warps,
            "maxnreg": (168 if rotate else 128) if narrow and not grouped else None,
        },
    }


def _meta(
    config: dict[str, Any], query: Tensor, block_size: int, cos: Tensor | None, rotate_value: bool
) -> dict[str, Any]:
    allow_tf32 = torch.backends.cuda.matmul.allow_tf32
    return {
        "SHAPE": config["shape"],
        "SHAPE_V": config["shape_value"],
        "TILE": config["tile"],
        "BLOCK_SIZE": block_size,
        "ROTATE": cos is not None,
        "ROTATE_VALUE": rotate_value,
        "PRECISION": "tf32" if allow_tf32 or query.element_size() == 2 else "tf32x3",
        "num_stages": 1,
    }


def list_tiles(cu_seqlens: Tensor, num_rows: int, step: int) -> Tensor:
    """The tiles of a batch, (slots, 2): first row, and number of rows as in ``tiles_kernel``; nothing is synchronised."""
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
    query, key, value, cos, sin = (_with_dense_rows(x) for x in (query, key, value, cos, sin))
    out = query.new_empty(*query.shape[:2], value.shape[2])
    if not out.numel():
        return out
    config = configuration(query, key, value, block_size, cos is not None, rotate_value)
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
        ACTIVATION=activation,
        CAUSAL=causal,
        **_meta(config, query, block_size, cos, rotate_value),
        **config["forward"],
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
    grad_out, query, key, value, cos, sin = (_with_dense_rows(x) for x in (grad_out, query, key, value, cos, sin))
    gradients = tuple(x.new_empty(x.shape) for x in (query, key, value))
    if not query.numel() or not value.numel():
        return tuple(gradient.zero_() for gradient in gradients)
    config = configuration(query, key, value, block_size, cos is not None, rotate_value)
    tiles = list_tiles(cu_seqlens, len(query), config["step"])
    num_kv_heads = key.shape[1]
    backward_kernel[(len(tiles) * num_kv_heads,)](
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
        NUM_KV_HEADS=num_kv_heads,
        GROUP=query.shape[1] // num_kv_heads,
        ACTIVATION=activation,
        CAUSAL=causal,
        **_meta(config, query, block_size, cos, rotate_value),
        **config["backward"],
    )
    return gradients


def _with_dense_rows(x: Tensor | None) -> Tensor | None:
    """The features of one row must lie side by side; rows and heads may lie anywhere."""
    return x if x is None or x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:2]]


def _row_strides(*tensors: Tensor | None) -> list[int]:
    return [0 if x is None else x.stride(0) for x in tensors]
