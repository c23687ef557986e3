"""What an interaction log consists of, as typed arguments, and the checks that need no file."""

import re
from dataclasses import dataclass, field, replace
from typing import Literal

from lightning_gem.data.schema import DenseFeature, Schema, Sequence

Scalar = bool | int | float | str

_NUM_COLUMNS = {"ratio": 2, "at_least": 1, "bucket": 1, "number": 1, "hour": 0, "weekday": 0, "file": 0}


@dataclass
class Join:
    """A static table (users, items) whose columns are added to the log; rows without a match get nulls.

    Its values must be known before the log begins: statistics of the same period would leak outcomes.

    Args:
        path: Parquet, CSV or TSV file with one row per key.
        key: Key column, or the pair of its name in the log and its name in the file.
        columns: Columns to add.
        prefix: Text to put before their names.
    """

    path: str
    key: str | list[str]
    columns: list[str]
    prefix: str = ""

    @property
    def keys(self) -> tuple[str, str]:
        """Key column in the log and in the file."""
        pair = [self.key, self.key] if isinstance(self.key, str) else self.key
        return pair[0], pair[1]

    @property
    def names(self) -> list[str]:
        """Names of the added columns."""
        return [self.prefix + column for column in self.columns]


@dataclass
class Derived:
    """A column computed from others, null where an input is null. Derived columns may use earlier ones of the list.

    Args:
        name: Name of the new column.
        op: ``hour`` (0-23) and ``weekday`` (0 is Monday) of the request time, in UTC; ``file``: position of the row's
            file in the list of logs; ``num_earlier`` and ``seconds_since_previous``: number of strictly earlier events
            of the same user and seconds since the latest of them (null: none), or of the same values of ``columns``;
            ``ratio``: first column divided by the second (null where that is 0); ``at_least``: 1 where the column
            reaches ``value``, else 0; ``bucket``: index of the column's interval in ``boundaries``; ``cross``: the
            columns as one text, to be used as a categorical value; ``number``: what the named group of ``pattern``
            finds in a text column, such as the year of "Heat (1995)" (null: nothing).
        columns: Inputs of the op.
        value: Threshold of ``at_least``.
        boundaries: Ascending interval limits of ``bucket``.
        pattern: Regular expression of ``number`` (RE2), with one named group: ``\\((?P<year>\\d{4})\\)``.
    """

    name: str
    op: Literal[
        "hour",
        "weekday",
        "file",
        "num_earlier",
        "seconds_since_previous",
        "ratio",
        "at_least",
        "bucket",
        "cross",
        "number",
    ]
    columns: list[str] = field(default_factory=list)
    value: float | None = None
    boundaries: list[float] = field(default_factory=list)
    pattern: str | None = None


@dataclass
class Counter:
    """Running counters as dense features: of all strictly earlier events, whoever the user, with equal ``by`` columns.

    They run on through validation and test like those of an online system, and become dense features of the schema:
    ``<name>_count`` (with log1p) and for each outcome ``<name>_<outcome>_rate``, which is
    ``(sum + prior * rate of all earlier events) / (count + prior)``.

    Args:
        by: Columns that an event must share with the request; none counts all events. Null is a value of its own. One
            may be a list column: then an event counts once for every value that both lists have.
        outcomes: 0/1 columns to average; nulls do not count.
        prior: Number of events that the overall rate weighs.
        last: Only the latest ``last`` of these events count; all when not given.
        within: Only the events of the ``within`` seconds before the request count; all when not given.
        log_odds: Give rates as log odds minus the log odds of the overall rate: 0 where nothing is known.
        name: Prefix of the feature names; by default the ``by`` columns joined by ``_``, or ``all``, with ``_last<n>``
            and ``_within<seconds>``.
    """

    by: list[str] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)
    prior: float = 10.0
    last: int | None = None
    within: int | None = None
    log_odds: bool = False
    name: str | None = None

    @property
    def prefix(self) -> str:
        """What the feature names begin with."""
        windows = [f"_{name}{size}" for name, size in (("last", self.last), ("within", self.within)) if size]
        return self.name or "".join(["_".join(self.by) or "all", *windows])

    @property
    def count_name(self) -> str:
        """Name of the count."""
        return f"{self.prefix}_count"

    def rate_name(self, outcome: str) -> str:
        """Name of the rate of an outcome."""
        return f"{self.prefix}_{outcome}_rate"

    @property
    def names(self) -> list[str]:
        """Names of all features."""
        return [self.count_name, *(self.rate_name(outcome) for outcome in self.outcomes)]


