"""Area under the ROC curve in bounded memory."""

from typing import Any

import torch
from torch import Tensor

from lightning_gem.metrics.base import SumMetric, read_examples


class AUC(SumMetric):
    """Area under the ROC curve, from histograms of the logits: the chance that a positive outranks a negative.

    ``AUC = sum_b P_b (sum_{a<b} N_a + N_b / 2) / (P N)``, where ``P_b`` and ``N_b`` are the weights of the positives
    and negatives whose logit lies in bin b. Equal logits always share a bin, so ties count one half, exactly; a label
    y between 0 and 1 counts as y of a positive and 1 - y of a negative. Two 64-bit histograms take 1 MiB, whatever the
    number of examples, and add up over ranks.

    The bins are equally wide in the logit, so a low click rate loses nothing (those of ``BinaryAUROC(thresholds=int)``
    are equally wide in the probability). Only pairs within a bin can be judged wrongly, by one half at most:
    ``|AUC - exact AUC| <= sum_b P_b N_b / (2 P N)``, see ``error_bound``. With the defaults (bins of 0.0005) this is
    below 1e-4 for logits with a standard deviation of 1 or more, and the actual error is far smaller. Logits beyond
    ``limit`` share the outermost bins; scores that are spread over less than 0.1 need a smaller ``limit``, or scaling.

    The value is NaN without positives or without negatives.

    Args:
        bins: Number of bins.
        limit: The bins divide the logits from ``-limit`` to ``limit``.
        **kwargs: Those of ``torchmetrics.Metric``.

    Raises:
        ValueError: ``bins`` or ``limit`` is not positive.
    """

    higher_is_better = True
    auc_histogram: Tensor

    def __init__(self, bins: int = 2**16, limit: float = 16.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if bins < 1:
            raise ValueError(f"`bins` is {bins}: pass a number of at least 1.")
        if not limit > 0:
            raise ValueError(f"`limit` is {limit}: pass the largest logit to tell apart, a number above 0.")
        self.bins = bins
        self.limit = limit
        self.add_sums("auc_histogram", 2, bins + 1)  # the last bin collects NaN logits

    def update(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Adds a batch.

        Args:
            logits: Logits of one task.
            labels: Labels in [0, 1], of the same shape; NaN = missing.
            weights: Weights, of the same shape; 0 = missing.
        """
        logits, labels, weights = read_examples(logits, labels, weights)
        bins = ((logits + self.limit) * (self.bins / (2 * self.limit))).clamp(0, self.bins - 1)
        bins = bins.nan_to_num(self.bins).long()
        classes = torch.stack([weights * labels, weights * (1 - labels)])
        # not in place: the state may be shared with a loaded state dict
        self.auc_histogram = self.auc_histogram.scatter_add(1, bins.expand_as(classes), classes)

    def compute(self) -> Tensor:
        """The area, a scalar."""
        positive, negative = self.auc_histogram
        wins = positive * (negative.cumsum(0) - negative / 2)
        area = wins.sum() / (positive.sum() * negative.sum())
        return torch.where(self.auc_histogram[:, -1].sum() > 0, torch.nan, area)

    def error_bound(self) -> Tensor:
        """How far ``compute`` can be from the exact area at most, for the examples of this process."""
        positive, negative = self.auc_histogram
        return (positive * negative).sum() / (2 * positive.sum() * negative.sum())
