"""Raw Arrow columns to NumPy arrays, as the schema says; no function here loops over rows.

``where`` is the place that an error message names, such as ``"file x.parquet, row group 3"``.
"""

import hashlib
import warnings
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lightning_gem.data.columns import (
    Column,
    check_number,
    fetch,
    first_true,
    is_text,
    one_array,
    to_bytes,
    to_floats,
    to_numpy,
)
from lightning_gem.data.schema import TIME_UNITS_PER_SECOND, DenseFeature, SparseFeature, Task

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float32]

_YEAR_2200 = 7_258_118_400
_NULL_CODE = np.uint64(0x6E756C6C_76616C75)
_BLOCK = 1 << 15


class Vocabulary:
    """Values that have rows of their own, from row 1 on.

    Attributes:
        values: The values in the order of their rows.
        codes: Their 64-bit codes, sorted for look-ups.
        rows: Their rows, in the order of ``codes``.
    """

    def __init__(self, values: pa.Array) -> None:
        codes = _codes(values, "vocabulary")
        order = np.argsort(codes)
        self.values = values
        self.codes = codes[order]
        self.rows = order + 1

    def __len__(self) -> int:
        return len(self.values)

    def look_up(self, array: pa.Array, place: str) -> Ints:
        """Rows of values; 0 for all others and nulls.

        Raises:
            ValueError: If the values are text and the vocabulary is not, or the other way round.
        """
        if len(self) == 0:
            return np.zeros(len(array), dtype=np.int64)
        if is_text(array.type) != is_text(self.values.type):
            raise ValueError(
                f"{place}: values of type {array.type} are none of the vocabulary, which has type {self.values.type}: "
                "store the column with one type in all files"
            )
        codes = _codes(array, place)
        found = np.minimum(np.searchsorted(self.codes, codes), len(self) - 1)
        return np.where(self.codes[found] == codes, self.rows[found], 0)


def encode_ids(
    feature: SparseFeature, values: Column, vocabulary: Vocabulary | None, where: str, out: Ints | None = None
) -> Ints:
    """Rows of the feature's table for raw values.

    Nulls and NaN: ``hash`` gives them a row like any other value, ``vocabulary`` row 0 or, with ``null_row``, the last,
    ``bucket`` the row after the last bucket or, if the table has no such row, the last bucket; for ``index`` they are
    an error. Hashes depend on the value, ``num_embeddings`` and the name of the table only: not on the width of
    integers, nor on whether whole numbers are stored as floats, nor on the process.

    Args:
        feature: Says how to encode.
        values: Flat raw values.
        vocabulary: What :func:`~lightning_gem.data.fitting.fit_vocabulary` gave, for the ``vocabulary`` encoding.
        where: Place that errors name.
        out: Where to write the rows, for large columns.

    Raises:
        ValueError: If the values do not fit the encoding.
    """
    array = one_array(values)
    if feature.encoding == "hash" and pa.types.is_integer(array.type):
        return _hash_integers(_codes(array, ""), feature, out)
    ids = _encode(feature, array, vocabulary, where)
    if out is None:
        return ids
    out[:] = ids
    return out


def _encode(feature: SparseFeature, array: pa.Array, vocabulary: Vocabulary | None, where: str) -> Ints:
    if is_text(array.type) or (feature.encoding == "vocabulary" and not pa.types.is_dictionary(array.type)):
        array = array.dictionary_encode()
    if not pa.types.is_dictionary(array.type):
        return _encode_plain(feature, array, vocabulary, where)
    distinct, indices = array.dictionary, array.indices
    if indices.null_count:
        indices = indices.fill_null(len(distinct))
        distinct = pa.concat_arrays([distinct, pa.nulls(1, distinct.type)])
    return _encode_plain(feature, distinct, vocabulary, where)[to_numpy(indices)]


