"""Vocabularies and statistics of a training split: fitted in one pass, stored, and identified by a digest."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lightning_gem.data.columns import Column, check_number, fetch, flatten, is_list, is_text, one_array, to_floats
from lightning_gem.data.encoding import Vocabulary
from lightning_gem.data.schema import DenseFeature, Schema, SparseFeature


@dataclass
class Fitted:
    """What the encodings learned from the training split.

    Attributes:
        vocabularies: By :func:`vocabulary_key`.
        statistics: Mean and standard deviation by :func:`statistics_key`.
    """

    vocabularies: dict[str, Vocabulary] = field(default_factory=dict)
    statistics: dict[str, tuple[float, float]] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Writes everything to a folder."""
        names = list(self.vocabularies)
        for i, name in enumerate(names):
            pq.write_table(pa.table({"values": self.vocabularies[name].values}), folder / f"{i}.parquet")
        (folder / "fitted.json").write_text(json.dumps({"vocabularies": names, "statistics": self.statistics}))

    @staticmethod
    def load(folder: Path) -> "Fitted":
        """Reads what :meth:`save` wrote."""
        stored = json.loads((folder / "fitted.json").read_text())
        tables = [pq.read_table(folder / f"{i}.parquet") for i in range(len(stored["vocabularies"]))]
        values = [one_array(table.column(0)) for table in tables]
        return Fitted(
            {name: Vocabulary(array) for name, array in zip(stored["vocabularies"], values, strict=True)},
            {name: (mean, deviation) for name, (mean, deviation) in stored["statistics"].items()},
        )

    def digest(self) -> str:
        """Changes with any id or number that the encodings would give."""
        digest = hashlib.sha256(json.dumps(self.statistics).encode())
        for name, vocabulary in self.vocabularies.items():
            for part in (name.encode(), vocabulary.codes.tobytes(), vocabulary.rows.tobytes()):
                digest.update(part)
        return digest.hexdigest()[:16]


def vocabulary_key(feature: SparseFeature, sequence: str | None) -> str:
    """Features that share a table share a vocabulary; tables of requests and of events are different ones."""
    if sequence is None:
        return f"request/{feature.table or feature.name}"
    return f"event/{feature.table or f'{sequence}.{feature.name}'}"


def statistics_key(feature: DenseFeature, sequence: str | None) -> str:
    """Every numeric feature has its own statistics."""
    return f"{sequence or 'request'}/{feature.name}"


def features_to_fit(schema: Schema) -> tuple[list[tuple[str, SparseFeature]], list[tuple[str, DenseFeature]]]:
    """Features that need a vocabulary or statistics, with their keys."""
    groups = [(None, schema.sparse, schema.dense), *((s.name, s.features, s.floats) for s in schema.sequences)]
    sparse = [(vocabulary_key(f, name), f) for name, features, _ in groups for f in features]
    dense = [(statistics_key(f, name), f) for name, _, floats in groups for f in floats]
    return (
        [(key, feature) for key, feature in sparse if feature.encoding == "vocabulary"],
        [(key, feature) for key, feature in dense if feature.transform == "standardize"],
    )


def fit(schema: Schema, tables: Iterable[tuple[pa.Table, str]]) -> Fitted:
    """Learns all vocabularies and statistics.

    Args:
        schema: Says which features need them.
        tables: Pieces of the training split with the columns of :func:`features_to_fit`, and their place for errors.
    """
    sparse, dense = features_to_fit(schema)
    counts = {key: _Counts() for key, _ in sparse}
    parts: dict[str, list[tuple[int, float, float]]] = {key: [] for key, _ in dense}
    for table, where in tables:
        for key, feature in sparse:
            counts[key].add(feature, _flat(table, feature.source, where), where)
        for key, number in dense:
            parts[key].append(moments(number, _flat(table, number.source, where), where))
    return Fitted(
        {key: top_values(feature, counts[key].total()) for key, feature in sparse},
        {key: merge_moments(number, parts[key]) for key, number in dense},
    )


