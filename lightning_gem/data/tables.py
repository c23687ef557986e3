"""Columns of CSV, TSV (compressed or not) and Parquet files as Arrow tables, and joins of static tables."""

import csv
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from lightning_gem.data.columns import check_column, fetch, first_true, is_text, one_array
from lightning_gem.data.log_config import Join

# Not "NA" and the like, which are values (Namibia) in many data sets.
_NULL_TEXTS = ["", "null", "NULL", "nan", "NaN", "\\N"]
_NUMBER = r"^\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*$"
_MAX_BLOCK = 1 << 30


def read_columns(path: str | Path, columns: Collection[str], numeric: Collection[str] = ()) -> pa.Table:
    """Some columns of a file. Text files are read whole into memory, their types are inferred from all rows.

    Args:
        path: ``.parquet``, or a text file with a header. Its delimiter is the one of its extension (``.csv``, ``.tsv``)
            if the header has it, else the most frequent one of comma, tab, semicolon and bar. ``.gz`` and the like are
            decompressed.
        columns: Names of the columns.
        numeric: Those of them that must hold numbers.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is empty or malformed, lacks a column, has it twice, or has text for a number.
    """
    path = Path(path)
    names = column_names(path)
    for column in columns:
        check_column(pa.schema([(name, pa.string()) for name in dict.fromkeys(names)]), column, str(path))
        if names.count(column) > 1:
            raise ValueError(f"column {column!r} occurs {names.count(column)} times in {path}: rename or remove one")
    table = _read_parquet(path, columns) if _is_parquet(path) else _read_text(path, columns)
    if not table.num_rows:
        raise ValueError(f"{path} has no rows: remove it from the list or write it again")
    for i, column in enumerate(table.schema.names):
        if pa.types.is_dictionary(table.schema.field(i).type):
            table = table.set_column(i, column, one_array(table.column(i)).dictionary_decode())
        if column in numeric:
            _check_numbers(one_array(table.column(i)), column, path)
    return table


