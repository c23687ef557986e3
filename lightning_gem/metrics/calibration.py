"""Calibration ratio."""

from typing import Any

import torch
from torch import Tensor

from lightning_gem.metrics.base import SumMetric, read_examples


class Calibration(SumMetric):
    """Expected over observed positives: ``sum_i w_i sigmoid(logit_i) / sum_i w_i y_i``; 1 is best, above 1 too high.

    The value is NaN without positives.

    Source: He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook", ADKDD 2014, section 2.

    Args:
        **kwargs: Those of ``torchmetrics.Metric``.
    """

    calibration_sums: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_sums("calibration_sums", 2)

    def update(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Adds a batch.

        Args:
            logits: Logits of one task.
            labels: Labels in [0, 1], of the same shape; NaN = missing.
            weights: Weights, of the same shape; 0 = missing.
        """
        logits, labels, weights = read_examples(logits, labels, weights)
        sums = torch.stack([(weights * logits.sigmoid()).sum(), (weights * labels).sum()])
        self.calibration_sums = self.calibration_sums + sums

    def compute(self) -> Tensor:
        """The ratio, a scalar."""
        predicted, observed = self.calibration_sums.unbind()
        return torch.where(observed > 0, predicted / observed, torch.nan)
