"""Kernels for Hopper (sm_90). A place kept for them: nothing is supported here yet, so the portable kernels run."""

from typing import Any

from torch import Tensor

from lightning_gem.kernels.attention.spec import AttentionSpec
from lightning_gem.kernels.schedule import Schedules


def supports(
    spec: AttentionSpec,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    attn_bias: Tensor | None,
) -> bool:
    """Whether :func:`forward` and :func:`backward` take this work; decided from shapes, strides, dtypes, and bounds."""
    return False


def configuration(
    spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor, max_seqlen_q: int | None, max_seqlen_k: int | None
) -> dict[str, Any]:
    """Block sizes and the like, for ``kernel_info``."""
    raise NotImplementedError


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
    """As ``triton_forward.forward``."""
    raise NotImplementedError


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
    """As ``triton_backward.backward``."""
    raise NotImplementedError
