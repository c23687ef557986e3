"""Exact numbers of (query, key) pairs, from lengths: what attention FLOPs are counted from.

One pair costs 2 * H * (Dqk + Dv) FLOPs forward: one multiply-add per feature for Q K^T and for P V. Lengths are those
of a batch, (B,), as a tensor, an ndarray or a list of ints; reading them from a GPU would wait for it, so pass the CPU
copy. Every function returns one int: exactly the pairs that the masks of the ops show, edges of windows and short last
blocks included.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias, Union

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np

Lengths: TypeAlias = Union[Tensor, "np.ndarray", Sequence[int]]


def full_pairs(lengths: Lengths) -> int:
    """Full self-attention: sum of T^2."""
    t = _as_int64(lengths)
    return int((t * t).sum())


def causal_pairs(lengths: Lengths) -> int:
    """Causal self-attention: sum of T (T + 1) / 2."""
    t = _as_int64(lengths)
    return int((t * (t + 1) // 2).sum())


def window_pairs(lengths: Lengths, window: int) -> int:
    """Self-attention with ``window_size=(window, window)``: T (2w + 1) - w (w + 1), where w is at most T - 1."""
    t = _as_int64(lengths)
    w = (t - 1).clamp(min=0, max=window)
    return int((t * (2 * w + 1) - w * (w + 1)).sum())


def causal_window_pairs(lengths: Lengths, window: int) -> int:
    """Causal self-attention with ``window_size=(window, 0)``: T (w + 1) - w (w + 1) / 2, where w is at most T - 1."""
    t = _as_int64(lengths)
    w = (t - 1).clamp(min=0, max=window)
    return int((t * (w + 1) - w * (w + 1) // 2).sum())


def block_pairs(lengths: Lengths, block_size: int) -> int:
    """Block-diagonal self-attention: whole blocks at c^2, and the short last one at the square of its length."""
    t = _as_int64(lengths)
    return int((t // block_size * block_size**2 + (t % block_size) ** 2).sum())


def causal_block_pairs(lengths: Lengths, block_size: int) -> int:
    """Causal block-diagonal self-attention: c (c + 1) / 2 per whole block, and the same for the short last one."""
    t = _as_int64(lengths)
    rest = t % block_size
    return int((t // block_size * (block_size * (block_size + 1) // 2) + rest * (rest + 1) // 2).sum())


def cross_pairs(lengths_q: Lengths | int, lengths_k: Lengths | int) -> int:
    """Cross-attention: sum of Tq Tk. An int stands for the same length in every sequence (seeds, dense keys)."""
    return int((_as_int64(lengths_q) * _as_int64(lengths_k)).sum())


def attention_pairs(
    lengths_q: Lengths, lengths_k: Lengths, causal: bool = False, window_size: tuple[int, int] = (-1, -1)
) -> int:
    """Any attention: the keys each query sees under the masks of ``jagged_flash_attention``, aligned at the end."""
    left, right = (window_size[0], 0) if causal else window_size
    if left < 0 and right < 0:
        return cross_pairs(lengths_q, lengths_k)
    q, k = _as_int64(lengths_q), _as_int64(lengths_k)
    last = torch.repeat_interleave(k - 1, q)
    position = _positions(q) + torch.repeat_interleave(k - q, q)
    lowest = (position - left).clamp(min=0) if left >= 0 else torch.zeros_like(position)
    highest = torch.minimum(position + right, last) if right >= 0 else last
    return int((highest - lowest + 1).clamp(min=0).sum())


def role_pairs(lengths: Lengths, num_targets: Lengths | int, contextual_seqlen: int = 0, left: int = -1) -> int:
    """Causal self-attention with context, history and targets: what ``gdpa`` shows with ``num_targets``."""
    t = _as_int64(lengths)
    others = (t - _as_int64(num_targets)).clamp(min=0)
    skipped = max(contextual_seqlen - 1, 0)
    last = torch.repeat_interleave((others - skipped).clamp(min=0), t)
    index = _positions(t)
    place = torch.minimum((index - skipped).clamp(min=0), last)
    # Places below the own one, of which the first may hold the whole context; then the token itself.
    seen = place.clamp(max=left) if left >= 0 else place
    first_is_seen = (place > 0) & (seen == place)
    causal = seen + first_is_seen * skipped + 1
    visible = torch.repeat_interleave(others, t)
    context = torch.where(index < visible, visible, visible + 1)
    return int(torch.where(index < contextual_seqlen, context, causal).sum())


def _positions(lengths: Tensor) -> Tensor:
    """Position of every token in its own sequence."""
    starts = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) - torch.repeat_interleave(starts, lengths)


def _as_int64(lengths: Lengths | int) -> Tensor:
    # Not on a default device: models count while they are built on meta.
    device = lengths.device if isinstance(lengths, Tensor) else "cpu"
    return torch.as_tensor(lengths, dtype=torch.int64, device=device)
