"""Rotary time encoding: half of the rotation pairs turn with the position, half with the logarithm of the age.

After ROTE as described for Kunlun (arXiv 2602.10016). Both are counted back from the request, so that a query which
stands for the request itself needs no rotation and attention to it depends on how long ago, and how many events ago, a
key lies.
"""

import math

import torch
from torch import Tensor


def rotary_angles(position: Tensor, log_age: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine per token and pair.

    Args:
        position: Events since this one, ``(N,)``.
        log_age: ``log(1 + age / time_scale)``, ``(N,)``.
        head_dim: Head dimension, a multiple of 4.

    Returns:
        Two float32 tensors ``(N, head_dim // 2)``: first the pairs of the position, then those of the age.
    """
    num_pairs = head_dim // 4
    steps = torch.arange(num_pairs, device=position.device, dtype=torch.float32) / num_pairs
    position_frequencies = torch.exp(-math.log(10_000.0) * steps)
    # Ages span some ten units of the logarithm: half a turn per unit for the fastest pair, 16 times slower at the end.
    age_frequencies = torch.exp(-math.log(16.0) * steps) * math.pi
    angles = torch.cat(
        [
            position.to(torch.float32)[:, None] * position_frequencies,
            log_age.to(torch.float32)[:, None] * age_frequencies,
        ],
        dim=1,
    )
    return angles.cos(), angles.sin()
