"""Launches of the kernels for self-attention over short sequences. Nothing here waits for the GPU."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_gem.kernels.attention.blocks import padded_dim
from lightning_gem.kernels.attention.spec import AttentionSpec
from lightning_gem.kernels.attention.triton_kernels import _operands
from lightning_gem.kernels.attention.triton_packed import packed_backward_kernel, packed_forward_kernel, packing_kernel
from lightning_gem.kernels.schedule import Schedules, _may_share
from lightning_gem.kernels.triton_activations import CODES

MAX_SEQLEN = 64
MAX_HEAD_DIM = 128
# Sequences that one program packs into tiles, one tile after the other: more would take longer, but leave fewer tiles
# half full.
_SEQUENCES = 64


@dataclass(frozen=True)
class PackedBlocks:
    """Rows per tile, and how a program runs."""

    block: int
    num_warps: int
    max_registers: int | None


@dataclass(frozen=True)
class Packing:
    """Tiles of whole sequences.

    Attributes:
        storage: First row of every tile, and the row behind its last (capacity each); for every row, the row at which
            its sequence starts. int32.
        capacity: Upper bound of the number of tiles, of slack rows too.
        num_chunks: How many parts of the batch are packed apart.
        min_rows: Rows that all tiles have but the last one of a part.
    """

    storage: Tensor
    capacity: int
    num_chunks: int
    min_rows: int


def supports(
    spec: AttentionSpec,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    attn_bias: Tensor | None,
) -> bool:
    """Whether :func:`forward` and :func:`backward` take this self-attention; decided from shapes, dtypes and bounds."""
    longest = longest_sequence(max_seqlen_q, max_seqlen_k)
    plain = attn_bias is None and not (spec.softcap or spec.has_roles or spec.broadcast_query)
    if longest is None or longest > MAX_SEQLEN or not plain or isinstance(spec.activation, tuple):
        return False
    largest = max(query.shape[2], value.shape[2])
    if largest > MAX_HEAD_DIM or len(query) >= 2**31:
        return False
    if longest > 32 and (largest > 64 or query.shape[1] > key.shape[1]):
        return False  # too much for the registers, in tiles of 128 rows
    return not query.is_cuda or _shared_bytes(query, value, longest) <= _shared_memory(query.device)


def longest_sequence(max_seqlen_q: int | None, max_seqlen_k: int | None) -> int | None:
    """The tighter of the bounds that are known: both sides are the same."""
    known = [x for x in (max_seqlen_q, max_seqlen_k) if x is not None]
    return min(known) if known else None


def block_rows(longest: int) -> int:
    """Rows per tile: twice the longest sequence, so that tiles are more than half full."""
    return 64 if longest <= 32 else 128


def min_rows(longest: int, block: int) -> int:
    """Rows that a tile has at least when it ends because the next sequence does not fit."""
    return block - max(1, longest) + 1


def choose_blocks(
    spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor, longest: int, backward: bool
) -> PackedBlocks:
    """Rules, not tuning at run time: what the compiler reports decides, see ``tests/kernels/offline_compile.py``."""
    block = block_rows(longest)
    large = max(query.shape[2], value.shape[2]) > 64 or query.shape[1] > key.shape[1]
    # Without matrix products from shared memory, what they take lies in registers.
    old = query.is_cuda and torch.cuda.get_device_capability(query.device) < (9, 0)
    if block == 128 or query.dtype == torch.float32 or old or (backward and large):
        return PackedBlocks(block, num_warps=8, max_registers=None)
    # A little less than the compiler would take, so that a multiprocessor holds one more program.
    limit = None
    if torch.version.hip is None and not large:
        plain_softmax = spec.activation is None and spec.window_left < 0 and spec.right < 0
        if backward:
            limit = None if plain_softmax else 168
        elif spec.activation is None:
            limit = 96
    return PackedBlocks(block, num_warps=4, max_registers=limit)


def configuration(
    spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor, max_seqlen_q: int | None, max_seqlen_k: int | None
) -> dict[str, Any]:
    """Block sizes of both kernels, for ``kernel_info``."""
    longest = longest_sequence(max_seqlen_q, max_seqlen_k)
    assert longest is not None
    kernels = {"forward": False, "backward": True}
    return {name: asdict(choose_blocks(spec, query, key, value, longest, flag)) for name, flag in kernels.items()}


def _shared_bytes(query: Tensor, value: Tensor, longest: int) -> int:
    """An upper bound of what the backward kernel needs: its four tiles, and twice the weights.

    Compilers trace this with symbols for sizes, which can be compared and no more.
    """
    block = block_rows(longest)
    dim = 64 if max(query.shape[2], value.shape[2]) <= 64 else 128
    return block * (4 * dim + 2 * block) * query.dtype.itemsize


def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may have, from the architecture alone."""
    if torch.version.hip is not None:
        return 65_536
    capability = torch.cuda.get_device_capability(device)
    if capability[0] in (9, 10):
        return 232_448
    return 166_912 if capability in ((8, 0), (8, 7)) else 101_376


