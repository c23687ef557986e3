"""Rows from Parquet files of any size."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from lightning_gem.data.cache import atomic_directory, default_cache_dir, fingerprint
from lightning_gem.data.fitting import Fitted, features_to_fit, fit
from lightning_gem.data.module import RecDataModule
from lightning_gem.data.parquet_source import ParquetSource, TableEncoder, expand_paths, read_pieces
from lightning_gem.data.rows import Ints
from lightning_gem.data.schema import Schema

_SPLITS = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict", "test")}
_ALL = ("train", "val", "test", "predict")


class ParquetStream(RecDataModule):
    """Streams Parquet files with flat and list columns.

    A request feature may be flat or a list column (several values per request); the columns of a sequence are list
    columns with one entry per event, oldest first. Each split is a file, a folder (all ``*.parquet`` below it), a glob
    pattern, or a list of them. Row groups of some 10,000 to 100,000 rows suit best: their order is shuffled, and a
    worker that starts within one must decode what is before.

    Args:
        schema: Features, labels and keys of the data.
        train: Training split.
        val: Validation split.
        test: Test split.
        predict: Rows to predict; label columns may be absent. By default those of ``test``.
        batch_size: Rows per batch and rank.
        num_workers: Worker processes per loader; 0 reads in the training process.
        shuffle_rows: Rows of the shuffle window of the training split, all of which are held in memory.
        seed: Seed of the shuffles.
        cache_dir: Where vocabularies and statistics of the training split are kept; ``~/.cache/lightning_gem`` by
            default.
        allow_future_events: Accept events later than the request of their row, which are an error otherwise.
    """

    def __init__(
        self,
        schema: Schema,
        train: str | list[str] | None = None,
        val: str | list[str] | None = None,
        test: str | list[str] | None = None,
        predict: str | list[str] | None = None,
        batch_size: int = 1024,
        num_workers: int = 0,
        shuffle_rows: int = 65536,
        seed: int = 0,
        cache_dir: str | None = None,
        allow_future_events: bool = False,
    ) -> None:
        super().__init__(schema, batch_size, num_workers, shuffle_rows, seed)
        self.paths = {"train": train, "val": val, "test": test, "predict": predict}
        self.cache_dir = Path(cache_dir) if cache_dir else default_cache_dir()
        self.allow_future_events = allow_future_events

    def prepare_data(self) -> None:
        """Fits vocabularies and statistics, if the schema needs any, once per machine."""
        self._fit()

    def setup(self, stage: str | None = None) -> None:
        """Opens the files of the splits that ``stage`` needs; of all without one.

        Raises:
            FileNotFoundError: If a path gives no file.
            ValueError: If a file does not suit the schema.
        """
        if self.fitted is None:
            self.fitted = self._fit()
        for split in _SPLITS[stage] if stage else _ALL:
            paths = self.paths[split]
            if paths is not None and split not in self.sources:
                encoder = TableEncoder(
                    self.schema, self.fitted, labels=split != "predict", future_events=self.allow_future_events
                )
                self.sources[split] = ParquetSource(paths, encoder)

    def _how_to_give(self, split: str) -> str:
        return f"name its files as {split} (data.init_args.{split})"

    def original_columns(self, split: str, columns: list[str]) -> Callable[[Ints], pa.Table]:
        """As in the base class; rows are to be asked for in ascending order, so that row groups are read once."""
        source = self.sources[split]
        assert isinstance(source, ParquetSource)
        return source.original_columns(columns)

    def _fit(self) -> Fitted:
        sparse, dense = features_to_fit(self.schema)
        if not sparse and not dense:
            return Fitted()
        if self.paths["train"] is None:
            name = [feature.name for _, feature in sparse] + [number.name for _, number in dense]
            raise ValueError(
                f"feature {name[0]!r} learns its encoding from the training split: give train, even where only "
                "other splits are read"
            )
        files = expand_paths(self.paths["train"])
        folder = self.cache_dir / f"fitted-{fingerprint(files, [sparse, dense])}"
        if not folder.exists():
            columns = [feature.source for _, feature in sparse] + [number.source for _, number in dense]
            pieces = (piece for file in files for piece in read_pieces(file, list(dict.fromkeys(columns))))
            fitted = fit(self.schema, pieces)
            with atomic_directory(folder) as temporary:
                fitted.save(temporary)
        return Fitted.load(folder)
