"""Public op: jagged softmax attention."""

from typing import Literal, overload

import torch
from torch import Tensor

from lightning_gem.kernels.attention import dispatch, reference
from lightning_gem.kernels.attention.registration import check_values, runs_reference_directly
from lightning_gem.kernels.attention.spec import AttentionSpec
from lightning_gem.kernels.checks import autocast, check_backend, check_qkv, check_sequences, check_window
from lightning_gem.kernels.flash.registration import forward_op
from lightning_gem.kernels.schedule import TileSchedule


@overload
def jagged_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attn_bias: Tensor | None = None,
    softcap: float = 0.0,
    broadcast_query: bool = False,
    deterministic: bool = True,
    schedule: TileSchedule | None = None,
    backend: str = "auto",
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def jagged_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attn_bias: Tensor | None = None,
    softcap: float = 0.0,
    broadcast_query: bool = False,
    deterministic: bool = True,
    schedule: TileSchedule | None = None,
    backend: str = "auto",
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def jagged_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attn_bias: Tensor | None = None,
    softcap: float = 0.0,
    broadcast_query: bool = False,
    deterministic: bool = True,
    schedule: TileSchedule | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention over packed sequences of different lengths, without padding in the interface.

    A token attends to the keys of its own sequence only. Sequences may be empty; a query that sees no key returns 0 and
    receives gradient 0. Rows from ``cu_seqlens[-1]`` on ("slack") belong to no sequence: they are never read, and come
    back as zeros in outputs and gradients.

    The layout and the names are those of flash-attn's variable-length functions. Method: Jagged Flash Attention (Xu et
    al., 2024, https://arxiv.org/abs/2409.15373) after FlashAttention-2 (Dao, https://arxiv.org/abs/2307.08691).

    Args:
        query: (total_q, H, D), bfloat16, float16, float32 or float64; (S, H, D) with ``broadcast_query``.
        key: (total_k, Hkv, D), where Hkv divides H: query head h reads key head h // (H / Hkv).
        value: (total_k, Hkv, Dv); Dv may differ from D.
        cu_seqlens_q: Query offsets (B+1,), int32 or int64; None with ``broadcast_query``.
        cu_seqlens_k: Key offsets (B+1,); None takes ``cu_seqlens_q`` (self-attention).
        max_seqlen_q: Upper bound of the query lengths; None where it is unknown, which may cost speed.
        max_seqlen_k: The same for keys.
        softmax_scale: Factor on Q K^T; None is 1 / sqrt(D).
        causal: Hide keys to the right. Unequal lengths are aligned at the end: the last query sees the last key.
        window_size: Keys visible (left, right) of the own position, in the same alignment; -1 is unlimited.
        attn_bias: Added to the scaled scores: (B or 1, H or 1, at least the longest query, at least the longest key),
            float; -inf hides a key.
        softcap: Bends the scaled scores to softcap * tanh(scores / softcap), before the bias; 0 leaves them.
        broadcast_query: ``query`` is one set of S queries for all sequences; sequence b returns rows b*S to b*S+S.
        deterministic: Give the same bits in every run. All code does so far, whatever is asked for.
        schedule: A schedule of the queries (``build_tile_schedule``), taken where its block size suits the kernel. None
            has it built, once for all calls on the same offsets tensor (in compiled graphs: for each call).
        backend: ``auto``, or one that must run: ``hopper``, ``packed`` (for self-attention over short sequences),
            ``triton`` (the portable kernels) or ``reference``.
        return_lse: Also return the log of the softmax denominators.

    Returns:
        (total_q, H, Dv), or (B*S, H, Dv) with ``broadcast_query``, in the dtype of ``query`` (autocast: in its dtype).
        With ``return_lse`` also (H, total_q) float32 (float64 for float64), -inf where a query sees no key.

    Raises:
        ValueError: For shapes, dtypes, devices or offsets that do not fit together, or a backend that cannot run them.
            Values of offsets are checked only where they are on a CPU.
    """
    query, key, value = autocast(query, key, value)
    check_qkv(query, key, value)
    cu_seqlens_k = check_sequences(query, key, cu_seqlens_q, cu_seqlens_k, broadcast_query)
    check_window(window_size)
    check_backend(backend, softcap=softcap)
    if attn_bias is not None:
        _check_bias(attn_bias, len(cu_seqlens_k) - 1, query.shape[1])
    spec = AttentionSpec(
        activation=None,
        scale=query.shape[2] ** -0.5 if softmax_scale is None else softmax_scale,
        causal=causal,
        window_left=window_size[0],
        window_right=window_size[1],
        broadcast_query=broadcast_query,
        softcap=softcap,
    )
    if runs_reference_directly(query, backend):
        check_values(query, key, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        _check_bias_size(attn_bias, query, cu_seqlens_q, cu_seqlens_k)
        out, lse = reference.forward(spec, query, key, value, cu_seqlens_q, cu_seqlens_k, attn_bias, None, return_lse)
        return out if lse is None else (out, lse)
    if backend != "auto":  # refuse before anything is launched
        bounds, itself = (max_seqlen_q, max_seqlen_k), cu_seqlens_q is cu_seqlens_k
        dispatch.choose(spec, query, key, value, *bounds, attn_bias, backend, itself)
    out, lse = forward_op(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        attn_bias,
        None if schedule is None else schedule.storage,
        0 if schedule is None else schedule.block_size,
        not torch.compiler.is_compiling(),
        backend,
        spec.scale,
        softcap,
        causal,
        *window_size,
        broadcast_query,
    )
    return (out, lse) if return_lse else out


def _check_bias(attn_bias: Tensor, num_sequences: int, num_heads: int) -> None:
    fits = (
        attn_bias.ndim == 4
        and attn_bias.is_floating_point()
        and attn_bias.shape[0] in (1, num_sequences)
        and attn_bias.shape[1] in (1, num_heads)
    )
    if not fits:
        raise ValueError(
            f"attn_bias must be float (1 or {num_sequences}, 1 or {num_heads}, >= longest query, >= longest key), "
            f"got {attn_bias.dtype} {tuple(attn_bias.shape)}: lay it out per sequence, padded to the longest"
        )


def _check_bias_size(
    attn_bias: Tensor | None, query: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor
) -> None:
    """Lengths are known on a CPU only."""
    if attn_bias is None or len(cu_seqlens_k) < 2:
        return
    longest_q = len(query) if cu_seqlens_q is None else int(cu_seqlens_q.diff().max())
    longest_k = int(cu_seqlens_k.diff().max())
    if attn_bias.shape[2] < longest_q or attn_bias.shape[3] < longest_k:
        raise ValueError(
            f"attn_bias must be float (.., .., >= {longest_q}, >= {longest_k}), "
            f"got {attn_bias.dtype} {tuple(attn_bias.shape)}: lay it out per sequence, padded to the longest"
        )
