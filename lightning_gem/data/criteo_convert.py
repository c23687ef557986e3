"""Conversion of Criteo's text files to Parquet, in one pass and constant memory unless they must be sorted."""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from tqdm import tqdm

from lightning_gem.data.columns import one_array

LABEL = "label"
NUMERIC = [f"I{i}" for i in range(1, 14)]
CATEGORICAL = [f"C{i}" for i in range(1, 27)]
_COLUMNS = [LABEL, *NUMERIC, *CATEGORICAL]
_ORDER = "order"
_ROW_GROUP = 1 << 16
_BLOCK_BYTES = 4 << 20


@dataclass
class Layout:
    """How the lines are written; see :class:`~lightning_gem.data.criteo.CriteoTSV`."""

    delimiter: str
    header: bool
    order_column: int | None

    @property
    def columns(self) -> list[str]:
        """Names of the columns of a line."""
        columns = list(_COLUMNS)
        if self.order_column is not None:
            columns.insert(self.order_column, _ORDER)
        return columns


def convert(files: dict[str, list[str]], shares: dict[str, float], layout: Layout, folder: Path) -> None:
    """Writes ``<split>.parquet`` for every split.

    Args:
        files: Text files by split.
        shares: Shares of the lines of ``train`` that become the splits ``val`` and ``test``.
        layout: How the lines are written.
        folder: Where to write.

    Raises:
        ValueError: If a line is malformed or a split would be empty.
    """
    num_bytes = sum(os.path.getsize(path) for paths in files.values() for path in paths)
    with tqdm(total=num_bytes, desc="convert to Parquet", unit="B", unit_scale=True) as progress:
        for split, paths in files.items():
            tables: Iterable[pa.Table] = (table for path in paths for table in _read(path, layout, progress))
            if layout.order_column is not None:
                tables = [pa.concat_tables(tables).sort_by(_ORDER).drop_columns(_ORDER)]
            later = shares if split == "train" else {}
            counts: dict[str, int] = {}
            if later:
                num_lines = tables[0].num_rows if isinstance(tables, list) else _count_lines(paths, layout)
                counts = _share_out(num_lines, later)
            _write(tables, counts, split, folder)


def _share_out(num_lines: int, shares: dict[str, float]) -> dict[str, int]:
    """Lines of each split, in their order in time."""
    counts = {name: round(num_lines * share) for name, share in shares.items()}
    for name, count in counts.items():
        if not count:
            raise ValueError(
                f"{name}_fraction={shares[name]} of {num_lines} lines is no line: raise it, or set it to 0"
            )
    if sum(counts.values()) >= num_lines:
        raise ValueError(f"of {num_lines} lines {counts} would leave none for training: lower the fractions")
    return {"train": num_lines - sum(counts.values()), **counts}


def _write(tables: Iterable[pa.Table], counts: dict[str, int], split: str, folder: Path) -> None:
    """Writes one split, or the given numbers of rows to several splits in turn."""
    splits = list(counts) or [split]
    stops = np.cumsum(list(counts.values())).tolist()[:-1]
    for part, pieces in groupby(_cut(tables, stops), key=itemgetter(0)):
        schema = pa.schema(
            [(LABEL, pa.int8()), *((c, pa.float32()) for c in NUMERIC), *((c, pa.uint32()) for c in CATEGORICAL)]
        )
        with pq.ParquetWriter(folder / f"{splits[part]}.parquet", schema) as writer:
            for group in _row_groups(table for _, table in pieces):
                writer.write_table(group.select(schema.names).cast(schema), row_group_size=_ROW_GROUP)


def _cut(tables: Iterable[pa.Table], stops: list[int]) -> Iterator[tuple[int, pa.Table]]:
    """Cuts tables at the given rows; yields the pieces with the number of their part."""
    part = position = 0
    for table in tables:
        while part < len(stops) and position + table.num_rows > stops[part]:
            head = stops[part] - position
            yield part, table.slice(0, head)
            table, position, part = table.slice(head), stops[part], part + 1
        yield part, table
        position += table.num_rows


def _row_groups(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    pending: list[pa.Table] = []
    for table in tables:
        pending.append(table)
        while sum(piece.num_rows for piece in pending) >= _ROW_GROUP:
            joined = pa.concat_tables(pending)
            yield joined.slice(0, _ROW_GROUP)
            pending = [joined.slice(_ROW_GROUP)]
    joined = pa.concat_tables(pending)
    if joined.num_rows:
        yield joined


def _open(path: str) -> tuple[pa.NativeFile, pa.NativeFile]:
    """The file itself and the stream of its text."""
    raw = pa.OSFile(path)
    compressed = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}.get(Path(path).suffix)
    return raw, pa.CompressedInputStream(raw, compressed) if compressed else raw


