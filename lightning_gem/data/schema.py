"""The single description of the features: readers, model and planner are all built from it."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

TIME_UNITS_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}


@dataclass
class SparseFeature:
    """A categorical feature and the embedding table that its ids look up.

    Args:
        name: Name of the feature, unique within its group (request features, or one sequence).
        num_embeddings: Rows of its table.
        embedding_dim: Width of its table.
        column: Column that holds the raw values; the feature's name when not given.
        table: Name of the table. Features that name the same table share its rows and must agree on its size and
            encoding. The default is a table of its own.
        encoding: How raw values become rows. ``index``: the values (integers, booleans, whole floats) are rows already,
            others are an error. ``hash``: any integer or string is hashed over all rows. ``vocabulary``: the values
            seen at least ``min_count`` times in the training split get rows from 1 on, in order of frequency; all
            others get row 0. ``bucket``: numbers become the index of their interval in ``boundaries``.
        boundaries: Ascending interval limits of the ``bucket`` encoding.
        min_count: Occurrences that the ``vocabulary`` encoding asks for.
        null_row: Whether nulls get the last row of a ``vocabulary`` table for themselves, instead of sharing row 0 with
            rare values. ``hash`` and ``bucket`` tell them apart anyway.
    """

    name: str
    num_embeddings: int = 1000
    embedding_dim: int = 16
    column: str | None = None
    table: str | None = None
    encoding: Literal["index", "hash", "vocabulary", "bucket"] = "hash"
    boundaries: list[float] = field(default_factory=list)
    min_count: int = 1
    null_row: bool = False

    @property
    def source(self) -> str:
        """Column that holds the raw values."""
        return self.column or self.name


@dataclass
class DenseFeature:
    """A numeric feature.

    Args:
        name: Name of the feature.
        column: Column that holds the values; the feature's name when not given.
        transform: ``log1p`` stands for ``sign(x) * log(1 + |x|)``; ``standardize`` subtracts the mean and divides by
            the standard deviation of the training split.
        fill: Value (before the transform) for nulls, NaN and infinities. Without it they are an error.
    """

    name: str
    column: str | None = None
    transform: Literal["none", "log1p", "standardize"] = "none"
    fill: float | None = None

    @property
    def source(self) -> str:
        """Column that holds the raw values."""
        return self.column or self.name


@dataclass
class Sequence:
    """One kind of event history.

    Args:
        name: Name of the sequence.
        features: Categorical features of every event; at least one.
        floats: Numeric features of every event.
        timestamp: Column of event times (a list column in flat files), ascending within a sequence.
        max_len: Only the latest ``max_len`` events are kept.
    """

    name: str
    features: list[SparseFeature]
    floats: list[DenseFeature] = field(default_factory=list)
    timestamp: str = "timestamp"
    max_len: int = 256

    @property
    def keys(self) -> list[str]:
        """Names of its features in batches and tables: ``"<sequence>.<feature>"``."""
        return [f"{self.name}.{feature.name}" for feature in self.features]


@dataclass
class Task:
    """A binary outcome to predict.

    Args:
        name: Name of the task.
        column: Column that holds the 0/1 label (null: missing); the task's name when not given.
        given: Name of another task: the label counts only where that task's label is 1 (conversion given click).
        weight: Column that holds sample weights.
    """

    name: str
    column: str | None = None
    given: str | None = None
    weight: str | None = None

    @property
    def source(self) -> str:
        """Column that holds the label."""
        return self.column or self.name


@dataclass
class Table:
    """An embedding table and the names of the features that look it up."""

    name: str
    num_embeddings: int
    embedding_dim: int
    features: list[str]


@dataclass
class Schema:
    """Features, labels and keys of a data set.

    Args:
        tasks: Outcomes to predict, in the order of the label columns.
        sparse: Categorical features of the request (user, context, candidate), pooled by sum when multi-valued.
        dense: Numeric features of the request.
        sequences: Event histories.
        timestamp: Column of the request time. Needed where sequences have times.
        time_unit: Unit of all time columns; batches hold seconds. Arrow timestamp columns know their own unit.
        user: Column that identifies the user, for GAUC.
        domain: Column of the surface (0 .. ``num_domains - 1``) that a request comes from.
        num_domains: Number of surfaces.
    """

    tasks: list[Task]
    sparse: list[SparseFeature] = field(default_factory=list)
    dense: list[DenseFeature] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    timestamp: str | None = None
    time_unit: Literal["s", "ms", "us", "ns"] = "s"
    user: str | None = None
    domain: str | None = None
    num_domains: int = 1

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError("schema.tasks is empty: name at least one label to predict")
        _check_unique("schema.tasks", [task.name for task in self.tasks])
        _check_unique("schema.sparse", [feature.name for feature in self.sparse])
        _check_unique("schema.dense", [feature.name for feature in self.dense])
        _check_unique("schema.sequences", [sequence.name for sequence in self.sequences])
        names = [task.name for task in self.tasks]
        for i, task in enumerate(self.tasks):
            if task.given is not None and task.given not in names[:i]:
                raise ValueError(f"schema.tasks[{i}] ({task.name}): given={task.given!r} is not a task before it")
        for sequence in self.sequences:
            if not sequence.features:
                raise ValueError(f"schema.sequences ({sequence.name}): features is empty: name at least one")
            if sequence.max_len < 1:
                raise ValueError(
                    f"schema.sequences ({sequence.name}): max_len must be positive, not {sequence.max_len}"
                )
            _check_unique(f"schema.sequences ({sequence.name}).features", [f.name for f in sequence.features])
            if self.timestamp is None:
                raise ValueError(
                    f"schema.timestamp is missing: sequence {sequence.name!r} needs the request time to measure "
                    f"the age "
                    "of its events"
                )
        for feature in self._sparse_features():
            if feature.num_embeddings < 1 or feature.embedding_dim < 1:
                raise ValueError(f"feature {feature.name!r}: num_embeddings and embedding_dim must be positive")
            if feature.null_row and (feature.encoding != "vocabulary" or feature.num_embeddings < 2):
                raise ValueError(
                    f"feature {feature.name!r}: null_row takes a row of two or more of the vocabulary encoding"
                )
            if feature.encoding == "bucket":
                if sorted(feature.boundaries) != feature.boundaries or not feature.boundaries:
                    raise ValueError(f"feature {feature.name!r}: the bucket encoding needs ascending boundaries")
                if feature.num_embeddings < len(feature.boundaries) + 1:
                    raise ValueError(
                        f"feature {feature.name!r}: {len(feature.boundaries)} boundaries make "
                        f"{len(feature.boundaries) + 1} buckets, more than num_embeddings={feature.num_embeddings}"
                    )
        for sequence in self.sequences:
            self._tables(sequence.features)
        self._tables(self.sparse)

    def _sparse_features(self) -> list[SparseFeature]:
        return [*self.sparse, *(feature for sequence in self.sequences for feature in sequence.features)]

    @property
    def request_tables(self) -> list[Table]:
        """Tables of the request features, each looked up by the names of ``sparse``."""
        return self._tables(self.sparse)

    @property
    def event_tables(self) -> list[Table]:
        """Tables of the event features of all sequences, looked up by ``"<sequence>.<feature>"``.

        Unpooled and pooled lookups are different TorchRec collections, so a table is never shared between a request and
        an event feature; between the sequences it is.
        """
        return self._tables(
            [feature for sequence in self.sequences for feature in sequence.features],
            [key for sequence in self.sequences for key in sequence.keys],
        )

    @staticmethod
    def _tables(features: list[SparseFeature], keys: list[str] | None = None) -> list[Table]:
        tables: dict[str, Table] = {}
        codings: dict[str, tuple[str, list[float], int, bool]] = {}
        for feature, key in zip(features, keys or [feature.name for feature in features], strict=True):
            name = feature.table or key
            table = tables.setdefault(name, Table(name, feature.num_embeddings, feature.embedding_dim, []))
            if (table.num_embeddings, table.embedding_dim) != (feature.num_embeddings, feature.embedding_dim):
                raise ValueError(
                    f"feature {key!r} asks for a table {name!r} of {feature.num_embeddings} x {feature.embedding_dim}, "
                    f"but feature {table.features[0]!r} made it {table.num_embeddings} x {table.embedding_dim}"
                )
            coding = (feature.encoding, feature.boundaries, feature.min_count, feature.null_row)
            if codings.setdefault(name, coding) != coding:
                raise ValueError(
                    f"feature {key!r} and feature {table.features[0]!r} share the table {name!r}: they need the same "
                    "encoding, boundaries, min_count and null_row"
                )
            table.features.append(key)
        return list(tables.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionary, for checkpoints and fingerprints."""
        return asdict(self)


def _check_unique(field_name: str, names: list[str]) -> None:
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ValueError(f"{field_name} has the name {duplicates[0]!r} twice: names must be unique")
