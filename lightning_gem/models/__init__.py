"""The GEM network and its LightningModule."""

from lightning_gem.models.config import ExpertsConfig, GEMConfig, SequenceConfig
from lightning_gem.models.ensemble import Ensemble
from lightning_gem.models.gem import GEM
from lightning_gem.models.module import GEMModule

__all__ = ["GEM", "Ensemble", "ExpertsConfig", "GEMConfig", "GEMModule", "SequenceConfig"]
