"""Train ads and recommendation foundation models at LLM scale with PyTorch Lightning."""

from importlib import import_module
from typing import Any

from lightning_gem.version import __version__

_PUBLIC = {
    "GEM": "models",
    "GEMConfig": "models",
    "GEMModule": "models",
    "HybridShardedStrategy": "strategies",
    "RecBatch": "data",
    "RecDataModule": "data",
    "Schema": "data",
}

__all__ = [
    "GEM",
    "GEMConfig",
    "GEMModule",
    "HybridShardedStrategy",
    "RecBatch",
    "RecDataModule",
    "Schema",
    "__version__",
]


def __getattr__(name: str) -> Any:
    # Loaded on first use, so that the kernels can be imported without Lightning and TorchRec.
    if name in _PUBLIC:
        return getattr(import_module(f"lightning_gem.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'lightning_gem' has no attribute {name!r}")
