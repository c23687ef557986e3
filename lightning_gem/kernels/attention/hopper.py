"""Launches of the Hopper (sm_90) kernels, which are written in Gluon: TMA, wgmma, and warps with roles of their own.

They cover the common ground (half precision, heads of 64 or 128) at full speed and leave the rest to the portable
kernels. Everything is decided from shapes: nothing here waits for the GPU.
"""

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lightning_gem.kernels.attention.spec import AttentionSpec
from lightning_gem.kernels.launch import multiprocessors
from lightning_gem.kernels.schedule import Schedules

_ACTIVATIONS = ("identity", "relu", "relu_squared", "leaky_relu", "gelu", "gelu_tanh", "silu", "hardswish")
# Activations that vanish, with their slope, far to the left: the backward hides pairs by such a score.
_FLAT = frozenset(_ACTIVATIONS) - {"identity", "leaky_relu"}
_ROW_LIMIT = 1 << 30
_BLOCK = 128  # rows of a tile, two warpgroups of 64
_SHORT_RUN = 8  # query tiles that one program takes while it keeps the keys of a sequence
_REGISTERS = {"PRODUCER_REGISTERS": 24, "CONSUMER_REGISTERS": 240, "num_warps": 4}


def supports(
    spec: AttentionSpec,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    attn_bias: Tensor | None,
) -> bool:
    """Whether :func:`forward` and :func:`backward` take this work; decided from shapes, strides, dtypes, and bounds."""
    masked = spec.window_left >= 0 or spec.right >= 0
    activation_fits = spec.activation is None or (
        spec.activation in _ACTIVATIONS and (not masked or spec.activation in _FLAT)
    )
    scale_fits = spec.scale > 0 if spec.activation is None else spec.scale != 0
    plain = attn_bias is None and not spec.has_roles and spec.softcap == 0 and scale_fits
    return (
        plain
        and activation_fits
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[2] == value.shape[2]
        and query.shape[2] in (64, 128)
        and all(_copyable(x) for x in (query, key, value))
        and _available(query.device.index)
    )


def _copyable(x: Tensor) -> bool:
    """Whether the copy engine takes (rows, heads, dim) as (rows, heads * dim): whole heads, 16-byte strides."""
    rows, heads, dim = x.shape
    aligned = torch.compiler.is_compiling() or x.data_ptr() % 16 == 0
    return (
        0 < rows <= _ROW_LIMIT
        and x.stride(2) == 1
        and (x.stride(1) == dim or heads == 1)
        and x.stride(0) % 8 == 0
        and x.stride(0) >= dim
        and aligned
    )


@lru_cache
def _available(device: int | None) -> bool:
    """A Hopper GPU, and the Triton release whose Gluon dialect the kernels are written in."""
    import triton

    return torch.version.hip is None and (
        torch.cuda.get_device_capability(device) == (9, 0) and triton.__version__.startswith("3.6.")
    )


def configuration(
    spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor, max_seqlen_q: int | None, max_seqlen_k: int | None
) -> dict[str, Any]:
    """Block sizes and the like, for ``kernel_info``."""
    sequences = len(query) // max_seqlen_q if max_seqlen_q else 1
    parts = _short_key_parts(spec, query, max_seqlen_k, sequences)
    forward = {"BLOCK_M": _BLOCK, **_forward_blocks(spec)}
    if parts:
        forward = {"BLOCK_M": _BLOCK, "BLOCK_N": 128, "PARTS": parts, "RUN": _SHORT_RUN}
    if _all_in_one_pass(spec, query, key, max_seqlen_k, sequences):
        return {"forward": forward, "gradients": {"BLOCK_M": 64, "BLOCK_N": 128, "STAGES": 2}}
    if _few_queries(spec, query, key, max_seqlen_q, sequences):
        return {"forward": forward, "gradients": {"BLOCK_M": 64, "BLOCK_N": 128, "STAGES": _short_query_stages(query)}}
    return {
        "forward": forward,
        "query_gradient": {"BLOCK_M": _BLOCK, "BLOCK_N": 64, "STAGES": 3},
        "key_value_gradient": {"BLOCK_M": 64, "BLOCK_N": _BLOCK, "STAGES": 3},
    }


