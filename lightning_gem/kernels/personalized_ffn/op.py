"""Public op: personalised feed-forward network, the core of GDPA-PFFN."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_gem.kernels.dot_product.op import gdpa
from lightning_gem.kernels.schedule import TileSchedule, dense_offsets

_GPU_PIECE = 4096


def pffn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int | None = None,
    *,
    activation: str | Sequence[str] = "gelu_tanh",
    scale: float = 1.0,
    out_scale: float = 1.0,
    deterministic: bool = True,
    schedule: TileSchedule | None = None,
    backend: str = "auto",
) -> Tensor:
    """A two-layer feed-forward network whose weights belong to the sample: out_scale * act(scale * Q K_b^T) V_b.

    Each token of sample b passes through the N hidden units K_b, V_b that the sample's static features have produced.
    Without a batch dimension, keys and values are ordinary weights shared by all tokens. Empty sequences and slack rows
    are as in ``gdpa``.

    Method: GDPA-PFFN of Kunlun (https://arxiv.org/abs/2602.10016).

    Args:
        query: (total_q, H, D) packed tokens.
        key: (B, N, Hkv, D), or (N, Hkv, D) shared by the batch.
        value: (B, N, Hkv, Dv), or (N, Hkv, Dv).
        cu_seqlens_q: Token offsets (B+1,), int32 or int64.
        max_seqlen_q: Upper bound of the lengths; None has it computed.
        activation: An activation of ``gdpa``, or a list of one per query head.
        scale: Factor on Q K^T.
        out_scale: Factor on the result.
        deterministic: As in ``gdpa``.
        schedule: As in ``gdpa``.
        backend: As in ``gdpa``.

    Returns:
        (total_q, H, Dv) in the dtype of ``query`` (under autocast: in its dtype).

    Raises:
        ValueError: As ``gdpa``, and for keys that are neither (B, N, Hkv, D) nor (N, Hkv, D).
    """
    num_sequences = len(cu_seqlens_q) - 1
    if key.ndim == 3 and value.ndim == 3:
        piece = _GPU_PIECE if query.is_cuda else max(1, len(query))
        cu_seqlens_q, max_seqlen_q = _cut(len(query), cu_seqlens_q, piece)
        num_sequences = len(cu_seqlens_q) - 1
        key, value = (x.expand(num_sequences, *x.shape) for x in (key, value))
    if key.ndim != 4 or value.ndim != 4 or len(key) != num_sequences or key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"key and value must be (B, N, num_heads, head_dim) with B={num_sequences}, or (N, num_heads, head_dim) "
            f"to share them, got {tuple(key.shape)} and {tuple(value.shape)}: give every sequence the same N"
        )
    width = key.shape[1]
    cu_seqlens_k = dense_offsets(cu_seqlens_q, width)
    return gdpa(
        query,
        key.flatten(0, 1),
        value.flatten(0, 1),
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        width,
        activation=activation,
        scale=scale,
        out_scale=out_scale,
        deterministic=deterministic,
        schedule=schedule,
        backend=backend,
    )


def _cut(num_rows: int, cu_seqlens: Tensor, piece: int) -> tuple[Tensor, int]:
    """Offsets of pieces of the batch, and the longest piece, for sequences that all read the same keys.

    To the reference the batch is one piece. On a GPU there are more, each with a copy of the keys, so that many
    programs compute the gradients of the keys.
    """
    num_pieces = max(1, -(-num_rows // piece))
    starts = piece * torch.arange(num_pieces + 1, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.minimum(starts, cu_seqlens[-1]), piece
