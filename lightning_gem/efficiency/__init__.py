"""How efficient a training run is: the work of a step, and what devices could do."""

from lightning_gem.efficiency.counting import FlopCounter
from lightning_gem.efficiency.local import LayerProfile, local_mfu, profile_layers
from lightning_gem.efficiency.peaks import Peak, find_peak, measure_peak
from lightning_gem.efficiency.work import StepWork

__all__ = [
    "FlopCounter",
    "LayerProfile",
    "Peak",
    "StepWork",
    "find_peak",
    "local_mfu",
    "measure_peak",
    "profile_layers",
]
