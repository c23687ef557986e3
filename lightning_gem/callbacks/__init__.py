"""Lightning callbacks."""

from lightning_gem.callbacks.checkpoint import ResumableCheckpoint
from lightning_gem.callbacks.efficiency import EfficiencyMonitor
from lightning_gem.callbacks.guard import QualityGuard
from lightning_gem.callbacks.local_mfu import LocalMFUProfiler
from lightning_gem.callbacks.predictions import PredictionWriter
from lightning_gem.callbacks.quality import QualityTable
from lightning_gem.callbacks.sensitivity import SensitivityProbe

__all__ = [
    "EfficiencyMonitor",
    "LocalMFUProfiler",
    "PredictionWriter",
    "QualityGuard",
    "QualityTable",
    "ResumableCheckpoint",
    "SensitivityProbe",
]
