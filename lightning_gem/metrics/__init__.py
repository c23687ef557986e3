"""The recommendation metrics that torchmetrics lacks, as plain ``torchmetrics.Metric`` subclasses.

All of them take ``(logits, labels, weights=None)`` of one shape, for one task, with labels in [0, 1] (``GAUC`` takes
``users`` too). An example whose label is NaN or whose weight is 0 has no label: it is ignored, whatever its logit.
A NaN logit of an example that has a label makes the value NaN.

Example:
    In a ``LightningModule``, over an epoch and over the latest examples::

        self.ne = NormalizedEntropy()
        self.window_ne = WindowedNormalizedEntropy(window=1_000_000)

        self.ne.update(logits, labels, weights)
        self.log("train/ne", self.ne, on_step=False, on_epoch=True)
        self.window_ne.update(logits, labels, weights)
        if batch_idx % 100 == 0:  # `compute` talks to the other ranks, so all must get here
            self.log("train/window_ne", self.window_ne.compute())
"""

from lightning_gem.metrics.auc import AUC
from lightning_gem.metrics.calibration import Calibration
from lightning_gem.metrics.gauc import GAUC
from lightning_gem.metrics.log_loss import LogLoss
from lightning_gem.metrics.normalized_entropy import NormalizedEntropy
from lightning_gem.metrics.windowed_normalized_entropy import WindowedNormalizedEntropy

__all__ = ["AUC", "GAUC", "Calibration", "LogLoss", "NormalizedEntropy", "WindowedNormalizedEntropy"]
