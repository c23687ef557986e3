"""Strictly earlier events as ranges: what histories, running counters and splits per user are made of.

Rows come sorted by time. Nothing here loops over rows, and nothing of a row at or after a time enters its ranges.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lightning_gem.data.rows import Ints

MIN_RATE = 1e-3


@dataclass
class Earlier:
    """For every row the strictly earlier rows of its group.

    Attributes:
        order: Rows arranged by group, then time, int64 ``(num_rows,)``.
        begins: The earlier rows of row ``i`` are ``order[begins[i] : ends[i]]``, latest last.
        ends: See ``begins``.
    """

    order: Ints
    begins: Ints
    ends: Ints

    def counts(self) -> Ints:
        """Number of earlier rows."""
        return self.ends - self.begins

    def sums(self, values: Ints) -> Ints:
        """Sum of whole numbers over the earlier rows: exact, so that later rows cannot change even a rounding."""
        before = _exclusive_sums(values[self.order])
        return before[self.ends] - before[self.begins]

    def latest(self) -> Ints:
        """The latest earlier row, or -1."""
        return np.where(self.ends > self.begins, self.order[self.ends - 1], -1)

    def last(self, count: int) -> "Earlier":
        """Only the latest ``count`` of the earlier rows."""
        return Earlier(self.order, np.maximum(self.begins, self.ends - count), self.ends)

    def since(self, first: Ints) -> "Earlier":
        """Only the earlier rows from row ``first[i]`` on, which may not be later than row ``i``; of whole groups."""
        return Earlier(self.order, np.minimum(self._place(first), self.ends), self.ends)

    def before(self, stop: Ints) -> "Earlier":
        """Only the rows before row ``stop[i]``, which may not be later than row ``i``; of whole groups."""
        return Earlier(self.order, self.begins, np.minimum(self._place(stop), self.ends))

    def _place(self, rows: Ints) -> Ints:
        """Where row ``rows[i]`` would stand in the group of row ``i``."""
        num_rows = len(self.order)
        # Ascending, for the start of a group stands for the group.
        keys = self.begins[self.order] * num_rows + self.order
        return np.searchsorted(keys, self.begins * num_rows + rows)


@dataclass
class EarlierByValue:
    """The same for rows with any number of values, each a group: an earlier row counts once for every shared value.

    Attributes:
        earlier: Earlier pairs of a row and one of its values, for every pair.
        rows: Row of every pair, ascending.
        starts: Position of every row's first pair, and the number of pairs, ``(num_rows + 1,)``.
    """

    earlier: Earlier
    rows: Ints
    starts: Ints

    def _add_up(self, values: Ints) -> Ints:
        before = _exclusive_sums(values)[self.starts]
        return before[1:] - before[:-1]

    def counts(self) -> Ints:
        """Number of earlier pairs of all values of a row."""
        return self._add_up(self.earlier.counts())

    def sums(self, values: Ints) -> Ints:
        """Sum of whole numbers, one for each row, over these pairs."""
        return self._add_up(self.earlier.sums(values[self.rows]))

    def last(self, count: int) -> "EarlierByValue":
        """Only the latest ``count`` of the earlier rows with a value, for every value."""
        return EarlierByValue(self.earlier.last(count), self.rows, self.starts)

    def since(self, first: Ints) -> "EarlierByValue":
        """Only the earlier rows from row ``first[i]`` on, see :meth:`Earlier.since`."""
        return EarlierByValue(self.earlier.since(self.starts[first[self.rows]]), self.rows, self.starts)

    def before(self, stop: Ints) -> "EarlierByValue":
        """Only the rows before row ``stop[i]``, see :meth:`Earlier.before`."""
        return EarlierByValue(self.earlier.before(self.starts[stop[self.rows]]), self.rows, self.starts)


def earlier_rows(groups: Ints, times: npt.NDArray[np.generic]) -> Earlier:
    """Finds the strictly earlier rows of the same group; rows of the same time do not see each other.

    Args:
        groups: Group of each row.
        times: Time of each row, ascending.
    """
    order = np.argsort(groups, kind="stable")
    new_group = np.ones(len(order), dtype=bool)
    new_group[1:] = groups[order[1:]] != groups[order[:-1]]
    new_time = new_group.copy()
    new_time[1:] |= times[order[1:]] != times[order[:-1]]
    begins, ends = np.empty_like(order), np.empty_like(order)
    begins[order] = _latest_true(new_group)
    ends[order] = _latest_true(new_time)
    return Earlier(order, begins, ends)


def histories(earlier: Earlier, max_len: int, keep: npt.NDArray[np.bool_] | None = None) -> tuple[Ints, Ints, Ints]:
    """Histories as ranges of one shared table of events.

    Args:
        earlier: Earlier rows by user.
        max_len: Only the latest events are kept.
        keep: Rows that are events of this history; all when not given.

    Returns:
        The rows that are the events, in the order of the table; and for every row the start and the length of its
        history in it.
    """
    if keep is None:
        keep = np.ones(len(earlier.order), dtype=bool)
    kept = keep[earlier.order]
    before = _exclusive_sums(kept.astype(np.int64))
    stops = before[earlier.ends]
    starts = np.maximum(before[earlier.begins], stops - max_len)
    return earlier.order[kept], starts, stops - starts


def running_rate(
    group: Earlier | EarlierByValue,
    everyone: Earlier,
    outcome: npt.NDArray[np.float64],
    prior: float,
    log_odds: bool = False,
) -> npt.NDArray[np.float64]:
    """Mean outcome of the earlier rows of the group, shrunk towards that of all earlier rows.

    Args:
        group: Earlier rows of the group.
        everyone: Earlier rows of all.
        outcome: 0, 1 or NaN, which does not count.
        prior: Number of rows that the overall mean weighs. It is 0 before the first row.
        log_odds: Give log odds of the mean minus those of the overall mean; both are kept from 0 and 1 by
            ``MIN_RATE``.
    """
    known = (~np.isnan(outcome)).astype(np.int64)
    positive = (outcome == 1).astype(np.int64)
    overall = everyone.sums(positive) / np.maximum(everyone.sums(known), 1)
    rate = (group.sums(positive) + prior * overall) / (group.sums(known) + prior)
    return _log_odds(rate) - _log_odds(overall) if log_odds else rate


def _log_odds(rate: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    rate = rate.clip(MIN_RATE, 1 - MIN_RATE)
    return np.log(rate) - np.log1p(-rate)


def group_codes(columns: list[pa.Array], num_rows: int) -> Ints:
    """One integer per row, equal where all columns are equal; null equals null."""
    codes = np.zeros(num_rows, dtype=np.int64)
    for i, column in enumerate(columns):
        encoded = column.dictionary_encode(null_encoding="encode")
        codes = codes * len(encoded.dictionary) + encoded.indices.to_numpy(zero_copy_only=False)
        if i:
            # Keeps the product of the next column far from overflow.
            codes = np.unique(codes, return_inverse=True)[1].reshape(-1)
    return codes


def _exclusive_sums(values: Ints) -> Ints:
    sums = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=sums[1:])
    return sums


def _latest_true(flags: npt.NDArray[np.bool_]) -> Ints:
    """Position of the latest true flag at or before each position; the first flag must be true."""
    return np.maximum.accumulate(np.where(flags, np.arange(len(flags)), 0))
