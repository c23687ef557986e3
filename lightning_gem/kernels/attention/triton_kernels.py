"""Launches of the portable kernels. Everything is decided from shapes: nothing here waits for the GPU."""

from dataclasses import asdict
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from lightning_gem.kernels.attention.blocks import Blocks, Kernel, choose_blocks, padded_dim
from lightning_gem.kernels.attention.spec import AttentionSpec
from lightning_gem.kernels.attention.triton_backward import (
    delta_kernel,
    key_value_gradient_kernel,
    query_gradient_kernel,
)
from lightning_gem.kernels.attention.triton_forward import attention_forward_kernel
from lightning_gem.kernels.launch import interpreted
from lightning_gem.kernels.schedule import Schedules
from lightning_gem.kernels.triton_activations import CODES

# For the gradient of broadcast queries: enough to fill a GPU, but the same on all of them, so that all sum alike.
_BROADCAST_PROGRAMS = 512
_DELTA_ROWS = 32


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
    num_heads, num_sequences = query.shape[1], len(cu_seqlens_k) - 1
    rows = len(query) * num_sequences if spec.broadcast_query else len(query)
    out = query.new_empty(rows, num_heads, value.shape[2])
    lse = query.new_empty(num_heads, rows, dtype=torch.float32) if spec.activation is None else None
    if num_sequences == 0:
        return out.zero_().to(dtype), None if lse is None else lse.zero_()
    if rows > 0:
        blocks = blocks_of("forward", spec, query, key, value, max_seqlen_q, max_seqlen_k)
        schedule = schedules.queries(blocks.block_m)
        attention_forward_kernel[(schedule.capacity * num_heads,)](
            query,
            key,
            value,
            out,
            query if lse is None else lse,
            query if attn_bias is None else attn_bias,
            cu_seqlens_k if num_targets is None else num_targets,
            _codes(spec, query),
            cu_seqlens_k if cu_seqlens_q is None else cu_seqlens_q,
            cu_seqlens_k,
            schedule.storage,
            *query.stride()[:2],
            *key.stride()[:2],
            *value.stride()[:2],
            *out.stride()[:2],
            rows,
            *_bias_strides(attn_bias),
            len(query),
            num_sequences,
            schedule.capacity,
            *_scalars(spec),
            HEADS=num_heads,
            **_constants(spec, query, key, value, attn_bias, blocks),
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
    """``dispatch.backward`` for tensors on the current device."""
    dtype = query.dtype
    query, key, value, grad_out = _operands(query, key, value, grad_out)
    if len(cu_seqlens_k) == 1 or len(grad_out) == 0 or len(key) == 0:
        zeros = [torch.zeros_like(x, dtype=dtype) for x in (query, key, value)]
        return zeros[0], zeros[1], zeros[2]
    delta = lse
    if spec.activation is None:
        assert out is not None
        assert lse is not None
        delta = _delta(spec, _operands(out)[0], grad_out, grad_lse, cu_seqlens_q, len(cu_seqlens_k) - 1)
    offsets = (cu_seqlens_k if cu_seqlens_q is None else cu_seqlens_q, cu_seqlens_k)
    tensors = (
        query,
        key,
        value,
        grad_out,
        query if lse is None else lse,
        query if delta is None else delta,
    )
    extras = (
        query if attn_bias is None else attn_bias,
        cu_seqlens_k if num_targets is None else num_targets,
        _codes(spec, query),
        *offsets,
    )
    bounds = (max_seqlen_q, max_seqlen_k)
    grad_query = grad_key = grad_value = None
    if needs_key_value:
        blocks = blocks_of("key_value_gradient", spec, query, key, value, *bounds)
        grad_key, grad_value = _key_value_gradients(spec, tensors, extras, attn_bias, schedules, blocks)
        grad_key, grad_value = grad_key.to(dtype), grad_value.to(dtype)
    if needs_query:
        blocks = blocks_of("query_gradient", spec, query, key, value, *bounds)
        grad_query = _query_gradients(spec, tensors, extras, attn_bias, schedules, blocks).to(dtype)
    return grad_query, grad_key, grad_value


def blocks_of(
    kernel: Kernel,
    spec: AttentionSpec,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> Blocks:
    """Block sizes for these inputs on their device."""
    bound_q = len(query) if spec.broadcast_query else max_seqlen_q
    shared_memory = _shared_memory(query.device.index) if query.is_cuda else 0
    dims = (query.shape[2], value.shape[2], query.dtype)
    return choose_blocks(kernel, *dims, shared_memory, bound_q, max_seqlen_k, interpreted())


def configuration(
    spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor, max_seqlen_q: int | None, max_seqlen_k: int | None
) -> dict[str, Any]:
    """Block sizes of every kernel, for ``kernel_info``."""
    kernels: tuple[Kernel, ...] = ("forward", "key_value_gradient", "query_gradient")
    return {name: asdict(blocks_of(name, spec, query, key, value, max_seqlen_q, max_seqlen_k)) for name in kernels}


def _key_value_gradients(
    spec: AttentionSpec,
    tensors: tuple[Tensor, ...],
    extras: tuple[Tensor, ...],
    attn_bias: Tensor | None,
    schedules: Schedules,
    blocks: Blocks,
) -> tuple[Tensor, Tensor]:
    query, key, value, grad_out = tensors[:4]
    grad_key, grad_value = key.new_empty(key.shape), value.new_empty(value.shape)
    schedule = schedules.keys(blocks.block_n)
    key_value_gradient_kernel[(schedule.capacity * key.shape[1],)](
        *tensors,
        grad_key,
        grad_value,
        *extras,
        schedule.storage,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *grad_out.stride()[:2],
        *grad_key.stride()[:2],
        *grad_value.stride()[:2],
        len(grad_out),
        *_bias_strides(attn_bias),
        len(key),
        len(query),
        len(extras[-1]) - 1,
        schedule.capacity,
        *_scalars(spec),
        HEADS_KV=key.shape[1],
        **_constants(spec, query, key, value, attn_bias, blocks),
    )
    return grad_key, grad_value


def _query_gradients(
    spec: AttentionSpec,
    tensors: tuple[Tensor, ...],
    extras: tuple[Tensor, ...],
    attn_bias: Tensor | None,
    schedules: Schedules,
    blocks: Blocks,
) -> Tensor:
    query, key, value, grad_out = tensors[:4]
    num_heads, num_sequences = query.shape[1], len(extras[-1]) - 1
    if spec.broadcast_query:
        tiles = triton.cdiv(len(query), blocks.block_m) * num_heads
        num_splits = max(1, min(num_sequences, _BROADCAST_PROGRAMS // tiles))
        gradient = query.new_empty(num_splits, *query.shape, dtype=torch.float32)
        programs, storage, capacity = tiles * num_splits, extras[-1], 0
    else:
        schedule = schedules.queries(blocks.block_m)
        num_splits, gradient = 1, query.new_empty(1, *query.shape)
        programs, storage, capacity = schedule.capacity * num_heads, schedule.storage, schedule.capacity
    query_gradient_kernel[(programs,)](
        *tensors[:6],
        gradient,
        *extras,
        storage,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *grad_out.stride()[:2],
        *gradient.stride()[:3],
        len(grad_out),
        *_bias_strides(attn_bias),
        len(query),
        num_sequences,
        capacity,
        num_splits,
        *_scalars(spec),
        HEADS=num_heads,
        **_constants(spec, query, key, value, attn_bias, blocks),
    )
    return gradient.sum(0) if spec.broadcast_query else gradient[0]


def _delta(
    spec: AttentionSpec,
    out: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    cu_seqlens_q: Tensor | None,
    num_sequences: int,
) -> Tensor:
    rows, num_heads, dim_v = out.shape
    delta = out.new_empty(num_heads, rows, dtype=torch.float32)
    delta_kernel[(triton.cdiv(rows, _DELTA_ROWS) * num_heads,)](
        out,
        grad_out,
        delta if grad_lse is None else grad_lse.to(torch.float32).contiguous(),
        delta,
        delta if cu_seqlens_q is None else cu_seqlens_q,
        *out.stride()[:2],
        *grad_out.stride()[:2],
        rows,
        rows,
        num_sequences,
        HEADS=num_heads,
        DIM_V=dim_v,
        BLOCK_M=_DELTA_ROWS,
        BLOCK_DV=padded_dim(dim_v),
        BROADCAST=spec.broadcast_query,
        HAS_GRAD_LSE=grad_lse is not None,
        num_warps=4,
    )
    return delta


def _operands(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Features side by side; in float32 under the interpreter, whose half precision products are wrong."""
    if interpreted():
        tensors = tuple(x.float() for x in tensors)
    return tuple(x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in tensors)


def _scalars(spec: AttentionSpec) -> tuple[float, float, float, int, int, int]:
    return spec.scale, spec.out_scale, spec.softcap, spec.window_left, spec.right, spec.contextual_seqlen


def _bias_strides(attn_bias: Tensor | None) -> tuple[int, ...]:
    """A bias that sequences or heads share has stride 0 there."""
    if attn_bias is None:
        return 0, 0, 0, 0
    shared = (0 if size == 1 else stride for size, stride in zip(attn_bias.shape[:2], attn_bias.stride(), strict=False))
    return (*shared, *attn_bias.stride()[2:])


def _constants(
    spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, blocks: Blocks
) -> dict[str, Any]:
    """What the kernels are compiled for."""
    names = [spec.activation] if isinstance(spec.activation, str) else spec.activation or ()
    full_precision = query.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    return {
        "GROUP": query.shape[1] // key.shape[1],
        "DIM": query.shape[2],
        "DIM_V": value.shape[2],
        "BLOCK_M": blocks.block_m,
        "BLOCK_N": blocks.block_n,
        "BLOCK_D": padded_dim(query.shape[2]),
        "BLOCK_DV": padded_dim(value.shape[2]),
        "SOFTMAX": spec.activation is None,
        "CODES": sum(1 << code for code in {CODES[name] for name in names}),
        "PER_HEAD": isinstance(spec.activation, tuple),
        "HAS_LEFT": spec.window_left >= 0,
        "HAS_RIGHT": spec.right >= 0,
        "HAS_ROLES": spec.has_roles,
        "HAS_TARGETS": spec.has_targets,
        "BROADCAST": spec.broadcast_query,
        "HAS_BIAS": attn_bias is not None,
        "HAS_CAP": spec.softcap > 0,
        "PRECISION": "ieee" if full_precision else "tf32",
        "FAST": query.is_cuda and torch.version.hip is None and query.dtype != torch.float32,
        "num_warps": blocks.num_warps,
        "num_stages": blocks.num_stages,
    }


def _codes(spec: AttentionSpec, query: Tensor) -> Tensor:
    """Activation of every head; any tensor where all have the same."""
    if not isinstance(spec.activation, tuple):
        return query
    return _codes_on(spec.activation, query.device)


@lru_cache(maxsize=64)
def _codes_on(names: tuple[str, ...], device: torch.device) -> Tensor:
    return torch.tensor([CODES[name] for name in names], dtype=torch.int32, device=device)


@lru_cache(maxsize=16)
def _shared_memory(device: int) -> int:
    return int(triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"])
