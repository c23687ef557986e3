"""Vocabularies and statistics of a training split: fitted in one pass, stored, and identified by a digest."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from lightning_gem.data.columns import fetch, flatten, is_list
from lightning_gem.data.encoding import count_values, merge_moments, moments, top_values
from lightning_gem.data.schema import DenseFeature, Schema, SparseFeature


@dataclass
class Fitted:
    """What the encodings learned from the training split.

    Attributes:
        vocabularies: By :func:`vocabulary_key`.
        statistics: Mean and standard deviation by :func:`statistics_key`.
    """

    vocabularies: dict[str, pa.Array] = field(default_factory=dict)
    statistics: dict[str, tuple[float, float]] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Writes everything to a folder."""
        names = list(self.vocabularies)
        for i, name in enumerate(names):
            pq.write_table(pa.table({"values": self.vocabularies[name]}), folder / f"{i}.parquet")
        (folder / "fitted.json").write_text(json.dumps({"vocabularies": names, "statistics": self.statistics}))

    @staticmethod
    def load(folder: Path) -> "Fitted":
        """Reads what :meth:`save` wrote."""
        stored = json.loads((folder / "fitted.json").read_text())
        tables = [pq.read_table(folder / f"{i}.parquet") for i in range(len(stored["vocabularies"]))]
        return Fitted(
            {
                name: table.column(0).combine_chunks()
                for name, table in zip(stored["vocabularies"], tables, strict=True)
            },
            {name: (mean, deviation) for name, (mean, deviation) in stored["statistics"].items()},
        )

    def digest(self) -> str:
        """Changes with any id or number that the encodings would give."""
        vocabularies = [[name, *values.cast(pa.string()).to_pylist()] for name, values in self.vocabularies.items()]
        return hashlib.sha256(json.dumps([vocabularies, self.statistics]).encode()).hexdigest()[:16]


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
    counts: dict[str, pa.Table] = {}
    parts: dict[str, list[tuple[int, float, float]]] = {key: [] for key, _ in dense}
    for table, where in tables:
        for key, feature in sparse:
            new = count_values(_flat(table, feature.source, where))
            counts[key] = _merge(counts[key], new) if key in counts else new
        for key, feature in dense:
            parts[key].append(moments(feature, _flat(table, feature.source, where), where))
    return Fitted(
        {key: top_values(feature, counts[key]) for key, feature in sparse},
        {key: merge_moments(feature, parts[key]) for key, feature in dense},
    )


def _flat(table: pa.Table | pa.RecordBatch, column: str, where: str) -> pa.Array:
    lists = column in table.schema.names and is_list(table.schema.field(column).type)
    array = fetch(table, column, where, lists=lists, nulls=True)
    return flatten(array)[0] if lists else array


def _merge(counts: pa.Table, new: pa.Table) -> pa.Table:
    total = pa.concat_tables([counts, new]).group_by("values").aggregate([("counts", "sum")])
    return total.rename_columns(["values", "counts"])