class _Counts:
    """Counts of values, added up whenever their list has doubled: the work stays linear, the memory bounded."""

    def __init__(self) -> None:
        self._parts: list[pa.Table] = []
        self._rows = self._merged_rows = 0

    def add(self, feature: SparseFeature, values: pa.Array, where: str) -> None:
        """Counts more values."""
        part = count_values(values)
        if self._parts and is_text(part.schema.types[0]) != is_text(self._parts[0].schema.types[0]):
            raise ValueError(
                f"feature {feature.name!r} (column {feature.source!r}, {where}): type {values.type} does not mix with "
                f"{self._parts[0].schema.types[0]} of other data with this vocabulary: store one type"
            )
        self._parts.append(part)
        self._rows += part.num_rows
        if self._rows > 2 * self._merged_rows + (1 << 16):
            self._parts = [self.total()]
            self._rows = self._merged_rows = self._parts[0].num_rows

    def total(self) -> pa.Table:
        """All counts, each value once."""
        table = pa.concat_tables(self._parts, promote_options="permissive")
        return table.group_by("values").aggregate([("counts", "sum")]).rename_columns(["values", "counts"])


def _flat(table: pa.Table | pa.RecordBatch, column: str, where: str) -> pa.Array:
    lists = column in table.schema.names and is_list(table.schema.field(column).type)
    array = fetch(table, column, where, lists=lists, nulls=True)
    return flatten(array)[0] if lists else array


def fit_vocabulary(feature: SparseFeature, values: Column) -> Vocabulary:
    """Values with at least ``min_count`` occurrences, by descending count, then ascending value.

    At most ``num_embeddings - 1`` of them, one less with ``null_row``: row 0 is for all others.
    """
    return top_values(feature, count_values(values))


def count_values(values: Column) -> pa.Table:
    """Distinct values (integers as int64, text as string) and their counts: columns ``values`` and ``counts``."""
    array = one_array(values)
    kind = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
    if pa.types.is_floating(kind):
        array = array.filter(pc.invert(pc.is_nan(array)))
    for test, common in (
        (pa.types.is_integer, pa.int64()),
        (pa.types.is_floating, pa.float64()),
        (is_text, pa.string()),
    ):
        if test(kind):
            array = array.cast(common)
    counts = array.drop_null().value_counts()
    return pa.table({"values": counts.field("values"), "counts": counts.field("counts")})


def top_values(feature: SparseFeature, counts: pa.Table) -> Vocabulary:
    """The vocabulary from counts, in which a value may appear several times (once per file, say)."""
    total = counts.group_by("values").aggregate([("counts", "sum")])
    total = total.filter(pc.field("counts_sum") >= feature.min_count)
    total = total.sort_by([("counts_sum", "descending"), ("values", "ascending")])
    return Vocabulary(one_array(total.column("values").slice(0, feature.num_embeddings - 1 - feature.null_row)))


def fit_statistics(feature: DenseFeature, values: Column) -> tuple[float, float]:
    """Mean and standard deviation of the finite values; a constant column has deviation 1.

    Raises:
        ValueError: If no value is finite.
    """
    return merge_moments(feature, [moments(feature, values, "training split")])


def moments(feature: DenseFeature, values: Column, where: str) -> tuple[int, float, float]:
    """Number, mean and sum of squared deviations of the finite values."""
    array = one_array(values)
    check_number(array, f"feature {feature.name!r} (column {feature.source!r}, {where})")
    numbers = to_floats(array)
    numbers = numbers[np.isfinite(numbers)]
    if not len(numbers):
        return 0, 0.0, 0.0
    mean = float(numbers.mean())
    return len(numbers), mean, float(np.square(numbers - mean).sum())


def merge_moments(feature: DenseFeature, parts: list[tuple[int, float, float]]) -> tuple[float, float]:
    """Mean and standard deviation of all parts together."""
    total = sum(count for count, _, _ in parts)
    if not total:
        raise ValueError(
            f"feature {feature.name!r}: column {feature.source!r} has no finite value in the training split: leave it "
            "out of the schema"
        )
    mean = sum(count * part for count, part, _ in parts) / total
    squares = sum(square + count * (part - mean) ** 2 for count, part, square in parts)
    return mean, float(np.sqrt(squares / total)) or 1.0
