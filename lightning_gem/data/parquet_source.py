"""Rows of Parquet files: Arrow tables encoded as the schema says, one small piece of a row group at a time."""

import glob
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch.utils.data import get_worker_info

from lightning_gem.data.columns import check_column, fetch, flatten, is_list
from lightning_gem.data.encoding import encode_dense, encode_ids, encode_keys, encode_labels, encode_times
from lightning_gem.data.fitting import Fitted, statistics_key, vocabulary_key
from lightning_gem.data.rows import Bags, Events, Floats, Ints, Rows
from lightning_gem.data.schema import DenseFeature, Schema, Sequence, SparseFeature

# Pieces fit the caches of a core and bound the memory whatever the size of the row groups.
_PIECE_ROWS = 16384


def expand_paths(paths: str | list[str], suffix: str = ".parquet") -> list[str]:
    """Files of a path, a folder (searched recursively), a glob pattern, or a list of them, without duplicates.

    Args:
        paths: Where to look. Files of a folder or pattern are sorted by name, numbers in names by size.
        suffix: End of the names of files in folders.

    Raises:
        FileNotFoundError: If a path, folder or pattern gives no file.
    """
    found: dict[str, None] = {}
    for path in [paths] if isinstance(paths, str) else paths:
        if os.path.isfile(path):
            files = [path]
        elif os.path.isdir(path):
            files = [str(file) for file in Path(path).rglob(f"*{suffix}") if file.is_file()]
        else:
            files = glob.glob(path, recursive=True)
        if not files:
            raise FileNotFoundError(f"no file at {path!r}: check the path")
        found.update(dict.fromkeys(sorted(files, key=_natural)))
    return list(found)


def _natural(path: str) -> list[tuple[int, str]]:
    return [(int(text), "") if text.isdecimal() else (-1, text) for text in re.split(r"(\d+)", path)]


def read_pieces(path: str, columns: list[str]) -> Iterator[tuple[pa.RecordBatch, str]]:
    """Some columns of a file in pieces, each with its place for error messages."""
    file = _open(path)
    schema = file.schema_arrow
    for column in columns:
        check_column(schema, column, f"file {path}", column in schema.names and is_list(schema.field(column).type))
    for group in range(file.num_row_groups):
        where = f"file {path}, row group {group}"
        with _reading(where):
            for piece in file.iter_batches(_PIECE_ROWS, row_groups=[group], columns=columns):
                yield piece, where