def _forward_blocks(spec: AttentionSpec) -> dict[str, int]:
    if spec.window_left >= 0 and spec.right >= 0:  # smaller tiles waste less at the edges of a window
        return {"BLOCK_N": 64, "STAGES": 4}
    return {"BLOCK_N": 128, "STAGES": 2}


def _short_key_parts(spec: AttentionSpec, query: Tensor, max_seqlen_k: int | None, sequences: int) -> int:
    """Tiles of 128 keys that a program can keep while queries pass by; 0 where that does not apply or pay."""
    if spec.window_left >= 0 or spec.right >= 0 or max_seqlen_k is None or max_seqlen_k > 256:
        return 0
    runs = (len(query) // (_SHORT_RUN * _BLOCK) + sequences) * query.shape[1]
    return -(-max_seqlen_k // 128) if max_seqlen_k > 0 and runs >= multiprocessors(query) else 0


def _all_in_one_pass(spec: AttentionSpec, query: Tensor, key: Tensor, max_seqlen_k: int | None, sequences: int) -> bool:
    """Whether one program can hold all keys of a sequence, and there are sequences enough to go around."""
    whole = max_seqlen_k is not None and max_seqlen_k <= 128 and spec.window_left < 0 and spec.right < 0
    busy = sequences * key.shape[1] >= multiprocessors(query)
    return whole and busy and query.shape[2] == 128


def _few_queries(spec: AttentionSpec, query: Tensor, key: Tensor, max_seqlen_q: int | None, sequences: int) -> bool:
    """Whether one tile holds all queries of a sequence, and there are sequences enough to go around."""
    longest = len(query) if spec.broadcast_query else max_seqlen_q
    whole = longest is not None and longest <= 64 and spec.window_left < 0 and spec.right < 0
    busy = sequences * key.shape[1] >= multiprocessors(query)
    return whole and busy and key.shape[1] == query.shape[1]


def _short_query_stages(query: Tensor) -> int:
    return 3 if query.shape[2] == 128 else 6


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
    from lightning_gem.kernels.attention.gluon_forward import attention_forward
    from lightning_gem.kernels.attention.gluon_short_key import attention_forward_short_key
    from lightning_gem.kernels.triton_slack import zero_slack_

    heads, dim, sequences = query.shape[1], query.shape[2], len(cu_seqlens_k) - 1
    rows = len(query) * sequences if spec.broadcast_query else len(query)
    out = query.new_empty(rows, heads, dim)
    # The kernels take a pointer in any case; only softmax writes to it.
    lse = torch.zeros(heads, rows, dtype=torch.float32, device=query.device) if spec.activation is None else None
    if sequences == 0:
        return out.zero_(), lse
    offsets_q = cu_seqlens_k if cu_seqlens_q is None else cu_seqlens_q
    parts = _short_key_parts(spec, query, max_seqlen_k, sequences)
    lse_or_any = cu_seqlens_k if lse is None else lse
    constants = {
        "HEADS": heads,
        "GROUP": heads // key.shape[1],
        "BROADCAST": spec.broadcast_query,
        "D": dim,
        "BLOCK_M": _BLOCK,
        "ACTIVATION": spec.activation or "",
        **_REGISTERS,
    }
    grid = (multiprocessors(query),)
    if parts:
        runs = schedules.queries(_SHORT_RUN * _BLOCK)
        attention_forward_short_key[grid](
            _segments(query, 64),
            _segments(key, 128),
            _segments(value, 128),
            _segments(out, 64),
            lse_or_any,
            runs.num_tiles,
            runs.sequence,
            runs.tile,
            offsets_q,
            cu_seqlens_k,
            len(query),
            _kernel_scale(spec),
            spec.out_scale,
            rows,
            BLOCK_N=128,
            PARTS=parts,
            SETS=2 // parts,
            STAGES=2,
            RUN=_SHORT_RUN,
            **constants,
        )
    else:
        blocks = _forward_blocks(spec)
        tiles = schedules.queries(_BLOCK)
        attention_forward[grid](
            _segments(query, 64),
            _segments(key, blocks["BLOCK_N"]),
            _segments(value, blocks["BLOCK_N"]),
            _segments(out, 64),
            lse_or_any,
            tiles.num_tiles,
            tiles.sequence,
            tiles.tile,
            offsets_q,
            cu_seqlens_k,
            len(query),
            spec.window_left,
            spec.right,
            _kernel_scale(spec),
            spec.out_scale,
            rows,
            HAS_LEFT=spec.window_left >= 0,
            HAS_RIGHT=spec.right >= 0,
            **blocks,
            **constants,
        )
    if not spec.broadcast_query:
        zero_slack_(out.flatten(1), offsets_q)
    return out, lse


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
    """``dispatch.backward`` for tensors on the current device."""
    from lightning_gem.kernels.attention.triton_row_stats import row_stats
    from lightning_gem.kernels.triton_slack import zero_slack_

    sequences = len(cu_seqlens_k) - 1
    if sequences == 0:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    if not _copyable(grad_out):
        grad_out = grad_out.contiguous()
    seeds, rows = len(query), len(grad_out)
    if cu_seqlens_q is None:
        offsets_q = torch.arange(sequences + 1, dtype=torch.int32, device=query.device) * seeds
    else:
        offsets_q = cu_seqlens_q
    stats = None
    if spec.activation is None:
        assert out is not None
        assert lse is not None
        stats = row_stats(out, grad_out, lse, grad_lse, offsets_q, schedules.queries(_BLOCK))
    in_one_pass = needs_query and needs_key_value
    all_keys = in_one_pass and _all_in_one_pass(spec, query, key, max_seqlen_k, sequences)
    all_queries = in_one_pass and not all_keys and _few_queries(spec, query, key, max_seqlen_q, sequences)
    # What is added up in the end, in a fixed order: two halves of the keys, and the sequences of broadcast queries.
    partial = query.new_empty(2 if all_queries else 1, rows if needs_query else 0, *query.shape[1:])
    grad_key, grad_value = (x.new_empty(x.shape if needs_key_value else (0,)) for x in (key, value))
    tensors = (query, key, value, grad_out)
    if all_keys:
        _launch_all(spec, *tensors, partial[0], grad_key, grad_value, stats, offsets_q, cu_seqlens_k)
    elif all_queries:
        _launch_few_queries(spec, *tensors, partial, grad_key, grad_value, stats, offsets_q, cu_seqlens_k)
    else:
        if needs_query:
            _launch_query(spec, *tensors, partial[0], stats, offsets_q, cu_seqlens_k, schedules)
        if needs_key_value:
            _launch_key_value(spec, *tensors, grad_key, grad_value, stats, offsets_q, cu_seqlens_k, schedules)
    if needs_key_value:
        zero_slack_(grad_key.flatten(1), cu_seqlens_k)
        zero_slack_(grad_value.flatten(1), cu_seqlens_k)
    if not needs_query:
        return None, grad_key if needs_key_value else None, grad_value if needs_key_value else None
    if spec.broadcast_query:
        grad_query = partial.unflatten(1, (sequences, seeds)).sum((0, 1))
    else:
        grad_query = partial.sum(0) if len(partial) > 1 else partial[0]
        zero_slack_(grad_query.flatten(1), offsets_q)
    return grad_query, grad_key if needs_key_value else None, grad_value if needs_key_value else None


def _launch_all(
    spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, grad_query: Tensor,
    grad_key: Tensor, grad_value: Tensor, stats: Tensor | None, offsets_q: Tensor, offsets_k: Tensor,
) -> None:  # fmt: skip
    from lightning_gem.kernels.attention.gluon_short_key_backward import attention_backward_short_key

    sequences, heads_k = len(offsets_k) - 1, key.shape[1]
    longest_first = torch.argsort(offsets_q.diff(), descending=True, stable=True).int()
    attention_backward_short_key[(multiprocessors(query),)](
        _segments(query, 64),
        _segments(key, 64),
        _segments(value, 64),
        _segments(grad_out, 64),
        _segments(grad_query, 64, columns=query.shape[2] // 2),
        _segments(grad_key, 64),
        _segments(grad_value, 64),
        _stats_runs(stats, 64, query),
        sequences * heads_k,
        longest_first,
        offsets_q,
        offsets_k,
        len(query),
        _kernel_scale(spec),
        spec.scale * spec.out_scale,
        spec.out_scale,
        HEADS_K=heads_k,
        GROUP=query.shape[1] // heads_k,
        BROADCAST=spec.broadcast_query,
        D=query.shape[2],
        BLOCK_M=64,
        STAGES=2,
        ACTIVATION=spec.activation or "",
        **_REGISTERS,
    )


def _launch_few_queries(
    spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, partial: Tensor,
    grad_key: Tensor, grad_value: Tensor, stats: Tensor | None, offsets_q: Tensor, offsets_k: Tensor,
) -> None:  # fmt: skip
    from lightning_gem.kernels.attention.gluon_short_query_backward import attention_backward_short_query

    heads = query.shape[1]
    longest_first = torch.argsort(offsets_k.diff(), descending=True, stable=True).int()
    attention_backward_short_query[(multiprocessors(query),)](
        _segments(query, 64),
        _segments(key, 64),
        _segments(value, 64),
        _segments(grad_out, 64),
        _segments(partial.flatten(0, 1), 64),
        _segments(grad_key, 64),
        _segments(grad_value, 64),
        _stats_runs(stats, 64, query),
        (len(offsets_k) - 1) * heads,
        longest_first,
        offsets_q,
        offsets_k,
        len(query),
        _kernel_scale(spec),
        spec.scale * spec.out_scale,
        spec.out_scale,
        partial.shape[1],
        HEADS=heads,
        BROADCAST=spec.broadcast_query,
        D=query.shape[2],
        STAGES=_short_query_stages(query),
        ACTIVATION=spec.activation or "",
        **_REGISTERS,
    )


def _launch_query(
    spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, grad_query: Tensor,
    stats: Tensor | None, offsets_q: Tensor, offsets_k: Tensor, schedules: Schedules,
) -> None:  # fmt: skip
    from lightning_gem.kernels.attention.gluon_backward import attention_backward_query

    tiles = schedules.queries(_BLOCK)
    attention_backward_query[(multiprocessors(query),)](
        _segments(query, 64),
        _segments(key, 64),
        _segments(value, 64),
        _segments(grad_out, 64),
        _segments(grad_query, 64),
        offsets_k if stats is None else stats,
        tiles.num_tiles,
        tiles.sequence,
        tiles.tile,
        offsets_q,
        offsets_k,
        len(query),
        spec.window_left,
        spec.right,
        _kernel_scale(spec),
        spec.scale * spec.out_scale,
        0 if stats is None else stats.shape[2],
        HEADS=query.shape[1],
        GROUP=query.shape[1] // key.shape[1],
        BROADCAST=spec.broadcast_query,
        HAS_LEFT=spec.window_left >= 0,
        HAS_RIGHT=spec.right >= 0,
        D=query.shape[2],
        BLOCK_M=_BLOCK,
        BLOCK_N=64,
        STAGES=3,
        ACTIVATION=spec.activation or "",
        **_REGISTERS,
    )


def _launch_key_value(
    spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, grad_key: Tensor,
    grad_value: Tensor, stats: Tensor | None, offsets_q: Tensor, offsets_k: Tensor, schedules: Schedules,
) -> None:  # fmt: skip
    from lightning_gem.kernels.attention.gluon_backward import attention_backward_key_value

    tiles = schedules.keys(_BLOCK)
    heads_k = key.shape[1]
    attention_backward_key_value[(multiprocessors(query),)](
        _segments(query, 64),
        _segments(key, 64),
        _segments(value, 64),
        _segments(grad_out, 64),
        _segments(grad_key, 64),
        _segments(grad_value, 64),
        _stats_runs(stats, 64, query),
        tiles.num_tiles,
        tiles.sequence,
        tiles.tile,
        offsets_q,
        offsets_k,
        len(query),
        spec.window_left,
        spec.right,
        _kernel_scale(spec),
        spec.scale * spec.out_scale,
        spec.out_scale,
        HEADS_K=heads_k,
        GROUP=query.shape[1] // heads_k,
        BROADCAST=spec.broadcast_query,
        HAS_LEFT=spec.window_left >= 0,
        HAS_RIGHT=spec.right >= 0,
        D=query.shape[2],
        BLOCK_M=64,
        BLOCK_N=_BLOCK,
        STAGES=3,
        ACTIVATION=spec.activation or "",
        **_REGISTERS,
    )


def _kernel_scale(spec: AttentionSpec) -> float:
    """Softmax is computed with powers of two."""
    return spec.scale * math.log2(math.e) if spec.activation is None else spec.scale


def _segments(x: Tensor, block_rows: int, columns: int | None = None) -> Any:
    """Describes (rows, heads, dim) to the copy engine as (rows, heads * dim), bounded by any segment of rows.

    The copy engine checks coordinates against the shape of a tensor, not of a sequence in it. Two more dimensions mend
    that: their strides are s and 2^34 - s for a row stride of s, so that the coordinates (2^30, start + length,
    2^30 - length + row) address row ``start + row`` modulo 2^64, while the third reaches the end of its dimension,
    2^30, exactly where the segment ends. (The idea of ``triton.tools.ragged_tma``.)

    Args:
        x: (rows, heads, dim).
        block_rows: Rows of one copy.
        columns: Columns of one copy; None is ``dim``.
    """
    _, heads, dim = x.shape
    block, layout = _block(block_rows, dim if columns is None else columns, x.dtype)
    shape = [0x7FFF0000, 0x7FFF0000, _ROW_LIMIT, heads * dim]
    stride = x.stride(0)
    return _descriptor(x, shape, [2**34 - stride, stride, stride, 1], block, layout)


def _descriptor(x: Tensor, shape: list[int], strides: list[int], block: list[int], layout: Any) -> Any:
    """A descriptor without the checks of its constructor, which take longer than a launch: ``supports`` made them."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    descriptor = object.__new__(TensorDescriptor)
    descriptor.base, descriptor.shape, descriptor.strides = x, shape, strides
    descriptor.block_shape, descriptor.layout, descriptor.padding = block, layout, "zero"
    return descriptor


@lru_cache
def _block(rows: int, columns: int, dtype: torch.dtype) -> tuple[list[int], Any]:
    """Shape of a copy and its layout in shared memory, which take as long to make as a launch."""
    from triton.experimental.gluon import language as gl

    block = [1, 1, rows, columns]
    return block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)


@lru_cache
def _stats_layout() -> Any:
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def _stats_runs(stats: Tensor | None, run: int, like: Tensor) -> Any:
    """Describes the row statistics (2, H, entries) as (2 * H, entries), in runs; any tensor where there are none."""
    if stats is None:
        stats = torch.empty(1, 1, run, dtype=torch.float32, device=like.device)
    rows, entries = stats.shape[0] * stats.shape[1], stats.shape[2]
    return _descriptor(stats, [rows, entries], [entries, 1], [1, run], _stats_layout())
