"""Normalized entropy over the latest examples."""

from typing import Any

import torch
from torch import Tensor

from lightning_gem.metrics.base import SumMetric
from lightning_gem.metrics.normalized_entropy import entropy_sums, normalized_entropy


class WindowedNormalizedEntropy(SumMetric):
    """Normalized entropy (see ``NormalizedEntropy``) over the latest examples of every process.

    A ring of ``slots + 1`` partial sums holds the latest ``window`` examples of this process, missing labels counted.
    Whole slots leave it: the oldest one may reach ``window / slots`` + one batch examples further back. Over ranks the
    windows are added, so the value is that of the latest ``world_size * window`` examples. It lives on the device and
    an update never synchronises with the host.

    ``forward`` returns the value of the batch, as in every torchmetric; call ``update`` and ``compute`` for the window.

    ``torchmetrics.wrappers.Running`` does not serve here: its window counts batches, it synchronises the state of every
    batch in it by a collective of its own, and (1.0.3) it reduces over ranks twice.

    Source: as for ``NormalizedEntropy``.

    Args:
        window: Number of examples per process.
        slots: Number of partial sums that make up the window.
        **kwargs: Those of ``torchmetrics.Metric``.

    Raises:
        ValueError: ``window`` or ``slots`` is not positive.
    """

    higher_is_better = False
    full_state_update = True  # for `forward`: the ring of a batch cannot be merged into the ring of the past

    def __init__(self, window: int = 1_000_000, slots: int = 100, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name, value in (("window", window), ("slots", slots)):
            if value < 1:
                raise ValueError(f"`{name}` is {value}: pass a number of at least 1.")
        self.window = window
        self.slot_size = -(-window // slots)
        # a collection takes metrics for one while a state of the same name is equal, as all windows are at first
        self.ring_name = f"ring_{window}"
        self.add_sums(self.ring_name, slots + 1, 4)  # oldest first; the last column counts examples

    def update(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Adds a batch.

        Args:
            logits: Logits of one task.
            labels: Labels in [0, 1], of the same shape; NaN = missing.
            weights: Weights, of the same shape; 0 = missing.
        """
        batch = entropy_sums(logits, labels, weights)
        batch = torch.cat([batch, batch.new_full((1,), logits.numel())])
        ring: Tensor = getattr(self, self.ring_name)
        turned = torch.cat([ring[1:], torch.zeros_like(ring[:1])])
        ring = torch.where(ring[-1, 3] >= self.slot_size, turned, ring)
        ring = torch.cat([ring[:-1], ring[-1:] + batch])
        newer = ring[:, 3].flip(0).cumsum(0).flip(0) - ring[:, 3]
        setattr(self, self.ring_name, ring.masked_fill((newer >= self.window)[:, None], 0))

    def compute(self) -> Tensor:
        """The normalized entropy of the window, a scalar; NaN as for ``NormalizedEntropy``."""
        return normalized_entropy(getattr(self, self.ring_name).sum(0)[:3])
