"""Public op: block-diagonal attention."""

import torch
from torch import Tensor

from lightning_gem.kernels.block.reference import block_attention_bucketed
from lightning_gem.kernels.block.registration import block_attention_op, runs_reference_directly
from lightning_gem.kernels.checks import autocast, check_cu_seqlens, check_qkv
from lightning_gem.kernels.dot_product.activations import check_activation
from lightning_gem.kernels.rope.op import check_angles
from lightning_gem.kernels.rope.op import rotary as rotate


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
    rotary: tuple[Tensor, Tensor] | None = None,
    rotate_value: bool = False,
    backend: str = "auto",
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
        rotary: Cosines and sines (total_tokens, D/2) as in the op ``rotary``, to rotate queries and keys by; their
            gradients, if they need any, come from that op. On a GPU, float16 angles halve what they cost: their error
            of 2e-4 is lost in bfloat16 tokens.
        rotate_value: Rotate the values too (D must be Dv).
        backend: ``auto``, ``triton`` (a CUDA device, or Triton's interpreter) or ``reference``.

    Returns:
        (total_tokens, H, Dv) in the dtype of ``query`` (under autocast: in its dtype).

    Raises:
        ValueError: For shapes, dtypes, devices or offsets that do not fit together, a block size below 1, an unknown
            activation or backend, or backend ``triton`` where it cannot run. Values of offsets are checked only where
            they are on a CPU, and not while compiling.
    """
    query, key, value = autocast(query, key, value)
    check_qkv(query, key, value)
    if len(query) != len(key):
        raise ValueError(
            f"key must have the {len(query)} rows of query, got {len(key)}: block attention is self-attention"
        )
    if type(cu_seqlens) is Tensor and not torch.compiler.is_compiling():
        check_cu_seqlens("cu_seqlens", cu_seqlens, query, max_seqlen)
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}: the usual size is 64")
    if backend not in ("auto", "triton", "reference"):
        raise ValueError(f"backend {backend!r} is unknown: use 'auto', 'triton' or 'reference'")
    if activation is not None:
        check_activation(activation, query.shape[1])
    cos, sin = (None, None) if rotary is None else rotary
    if cos is not None and sin is not None:
        check_angles(query, cos, sin)
        if rotate_value:
            check_angles(value, cos, sin)
    elif rotate_value:
        raise ValueError("rotate_value=True needs angles: pass rotary=(cos, sin)")
    scale = query.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    with torch.autocast(query.device.type, enabled=False):
        if runs_reference_directly(query, value, block_size, backend):
            return block_attention_bucketed(
                query, key, value, cu_seqlens, cos, sin, block_size, scale, activation, causal, rotate_value
            )
        if cos is not None and sin is not None and (cos.requires_grad or sin.requires_grad):
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
            value = rotate(value, cos, sin) if rotate_value else value
            cos, sin, rotate_value = None, None, False
        return block_attention_op(
            query, key, value, cu_seqlens, cos, sin, block_size, scale, activation, causal, rotate_value, backend
        )