@dataclass
class Split:
    """Which rows are for training, validation and test.

    Args:
        by: ``time``: test follows validation follows training for the whole log, and rows of the same time are never
            separated. ``user``: the same for the rows of each user.
        test: Share of rows, the latest, for test; 0: no test split.
        val: Share of the remaining rows, the latest, for validation; 0: no validation split, training goes without.
        test_from: Time of the first test row, instead of ``test``: a number in the unit of the time column, or ISO 8601
            (UTC unless it names an offset).
        val_from: Time of the first validation row, instead of ``val``.
    """

    by: Literal["time", "user"] = "time"
    test: float = 0.2
    val: float = 0.1
    test_from: int | float | str | None = None
    val_from: int | float | str | None = None

    def __post_init__(self) -> None:
        for name in ("test", "val"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"split.{name} is a share of rows from 0 to below 1, not {getattr(self, name)}")
        if self.by == "user" and (self.test_from is not None or self.val_from is not None):
            raise ValueError("split.test_from and split.val_from need split.by: time")


@dataclass
class LogConfig:
    """All arguments of :class:`~lightning_gem.data.interaction_log.InteractionLog` that decide what the rows are."""

    schema: Schema
    log: list[str]
    joins: list[Join]
    derived: list[Derived]
    outcomes: list[str]
    history_filters: dict[str, dict[str, Scalar]]
    counters: list[Counter]
    split: Split
    drop_duplicates: list[str]
    order: list[str]
    list_separators: dict[str, str]
    label_delay: int = 0

    def __post_init__(self) -> None:
        schema = self.schema
        if not self.log:
            raise ValueError("log is empty: name at least one file")
        if self.label_delay < 0:
            raise ValueError(f"label_delay is a number of seconds, 0 or more, not {self.label_delay}")
        if schema.timestamp is None:
            raise ValueError("schema.timestamp is missing: an interaction log needs a time column")
        if schema.user is None and (schema.sequences or self.split.by == "user"):
            raise ValueError("schema.user is missing: histories and split.by: user need a user column")
        for sequence in schema.sequences:
            if sequence.timestamp not in ("timestamp", schema.timestamp):
                raise ValueError(
                    f"schema.sequences ({sequence.name}): timestamp is {sequence.timestamp!r}, but the events of a log "
                    f"have the time of their row, {schema.timestamp!r}: leave it out"
                )
        for name in self.history_filters:
            if name not in [sequence.name for sequence in schema.sequences]:
                raise ValueError(f"history_filters names {name!r}, which is not a sequence of the schema")
        for join in self.joins:
            if not isinstance(join.key, str) and len(join.key) != 2:
                raise ValueError(
                    f"join {join.path}: key is one column or a pair (in the log, in the file), not {join.key}"
                )
        for derived in self.derived:
            self._check_derived(derived)
        for counter in self.counters:
            if counter.prior <= 0:
                raise ValueError(f"counter {counter.count_name}: prior must be positive, not {counter.prior}")
            for name, size in (("last", counter.last), ("within", counter.within)):
                if size is not None and size < 1:
                    raise ValueError(f"counter {counter.count_name}: {name} must be positive, not {size}")
        late = {derived.name for derived in self.derived}
        late |= {name for counter in self.counters for name in counter.names}
        for what, columns in (
            ("drop_duplicates", self.drop_duplicates),
            ("order", self.order),
            ("list_separators", self.list_separators),
            ("joins", [join.keys[0] for join in self.joins]),
        ):
            if late.intersection(columns):
                raise ValueError(
                    f"{what} uses the column {min(late.intersection(columns))!r}, which is computed later: use columns "
                    "of the log or of joins"
                )
        made = self.made_columns
        for name in made:
            if made.count(name) > 1:
                raise ValueError(
                    f"joins, derived and counters make the column {name!r} twice: rename one (a join with prefix)"
                )
        self._check_leaks()

    def _check_derived(self, derived: Derived) -> None:
        expected = _NUM_COLUMNS.get(derived.op)
        if expected is not None and len(derived.columns) != expected:
            raise ValueError(f"derived {derived.name!r}: {derived.op} takes {expected} columns, not {derived.columns}")
        if derived.op == "cross" and not derived.columns:
            raise ValueError(f"derived {derived.name!r}: cross needs columns")
        if (derived.op == "at_least") != (derived.value is not None):
            raise ValueError(f"derived {derived.name!r}: at_least needs a value, other ops take none")
        if (derived.op == "bucket") != bool(derived.boundaries) or sorted(derived.boundaries) != derived.boundaries:
            raise ValueError(f"derived {derived.name!r}: bucket needs ascending boundaries, other ops take none")
        if (derived.op == "number") != (derived.pattern is not None):
            raise ValueError(f"derived {derived.name!r}: number needs a pattern, other ops take none")
        if derived.pattern is not None:
            try:
                groups = re.compile(derived.pattern).groupindex
            except re.error as error:
                raise ValueError(f"derived {derived.name!r}: pattern {derived.pattern!r}: {error}") from error
            if len(groups) != 1:
                raise ValueError(
                    f"derived {derived.name!r}: pattern {derived.pattern!r} has {len(groups)} named groups, but needs "
                    "one, such as (?P<year>\\d{4})"
                )
        if derived.op in ("num_earlier", "seconds_since_previous") and not (derived.columns or self.schema.user):
            raise ValueError(f"derived {derived.name!r}: {derived.op} needs columns or schema.user")

    def _check_leaks(self) -> None:
        outcomes = self.outcome_columns
        schema = self.schema
        used = [(f"sparse feature {feature.name!r}", feature.source) for feature in schema.sparse]
        used += [(f"dense feature {feature.name!r}", feature.source) for feature in schema.dense]
        used += [(f"counter {counter.count_name!r} (by)", column) for counter in self.counters for column in counter.by]
        used += [("schema.domain", schema.domain)] if schema.domain else []
        for what, column in used:
            if column in outcomes:
                raise ValueError(
                    f"{what} reads the column {column!r}, which is an outcome of the same row and unknown at request "
                    "time: use it in a sequence or as outcome of a counter, or remove it here"
                )

    @property
    def outcome_columns(self) -> set[str]:
        """Columns that are not known before the event: outcomes, labels, weights, what they follow from, and what
        follows from them.

        A label that is computed from one column makes that column an outcome. Of a ratio one side may be known, as is
        the length of a video beside the time it was watched: unless an outcome is among the two, it is the numerator.
        """
        outcomes = {*self.outcomes, *(task.source for task in self.schema.tasks)}
        outcomes |= {task.weight for task in self.schema.tasks if task.weight}
        for derived in reversed(self.derived):
            if derived.name not in outcomes:
                continue
            if derived.op in ("at_least", "bucket"):
                outcomes.update(derived.columns)
            if derived.op == "ratio" and not outcomes.intersection(derived.columns):
                outcomes.add(derived.columns[0])
        for join in self.joins:
            if join.keys[0] in outcomes:
                outcomes.update(join.names)
        for derived in self.derived:
            if outcomes.intersection(derived.columns):
                outcomes.add(derived.name)
        return outcomes

    def has_outcomes(self, sequence: Sequence) -> bool:
        """Whether the events of a sequence, or which events it has, depend on outcomes."""
        columns = {feature.source for feature in sequence.features} | {number.source for number in sequence.floats}
        return bool(self.outcome_columns & (columns | set(self.history_filters.get(sequence.name, {}))))

    @property
    def made_columns(self) -> list[str]:
        """Columns that joins, derived columns and counters add to the log."""
        return [
            *(name for join in self.joins for name in join.names),
            *(derived.name for derived in self.derived),
            *(name for counter in self.counters for name in counter.names),
        ]

    @property
    def numeric_columns(self) -> set[str]:
        """Columns that must hold numbers."""
        schema = self.schema
        columns = {task.source for task in schema.tasks} | {task.weight for task in schema.tasks if task.weight}
        columns |= {feature.source for feature in schema.dense}
        columns |= {feature.source for sequence in schema.sequences for feature in sequence.floats}
        columns |= {column for counter in self.counters for column in counter.outcomes}
        columns |= {column for d in self.derived if d.op in ("ratio", "at_least", "bucket") for column in d.columns}
        return columns

    @property
    def log_columns(self) -> list[str]:
        """Columns that the log files themselves must have."""
        schema = self.schema
        columns = self.numeric_columns | self.outcome_columns | {schema.timestamp or ""}
        columns |= {column for column in (schema.user, schema.domain) if column}
        columns |= {feature.source for feature in schema.sparse}
        columns |= {feature.source for sequence in schema.sequences for feature in sequence.features}
        columns |= {join.keys[0] for join in self.joins}
        columns |= {column for derived in self.derived for column in derived.columns}
        columns |= {column for counter in self.counters for column in counter.by}
        columns |= {column for conditions in self.history_filters.values() for column in conditions}
        columns |= {*self.drop_duplicates, *self.order, *self.list_separators}
        return sorted(columns - set(self.made_columns))


def complete_schema(schema: Schema, counters: list[Counter]) -> Schema:
    """The schema with the counters among its dense features."""
    features = [*schema.dense]
    for counter in counters:
        features.append(DenseFeature(counter.count_name, transform="log1p"))
        features += [DenseFeature(counter.rate_name(outcome)) for outcome in counter.outcomes]
    return replace(schema, dense=features)