def _count_lines(paths: list[str], layout: Layout) -> int:
    total = 0
    for path in paths:
        raw, stream = _open(path)
        with raw, stream:
            last = b"\n"
            while block := stream.read(_BLOCK_BYTES):
                total += block.count(b"\n")
                last = block[-1:]
        total += (last != b"\n") - layout.header
    return total


def _read(path: str, layout: Layout, progress: tqdm) -> Iterator[pa.Table]:
    """Tables of checked lines."""
    wrong: list[pa_csv.InvalidRow] = []

    def keep(row: pa_csv.InvalidRow) -> str:
        wrong.append(row)
        return "error"

    types = {LABEL: pa.int8(), _ORDER: pa.int64(), **dict.fromkeys(NUMERIC, pa.float64())}
    line = first = 1 + layout.header
    done = 0
    raw, stream = _open(path)
    try:
        with raw, stream:
            # A single thread, for only then Arrow counts lines.
            batches = pa_csv.open_csv(
                stream,
                pa_csv.ReadOptions(
                    use_threads=False,
                    column_names=layout.columns,
                    skip_rows=int(layout.header),
                    block_size=_BLOCK_BYTES,
                ),
                pa_csv.ParseOptions(
                    delimiter=layout.delimiter, quote_char=False, ignore_empty_lines=False, invalid_row_handler=keep
                ),
                pa_csv.ConvertOptions(
                    column_types={name: types.get(name, pa.string()) for name in layout.columns},
                    null_values=[""],
                    strings_can_be_null=True,
                ),
            )
            for batch in batches:
                yield _checked(pa.Table.from_batches([batch]), path, line)
                line += batch.num_rows
                position = raw.tell()
                progress.update(position - done)
                done = position
    except (pa.ArrowInvalid, OSError) as error:
        if wrong:
            reason = f"line {wrong[0].number} has {wrong[0].actual_columns} columns, but should have"
            raise ValueError(f"{path}: {reason} {wrong[0].expected_columns}: correct the file or delimiter") from error
        if "Empty CSV" not in str(error):
            text = re.sub(r"^In CSV column #(\d+): Row #(\d+): CSV conversion error", _conversion(layout), str(error))
            raise ValueError(f"{path}: {text}") from error
    if line == first:
        raise ValueError(f"{path} has no lines: remove it from the list")


def _conversion(layout: Layout) -> Any:
    return lambda match: f"line {match[2]}, column {layout.columns[int(match[1])]}: no conversion"


def _checked(table: pa.Table, path: str, line: int) -> pa.Table:
    """Checks labels and order, and turns the hexadecimal categories into numbers."""
    wrong = pc.invert(pc.is_in(table.column(LABEL), pa.array([0, 1], pa.int8())))
    if pc.any(wrong).as_py():
        position = pc.index(wrong, True).as_py()
        value = table.column(LABEL)[position].as_py()
        raise ValueError(f"{path}: line {line + position} has the label {value}, but it should be 0 or 1")
    if _ORDER in table.schema.names and table.column(_ORDER).null_count:
        position = pc.index(table.column(_ORDER).is_null(), True).as_py()
        raise ValueError(f"{path}: line {line + position} has no number in the order column")
    for name in CATEGORICAL:
        codes = one_array(table.column(name)).dictionary_encode()
        try:
            numbers = pa.array([int(text, 16) for text in codes.dictionary.to_pylist()], pa.uint32())
        except (ValueError, OverflowError, pa.ArrowInvalid):
            _raise_not_hexadecimal(table.column(name), name, path, line)
        table = table.set_column(table.schema.get_field_index(name), name, numbers.take(codes.indices))
    return table


def _raise_not_hexadecimal(column: pa.ChunkedArray, name: str, path: str, line: int) -> None:
    wrong = pc.invert(pc.match_substring_regex(column, "^[0-9a-fA-F]{1,8}$")).fill_null(False)
    position = pc.index(wrong, True).as_py()
    raise ValueError(
        f"{path}: line {line + position}, column {name}: {column[position].as_py()!r} is not a hexadecimal number of "
        "up to 8 digits"
    )
