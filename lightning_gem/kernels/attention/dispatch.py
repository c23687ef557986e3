"""Which code computes an attention op: the reference, the portable Triton kernels, or those for one kind of work."""

from typing import Any

import torch
from torch import Tensor

from lightning_gem.kernels.attention import reference
from lightning_gem.kernels.attention.spec import AttentionSpec
from lightning_gem.kernels.launch import interpreted, on_device
from lightning_gem.kernels.schedule import Schedules

MAX_HEAD_DIM = 256


def choose(
    spec: AttentionSpec,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    attn_bias: Tensor | None,
    backend: str = "auto",
    self_attention: bool = False,
) -> str:
    """``reference``, ``triton``, ``packed`` or ``hopper``, from shapes, dtypes and devices alone.

    Args:
        spec: What to compute.
        query: See :func:`forward`; so are the others.
        key: See ``query``.
        value: See ``query``.
        max_seqlen_q: See ``query``.
        max_seqlen_k: See ``query``.
        attn_bias: See ``query``.
        backend: See ``query``.
        self_attention: Whether both sides have the same offsets (:func:`is_self_attention`).

    Raises:
        ValueError: For a backend that cannot do this work.
    """
    if backend == "reference":
        return "reference"
    reason = _why_not_triton(query, value)
    if backend in ("auto", "packed") and self_attention and reason is None:
        from lightning_gem.kernels.attention import packed

        if packed.supports(spec, query, key, value, max_seqlen_q, max_seqlen_k, attn_bias):
            return "packed"
    if backend == "packed":
        raise ValueError(
            "backend 'packed' is for self-attention over short sequences of known max_seqlen_q on a GPU: use 'auto'"
        )
    if backend in ("auto", "hopper") and query.is_cuda:
        from lightning_gem.kernels.attention import hopper

        if hopper.supports(spec, query, key, value, max_seqlen_q, max_seqlen_k, attn_bias):
            return "hopper"
    if backend == "hopper":
        raise ValueError("backend 'hopper' has no kernel for these inputs on this device: use 'auto'")
    if reason is None:
        return "triton"
    if backend == "triton":
        raise ValueError(f"backend 'triton' cannot run: {reason}; use 'auto' or 'reference'")
    return "reference"


def is_self_attention(query: Tensor, key: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor) -> bool:
    """Whether queries and keys are the same packed rows: the offsets are one tensor, or one piece of memory.

    Custom ops may hand on one tensor as two. Under fake tensors, which have no memory, only identity tells.
    """
    if cu_seqlens_q is None or len(query) != len(key):
        return False
    if cu_seqlens_q is cu_seqlens_k:
        return True
    if type(cu_seqlens_q) is not Tensor or type(cu_seqlens_k) is not Tensor:
        return False
    same_layout = cu_seqlens_q.shape == cu_seqlens_k.shape and cu_seqlens_q.stride() == cu_seqlens_k.stride()
    same_kind = cu_seqlens_q.dtype == cu_seqlens_k.dtype and cu_seqlens_q.device == cu_seqlens_k.device
    return same_layout and same_kind and cu_seqlens_q.data_ptr() == cu_seqlens_k.data_ptr()


def _why_not_triton(query: Tensor, value: Tensor) -> str | None:
    if not query.is_cuda and not (query.device.type == "cpu" and interpreted()):
        return f"the tensors are on {query.device}"
    if query.dtype == torch.float64:
        return "float64 has no matrix units"
    if max(query.shape[2], value.shape[2]) > MAX_HEAD_DIM:
        return f"a head_dim is above {MAX_HEAD_DIM}"
    if min(query.shape[1], query.shape[2], value.shape[2]) == 0:
        return "there are no heads or features"
    if query.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(query.device) < (8, 0):
        return "the GPU is older than sm_80"
    return None


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
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Outputs, and with softmax the log of the denominators (H, rows).

    Args:
        spec: What to compute.
        query: (total_q, H, D), or (S, H, D) with ``spec.broadcast_query``.
        key: (total_k, Hkv, D).
        value: (total_k, Hkv, Dv).
        cu_seqlens_q: (B+1,); None with ``spec.broadcast_query``.
        cu_seqlens_k: (B+1,).
        max_seqlen_q: Upper bound of the query lengths, if known.
        max_seqlen_k: The same for keys.
        attn_bias: (B or 1, H or 1, >= longest query, >= longest key), softmax only.
        num_targets: (B,) with ``spec.has_targets``.
        schedules: Work lists, built when asked for.
        backend: ``auto``, or the one that must run.
    """
    itself = is_self_attention(query, key, cu_seqlens_q, cu_seqlens_k)
    chosen = choose(spec, query, key, value, max_seqlen_q, max_seqlen_k, attn_bias, backend, itself)
    if chosen == "reference":
        out, lse = reference.forward(
            spec, query, key, value, cu_seqlens_q, cu_seqlens_k, attn_bias, num_targets, spec.activation is None
        )
        return out, None if lse is None else lse.contiguous()
    with on_device(query):
        return _kernels(chosen).forward(
            spec,
            query,
            key,
            value,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            attn_bias,
            num_targets,
            schedules,
        )


def backward(
    spec: AttentionSpec,
    grad_out: Tensor | None,
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
    needs_query: bool = True,
    needs_key_value: bool = True,
    needs_bias: bool = False,
    backend: str = "auto",
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of query, key, value and bias, None where not needed; arguments as in :func:`forward`.

    Args:
        grad_out: (rows, H, Dv), any strides; None is zero.
        grad_lse: (H, rows) or None.
        out: The output, which softmax needs (``lse`` likewise).
        needs_query: Whether the gradient of the query is wanted.
        needs_key_value: The same for key and value, which come together.
        needs_bias: The same for the bias.
    """
    itself = is_self_attention(query, key, cu_seqlens_q, cu_seqlens_k)
    chosen = choose(spec, query, key, value, max_seqlen_q, max_seqlen_k, attn_bias, backend, itself)
    if chosen == "reference" or needs_bias:  # the kernels have no gradient of a bias: the reference gives all of them
        return reference.backward(
            spec,
            grad_out,
            grad_lse,
            query,
            key,
            value,
            cu_seqlens_q,
            cu_seqlens_k,
            attn_bias,
            num_targets,
            needs_query,
            needs_key_value,
            needs_bias,
        )
    if grad_out is None:
        assert out is not None
        grad_out = torch.zeros_like(out)
    with on_device(query):
        gradients = _kernels(chosen).backward(
            spec,
            grad_out,
            grad_lse,
            query,
            key,
            value,
            out,
            lse,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            attn_bias,
            num_targets,
            schedules,
            needs_query,
            needs_key_value,
        )
    return (*gradients, None)


def _kernels(chosen: str) -> Any:
    """The module with ``forward`` and ``backward``; Triton is imported when it is first needed."""
    if chosen == "hopper":
        from lightning_gem.kernels.attention import hopper

        return hopper
    if chosen == "packed":
        from lightning_gem.kernels.attention import packed

        return packed
    from lightning_gem.kernels.attention import triton_kernels

    return triton_kernels
