"""Log loss."""

from typing import Any

import torch
from torch import Tensor

from lightning_gem.metrics.base import SumMetric, bce_sum, read_examples


class LogLoss(SumMetric):
    """Weighted mean of the binary cross-entropy, in nats: ``sum_i w_i BCE(logit_i, y_i) / sum_i w_i``.

    The value is NaN without examples.

    Args:
        **kwargs: Those of ``torchmetrics.Metric``.
    """

    higher_is_better = False
    log_loss_sums: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_sums("log_loss_sums", 2)

    def update(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Adds a batch.

        Args:
            logits: Logits of one task.
            labels: Labels in [0, 1], of the same shape; NaN = missing.
            weights: Weights, of the same shape; 0 = missing.
        """
        logits, labels, weights = read_examples(logits, labels, weights)
        self.log_loss_sums = self.log_loss_sums + torch.stack([bce_sum(logits, labels, weights), weights.sum()])

    def compute(self) -> Tensor:
        """The mean loss, a scalar."""
        loss, weight = self.log_loss_sums.unbind()
        return loss / weight
