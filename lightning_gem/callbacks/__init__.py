"""Lightning callbacks."""

from lightning_gem.callbacks.checkpoint import ResumableCheckpoint
from lightning_gem.callbacks.predictions import PredictionWriter
from lightning_gem.callbacks.quality import QualityTable

__all__ = ["PredictionWriter", "QualityTable", "ResumableCheckpoint"]
