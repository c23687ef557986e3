"""An interaction log in memory: reading, joining, sorting, derived columns, counters and splits."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lightning_gem.data.columns import (
    check_number,
    fetch,
    first_true,
    flatten,
    is_list,
    is_text,
    one_array,
    to_floats,
    to_numpy,
)
from lightning_gem.data.encoding import encode_keys, encode_times
from lightning_gem.data.history import Earlier, EarlierByValue, earlier_rows, group_codes, running_rate
from lightning_gem.data.log_config import Counter, Derived, LogConfig
from lightning_gem.data.rows import Ints
from lightning_gem.data.schema import TIME_UNITS_PER_SECOND
from lightning_gem.data.tables import column_names, concat_tables, join_table, read_columns, split_lists

Encoder: TypeAlias = Callable[[pa.Array, str], npt.NDArray[Any]]

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


@dataclass
class Log:
    """The rows in the order of the files, so that errors can name them, and their order in time.

    Attributes:
        config: What was asked for.
        table: All columns; rows in the order of the files.
        parts: Each file with its first row in the table and the row after its last.
        where: Name of the whole log, for errors.
        order: Rows of the table without duplicates, sorted by time; ``row i`` of the log is ``table[order[i]]``.
        times: Times of the sorted rows in the unit of the column.
        seconds: The same in seconds.
        users: User keys of the sorted rows; zeros when there is no user column.
    """

    config: LogConfig
    table: pa.Table
    parts: list[tuple[str, int, int]]
    where: str
    order: Ints
    times: npt.NDArray[Any]
    seconds: Ints
    users: Ints

    def column(self, name: str) -> pa.Array:
        """A flat column in the order of the files."""
        return fetch(self.table, name, self.where)

    def is_list(self, name: str) -> bool:
        """Whether a column, if it exists, holds lists."""
        return name in self.table.schema.names and is_list(self.table.schema.field(name).type)

    def encode(
        self, name: str, function: Encoder, keep: npt.NDArray[np.bool_] | None = None, where: str = ""
    ) -> npt.NDArray[Any]:
        """Encodes a flat column file by file, so that errors name the file.

        Args:
            name: The column.
            function: Encodes values; its second argument is the place for errors.
            keep: Rows of the table to encode; the others get zeros.
            where: What to add to the place.

        Returns:
            One value per sorted row.
        """
        column, parts = self.column(name), []
        for path, start, stop in self.parts:
            values = column[start:stop]
            if keep is None:
                parts.append(function(values, path + where))
                continue
            encoded = function(values.filter(pa.array(keep[start:stop])), path + where)
            parts.append(np.zeros(stop - start, dtype=encoded.dtype))
            parts[-1][keep[start:stop]] = encoded
        return np.concatenate(parts)[self.order]

    def known(self) -> Ints:
        """For every row, the first row whose outcome is not known at its time; see ``label_delay``."""
        delay = self.config.label_delay * _units_per_second(self)
        return np.searchsorted(self.times, self.times - delay)

    def earlier(self, columns: list[str]) -> Earlier:
        """The strictly earlier rows with equal values of ``columns``, among the sorted rows."""
        columns_of_groups = [self.column(name).take(pa.array(self.order)) for name in columns]
        return earlier_rows(group_codes(columns_of_groups, len(self.order)), self.times)

    def earlier_by_value(self, columns: list[str], lists: str) -> EarlierByValue:
        """The same for every value of the list column ``lists``."""
        values, lengths = flatten(one_array(self.table.column(lists)).take(pa.array(self.order)))
        rows = np.repeat(np.arange(len(lengths)), lengths)
        others = [self.column(name).take(pa.array(self.order[rows])) for name in columns]
        pairs = earlier_rows(group_codes([values, *others], len(rows)), self.times[rows])
        return EarlierByValue(pairs, rows, np.concatenate([[0], np.cumsum(lengths)]))

    def add(self, name: str, values: npt.NDArray[np.generic]) -> None:
        """Adds a column given for the sorted rows; NaN is null. The rows dropped as duplicates get a harmless 0."""
        column = np.zeros(self.table.num_rows, dtype=values.dtype)
        column[self.order] = values
        self.table = self.table.append_column(name, pa.array(column, from_pandas=True))


def read_log(config: LogConfig) -> Log:
    """Reads the files and joins the side tables; the rows are not sorted yet."""
    tables, parts, start = [], [], 0
    made = set(config.made_columns)
    for path in config.log:
        clash = made.intersection(column_names(path))
        if clash:
            raise ValueError(
                f"joins, derived or counters make the column {min(clash)!r}, which {path} has already: rename it (a "
                "join with prefix)"
            )
        table = read_columns(path, config.log_columns, config.numeric_columns)
        tables.append(table)
        parts.append((path, start, start + table.num_rows))
        start += table.num_rows
    where = config.log[0] if len(config.log) == 1 else f"{config.log[0]} and {len(config.log) - 1} more"
    table = concat_tables(tables, config.log)
    for join in config.joins:
        table = join_table(table, join, config.numeric_columns, where)
    for column, separator in config.list_separators.items():
        table = split_lists(table, column, separator, where)
    none = np.empty(0, dtype=np.int64)
    return Log(config, table, parts, where, none, none, none, none)


def read_original(config: LogConfig, columns: list[str]) -> pa.Table:
    """Columns of the log and of its joins, rows in the order of the files."""
    joins = [join for join in config.joins if set(columns).intersection(join.names)]
    joined = {name for join in joins for name in join.names}
    own = sorted({*columns, *(join.keys[0] for join in joins)} - joined)
    table = concat_tables([read_columns(path, own) for path in config.log], config.log)
    for join in joins:
        table = join_table(table, join, config.numeric_columns, config.log[0])
    return table.select(columns)


def sort_log(log: Log) -> None:
    """Drops duplicates (the first of the files stays) and sorts by time, then ``order``, then position in the files."""
    config, table = log.config, log.table
    num_rows = table.num_rows
    name, user = config.schema.timestamp, config.schema.user
    assert name is not None
    seconds, users = np.empty(num_rows, dtype=np.int64), np.zeros(num_rows, dtype=np.int64)
    column, user_column = log.column(name), log.column(user) if user is not None else None
    for path, start, stop in log.parts:
        seconds[start:stop] = encode_times(name, column[start:stop], config.schema.time_unit, path)
        if user_column is not None:
            keys = user_column[start:stop]
            if keys.null_count:
                raise ValueError(
                    f"user column {user!r} ({path}): null at position {first_true(keys.is_null())}: every row needs a "
                    "user; drop the row"
                )
            users[start:stop] = encode_keys(str(user), keys, path)
    order = np.arange(num_rows)
    if config.drop_duplicates:
        codes = group_codes([log.column(name) for name in config.drop_duplicates], num_rows)
        order = np.sort(np.unique(codes, return_index=True)[1])
    times = _raw_times(column)
    # Dense ranks stand for values of any type; the sort itself is stable.
    ties = [to_numpy(pc.rank(log.column(name), tiebreaker="dense"))[order] for name in config.order]
    order = order[np.lexsort([*reversed(ties), times[order]])]
    log.order, log.times, log.seconds, log.users = order, times[order], seconds[order], users[order]


def add_derived(log: Log, derived: Derived) -> None:
    """Adds a derived column."""
    config = log.config
    if derived.op == "hour":
        log.add(derived.name, log.seconds // 3600 % 24)
    elif derived.op == "weekday":
        # The epoch was a Thursday.
        log.add(derived.name, (log.seconds // 86400 + 3) % 7)
    elif derived.op == "file":
        files = np.concatenate([np.full(stop - start, i) for i, (_, start, stop) in enumerate(log.parts)])
        log.table = log.table.append_column(derived.name, pa.array(files))
    elif derived.op in ("num_earlier", "seconds_since_previous"):
        earlier = log.earlier(derived.columns or [str(config.schema.user)])
        if derived.op == "num_earlier":
            log.add(derived.name, earlier.counts())
        else:
            latest = earlier.latest()
            gaps = (log.times - log.times[latest]) / _units_per_second(log)
            log.add(derived.name, np.where(latest < 0, np.nan, gaps))
    elif derived.op == "number":
        log.table = log.table.append_column(derived.name, _find_numbers(log, derived))
    elif derived.op == "cross":
        texts = [log.column(name).cast(pa.large_string()) for name in derived.columns]
        bar = pa.scalar("|", pa.large_string())
        crossed = pc.binary_join_element_wise(*texts, bar, null_handling="replace", null_replacement="null")
        log.table = log.table.append_column(derived.name, crossed)
    else:
        numbers = [_numbers(log, name, f"derived {derived.name!r}") for name in derived.columns]
        if derived.op == "ratio":
            with np.errstate(divide="ignore", invalid="ignore"):
                values = np.where(numbers[1] == 0, np.nan, numbers[0] / numbers[1])
        elif derived.op == "bucket":
            buckets = np.searchsorted(derived.boundaries, numbers[0], side="right")
            values = np.where(np.isnan(numbers[0]), np.nan, buckets)
        else:
            values = np.where(np.isnan(numbers[0]), np.nan, numbers[0] >= float(derived.value or 0))
        column = pa.array(values, from_pandas=True)
        column = column if derived.op == "ratio" else column.cast(pa.int64() if derived.op == "bucket" else pa.int8())
        log.table = log.table.append_column(derived.name, column)


def _find_numbers(log: Log, derived: Derived) -> pa.Array:
    """What the named group of a pattern finds in a text column; null where it finds nothing."""
    column = log.column(derived.columns[0])
    place = f"derived {derived.name!r} (column {derived.columns[0]!r}, {log.where})"
    if not is_text(column.type):
        raise ValueError(f"{place}: type {column.type} is no text to find a number in: use the column itself")
    try:
        found = pc.struct_field(pc.extract_regex(column, derived.pattern), 0)
        return found.cast(pa.string()).cast(pa.float64())
    except pa.ArrowInvalid as error:
        raise ValueError(f"{place}: {derived.pattern!r} does not lead to one number per row: {error}") from error


def add_counter(log: Log, counter: Counter) -> None:
    """Adds the columns of a counter."""
    everyone, lists = log.earlier([]), [name for name in counter.by if log.is_list(name)]
    if len(lists) > 1:
        raise ValueError(
            f"counter {counter.count_name!r}: {lists} are list columns ({log.where}), but by takes only one"
        )
    flat = [name for name in counter.by if name not in lists]
    group = log.earlier_by_value(flat, lists[0]) if lists else log.earlier(flat)
    if counter.outcomes and log.config.label_delay:
        everyone, group = everyone.before(log.known()), group.before(log.known())
    if counter.within is not None:
        oldest = log.times - counter.within * _units_per_second(log)
        group = group.since(np.searchsorted(log.times, oldest))
    if counter.last is not None:
        group = group.last(counter.last)
    log.add(counter.count_name, group.counts())
    for outcome in counter.outcomes:
        values = _numbers(log, outcome, f"counter {counter.count_name!r}")
        wrong = ~np.isnan(values) & (values != 0) & (values != 1)
        if wrong.any():
            position = int(np.flatnonzero(wrong)[0])
            raise ValueError(
                f"counter {counter.count_name!r}: outcome {outcome!r} is {values[position]:g} at position {position} "
                f"({log.where}), not 0, 1 or null: derive a 0/1 column with at_least"
            )
        rates = running_rate(group, everyone, values[log.order], counter.prior, counter.log_odds)
        log.add(counter.rate_name(outcome), rates)


def split_log(log: Log) -> dict[str, Ints]:
    """Rows of each split, ascending in time.

    Raises:
        ValueError: If a split that was asked for is empty.
    """
    split, num_rows = log.config.split, len(log.order)
    if split.by == "time":
        test = _first_row(log, split.test_from, split.test, num_rows, "split.test_from")
        val = _first_row(log, split.val_from, split.val, test, "split.val_from")
        rows = np.arange(num_rows)
        splits = {"train": rows[:val], "val": rows[val:test], "test": rows[test:]}
    else:
        earlier = earlier_rows(log.users, np.arange(num_rows))
        rank = earlier.ends - earlier.begins
        _, inverse, counts = np.unique(log.users, return_inverse=True, return_counts=True)
        sizes = counts[inverse.reshape(-1)]
        test_rank = _share(1 - split.test, sizes)
        val_rank = _share(1 - split.val, test_rank)
        splits = {
            "train": np.flatnonzero(rank < val_rank),
            "val": np.flatnonzero((rank >= val_rank) & (rank < test_rank)),
            "test": np.flatnonzero(rank >= test_rank),
        }
    wanted = {"train": True, "val": bool(split.val or split.val_from), "test": bool(split.test or split.test_from)}
    for name in wanted:
        if wanted[name] and not len(splits[name]):
            sizes_text = ", ".join(f"{name}: {len(rows)}" for name, rows in splits.items())
            hint = " (rows of the same time stay together)" if split.by == "time" else ""
            raise ValueError(f"the {name} split of {log.where} is empty ({sizes_text} rows): change the split{hint}")
    return {name: rows for name, rows in splits.items() if wanted[name]}


def _first_row(log: Log, time: int | float | str | None, share: float, num_rows: int, name: str) -> int:
    """Where the later part of the first ``num_rows`` rows begins; rows of one time stay together."""
    if time is not None:
        return min(num_rows, int(np.searchsorted(log.times, _to_raw(log, time, name), side="left")))
    cut = int(_share(1 - share, num_rows))
    return cut if cut == num_rows else int(np.searchsorted(log.times, log.times[cut], side="left"))


def _share(share: float, count: int | Ints) -> Ints:
    # The small number mends products such as 0.29 * 100 = 28.999999999999996.
    return np.floor(share * np.asarray(count) + 1e-9).astype(np.int64)


def _to_raw(log: Log, time: int | float | str, name: str) -> int | float:
    column = str(log.config.schema.timestamp)
    if isinstance(time, str):
        try:
            moment = datetime.fromisoformat(time.replace("Z", "+00:00"))
        except ValueError as error:
            raise ValueError(f"{name}: {time!r} is neither a number nor an ISO 8601 time") from error
        moment = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
        microseconds = (moment - _EPOCH) // timedelta(microseconds=1)
        # Upwards: the first time that is not before the moment.
        return -(-microseconds * _units_per_second(log) // 1_000_000)
    if pa.types.is_temporal(log.table.schema.field(column).type):
        raise ValueError(f"{name}: {time} is a number, but {column!r} holds timestamps: write an ISO 8601 time")
    return time


def _units_per_second(log: Log) -> int:
    kind = log.table.schema.field(str(log.config.schema.timestamp)).type
    if pa.types.is_date(kind):
        return 1000
    return TIME_UNITS_PER_SECOND[kind.unit if pa.types.is_timestamp(kind) else log.config.schema.time_unit]


def _raw_times(array: pa.Array) -> npt.NDArray[Any]:
    """Times in the unit of the column: seconds are too coarse to tell earlier from simultaneous."""
    if pa.types.is_date(array.type):
        array = array.cast(pa.timestamp("ms"))
    return to_numpy(array.cast(pa.int64()) if pa.types.is_timestamp(array.type) else array)


def _numbers(log: Log, name: str, what: str) -> npt.NDArray[np.float64]:
    array = log.column(name)
    check_number(array, f"{what} (column {name!r}, {log.where})")
    return np.asarray(to_floats(one_array(array)), dtype=np.float64)
