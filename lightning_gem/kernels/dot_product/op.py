"""Public op: generalised dot-product attention."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_gem.kernels.attention import dispatch, reference
from lightning_gem.kernels.attention.registration import check_values, runs_reference_directly
from lightning_gem.kernels.attention.spec import AttentionSpec
from lightning_gem.kernels.checks import autocast, check_backend, check_qkv, check_sequences, check_window
from lightning_gem.kernels.dot_product.activations import check_activation
from lightning_gem.kernels.dot_product.registration import forward_op
from lightning_gem.kernels.schedule import TileSchedule


def gdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    activation: str | Sequence[str] = "gelu_tanh",
    scale: float = 1.0,
    out_scale: float = 1.0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    num_targets: Tensor | None = None,
    contextual_seqlen: int = 0,
    broadcast_query: bool = False,
    deterministic: bool = True,
    schedule: TileSchedule | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention with an activation in place of the softmax: out_scale * act(scale * Q K^T) V, per sequence and head.

    With short keys this is a two-layer feed-forward network whose weights belong to the sample (see ``pffn``). The two
    scales cover the conventions in use: HSTU scales before and after, Kunlun before, Meta's open kernels after.

    Empty sequences, slack rows, alignment and windows are as in ``jagged_flash_attention``; hidden keys contribute 0.
    Method: Kunlun (https://arxiv.org/abs/2602.10016) and github.com/facebookresearch/ads_model_kernel_library.

    Args:
        query: (total_q, H, D), bfloat16, float16, float32 or float64; (S, H, D) with ``broadcast_query``.
        key: (total_k, Hkv, D), where Hkv divides H: query head h reads key head h // (H / Hkv).
        value: (total_k, Hkv, Dv); Dv may differ from D.
        cu_seqlens_q: Query offsets (B+1,), int32 or int64; None with ``broadcast_query``.
        cu_seqlens_k: Key offsets (B+1,); None takes ``cu_seqlens_q`` (self-attention).
        max_seqlen_q: Upper bound of the query lengths; None where it is unknown, which may cost speed.
        max_seqlen_k: The same for keys.
        activation: identity, relu, relu_squared, leaky_relu, gelu, gelu_tanh, gelu_poly (for scores within 2), silu or
            hardswish; or a list of one such name per query head.
        scale: Factor on Q K^T.
        out_scale: Factor on the result.
        causal: Hide keys to the right.
        window_size: Keys visible (left, right) of the own position; -1 is unlimited.
        num_targets: (B,) numbers of candidates at the end of each sequence, int32 or int64, for causal self-attention:
            a target sees itself and what comes before all targets. As in HSTU (https://arxiv.org/abs/2402.17152).
        contextual_seqlen: Tokens at the start of each sequence, for causal self-attention, that see all but targets.
        broadcast_query: ``query`` is one set of S queries for all sequences; sequence b returns rows b*S to b*S+S.
        deterministic: Give the same bits in every run. All code does so far, whatever is asked for.
        schedule: A schedule of the queries (``build_tile_schedule``), taken where its block size suits the kernel. None
            has it built, once for all calls on the same offsets tensor (in compiled graphs: for each call).
        backend: ``auto``, or one that must run: ``hopper``, ``packed`` (for self-attention over short sequences),
            ``triton`` (the portable kernels) or ``reference``.

    Returns:
        (total_q, H, Dv), or (B*S, H, Dv) with ``broadcast_query``, in the dtype of ``query`` (autocast: in its dtype).

    Raises:
        ValueError: For an unknown activation, shapes, dtypes, devices or offsets that do not fit together, masks that
            exclude each other, or a backend that cannot run them. Values of offsets are checked only on a CPU.
    """
    query, key, value = autocast(query, key, value)
    check_qkv(query, key, value)
    has_roles = num_targets is not None or contextual_seqlen != 0
    if has_roles:
        _check_roles(num_targets, contextual_seqlen, cu_seqlens_q, cu_seqlens_k, causal, window_size, broadcast_query)
    cu_seqlens_k = check_sequences(query, key, cu_seqlens_q, cu_seqlens_k, broadcast_query)
    check_window(window_size)
    check_activation(activation, query.shape[1])
    check_backend(backend)
    spec = AttentionSpec(
        activation=activation if isinstance(activation, str) else tuple(activation),
        scale=scale,
        out_scale=out_scale,
        causal=causal,
        window_left=window_size[0],
        window_right=window_size[1],
        broadcast_query=broadcast_query,
        contextual_seqlen=contextual_seqlen,
        has_targets=num_targets is not None,
    )
    if runs_reference_directly(query, backend):
        check_values(query, key, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return reference.forward(
            spec, query, key, value, cu_seqlens_q, cu_seqlens_k, None, num_targets, return_lse=False
        )[0]
    if backend != "auto":  # refuse before anything is launched
        bounds, itself = (max_seqlen_q, max_seqlen_k), cu_seqlens_q is cu_seqlens_k
        dispatch.choose(spec, query, key, value, *bounds, None, backend, itself)
    return forward_op(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        num_targets,
        None if schedule is None else schedule.storage,
        0 if schedule is None else schedule.block_size,
        not torch.compiler.is_compiling(),
        backend,
        activation if isinstance(activation, str) else ",".join(activation),
        scale,
        out_scale,
        causal,
        *window_size,
        contextual_seqlen,
        broadcast_query,
    )


def _check_roles(
    num_targets: Tensor | None,
    contextual_seqlen: int,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    causal: bool,
    window_size: tuple[int, int],
    broadcast_query: bool,
) -> None:
    """Raises ValueError unless tokens can be context, history and targets."""
    is_self_attention = not broadcast_query and (cu_seqlens_k is None or cu_seqlens_k is cu_seqlens_q)
    if not (causal and is_self_attention and window_size[1] in (-1, 0)):
        raise ValueError(
            "num_targets and contextual_seqlen are for causal self-attention: "
            "pass causal=True, cu_seqlens_k=None, and a window to the left only"
        )
    if contextual_seqlen < 0:
        raise ValueError(f"contextual_seqlen must be 0 or more, got {contextual_seqlen}")
    if num_targets is None or cu_seqlens_q is None:
        return
    fits = num_targets.shape == (len(cu_seqlens_q) - 1,) and num_targets.dtype in (torch.int32, torch.int64)
    if not fits or num_targets.device != cu_seqlens_q.device:
        raise ValueError(
            f"num_targets must be int32 or int64 ({len(cu_seqlens_q) - 1},) on {cu_seqlens_q.device}, "
            f"got {num_targets.dtype} {tuple(num_targets.shape)} on {num_targets.device}: give one number per sequence"
        )