@dataclass
class TableEncoder:
    """Turns Arrow tables into rows.

    Args:
        schema: Says how.
        fitted: What its vocabularies and statistics are.
        labels: Whether the label columns must be there; otherwise all labels of a table without them are missing.
        future_events: Whether histories may hold events later than their request.
    """

    schema: Schema
    fitted: Fitted
    labels: bool = True
    future_events: bool = False

    def columns(self, names: list[str]) -> list[str]:
        """Columns to read of a file that has columns ``names``."""
        schema = self.schema
        columns = [feature.source for feature in schema.sparse] + [feature.source for feature in schema.dense]
        columns += [column for column in (schema.timestamp, schema.user, schema.domain) if column]
        if self._has_labels(names):
            columns += [task.source for task in schema.tasks] + [task.weight for task in schema.tasks if task.weight]
        for sequence in schema.sequences:
            columns += [sequence.timestamp, *_sources(sequence)]
        return list(dict.fromkeys(columns))

    def _has_labels(self, names: list[str]) -> bool:
        return self.labels or all(task.source in names for task in self.schema.tasks)

    def encode(self, table: pa.Table | pa.RecordBatch, where: str, first_row: int) -> Rows:
        """Encodes a table whose first row has number ``first_row`` in the split."""
        schema, size = self.schema, table.num_rows
        dense = np.empty((size, len(schema.dense)), dtype=np.float32)
        for i, feature in enumerate(schema.dense):
            dense[:, i] = self._dense(feature, fetch(table, feature.source, where, nulls=True), None, where)
        if self._has_labels(table.schema.names):
            labels, weights = encode_labels(schema.tasks, table, where)
        else:
            labels = np.full((size, len(schema.tasks)), np.nan, dtype=np.float32)
            weights = np.zeros_like(labels)
        times, user, domain = np.zeros((3, size), dtype=np.int64)
        if schema.timestamp:
            values = fetch(table, schema.timestamp, where, nulls=True)
            times = encode_times(schema.timestamp, values, schema.time_unit, where)
        if schema.user:
            user = encode_keys(schema.user, fetch(table, schema.user, where, nulls=True), where, first_row)
        if schema.domain:
            surfaces = SparseFeature(schema.domain, schema.num_domains, encoding="index")
            domain = encode_ids(surfaces, fetch(table, schema.domain, where, nulls=True), None, where)
        return Rows(
            dense=dense,
            sparse={feature.name: self._bag(feature, table, where) for feature in schema.sparse},
            sequences={sequence.name: self._events(sequence, table, times, where) for sequence in schema.sequences},
            sequence_keys={sequence.name: sequence.keys for sequence in schema.sequences},
            request_timestamps=times,
            domain=domain,
            labels=labels,
            weights=weights,
            user=user,
            row=np.arange(first_row, first_row + size),
        )

    def _ids(
        self, feature: SparseFeature, values: pa.Array, sequence: str | None, where: str, out: Ints | None = None
    ) -> Ints:
        vocabulary = self.fitted.vocabularies.get(vocabulary_key(feature, sequence))
        return encode_ids(feature, values, vocabulary, where, out)

    def _dense(self, feature: DenseFeature, values: pa.Array, sequence: str | None, where: str) -> Floats:
        return encode_dense(feature, values, self.fitted.statistics.get(statistics_key(feature, sequence)), where)

    def _bag(self, feature: SparseFeature, table: pa.Table | pa.RecordBatch, where: str) -> Bags:
        column = feature.source
        multi = column in table.schema.names and is_list(table.schema.field(column).type)
        array = fetch(table, column, where, lists=multi, nulls=True)
        if not multi:
            return Bags.single(self._ids(feature, array, None, where))
        values, lengths = flatten(array)
        return Bags(self._ids(feature, values, None, where), np.cumsum(lengths) - lengths, lengths)

    def _events(self, sequence: Sequence, table: pa.Table | pa.RecordBatch, requests: Ints, where: str) -> Events:
        values, lengths = flatten(fetch(table, sequence.timestamp, where, lists=True, nulls=True))
        times = encode_times(sequence.timestamp, values, self.schema.time_unit, where)
        flat = []
        for column in _sources(sequence):
            values, other = flatten(fetch(table, column, where, lists=True, nulls=True))
            if not np.array_equal(lengths, other):
                row = int(np.flatnonzero(lengths != other)[0])
                raise ValueError(
                    f"sequence {sequence.name!r} ({where}): row {row} has {lengths[row]} values in "
                    f"{sequence.timestamp!r}, but {other[row]} in {column!r}: all its columns need one value per event"
                )
            flat.append(values)
        ends = np.cumsum(lengths)
        self._check_ascending(sequence, times, ends, where)
        if not self.future_events:
            self._check_past(sequence, times, lengths, ends, requests, where)
        ids = np.empty((len(sequence.features), len(times)), dtype=np.int64)
        floats = np.empty((len(times), len(sequence.floats)), dtype=np.float32)
        for i, feature in enumerate(sequence.features):
            self._ids(feature, flat[i], sequence.name, where, out=ids[i])
        for i, number in enumerate(sequence.floats):
            floats[:, i] = self._dense(number, flat[len(sequence.features) + i], sequence.name, where)
        kept = np.minimum(lengths, sequence.max_len)
        return Events(ids, floats, times, ends - kept, kept, in_order=int(kept.sum()) == len(times))

    @staticmethod
    def _check_ascending(sequence: Sequence, times: Ints, ends: Ints, where: str) -> None:
        falls = np.flatnonzero(times[1:] < times[:-1]) + 1
        first_of_row = np.zeros(len(times) + 1, dtype=bool)
        first_of_row[ends] = True
        falls = falls[~first_of_row[falls]]
        if len(falls):
            row = int(np.searchsorted(ends, falls[0], side="right"))
            raise ValueError(
                f"sequence {sequence.name!r} ({where}): the times in {sequence.timestamp!r} of row {row} decrease from "
                f"{times[falls[0] - 1]} s to {times[falls[0]]} s: sort each history by time, oldest first"
            )

    def _check_past(
        self, sequence: Sequence, times: Ints, lengths: Ints, ends: Ints, requests: Ints, where: str
    ) -> None:
        """The latest event of each row, which is its last, must not be later than the request."""
        filled = np.flatnonzero(lengths)
        late = filled[times[ends[filled] - 1] > requests[filled]]
        if len(late):
            row = int(late[0])
            raise ValueError(
                f"sequence {sequence.name!r} ({where}): row {row} has an event at {times[ends[row] - 1]} s in "
                f"{sequence.timestamp!r}, later than its request at {requests[row]} s in {self.schema.timestamp!r}: "
                "the model would see the future; cut histories at the request, check time_unit, or set "
                "allow_future_events: true"
            )