def forward(
    spec: AttentionSpec,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    attn_bias: Tensor | None,
    num_targets: Tensor | None,
    schedules: Schedules,
) -> tuple[Tensor, Tensor | None]:
    """``dispatch.forward`` for tensors on the current device."""
    dtype = query.dtype
    query, key, value = _operands(query, key, value)
    rows, heads = query.shape[:2]
    out = query.new_empty(rows, heads, value.shape[2])
    lse = query.new_empty(heads, rows, dtype=torch.float32) if spec.activation is None else None
    if len(cu_seqlens_k) == 1:
        return out.zero_().to(dtype), None if lse is None else lse.zero_()
    if rows > 0:
        longest = longest_sequence(max_seqlen_q, max_seqlen_k)
        assert longest is not None
        blocks = choose_blocks(spec, query, key, value, longest, backward=False)
        packing = get_packing(cu_seqlens_k, rows, longest, blocks.block, schedules.share)
        packed_forward_kernel[(packing.capacity * heads,)](
            query,
            key,
            value,
            out,
            query if lse is None else lse,
            cu_seqlens_k,
            packing.storage,
            *query.stride()[:2],
            *key.stride()[:2],
            *value.stride()[:2],
            *out.stride()[:2],
            rows,
            *_scalars(spec, cu_seqlens_k, rows, packing),
            HEADS=heads,
            **constants(spec, query, key, value, longest, blocks),
        )
    return out.to(dtype), lse


