"""Public op: generalised dot-product attention."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_gem.kernels.checks import autocast, check_qkv, check_sequences, check_window
from lightning_gem.kernels.dot_product.activations import check_activation
from lightning_gem.kernels.dot_product.reference import gdpa_bucketed


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
    broadcast_query: bool = False,
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
        max_seqlen_q: Upper bound of the query lengths; None has it computed, which may wait for the GPU.
        max_seqlen_k: The same for keys.
        activation: identity, relu, relu_squared, leaky_relu, gelu, gelu_tanh, silu or hardswish; or a list of one such
            name per query head.
        scale: Factor on Q K^T.
        out_scale: Factor on the result.
        causal: Hide keys to the right.
        window_size: Keys visible (left, right) of the own position; -1 is unlimited.
        broadcast_query: ``query`` is one set of S queries for all sequences; sequence b returns rows b*S to b*S+S.

    Returns:
        (total_q, H, Dv), or (B*S, H, Dv) with ``broadcast_query``, in the dtype of ``query`` (autocast: in its dtype).

    Raises:
        ValueError: For an unknown activation, or shapes, dtypes, devices or offsets that do not fit together. Values of
            offsets are checked only where they are on a CPU.
    """
    query, key, value = autocast(query, key, value)
    check_qkv(query, key, value)
    cu_seqlens_k = check_sequences(query, key, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, broadcast_query)
    check_window(window_size)
    check_activation(activation, query.shape[1])
    with torch.autocast(query.device.type, enabled=False):
        return gdpa_bucketed(
            query,
            key,
            value,
            cu_seqlens_q,
            cu_seqlens_k,
            activation=activation,
            scale=scale,
            out_scale=out_scale,
            causal=causal,
            window_size=window_size,
        )