def _encode_plain(feature: SparseFeature, array: pa.Array, vocabulary: Vocabulary | None, where: str) -> Ints:
    place = f"feature {feature.name!r} (column {feature.source!r}, {where})"
    if feature.encoding == "hash":
        return _hash_rows(_codes(array, place), feature)
    if feature.encoding == "vocabulary":
        if vocabulary is None:
            raise ValueError(f"{place}: the vocabulary encoding needs a vocabulary: fit one on the training split")
        rows = vocabulary.look_up(array, place)
        if feature.null_row:
            rows[to_numpy(pc.is_null(array, nan_is_null=True))] = feature.num_embeddings - 1
        return rows
    if feature.encoding == "bucket":
        check_number(array, place)
        numbers = to_floats(array)
        ids = np.searchsorted(np.asarray(feature.boundaries, dtype=np.float64), numbers, side="right")
        missing = np.isnan(numbers)
        if missing.any():
            ids[missing] = min(len(feature.boundaries) + 1, feature.num_embeddings - 1)
        return ids
    return _indices(array, feature.num_embeddings, place)


def _indices(array: pa.Array, num_embeddings: int, place: str) -> Ints:
    kind = array.type
    if not (pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_floating(kind)):
        raise ValueError(
            f"{place}: the index encoding needs integers, not {kind}: cast the column or use encoding: hash"
        )
    if array.null_count:
        raise ValueError(f"{place}: null at position {first_true(array.is_null())}: fill it or use encoding: hash")
    numbers = to_numpy(array)
    if pa.types.is_floating(kind):
        # Whole numbers become floats in tools that mark missing values with NaN.
        broken = ~np.isfinite(numbers) | (numbers != np.trunc(numbers))
        if broken.any():
            position = int(np.flatnonzero(broken)[0])
            raise ValueError(
                f"{place}: value {numbers[position]} at position {position} is no integer: fill or cast the column, or "
                "use encoding: hash"
            )
    ids = numbers.astype(np.int64, copy=False)
    if len(ids) and (ids.min() < 0 or ids.max() >= num_embeddings):
        value = int(ids[np.flatnonzero((ids < 0) | (ids >= num_embeddings))[0]])
        raise ValueError(
            f"{place}: value {value} is not in 0 .. {num_embeddings - 1}: raise num_embeddings above the largest value "
            "or use encoding: hash"
        )
    return ids


def _codes(array: pa.Array, place: str) -> npt.NDArray[np.uint64]:
    """A 64-bit code per value; equal values have equal codes whatever their width."""
    kind = array.type
    missing = to_numpy(array.is_null()) if array.null_count else None
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        if array.null_count:
            array = array.fill_null(False if pa.types.is_boolean(kind) else 0)
        codes = to_numpy(array).astype(np.int64, copy=False).view(np.uint64)
    elif pa.types.is_floating(kind):
        numbers = to_floats(array)
        nan = np.isnan(numbers)
        missing = nan if nan.any() else None
        whole = (np.trunc(numbers) == numbers) & (np.abs(numbers) < 2.0**63)
        codes = np.where(whole, np.where(whole, numbers, 0).astype(np.int64), numbers.view(np.int64)).view(np.uint64)
    elif is_text(kind):
        digests = [hashlib.blake2b(value or b"", digest_size=8).digest() for value in to_bytes(array)]
        codes = np.frombuffer(b"".join(digests), dtype="<u8")
    else:
        raise ValueError(
            f"{place}: cannot hash values of type {kind}: store integers or strings, or leave the feature out"
        )
    return codes if missing is None else np.where(missing, _NULL_CODE, codes)


