"""Public op: pooling by multi-head attention."""

from collections.abc import Sequence

from torch import Tensor

from lightning_gem.kernels.dot_product.op import gdpa
from lightning_gem.kernels.flash.op import jagged_flash_attention
from lightning_gem.kernels.schedule import TileSchedule


def pma_attention(
    seeds: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_k: int | None = None,
    *,
    softmax_scale: float | None = None,
    activation: str | Sequence[str] | None = None,
    deterministic: bool = True,
    schedule: TileSchedule | None = None,
    backend: str = "auto",
) -> Tensor:
    """Pools every sequence with the same S seed queries: (S, H, D) seeds become (B, S, H, Dv) summaries.

    An empty sequence gives zeros. Method: pooling by multi-head attention, Set Transformer
    (https://arxiv.org/abs/1810.00825), as in the seed pooling of Kunlun (https://arxiv.org/abs/2602.10016).

    Args:
        seeds: (S, H, D), shared by the batch.
        key: (total_k, Hkv, D), where Hkv divides H.
        value: (total_k, Hkv, Dv).
        cu_seqlens_k: Key offsets (B+1,), int32 or int64.
        max_seqlen_k: Upper bound of the lengths; None has it computed.
        softmax_scale: Factor on Q K^T, before the softmax or the activation; None is 1 / sqrt(D).
        activation: None is softmax; otherwise an activation of ``gdpa``, or a list of one per head.
        deterministic: As in ``jagged_flash_attention``.
        schedule: As in ``jagged_flash_attention``.
        backend: As in ``jagged_flash_attention``.

    Returns:
        (B, S, H, Dv) in the dtype of ``seeds`` (under autocast: in its dtype).

    Raises:
        ValueError: As ``jagged_flash_attention`` and ``gdpa``, where ``query`` is ``seeds``.
    """
    scale = seeds.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    arguments = (seeds, key, value, None, cu_seqlens_k, None, max_seqlen_k)
    if activation is None:
        out = jagged_flash_attention(
            *arguments,
            softmax_scale=scale,
            broadcast_query=True,
            deterministic=deterministic,
            schedule=schedule,
            backend=backend,
        )
    else:
        out = gdpa(
            *arguments,
            activation=activation,
            scale=scale,
            broadcast_query=True,
            deterministic=deterministic,
            schedule=schedule,
            backend=backend,
        )
    return out.unflatten(0, (len(cu_seqlens_k) - 1, len(seeds)))
