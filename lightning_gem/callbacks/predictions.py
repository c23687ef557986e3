"""Writes predictions to Parquet while they are made."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_gem.data import RecDataModule


class PredictionWriter(Callback):
    """Writes what ``predict_step`` returns (a dictionary of columns) to one Parquet file per rank.

    The file appears under its name only when it is complete; those of an earlier run are removed first.

    Args:
        folder: Folder of the files; made if needed.
        columns: Columns of the input to write beside the predictions, such as the ids of user and item, whether or not
            the schema uses them. They need a :class:`~lightning_gem.data.RecDataModule` that reads files.
        row_group_rows: Rows of a row group, all of which are held in memory.
    """

    def __init__(
        self, folder: str = "predictions", columns: list[str] | None = None, row_group_rows: int = 100_000
    ) -> None:
        if row_group_rows < 1:
            raise ValueError(f"row_group_rows must be positive, not {row_group_rows}")
        self.folder = Path(folder)
        self.columns = columns or []
        self.row_group_rows = row_group_rows
        self._original: Callable[[npt.NDArray[np.int64]], pa.Table] | None = None
        self._writer: pq.ParquetWriter | None = None
        self._waiting: list[pa.Table] = []

    def _path(self, trainer: Trainer) -> Path:
        return self.folder / f"part-{trainer.global_rank:05d}.parquet"

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Removes the files of an earlier run, which may have had more ranks."""
        if trainer.is_global_zero:
            for path in self.folder.glob("part-*.parquet*"):
                path.unlink()
        trainer.strategy.barrier()
        self._waiting = []
        if self.columns:
            data = getattr(trainer, "datamodule", None)
            if not isinstance(data, RecDataModule):
                raise ValueError("predictions.columns needs a RecDataModule, which knows the files: leave it empty")
            self._original = data.original_columns("predict" if "predict" in data.sources else "test", self.columns)

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: dict[str, Tensor],
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keeps a batch, and writes row groups as soon as there are enough rows."""
        columns: dict[str, pa.Array] = {name: column.cpu().numpy() for name, column in outputs.items()}
        if self._original is not None:
            table = self._original(columns["row"])
            original = dict(zip(table.column_names, table.columns, strict=True))
            # Of equal names the original is meant: the user's id instead of its key.
            columns = {"row": columns.pop("row"), **original, **{k: v for k, v in columns.items() if k not in original}}
        self._waiting.append(pa.table(columns))
        if sum(table.num_rows for table in self._waiting) >= self.row_group_rows:
            table = pa.concat_tables(self._waiting, promote_options="permissive")
            whole = table.num_rows // self.row_group_rows * self.row_group_rows
            self._write(trainer, table.slice(0, whole))
            self._waiting = [table.slice(whole)]

    def _write(self, trainer: Trainer, table: pa.Table) -> None:
        if self._writer is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(f"{self._path(trainer)}.incomplete", table.schema)
        self._writer.write_table(table.cast(self._writer.schema), row_group_size=self.row_group_rows)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Completes the file."""
        if self._waiting:
            self._write(trainer, pa.concat_tables(self._waiting, promote_options="permissive"))
            self._waiting = []
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
