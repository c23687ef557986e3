"""Schema, batch type and data modules."""

try:
    import torchrec  # noqa: F401
except (ImportError, OSError) as error:
    raise ImportError(
        "lightning_gem's data and models need TorchRec with the FBGEMM build of this machine. Without an NVIDIA "
        "driver: pip install --no-deps -r requirements/cpu.txt; with one: pip install 'lightning-gem[cuda]'"
    ) from error

from lightning_gem.data.batch import EventSequence, RecBatch
from lightning_gem.data.criteo import CriteoTSV
from lightning_gem.data.interaction_log import InteractionLog
from lightning_gem.data.module import RecDataModule
from lightning_gem.data.parquet_stream import ParquetStream
from lightning_gem.data.schema import DenseFeature, Schema, Sequence, SparseFeature, Task
from lightning_gem.data.synthetic import SyntheticAds

__all__ = [
    "CriteoTSV",
    "DenseFeature",
    "EventSequence",
    "InteractionLog",
    "ParquetStream",
    "RecBatch",
    "RecDataModule",
    "Schema",
    "Sequence",
    "SparseFeature",
    "SyntheticAds",
    "Task",
]
