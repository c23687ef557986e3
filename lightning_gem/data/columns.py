"""Access to Arrow columns with clear errors, and their conversion to NumPy."""

import difflib
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Column: TypeAlias = pa.Array | pa.ChunkedArray

_TEXT = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def fetch(
    table: pa.Table | pa.RecordBatch, column: str, where: str, lists: bool = False, nulls: bool = False
) -> pa.Array:
    """A column as one array.

    Args:
        table: Where the column should be.
        column: Its name.
        where: Place that errors name.
        lists: Whether a list column is asked for.
        nulls: Whether a column of nothing but nulls is acceptable.

    Raises:
        ValueError: If the column is missing, holds only nulls, or is a list where a flat column is asked for or the
            other way round.
    """
    check_column(table.schema, column, where, lists)
    array = one_array(table.column(column))
    if not nulls and len(array) and array.null_count == len(array):
        raise ValueError(f"column {column!r} ({where}) holds only nulls: fill it or leave it out of the schema")
    return array


def check_column(schema: pa.Schema, column: str, where: str, lists: bool = False) -> None:
    """Checks the presence and the shape (list or flat) of a column.

    Raises:
        ValueError: If they are not as asked for.
    """
    position = schema.get_field_index(column)
    if position < 0:
        if column in schema.names:
            raise ValueError(f"column {column!r} occurs several times ({where}): rename or remove one")
        close = difflib.get_close_matches(column, schema.names, n=1)
        guess = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"column {column!r} is missing ({where}): {guess}the columns are {', '.join(schema.names)}")
    kind = schema.field(position).type
    if lists and not is_list(kind):
        raise ValueError(
            f"column {column!r} ({where}) has type {kind}, but a list column is needed: store one list per row"
        )
    if (not lists and is_list(kind)) or pa.types.is_struct(kind) or pa.types.is_map(kind):
        raise ValueError(
            f"column {column!r} ({where}) has type {kind}, but a flat column is needed: store one value per row"
        )
    if pa.types.is_null(kind):
        raise ValueError(f"column {column!r} ({where}) holds only nulls: fill it or leave it out of the schema")


def is_list(kind: pa.DataType) -> bool:
    """Whether values are lists."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def flatten(array: pa.Array) -> tuple[pa.Array, npt.NDArray[np.int64]]:
    """Values of all lists one after the other, and the length of each list; null is an empty list."""
    if pa.types.is_fixed_size_list(array.type):
        array = array.cast(pa.list_(array.type.value_type))
    lengths = np.diff(to_numpy(array.offsets)).astype(np.int64)
    if array.null_count:
        lengths[to_numpy(array.is_null())] = 0
    return array.flatten(), lengths


def one_array(values: Column) -> pa.Array:
    """The values as one contiguous array, copied only if they are in several chunks."""
    if isinstance(values, pa.ChunkedArray):
        return values.chunk(0) if values.num_chunks == 1 else values.combine_chunks()
    return values


def is_text(kind: pa.DataType) -> bool:
    """Whether values are strings or bytes."""
    return kind in _TEXT


def to_bytes(array: pa.Array) -> list[bytes | None]:
    """Text as UTF-8."""
    binary = pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type)
    return (array if binary else array.cast(pa.large_binary())).to_pylist()


def to_numpy(array: pa.Array) -> npt.NDArray[np.generic]:
    """The values, copied only where Arrow must (nulls, booleans)."""
    return array.to_numpy(zero_copy_only=False)


def to_floats(array: pa.Array, dtype: type = np.float64) -> npt.NDArray[np.floating]:
    """Numbers with NaN for null."""
    if pa.types.is_decimal(array.type) or (pa.types.is_boolean(array.type) and array.null_count):
        array = array.cast(pa.float64()) if pa.types.is_decimal(array.type) else array.cast(pa.uint8())
    return to_numpy(array).astype(dtype, copy=False)


def check_number(array: pa.Array, place: str) -> None:
    """Checks that values are numbers.

    Raises:
        ValueError: If they are not.
    """
    kind = array.type
    if not any(
        test(kind) for test in (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal)
    ):
        raise ValueError(f"{place}: values of type {kind} are not numbers: cast the column")


def first_true(mask: pa.Array) -> int:
    """Position of the first true value."""
    return int(np.flatnonzero(to_numpy(mask))[0])
