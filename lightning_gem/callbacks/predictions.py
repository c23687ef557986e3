"""Writes predictions to Parquet while they are made."""

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor


class PredictionWriter(Callback):
    """Writes what ``predict_step`` returns (a dictionary of columns) to one Parquet file per rank.

    The file appears under its name only when it is complete; those of an earlier run are removed first.

    Args:
        folder: Folder of the files; made if needed.
    """

    def __init__(self, folder: str = "predictions") -> None:
        self.folder = Path(folder)
        self._writer: pq.ParquetWriter | None = None

    def _path(self, trainer: Trainer) -> Path:
        return self.folder / f"part-{trainer.global_rank:05d}.parquet"

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Removes the files of an earlier run, which may have had more ranks."""
        if trainer.is_global_zero:
            for path in self.folder.glob("part-*.parquet*"):
                path.unlink()
        trainer.strategy.barrier()

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: dict[str, Tensor],
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Appends a row group."""
        table = pa.table({name: column.cpu().numpy() for name, column in outputs.items()})
        if self._writer is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(f"{self._path(trainer)}.incomplete", table.schema)
        self._writer.write_table(table)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Completes the file."""
        if self._writer is None:
            return
        self._writer.close()
        self._writer = None
        os.replace(f"{self._path(trainer)}.incomplete", self._path(trainer))
        rank_zero_info(f"Predictions are in {self.folder}/part-*.parquet, one file per rank")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leaves no incomplete file behind."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            Path(f"{self._path(trainer)}.incomplete").unlink(missing_ok=True)
