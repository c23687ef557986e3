"""FLOPs of attention ops for torch's FLOP counter: real pairs where the offsets are real."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lightning_gem.kernels.attention.spec import AttentionSpec
from lightning_gem.kernels.pairs import attention_pairs, role_pairs


def forward_flops(
    spec: AttentionSpec,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    num_targets: Tensor | None = None,
) -> int:
    """Two matrix products: 2 H (D + Dv) per visible pair."""
    pairs = _count_pairs(spec, query, key, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, num_targets)
    return 2 * query.shape[1] * (query.shape[2] + value.shape[2]) * pairs


def backward_flops(
    spec: AttentionSpec,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    num_targets: Tensor | None = None,
    needs_query: bool = True,
    needs_key_value: bool = True,
) -> int:
    """Five matrix products, one of which computes the scores again: 2 H (3 D + 2 Dv) per visible pair.

    As in torch's own formulas. Products that only one of the gradients needs count where it is wanted.
    """
    pairs = _count_pairs(spec, query, key, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, num_targets)
    dim, dim_v = query.shape[2], value.shape[2]
    per_pair = (dim + dim_v) + needs_query * dim + needs_key_value * (dim + dim_v)
    return 2 * query.shape[1] * per_pair * pairs


def _count_pairs(
    spec: AttentionSpec,
    query: Tensor,
    key: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    num_targets: Tensor | None,
) -> int:
    with _disable_current_modes():  # a fake tensor mode would also fake the counting
        return _count_pairs_without_modes(
            spec, query, key, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, num_targets
        )


def _count_pairs_without_modes(
    spec: AttentionSpec,
    query: Tensor,
    key: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    num_targets: Tensor | None,
) -> int:
    num_sequences = cu_seqlens_k.shape[0] - 1
    lengths_k = _lengths(cu_seqlens_k, max_seqlen_k, key.shape[0])
    if cu_seqlens_q is None:
        lengths_q = torch.full((num_sequences,), query.shape[0])
    else:
        lengths_q = _lengths(cu_seqlens_q, max_seqlen_q, query.shape[0])
    if spec.has_roles:
        targets = 0 if num_targets is None or not _is_real(num_targets) else num_targets.cpu()
        return role_pairs(lengths_q, targets, spec.contextual_seqlen, spec.window_left)
    return attention_pairs(lengths_q, lengths_k, spec.causal, spec.window_size)


def _lengths(cu_seqlens: Tensor, max_seqlen: int | None, num_rows: int) -> Tensor:
    """True lengths; without real offsets the upper bound for every sequence, or the mean where there is no bound."""
    if _is_real(cu_seqlens):
        return cu_seqlens.cpu().diff()
    num_sequences = cu_seqlens.shape[0] - 1
    length = -(-num_rows // max(num_sequences, 1)) if max_seqlen is None else max_seqlen
    return torch.full((int(num_sequences),), int(length))


def _is_real(tensor: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return not isinstance(tensor, FakeTensor | FunctionalTensor) and tensor.device.type != "meta"