def _sources(sequence: Sequence) -> list[str]:
    return [feature.source for feature in sequence.features] + [number.source for number in sequence.floats]


class ParquetSource:
    """Rows of one split. A chunk is a row group; pieces of it are decoded and encoded in order, each once.

    Files are opened when first read, in whatever process that is.

    Args:
        paths: Files, see :func:`expand_paths`.
        encoder: Encodes their tables.

    Raises:
        FileNotFoundError: If there is no file.
        ValueError: If a file cannot be read, has no rows, or lacks a column.
    """

    def __init__(self, paths: str | list[str], encoder: TableEncoder) -> None:
        self.encoder = encoder
        self.chunk_sizes: list[int] = []
        self._chunks: list[tuple[str, int, int]] = []
        self._cursor: _Cursor | None = None
        num_rows = 0
        files = expand_paths(paths)
        known: pa.Schema | None = None
        lists: set[str] | None = None
        for path in files:
            file = _open(path)
            names = encoder.columns(file.schema_arrow.names)
            if known is None or not file.schema_arrow.equals(known):
                known = file.schema_arrow
                # Encoding no rows checks the presence and the types of all columns.
                encoder.encode(known.empty_table(), f"file {path}", 0)
                now = {name for name in names if is_list(known.field(name).type)}
                lists = now if lists is None else lists
                if lists != now:
                    raise ValueError(
                        f"column {min(lists ^ now)!r} is a list column in one of {files[0]} and {path}, but flat in "
                        "the other: store it in one way"
                    )
            _check_not_null(file, names, f"file {path}")
            for group in range(file.num_row_groups):
                size = file.metadata.row_group(group).num_rows
                self.chunk_sizes.append(size)
                self._chunks.append((path, group, num_rows))
                num_rows += size

    def read(self, chunk: int, start: int, stop: int) -> Rows:
        """Rows ``start`` to ``stop`` of a row group, or fewer where a piece of it ends."""
        cursor = self._cursor
        # A forked worker inherits the cursor of its parent, and with it the parent's file and its threads' state.
        if cursor is None or cursor.key != (chunk, os.getpid()) or start < cursor.start:
            cursor = self._cursor = _Cursor((chunk, os.getpid()), self.encoder, *self._chunks[chunk])
        return cursor.read(start, stop)

    def original_columns(self, columns: list[str]) -> Callable[[Ints], pa.Table]:
        """Gives a function that reads columns for some rows; the latest row group is kept.

        Raises:
            ValueError: If a file lacks a column.
        """
        for path in dict.fromkeys(path for path, _, _ in self._chunks):
            names = pq.read_schema(path).names
            for column in columns:
                if column not in names:
                    check_column(pq.read_schema(path), column, f"file {path}")
        firsts = np.array([first for _, _, first in self._chunks])
        kept: tuple[int, pa.Table] | None = None

        def read(rows: Ints) -> pa.Table:
            nonlocal kept
            chunks = np.searchsorted(firsts, rows, side="right") - 1
            cuts = np.flatnonzero(np.diff(chunks)) + 1
            parts = []
            for part in np.split(np.arange(len(rows)), cuts):
                chunk = int(chunks[part[0]])
                if kept is None or kept[0] != chunk:
                    path, group, _ = self._chunks[chunk]
                    with _reading(f"file {path}, row group {group}"):
                        kept = chunk, pq.ParquetFile(path).read_row_group(group, columns=columns)
                parts.append(kept[1].take(pa.array(rows[part] - firsts[chunk])))
            return pa.concat_tables(parts, promote_options="permissive").select(columns)

        return read

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cursor": None}