def backward(
    spec: AttentionSpec,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    attn_bias: Tensor | None,
    num_targets: Tensor | None,
    schedules: Schedules,
    needs_query: bool,
    needs_key_value: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``dispatch.backward`` for tensors on the current device; all three gradients come together."""
    dtype = query.dtype
    query, key, value, grad_out = _operands(query, key, value, grad_out)
    rows = len(query)
    gradients = tuple(x.new_empty(x.shape) for x in (query, key, value))
    if len(cu_seqlens_k) == 1:
        gradients = tuple(x.zero_() for x in gradients)
    elif rows > 0:
        longest = longest_sequence(max_seqlen_q, max_seqlen_k)
        assert longest is not None
        blocks = choose_blocks(spec, query, key, value, longest, backward=True)
        packing = get_packing(cu_seqlens_k, rows, longest, blocks.block, schedules.share)
        packed_backward_kernel[(packing.capacity * key.shape[1],)](
            query,
            key,
            value,
            grad_out,
            query if lse is None else lse,
            query if grad_lse is None else grad_lse.to(torch.float32).contiguous(),
            *gradients,
            cu_seqlens_k,
            packing.storage,
            *query.stride()[:2],
            *key.stride()[:2],
            *value.stride()[:2],
            *grad_out.stride()[:2],
            *(stride for x in gradients for stride in x.stride()[:2]),
            rows,
            *_scalars(spec, cu_seqlens_k, rows, packing),
            HEADS_KV=key.shape[1],
            HAS_GRAD_LSE=grad_lse is not None,
            **constants(spec, query, key, value, longest, blocks),
        )
    grad_query, grad_key, grad_value = (x.to(dtype) for x in gradients)
    return grad_query, grad_key, grad_value


def _scalars(
    spec: AttentionSpec, cu_seqlens: Tensor, rows: int, packing: Packing
) -> tuple[int, int, int, int, float, float, int, int]:
    return (
        rows,
        len(cu_seqlens) - 1,
        packing.num_chunks,
        packing.capacity,
        spec.scale,
        spec.out_scale,
        spec.window_left,
        spec.right,
    )


def constants(
    spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor, longest: int, blocks: PackedBlocks
) -> dict[str, Any]:
    """What the kernels are compiled for."""
    full_precision = query.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    limit = {} if blocks.max_registers is None else {"maxnreg": blocks.max_registers}
    # One width for all heads: with 32 columns behind scores over 64 or 128, Triton 3.6 gets three warps of four wrong.
    padded = max(32, padded_dim(max(query.shape[2], value.shape[2])))
    return {
        "GROUP": query.shape[1] // key.shape[1],
        "DIM": query.shape[2],
        "DIM_V": value.shape[2],
        "BLOCK": blocks.block,
        "STARTS": min_rows(longest, blocks.block),
        "BLOCK_D": padded,
        "BLOCK_DV": padded,
        "SOFTMAX": spec.activation is None,
        "CODE": CODES[spec.activation] if isinstance(spec.activation, str) else 0,
        "HAS_LEFT": spec.window_left >= 0,
        "HAS_RIGHT": spec.right >= 0,
        "PRECISION": "ieee" if full_precision else "tf32",
        "FAST": query.is_cuda and torch.version.hip is None and query.dtype != torch.float32,
        "num_warps": blocks.num_warps,
        "num_stages": 1,
        **limit,
    }


# Per offsets tensor: its packings, and the version of the tensor that they belong to.
_cache: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def get_packing(cu_seqlens: Tensor, num_rows: int, longest: int, block: int, share: bool) -> Packing:
    """The packing of a batch, which all calls on the same offsets tensor share, on one stream."""
    longest = max(1, longest)
    if not (share and _may_share(cu_seqlens)):
        return build_packing(cu_seqlens, num_rows, longest, block)
    stream = torch.cuda.current_stream(cu_seqlens.device).cuda_stream if cu_seqlens.is_cuda else 0
    key = (num_rows, longest, block, stream)
    entries = _cache.setdefault(cu_seqlens, {})
    if key not in entries or entries[key][0] != cu_seqlens._version:
        entries[key] = (cu_seqlens._version, build_packing(cu_seqlens, num_rows, longest, block))
    return entries[key][1]


def build_packing(cu_seqlens: Tensor, num_rows: int, longest: int, block: int) -> Packing:
    """Packs a batch, in one launch.

    Args:
        cu_seqlens: Offsets (B+1,) with B > 0, int32 or int64.
        num_rows: Rows of the packed tensors, slack included; below 2^31.
        longest: Upper bound of the lengths, at least 1 and at most ``block``.
        block: Rows per tile.
    """
    num_sequences = len(cu_seqlens) - 1
    num_chunks = triton.cdiv(num_sequences, _SEQUENCES)
    at_least = min_rows(longest, block)
    capacity = num_rows // at_least + num_chunks + 1
    storage = torch.empty(2 * capacity + num_rows, dtype=torch.int32, device=cu_seqlens.device)
    packing_kernel[(num_chunks,)](
        cu_seqlens,
        storage,
        num_sequences,
        capacity,
        BLOCK=block,
        STARTS=at_least,
        LONGEST=triton.next_power_of_2(longest),
        SEQUENCES=_SEQUENCES,
        num_warps=1,
    )
    return Packing(storage, capacity, num_chunks, at_least)
