"""Normalized entropy over all examples seen."""

from typing import Any

import torch
from torch import Tensor

from lightning_gem.metrics.base import SumMetric, bce_sum, read_examples


def entropy_sums(logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    """The three sums behind the normalized entropy: ``[sum w * BCE, sum w * y, sum w * (1 - y)]``."""
    logits, labels, weights = read_examples(logits, labels, weights)
    loss = bce_sum(logits, labels, weights)
    return torch.stack([loss, (weights * labels).sum(), (weights * (1 - labels)).sum()])


def normalized_entropy(sums: Tensor) -> Tensor:
    """Normalized entropy from the sums of ``entropy_sums``."""
    loss, positive, negative = sums.unbind()
    total = positive + negative
    entropy = -(torch.xlogy(positive, positive / total) + torch.xlogy(negative, negative / total))
    return torch.where(entropy > 0, loss / entropy, torch.nan)


class NormalizedEntropy(SumMetric):
    """Normalized entropy (NE): the log loss over that of always predicting the mean label; lower is better.

    ``NE = sum_i w_i BCE(logit_i, y_i) / -sum_i w_i (p log p + (1 - p) log(1 - p))``, ``p = sum w_i y_i / sum w_i``
    over the same examples: all those since the last reset (lifetime NE), of all ranks.

    The value is NaN without examples, and when all labels are 0 or all are 1: the mean label then has no entropy.

    Source: He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook", ADKDD 2014, section 2.

    Args:
        **kwargs: Those of ``torchmetrics.Metric``.
    """

    higher_is_better = False
    entropy_sums: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_sums("entropy_sums", 3)

    def update(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Adds a batch.

        Args:
            logits: Logits of one task.
            labels: Labels in [0, 1], of the same shape; NaN = missing.
            weights: Weights, of the same shape; 0 = missing.
        """
        self.entropy_sums = self.entropy_sums + entropy_sums(logits, labels, weights)

    def compute(self) -> Tensor:
        """The normalized entropy, a scalar."""
        return normalized_entropy(self.entropy_sums)
