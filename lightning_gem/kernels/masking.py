"""Which keys a query may see."""

import torch
from torch import Tensor

from lightning_gem.kernels.bucketing import Bucket


def visible_pairs(length_q: int, length_k: int, causal: bool, window_size: tuple[int, int]) -> Tensor:
    """The rule for one sequence: bool (length_q, length_k), True where the query sees the key.

    Queries are aligned at the end: the last query stands at the position of the last key. ``window_size`` counts the
    keys visible to the left and to the right of the own position, -1 being unlimited; a causal query sees nothing to
    its right.
    """
    left, right = window_size
    position = torch.arange(length_q)[:, None] + length_k - length_q
    distance = torch.arange(length_k) - position
    visible = torch.ones(length_q, length_k, dtype=torch.bool)
    if left >= 0:
        visible &= distance >= -left
    if causal or right >= 0:
        visible &= distance <= (0 if causal else right)
    return visible


def visible_roles(length: int, num_targets: int, contextual_seqlen: int, left: int) -> Tensor:
    """The rule of HSTU for one sequence that attends to itself causally: bool (length, length).

    The first ``contextual_seqlen`` tokens are context, the last ``num_targets`` are candidates, and between them lies
    the history. Context sees all but the targets. History is causal and sees all context. Every target sees context,
    history, and itself, but no other target. A window to the left (-1 is unlimited) counts places of the history, where
    the whole context takes one place, and so do all targets.
    """
    index = torch.arange(length)
    place = role_places(index, torch.tensor(length), torch.tensor(num_targets), contextual_seqlen)
    distance = place[:, None] - place
    visible = distance > 0
    if left >= 0:
        visible &= distance <= left
    visible |= index[:, None] == index
    return visible | ((index[:, None] < contextual_seqlen) & (index < length - num_targets))


def role_places(index: Tensor, length: Tensor, num_targets: Tensor, contextual_seqlen: int) -> Tensor:
    """Place of each token in the history: all context shares the first, all targets the one after the last."""
    skipped = max(contextual_seqlen - 1, 0)
    last = (length - num_targets - skipped).clamp(min=0)
    return torch.minimum((index - skipped).clamp(min=0), last)


def padding_mask(bucket: Bucket) -> Tensor | None:
    """Real keys of a bucket: bool (n, 1, 1, size_k); None if there is no padding among the keys."""
    if not bucket.keys_padded:
        return None
    columns = torch.arange(bucket.size_k, device=bucket.lengths_k.device)
    return (columns < bucket.lengths_k[:, None])[:, None, None]


def window_mask(bucket: Bucket, causal: bool, window_size: tuple[int, int]) -> Tensor | None:
    """``visible_pairs`` of a bucket, padding apart: bool (n or 1, 1, size_q, size_k); None if everything is visible."""
    left, right = (window_size[0], 0) if causal else window_size
    if left < 0 and right < 0:
        return None
    columns = torch.arange(bucket.size_k, device=bucket.shifts.device)
    position = (torch.arange(bucket.size_q, device=bucket.shifts.device) + bucket.shifts[:, None])[:, None, :, None]
    if left < 0:
        return columns <= position + right
    if right < 0:
        return columns >= position - left
    return (columns >= position - left) & (columns <= position + right)


def role_mask(bucket: Bucket, num_targets: Tensor | None, contextual_seqlen: int, left: int) -> Tensor:
    """``visible_roles`` of a bucket, padding apart: bool (n, 1, size_q, size_k)."""
    length = bucket.lengths_k[:, None]
    targets = torch.zeros_like(length) if num_targets is None else num_targets[bucket.sequences].to(length)[:, None]
    index = torch.arange(bucket.size_k, device=length.device)
    place = role_places(index, length, targets, contextual_seqlen)
    distance = place[:, :, None] - place[:, None]
    visible = distance > 0
    if left >= 0:
        visible &= distance <= left
    visible |= index[:, None] == index
    visible |= (index[:, None] < contextual_seqlen) & (index < length - targets)[:, None]
    return visible[:, None]


def softmax_mask(
    bucket: Bucket, causal: bool, window_size: tuple[int, int], attn_bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The mask of a bucket, and its blind queries, which see no key at all.

    Softmax over no keys is 0/0. A blind query is therefore shown every key, and the caller replaces what comes out.

    Returns:
        mask: Bool, or float where there is a bias, broadcastable to (n, H, size_q, size_k); None if nothing is hidden.
        blind: Bool, broadcastable to (n, H, size_q, 1); None if no query can be blind.
    """
    real, window = padding_mask(bucket), window_mask(bucket, causal, window_size)
    mask = window if real is None else real if window is None else real & window
    if attn_bias is None:
        if mask is None or not (bucket.may_lack_keys or window is not None):
            return mask, None
        blind = ~mask.any(-1, keepdim=True)
        return mask | blind, blind
    bias = attn_bias if len(attn_bias) == 1 else attn_bias.index_select(0, bucket.sequences)
    bias = bias[:, :, : bucket.size_q, : bucket.size_k]
    finite = bias > -torch.inf
    mask = finite if mask is None else mask & finite
    blind = ~mask.any(-1, keepdim=True)
    return bias.masked_fill(~mask, -torch.inf).masked_fill(blind, 0.0), blind