class _Cursor:
    """Goes through a row group piece by piece."""

    def __init__(self, key: tuple[int, int], encoder: TableEncoder, path: str, group: int, first_row: int) -> None:
        self.key = key
        self.start = 0
        self._encoder = encoder
        self._first_row = first_row
        self._where = f"file {path}, row group {group}"
        self._rows: Rows | None = None
        self._size = 0
        threads = get_worker_info() is None and pa.cpu_count() > 1
        with _reading(self._where):
            file = pq.ParquetFile(path)
            columns = encoder.columns(file.schema_arrow.names)
            self._pieces = file.iter_batches(_PIECE_ROWS, row_groups=[group], columns=columns, use_threads=threads)
        # Outside of workers, Arrow decodes the next piece while this one is encoded and trained on.
        self._pool = ThreadPoolExecutor(1) if threads else None
        self._ahead = self._pool.submit(next, self._pieces, None) if self._pool else None

    def read(self, start: int, stop: int) -> Rows:
        """Rows from ``start`` to ``stop`` or the end of the piece."""
        while start >= self.start + self._size:
            piece = self._next()
            self.start += self._size
            self._size = piece.num_rows
            self._rows = None
            if start < self.start + self._size:
                where = f"{self._where}, rows {self.start} to {self.start + self._size - 1}"
                self._rows = self._encoder.encode(piece, where, self._first_row + self.start)
        assert self._rows is not None
        return self._rows.take(slice(start - self.start, stop - self.start))

    def _next(self) -> pa.RecordBatch:
        with _reading(self._where):
            if self._pool is None or self._ahead is None:
                return next(self._pieces)
            piece = self._ahead.result()
            self._ahead = self._pool.submit(next, self._pieces, None)
            return piece


def _open(path: str) -> pq.ParquetFile:
    with _reading(f"file {path}"):
        file = pq.ParquetFile(path)
    if not file.metadata.num_rows:
        raise ValueError(
            f"file {path} has no rows ({file.num_row_groups} row groups): remove it from the split or write it again"
        )
    return file


def _check_not_null(file: pq.ParquetFile, columns: list[str], where: str) -> None:
    """Raises if a column of the file has no value, as far as the statistics of the file tell."""
    leaves: dict[str, int] = {}
    for i in range(len(file.schema)):
        path = file.schema.column(i).path
        leaves.setdefault(path, i)
        leaves.setdefault(path.split(".")[0], i)
    for column in columns:
        chunks = (file.metadata.row_group(group).column(leaves[column]) for group in range(file.num_row_groups))
        # Empty lists count as nulls in the statistics, but are legal.
        if all(_is_null(chunk) for chunk in chunks):
            with _reading(where):
                values = file.read(columns=[column]).column(0)
            if values.null_count == len(values):
                raise ValueError(f"column {column!r} ({where}) holds only nulls: fill it or leave it out of the schema")


def _is_null(chunk: pq.ColumnChunkMetaData) -> bool:
    statistics = chunk.statistics
    return statistics is not None and statistics.has_null_count and statistics.null_count == chunk.num_values


@contextmanager
def _reading(where: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{where} is not readable Parquet ({error}): it is truncated or corrupt, write it again"
        ) from error