def _hash_integers(codes: npt.NDArray[np.uint64], feature: SparseFeature, out: Ints | None) -> Ints:
    """Hashes a small range of values once and looks the rows up, for that is twice as fast."""
    values, most = codes.view(np.int64), min(len(codes) // 4, _BLOCK)
    # Some of the values tell nearly always that the range is large.
    for some in (values[:: 1 + len(values) // 256], values):
        low, high = (int(some.min()), int(some.max())) if len(some) else (0, 0)
        if high - low >= most:
            break
    if high - low < most:
        rows = _hash_rows(np.arange(low, high + 1).view(np.uint64), feature)
        return rows.take(values - low, out=out, mode="clip")
    return _hash_rows(codes, feature, out)


def _hash_rows(codes: npt.NDArray[np.uint64], feature: SparseFeature, out: Ints | None = None) -> Ints:
    """Two rounds of multiplication, the first by a factor of the table's own; in blocks that stay in the caches.

    The upper 32 bits of the hash are scaled to the number of rows: as even as a remainder, and NumPy vectorises it.
    """
    digest = hashlib.blake2b((feature.table or feature.name).encode(), digest_size=8).digest()
    factor = np.frombuffer(digest, dtype="<u8")[0] | np.uint64(1)
    half, rows = np.uint64(32), np.uint64(feature.num_embeddings)
    out = np.empty(len(codes), dtype=np.int64) if out is None else out
    buffer = np.empty(min(_BLOCK, len(codes)), dtype=np.uint64)
    for start in range(0, len(codes), _BLOCK):
        z = out[start : start + _BLOCK].view(np.uint64)
        t = buffer[: len(z)]
        np.multiply(codes[start : start + _BLOCK], factor, out=z)
        np.right_shift(z, half, out=t)
        np.bitwise_xor(z, t, out=z)
        np.multiply(z, np.uint64(0x94D049BB133111EB), out=z)
        if feature.num_embeddings > 1 << 32:
            np.remainder(z, rows, out=z)
            continue
        np.right_shift(z, half, out=z)
        np.multiply(z, rows, out=z)
        np.right_shift(z, half, out=z)
    return out


def encode_dense(feature: DenseFeature, values: Column, statistics: tuple[float, float] | None, where: str) -> Floats:
    """Filled and transformed numbers.

    Args:
        feature: Says how to transform; its ``fill`` replaces nulls, NaN and infinities.
        values: Flat raw values.
        statistics: What :func:`~lightning_gem.data.fitting.fit_statistics` gave, for the ``standardize`` transform.
        where: Place that errors name.

    Raises:
        ValueError: If values are not numbers, or not finite and there is no ``fill``.
    """
    place = f"feature {feature.name!r} (column {feature.source!r}, {where})"
    array = one_array(values)
    check_number(array, place)
    numbers = to_floats(array) if feature.transform == "standardize" else to_floats(array, np.float32)
    if feature.fill is not None:
        numbers = np.where(np.isfinite(numbers), numbers, numbers.dtype.type(feature.fill))
    if feature.transform == "log1p":
        numbers = np.copysign(np.log1p(np.abs(numbers)), numbers)
    elif feature.transform == "standardize":
        if statistics is None:
            raise ValueError(f"{place}: standardize needs statistics: fit them on the training split")
        numbers = ((numbers - statistics[0]) / statistics[1]).astype(np.float32)
    if not np.isfinite(numbers).all():
        position = int(np.flatnonzero(~np.isfinite(numbers))[0])
        raise ValueError(
            f"{place}: value {array[position].as_py()} at position {position} is not a finite float32 number: give the "
            "feature a fill or clean the column"
        )
    return numbers


def encode_times(column: str, values: Column, unit: str, where: str) -> Ints:
    """Times in whole seconds.

    Args:
        column: Name that errors use.
        values: Timestamps, dates, or numbers in ``unit``.
        unit: Unit of plain numbers: s, ms, us or ns.
        where: Place that errors name.

    Raises:
        ValueError: If values are no times, null or NaN.
    """
    array = one_array(values)
    place = f"time column {column!r} ({where})"
    if array.null_count:
        raise ValueError(f"{place}: null at position {first_true(array.is_null())}: every row and event needs a time")
    if pa.types.is_date(array.type):
        array = array.cast(pa.timestamp("ms"))
    stamped = pa.types.is_timestamp(array.type)
    if stamped:
        unit = array.type.unit
        array = array.cast(pa.int64())
    per_second = TIME_UNITS_PER_SECOND[unit]
    if pa.types.is_integer(array.type):
        times = to_numpy(array).astype(np.int64, copy=False)
        times = times if per_second == 1 else times // per_second
        if not stamped:
            _warn_of_far_future(column, times, unit)
        return times
    if pa.types.is_floating(array.type):
        numbers = to_floats(array)
        if not np.isfinite(numbers).all():
            raise ValueError(f"{place}: NaN or infinite time: every row and event needs a time")
        times = np.floor(numbers / per_second).astype(np.int64)
        _warn_of_far_future(column, times, unit)
        return times
    raise ValueError(f"{place}: type {array.type} is no time: store integers in {unit} or Arrow timestamps")


def _warn_of_far_future(column: str, times: Ints, unit: str) -> None:
    """Warns of milliseconds taken as seconds and the like. Small numbers may be times since any beginning."""
    units = list(TIME_UNITS_PER_SECOND)
    latest, finer = int(times.max(initial=0)), units.index(unit)
    while latest > _YEAR_2200 and finer + 1 < len(units):
        latest, finer = latest // 1000, finer + 1
    if units[finer] != unit:
        warnings.warn(
            f"time column {column!r} read in {unit} has times after the year 2200: if they are in {units[finer]}, set "
            f"schema.time_unit: {units[finer]}",
            stacklevel=2,
        )


def encode_labels(tasks: list[Task], table: pa.Table | pa.RecordBatch, where: str) -> tuple[Floats, Floats]:
    """Labels (NaN: missing) and weights (0: does not count), both ``(rows, tasks)``.

    Raises:
        ValueError: If a label is not 0, 1 or null, or a weight is null, NaN, infinite or negative.
    """
    labels = np.empty((table.num_rows, len(tasks)), dtype=np.float32)
    weights = np.ones_like(labels)
    names = [task.name for task in tasks]
    for i, task in enumerate(tasks):
        array = fetch(table, task.source, where, nulls=True)
        place = f"task {task.name!r} (label column {task.source!r}, {where})"
        check_number(array, place)
        label = to_floats(array, np.float32)
        missing = np.isnan(label)
        bad = (label != 0) & (label != 1) & ~missing
        if bad.any():
            position = int(np.flatnonzero(bad)[0])
            raise ValueError(
                f"{place}: label {array[position].as_py()} at position {position} is not 0, 1 or null: derive a 0/1 "
                "column"
            )
        if task.weight is not None:
            array = fetch(table, task.weight, where)
            place = f"task {task.name!r} (weight column {task.weight!r}, {where})"
            check_number(array, place)
            weight = to_floats(array, np.float32)
            bad = ~(np.isfinite(weight) & (weight >= 0))
            if bad.any():
                position = int(np.flatnonzero(bad)[0])
                raise ValueError(
                    f"{place}: weight {array[position].as_py()} at position {position} is not a finite number >= 0: "
                    "write 0 where a row must not count"
                )
            weights[:, i] = weight
        if task.given is not None:
            missing = missing | (labels[:, names.index(task.given)] != 1)
        labels[:, i] = np.where(missing, np.float32(np.nan), label)
        weights[missing, i] = 0
    return labels, weights


def encode_keys(column: str, values: Column, where: str, first_row: int = 0) -> Ints:
    """Integers as they are, text hashed to 63 bits; every null is a key of its own, the lowest integers being theirs.

    Args:
        column: Name that errors use.
        values: Flat raw values.
        where: Place that errors name.
        first_row: Number of the first row in its split, from which the keys of nulls are counted.

    Raises:
        ValueError: If values are neither integers nor text.
    """
    array = one_array(values)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    missing = to_numpy(array.is_null()) if array.null_count else None
    if pa.types.is_integer(array.type):
        keys = to_numpy(array.fill_null(0) if array.null_count else array).astype(np.int64, copy=False)
    elif is_text(array.type):
        coded = array.dictionary_encode()
        hashed = (_codes(coded.dictionary, column) >> np.uint64(1)).view(np.int64)
        keys = np.append(hashed, 0)[to_numpy(coded.indices.fill_null(len(hashed)))]
    else:
        raise ValueError(f"key column {column!r} ({where}) has type {array.type}: store integers or strings")
    if missing is None:
        return keys
    return np.where(missing, np.iinfo(np.int64).min + first_row + np.arange(len(keys)), keys)