def column_names(path: str | Path) -> list[str]:
    """Names of all columns of a file.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is empty.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no such file: {path}")
    if path.is_dir():
        raise ValueError(f"{path} is a folder: list its files")
    if _is_parquet(path):
        try:
            return list(pq.read_schema(path).names)
        except pa.ArrowInvalid as error:
            raise ValueError(f"{path} is no readable Parquet file: {error}") from error
    header = _header(path)
    return next(csv.reader([header], delimiter=_delimiter(path, header)))


def concat_tables(tables: list[pa.Table], paths: list[str]) -> pa.Table:
    """Rows of all tables one after the other; whole numbers and floats mix, other types do not.

    Raises:
        ValueError: If a column has types that do not mix.
    """
    try:
        return pa.concat_tables(tables, promote_options="permissive").combine_chunks()
    except (pa.ArrowTypeError, pa.ArrowInvalid) as error:
        for column in tables[0].schema.names:
            kinds = {str(table.schema.field(column).type): path for table, path in zip(tables, paths, strict=True)}
            if len(kinds) > 1:
                found = ", ".join(f"{kind} in {path}" for kind, path in kinds.items())
                raise ValueError(f"column {column!r} is {found}: store one type in all files") from error
        raise


def join_table(table: pa.Table, join: Join, numeric: Collection[str], where: str) -> pa.Table:
    """Adds the columns of a static table; rows whose key is null or not in it get nulls.

    Args:
        table: The log.
        join: What to add.
        numeric: Columns (as named in the log) that must hold numbers.
        where: Name of the log, for errors.

    Raises:
        ValueError: If keys are repeated, have types that do not compare, or match nowhere.
    """
    log_key, file_key = join.keys
    numbers = [column for column, name in zip(join.columns, join.names, strict=True) if name in numeric]
    side = read_columns(join.path, dict.fromkeys([file_key, *join.columns]), numbers)
    left, right = fetch(table, log_key, where), fetch(side, file_key, join.path)
    if left.type != right.type:
        common = _common_type(left.type, right.type)
        if common is None:
            raise ValueError(
                f"join {join.path}: its key {file_key!r} has type {right.type}, but {log_key!r} ({where}) has type "
                f"{left.type}: store one type"
            )
        left, right = left.cast(common), right.cast(common)
    counts = right.drop_null().value_counts()
    repeated = counts.filter(pc.greater(counts.field("counts"), 1))
    if len(repeated):
        raise ValueError(
            f"join {join.path}: key {file_key!r} has the value {repeated[0]['values'].as_py()!r} "
            f"{repeated[0]['counts'].as_py()} times: keep one row per key"
        )
    rows = pc.index_in(left, value_set=right, skip_nulls=True)
    if rows.null_count == len(rows):
        raise ValueError(
            f"join {join.path}: no value of {log_key!r} ({where}) occurs in its key {file_key!r}: name the right keys"
        )
    for column, name in zip(join.columns, join.names, strict=True):
        table = table.append_column(name, one_array(side.column(column)).take(rows))
    return table


def split_lists(table: pa.Table, column: str, separator: str, where: str) -> pa.Table:
    """Turns text such as ``Comedy|Drama`` into lists; null becomes the empty list.

    Raises:
        ValueError: If the column holds no text.
    """
    array = fetch(table, column, where)
    if not is_text(array.type):
        raise ValueError(f"list_separators: column {column!r} ({where}) has type {array.type}, but text is needed")
    lists = pc.split_pattern(array, separator)
    if lists.null_count:
        lists = pc.if_else(lists.is_null(), pa.scalar([], lists.type), lists)
    return table.set_column(table.schema.get_field_index(column), column, lists)


def _is_parquet(path: Path) -> bool:
    return path.suffix in (".parquet", ".pq")


def _read_parquet(path: Path, columns: Collection[str]) -> pa.Table:
    # A single file: no guesses of partition columns from the names of its folders.
    try:
        return pq.ParquetFile(path).read(columns=list(columns))
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} cannot be read as Parquet ({error}): write it again") from error


def _read_text(path: Path, columns: Collection[str]) -> pa.Table:
    with pa.input_stream(str(path), compression="detect") as stream:
        data = stream.read_buffer()
    options: dict[str, Any] = {
        # Arrow infers types from the first block: one block makes an id that is text in the last row text everywhere.
        "read_options": pa_csv.ReadOptions(block_size=min(data.size + 1, _MAX_BLOCK)),
        "parse_options": pa_csv.ParseOptions(delimiter=_delimiter(path, _header(path)), newlines_in_values=True),
        "convert_options": pa_csv.ConvertOptions(
            include_columns=list(columns), null_values=_NULL_TEXTS, strings_can_be_null=True
        ),
    }
    try:
        return pa_csv.read_csv(pa.BufferReader(data), **options)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is malformed: {_with_row(data, options) or error}") from error


def _with_row(data: pa.Buffer, options: dict[str, Any]) -> str:
    """The error once more, with the row, which Arrow counts in a single thread only."""
    options["read_options"].use_threads = False
    try:
        pa_csv.read_csv(pa.BufferReader(data), **options)
    except pa.ArrowInvalid as error:
        return str(error)
    return ""


def _header(path: Path) -> str:
    with pa.input_stream(str(path), compression="detect") as stream:
        lines = stream.read(1 << 20).decode("utf-8-sig", errors="replace").splitlines()
    if not lines:
        raise ValueError(f"{path} is empty: it has not even a header")
    return lines[0]


def _delimiter(path: Path, header: str) -> str:
    by_extension = {".csv": ",", ".tsv": "\t"}
    for suffix in path.suffixes[::-1]:
        if by_extension.get(suffix, "\0") in header:
            return by_extension[suffix]
    return max(",\t;|", key=header.count)


def _check_numbers(array: pa.Array, column: str, path: Path) -> None:
    if is_text(array.type):
        wrong = pc.invert(pc.match_substring_regex(array, _NUMBER)).fill_null(False)
        if wrong.true_count:
            position = first_true(wrong)
            raise ValueError(
                f"column {column!r} in {path} must hold numbers, but has {array[position].as_py()!r} at position "
                f"{position}: clean the file, or use the column as a sparse feature"
            )


def _common_type(left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
    if is_text(left) and is_text(right):
        return pa.large_string()
    if pa.types.is_integer(left) and pa.types.is_integer(right):
        return pa.int64()
    numbers = (pa.types.is_integer, pa.types.is_floating)
    if all(any(test(kind) for test in numbers) for kind in (left, right)):
        return pa.float64()
    return None
