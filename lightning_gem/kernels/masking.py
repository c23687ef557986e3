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
