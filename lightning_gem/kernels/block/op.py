"""Public op: block-diagonal attention."""

import torch
from torch import Tensor

from lightning_gem.kernels.block.reference import block_offsets
from lightning_gem.kernels.checks import autocast, check_cu_seqlens, check_qkv
from lightning_gem.kernels.dot_product.activations import check_activation
from lightning_gem.kernels.dot_product.reference import gdpa_bucketed
from lightning_gem.kernels.flash.reference import attention_bucketed


def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | None = None,
    *,
    block_size: int = 64,
    softmax_scale: float | None = None,
    activation: str | None = None,
    causal: bool = False,
) -> Tensor:
    """Self-attention inside consecutive blocks of each sequence; time and memory are linear in the number of tokens.

    Token i of a sequence attends to token j of the same sequence if i // block_size == j // block_size. Blocks are
    counted from the sequence's own start; the last one may be short. Empty sequences and slack rows are as in
    ``jagged_flash_attention``.

    Method: Meta's block attention (https://pytorch.org/blog/ "TLX Block Attention", 2026), whose sparsity is that of
    BlockBERT (https://arxiv.org/abs/1911.02972).

    Args:
        query: (total_tokens, H, D), bfloat16, float16, float32 or float64.
        key: (total_tokens, Hkv, D), where Hkv divides H.
        value: (total_tokens, Hkv, Dv); Dv may differ from D.
        cu_seqlens: Offsets (B+1,), int32 or int64.
        max_seqlen: Upper bound of the lengths; None has it computed.
        block_size: Tokens per block.
        softmax_scale: Factor on Q K^T, before the softmax or the activation; None is 1 / sqrt(D).
        activation: None is softmax; otherwise one of the activations of ``gdpa``.
        causal: Also hide keys to the right.

    Returns:
        (total_tokens, H, Dv) in the dtype of ``query`` (under autocast: in its dtype).

    Raises:
        ValueError: For shapes, dtypes, devices or offsets that do not fit together, a block size below 1, or an unknown
            activation. Values of offsets are checked only where they are on a CPU.
    """
    query, key, value = autocast(query, key, value)
    check_qkv(query, key, value)
    if len(query) != len(key):
        raise ValueError(
            f"key must have the {len(query)} rows of query, got {len(key)}: block attention is self-attention"
        )
    check_cu_seqlens("cu_seqlens", cu_seqlens, query, max_seqlen)
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}: the usual size is 64")
    scale = query.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    blocks = block_offsets(cu_seqlens, block_size)
    with torch.autocast(query.device.type, enabled=False):
        if activation is None:
            return attention_bucketed(query, key, value, blocks, blocks, softmax_scale=scale, causal=causal)[0]
        check_activation(activation, query.shape[1])
        return gdpa_bucketed(query, key, value, blocks, blocks, activation=activation, scale=scale, causal=causal)
