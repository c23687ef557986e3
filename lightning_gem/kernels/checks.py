"""Argument checks shared by the attention ops, and their autocast rule."""

import torch
from torch import Tensor

BACKENDS = ("auto", "hopper", "packed", "triton", "reference")
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts to the autocast dtype where autocast is on, as ``scaled_dot_product_attention`` does; float64 stays."""
    device_type = tensors[0].device.type
    # torch.compile of torch 2.11 cannot trace the first question, and traces no device on which it matters.
    available = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device_type)
    if not available or not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def check_qkv(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raises ValueError unless the three are packed (tokens, heads, dim) tensors that fit together."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim != 3:
            raise ValueError(
                f"{name} must be (total_tokens, num_heads, head_dim), got shape {tuple(tensor.shape)}: "
                "split the heads with unflatten(-1, (num_heads, head_dim)) and leave sequences packed"
            )
        if tensor.dtype not in _FLOATS:
            raise ValueError(f"{name} must be bfloat16, float16, float32 or float64, got {tensor.dtype}: cast it")
        if tensor.dtype != query.dtype or tensor.device != query.device:
            raise ValueError(
                f"{name} must have the dtype and device of query ({query.dtype}, {query.device}), "
                f"got {tensor.dtype}, {tensor.device}: move or cast it with {name}.to(query)"
            )
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"key must have the head_dim of query ({query.shape[2]}), got {key.shape[2]}: project both to one size"
        )
    if key.shape[:2] != value.shape[:2]:
        raise ValueError(
            f"value must have the tokens and heads of key {tuple(key.shape[:2])}, got {tuple(value.shape[:2])}: "
            "only head_dim may differ"
        )
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"query has {query.shape[1]} heads, which is no multiple of the {key.shape[1]} heads of key: "
            "each key head must serve the same number of query heads"
        )


def check_sequences(
    query: Tensor, key: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, broadcast_query: bool
) -> Tensor:
    """Raises ValueError unless the offsets fit query and key; returns those of key (in self-attention: of query).

    Their values are looked at by the ops (``check_offset_values``).
    """
    if broadcast_query and (cu_seqlens_q is not None or cu_seqlens_k is None):
        raise ValueError(
            "broadcast_query=True shares one set of queries, which has no offsets: "
            "pass cu_seqlens_q=None and the offsets of the keys as cu_seqlens_k"
        )
    offsets_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    if offsets_k is None or (cu_seqlens_q is None and not broadcast_query):
        raise ValueError("cu_seqlens_q may be None only with broadcast_query=True: pass the offsets of query")
    check_offsets("cu_seqlens_k", offsets_k, key)
    if cu_seqlens_q is not None:
        check_offsets("cu_seqlens_q", cu_seqlens_q, query)
        if len(cu_seqlens_q) != len(offsets_k):
            raise ValueError(
                f"cu_seqlens_k describes {len(offsets_k) - 1} sequences, but cu_seqlens_q {len(cu_seqlens_q) - 1}: "
                "give every sequence an entry in both, with length 0 where it has no tokens"
            )
    return offsets_k


def check_cu_seqlens(name: str, cu_seqlens: Tensor, tokens: Tensor, max_seqlen: int | None) -> None:
    """Raises ValueError for offsets that cannot describe ``tokens``; values are read on a CPU only, for free."""
    check_offsets(name, cu_seqlens, tokens)
    check_offset_values(name, cu_seqlens, tokens, max_seqlen)


def check_offsets(name: str, cu_seqlens: Tensor, tokens: Tensor) -> None:
    """Raises ValueError for a wrong shape, dtype or device."""
    if cu_seqlens.ndim != 1 or len(cu_seqlens) == 0 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{name} must be int32 or int64 of shape (B+1,), got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}: "
            "make it with lengths_to_cu_seqlens(lengths)"
        )
    if cu_seqlens.device != tokens.device:
        raise ValueError(
            f"{name} must be on {tokens.device} like the tokens, got {cu_seqlens.device}: use {name}.to(query.device)"
        )


def check_offset_values(name: str, cu_seqlens: Tensor, tokens: Tensor, max_seqlen: int | None) -> None:
    """Raises ValueError for offsets on a CPU whose values cannot describe ``tokens``."""
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        return
    lengths = cu_seqlens.diff()
    if cu_seqlens[0] != 0 or (lengths < 0).any():
        raise ValueError(
            f"{name} must start at 0 and never decrease: these look like other numbers; "
            "make offsets with lengths_to_cu_seqlens(lengths)"
        )
    if cu_seqlens[-1] > len(tokens):
        raise ValueError(
            f"{name} ends at {int(cu_seqlens[-1])}, but there are {len(tokens)} rows: pass the offsets of this tensor"
        )
    if max_seqlen is not None and (lengths > max_seqlen).any():
        raise ValueError(
            f"max_seqlen {max_seqlen} is below the longest sequence of {name} ({int(lengths.max())}): "
            "pass an upper bound, or None to have it computed"
        )


def check_window(window_size: tuple[int, int]) -> None:
    """Raises ValueError unless the window is two ints of at least -1."""
    if len(window_size) != 2 or min(window_size) < -1:
        raise ValueError(
            f"window_size must be (left, right), each -1 (unlimited) or more, got {window_size}: "
            "a symmetric window W is (W, W)"
        )


def check_backend(backend: str, softcap: float = 0.0) -> None:
    """Raises ValueError for a backend that does not exist, or a negative cap."""
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is unknown: use one of {', '.join(BACKENDS)}")
    if softcap < 0:
        raise ValueError(f"softcap must be 0 (off) or more, got {softcap}")
