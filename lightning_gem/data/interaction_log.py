"""A log of (user, item, time, outcomes) as point-in-time requests with histories of strictly earlier events."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lightning_gem.data.cache import atomic_directory, default_cache_dir, fingerprint, load_arrays
from lightning_gem.data.fitting import Fitted
from lightning_gem.data.log_build import build_log
from lightning_gem.data.log_config import (
    Counter,
    Derived,
    Join,
    LogConfig,
    Scalar,
    Split,
    complete_schema,
)
from lightning_gem.data.log_table import read_original
from lightning_gem.data.module import RecDataModule
from lightning_gem.data.rows import Bags, Events, Ints, Rows
from lightning_gem.data.schema import Schema

__all__ = ["Counter", "Derived", "InteractionLog", "Join", "LogSource", "Split"]

CHUNK_ROWS = 1024
# Part of the cache key: to be raised when the same arguments give other arrays.
FORMAT = 2


class InteractionLog(RecDataModule):
    """Requests from one table of interactions, for training as an online system would have seen them.

    Every row of the log is a request. Its histories and counters come from strictly earlier rows (rows of the same time
    do not see each other), including those of the validation and test period; vocabularies and statistics come from the
    training rows alone. ``RecBatch.row`` is the position in the log sorted by time. Outcomes serve as labels, in
    sequences and in counters, and are refused as features of the request.

    Args:
        schema: ``user``, ``timestamp`` and ``time_unit`` name the keys; the features of its sequences are columns of
            the past rows. The attribute ``schema`` has the counters as further dense features.
        log: Parquet, CSV or TSV file (``.gz`` too) or a list of them.
        batch_size: Rows per batch and rank.
        joins: Static side tables.
        derived: Computed columns, for use as any other column.
        outcomes: Columns that are known only after the request, besides the tasks'. What is computed from an outcome is
            one too.
        history_filters: For a sequence, the values that columns must have in its events; without it, all rows are
            events.
        counters: Running counts and rates.
        split: Training, validation and test rows. Without a validation split, training goes without validation.
        drop_duplicates: Rows that agree in these columns are dropped but for the first.
        order: Columns that order rows of the same time; then their position in the files decides.
        list_separators: Separators of columns whose text is a list, such as ``{genres: "|"}``.
        label_delay: Seconds after which the outcome of an event is known, such as 86400 where conversions are joined a
            day later. Sequences and counters that use outcomes (as features, in ``history_filters``, as ``outcomes``)
            have only events more than this before the request; others have all strictly earlier events.
        cache_dir: Where prepared data is kept; ``$XDG_CACHE_HOME/lightning_gem`` or ``~/.cache/lightning_gem`` when not
            given. A change of the arguments or of the log's files (size, modification time) prepares it anew.
        num_workers: Worker processes per loader; 0 reads in the training process.
        shuffle_rows: Rows of the shuffle window of the training split.
        seed: Seed of the shuffles.
    """

    def __init__(
        self,
        schema: Schema,
        log: str | list[str],
        batch_size: int,
        joins: list[Join] | None = None,
        derived: list[Derived] | None = None,
        outcomes: list[str] | None = None,
        history_filters: dict[str, dict[str, Scalar]] | None = None,
        counters: list[Counter] | None = None,
        split: Split | None = None,
        drop_duplicates: list[str] | None = None,
        order: list[str] | None = None,
        list_separators: dict[str, str] | None = None,
        label_delay: int = 0,
        cache_dir: str | None = None,
        num_workers: int = 0,
        shuffle_rows: int = 65536,
        seed: int = 0,
    ) -> None:
        counters = counters or []
        self.config = LogConfig(
            schema=complete_schema(schema, counters),
            log=[log] if isinstance(log, str) else log,
            joins=joins or [],
            derived=derived or [],
            outcomes=outcomes or [],
            history_filters=history_filters or {},
            counters=counters,
            split=split or Split(),
            drop_duplicates=drop_duplicates or [],
            order=order or [],
            list_separators=list_separators or {},
            label_delay=label_delay,
        )
        super().__init__(self.config.schema, batch_size, num_workers, shuffle_rows, seed)
        self.cache_dir = Path(cache_dir).expanduser() if cache_dir else default_cache_dir()

    def _folder(self) -> Path:
        files = [*self.config.log, *(join.path for join in self.config.joins)]
        for file in files:
            if not Path(file).exists():
                raise FileNotFoundError(f"no such file: {file}")
        return self.cache_dir / f"log-{fingerprint(files, [FORMAT, self.config])}"

    def prepare_data(self) -> None:
        """Builds the cache unless it exists."""
        folder = self._folder()
        if not folder.is_dir():
            with atomic_directory(folder) as temporary:
                build_log(self.config, temporary)

    def setup(self, stage: str | None = None) -> None:
        """Opens the cache, memory-mapped."""
        folder = self._folder()
        if not folder.is_dir():
            raise RuntimeError(
                f"the prepared data {folder} is missing: call prepare_data() first, and on several hosts set cache_dir "
                "to a shared folder or leave prepare_data_per_node on"
            )
        names = [path.stem.removeprefix("split_") for path in folder.glob("split_*.npy")]
        self.sources = {name: LogSource(folder, name, self.schema) for name in names}
        self.fitted = Fitted.load(folder)

    def _how_to_give(self, split: str) -> str:
        if not self.sources:
            return "call prepare_data() and setup() first"
        return f"set data.init_args.split.{split} above 0, or split.{split}_from to its first time"

    def original_columns(self, split: str, columns: list[str]) -> Callable[[Ints], pa.Table]:
        """As in the base class, with the columns of joins too; the columns of the whole log are held in memory."""
        source = self.sources[split]
        assert isinstance(source, LogSource)
        table, order = read_original(self.config, columns), source.arrays["order"]
        return lambda rows: table.take(pa.array(order[rows]))


class LogSource:
    """Rows of one split of a prepared log. Workers get its path, not its arrays."""

    def __init__(self, folder: Path, split: str, schema: Schema) -> None:
        self.folder = folder
        self.split = split
        self.schema = schema
        self._open()

    def _open(self) -> None:
        self.arrays = load_arrays(self.folder)
        self.rows = self.arrays[f"split_{self.split}"]
        full, rest = divmod(len(self.rows), CHUNK_ROWS)
        self.chunk_sizes: Sequence[int] = [CHUNK_ROWS] * full + [rest] * (rest > 0)

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "split": self.split, "schema": self.schema}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def read(self, chunk: int, start: int, stop: int) -> Rows:
        """Rows ``start`` to ``stop`` of a chunk; all share the event arrays of the whole log."""
        arrays = self.arrays
        rows = self.rows[chunk * CHUNK_ROWS + start : chunk * CHUNK_ROWS + stop]
        sequences = {
            sequence.name: Events(
                ids=arrays[f"seq{i}_ids"],
                floats=arrays[f"seq{i}_floats"],
                timestamps=arrays[f"seq{i}_times"],
                starts=arrays[f"seq{i}_starts"][rows],
                lengths=arrays[f"seq{i}_lengths"][rows],
            )
            for i, sequence in enumerate(self.schema.sequences)
        }
        return Rows(
            dense=arrays["dense"][rows],
            sparse={feature.name: self._bags(i, rows) for i, feature in enumerate(self.schema.sparse)},
            sequences=sequences,
            sequence_keys={s.name: s.keys for s in self.schema.sequences},
            request_timestamps=arrays["times"][rows],
            domain=arrays["domain"][rows],
            labels=arrays["labels"][rows],
            weights=arrays["weights"][rows],
            user=arrays["user"][rows],
            row=np.array(rows),
        )

    def _bags(self, i: int, rows: npt.NDArray[np.int64]) -> Bags:
        values = self.arrays[f"sparse{i}"]
        if f"sparse{i}_starts" not in self.arrays:
            return Bags.single(values[rows])
        return Bags(values, self.arrays[f"sparse{i}_starts"][rows], self.arrays[f"sparse{i}_lengths"][rows])
