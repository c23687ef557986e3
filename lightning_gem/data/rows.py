"""Encoded rows as NumPy arrays: what readers hold in memory before a batch is cut from them."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_gem.data.batch import EventSequence, RecBatch

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Number = TypeVar("Number", np.int64, np.float32)


@dataclass
class Events:
    """Histories as ranges into shared event arrays: rows may overlap, so a log needs no copy per row.

    Attributes:
        ids: Table rows, int64 ``(num_features, num_events)``.
        floats: float32 ``(num_events, num_floats)``.
        timestamps: Seconds, int64 ``(num_events,)``.
        starts: First event of each row, int64 ``(num_rows,)``.
        lengths: Events of each row, int64 ``(num_rows,)``.
        in_order: Whether the ranges follow each other and use all events.
    """

    ids: Ints
    floats: Floats
    timestamps: Ints
    starts: Ints
    lengths: Ints
    in_order: bool = False

    def take(self, index: Ints | slice) -> "Events":
        """Selects rows; the events are shared."""
        starts, lengths = self.starts[index], self.lengths[index]
        if not (self.in_order and isinstance(index, slice) and len(starts) and index.step in (None, 1)):
            return Events(self.ids, self.floats, self.timestamps, starts, lengths)
        begin, end = int(starts[0]), int(starts[-1] + lengths[-1])
        ids, floats, timestamps = self.ids[:, begin:end], self.floats[begin:end], self.timestamps[begin:end]
        return Events(ids, floats, timestamps, starts - begin, lengths, in_order=True)

    def compact(self) -> "Events":
        """Only the events that the rows use, in the order of the rows: a view if they lie so, else a copy."""
        if self.in_order:
            return self
        where = _places(self.starts, self.lengths)
        starts = np.cumsum(self.lengths) - self.lengths
        if isinstance(where, slice):
            return Events(self.ids[:, where], self.floats[where], self.timestamps[where], starts, self.lengths, True)
        ids = np.empty((len(self.ids), len(where)), dtype=np.int64)
        floats = np.empty((len(where), self.floats.shape[1]), dtype=np.float32)
        timestamps = np.empty(len(where), dtype=np.int64)
        # The indices are right by construction; "clip" spares NumPy a buffer to check them with.
        self.ids.take(where, axis=1, out=ids, mode="clip")
        self.timestamps.take(where, out=timestamps, mode="clip")
        if floats.size:
            self.floats.take(where, axis=0, out=floats, mode="clip")
        return Events(ids, floats, timestamps, starts, self.lengths, in_order=True)

    def reorder(self, order: Ints) -> "Events":
        """All rows in another order, compact. Whole histories are moved, which is faster than to gather events."""
        if not self.in_order:
            return self.take(order).compact()
        lengths, keys, width = self.lengths[order], len(self.ids), self.floats.shape[1]
        order_by_key = (order + len(order) * np.arange(keys)[:, None]).ravel()
        floats = self.floats
        if width:
            floats = _move(floats.reshape(-1), self.lengths * width, order).reshape(-1, width)
        return Events(
            ids=_move(self.ids.reshape(-1), np.tile(self.lengths, keys), order_by_key).reshape(keys, -1),
            floats=floats,
            timestamps=_move(self.timestamps, self.lengths, order),
            starts=np.cumsum(lengths) - lengths,
            lengths=lengths,
            in_order=True,
        )

    @staticmethod
    def concat(parts: Sequence["Events"], ranges: Sequence[slice]) -> "Events":
        """Joins some rows of each part."""
        parts = [part.take(rows).compact() for part, rows in zip(parts, ranges, strict=True)]
        lengths = np.concatenate([part.lengths for part in parts])
        return Events(
            ids=np.concatenate([part.ids for part in parts], axis=1),
            floats=np.concatenate([part.floats for part in parts]),
            timestamps=np.concatenate([part.timestamps for part in parts]),
            starts=np.cumsum(lengths) - lengths,
            lengths=lengths,
            in_order=True,
        )


@dataclass
class Bags:
    """A categorical feature: table rows ``values[starts[i] : starts[i] + lengths[i]]`` of row ``i``.

    Without ``starts`` and ``lengths`` every row has exactly one id.
    """

    values: Ints
    starts: Ints | None = None
    lengths: Ints | None = None

    @staticmethod
    def single(values: Ints) -> "Bags":
        """A feature with exactly one id in every row."""
        return Bags(values)

    def take(self, index: Ints | slice) -> "Bags":
        """Selects rows; ranges of values are shared."""
        if self.starts is None or self.lengths is None:
            return Bags(self.values[index])
        return Bags(self.values, self.starts[index], self.lengths[index])

    def compact(self) -> "Bags":
        """Only the values that the rows use, in the order of the rows: a view if they lie so, else a copy."""
        if self.starts is None or self.lengths is None:
            return self
        where = _places(self.starts, self.lengths)
        return Bags(self.values[where], np.cumsum(self.lengths) - self.lengths, self.lengths)

    def row_lengths(self) -> Ints:
        """Ids of each row."""
        return np.ones(len(self.values), dtype=np.int64) if self.lengths is None else self.lengths

    @staticmethod
    def concat(parts: Sequence["Bags"], ranges: Sequence[slice]) -> "Bags":
        """Joins some rows of each part of a multi-valued feature."""
        parts = [part.take(rows).compact() for part, rows in zip(parts, ranges, strict=True)]
        lengths = np.concatenate([part.row_lengths() for part in parts])
        return Bags(np.concatenate([part.values for part in parts]), np.cumsum(lengths) - lengths, lengths)


@dataclass
class Rows:
    """Encoded rows; the fields mirror :class:`~lightning_gem.data.batch.RecBatch`.

    Attributes:
        sparse: Categorical features of the request; None where the ids are in ``single``.
        single: Ids of the features with None in ``sparse``, int64 ``(num_features, num_rows)``; see :meth:`compact`.
    """

    dense: Floats
    sparse: Mapping[str, Bags | None]
    sequences: Mapping[str, Events]
    sequence_keys: dict[str, list[str]]
    request_timestamps: Ints
    domain: Ints
    labels: Floats
    weights: Floats
    user: Ints
    row: Ints
    single: Ints | None = None

    def __len__(self) -> int:
        return len(self.row)

    def take(self, index: Ints | slice) -> "Rows":
        """Selects rows; event and bag values are shared, not copied."""
        return Rows(
            dense=_take(self.dense, index),
            sparse={name: None if bag is None else bag.take(index) for name, bag in self.sparse.items()},
            sequences={name: events.take(index) for name, events in self.sequences.items()},
            sequence_keys=self.sequence_keys,
            request_timestamps=self.request_timestamps[index],
            domain=self.domain[index],
            labels=self.labels[index],
            weights=self.weights[index],
            user=self.user[index],
            row=self.row[index],
            single=None if self.single is None else _take(self.single, index, axis=1),
        )

    def compact(self) -> "Rows":
        """The form from which batches are cut fast: ids of single-valued features in one matrix, events in row order.

        Events stay shared where rows overlap so much that copies would need more memory.
        """
        single = self.single
        if single is None:
            columns = [bag.values for bag in self.sparse.values() if bag is not None and bag.lengths is None]
            single = np.stack(columns) if columns else np.empty((0, len(self)), dtype=np.int64)
        bags = {name: None if bag is None or bag.lengths is None else bag for name, bag in self.sparse.items()}
        sequences = {
            name: events.compact() if events.lengths.sum() <= len(events.timestamps) else events
            for name, events in self.sequences.items()
        }
        sparse = {name: None if bag is None else bag.compact() for name, bag in bags.items()}
        return replace(self, sparse=sparse, sequences=sequences, single=single)

    def reorder(self, order: Ints) -> "Rows":
        """All rows in another order, compact."""
        rows = replace(self, sequences={}).take(order).compact()
        return replace(rows, sequences={name: events.reorder(order) for name, events in self.sequences.items()})

    @staticmethod
    def concat(parts: Sequence["Rows"], ranges: Sequence[slice] | None = None) -> "Rows":
        """Joins rows of one schema; only events and values that they use are copied.

        Args:
            parts: Where the rows are.
            ranges: Which rows of each part; all by default.
        """
        if ranges is None:
            ranges = [slice(0, len(part)) for part in parts]
        if len(parts) == 1:
            return parts[0].take(ranges[0])
        parts = [part if part.single is not None else part.compact() for part in parts]
        pairs = list(zip(parts, ranges, strict=True))
        first = parts[0]

        def bags(name: str) -> Bags | None:
            each = [bag for part in parts if (bag := part.sparse[name]) is not None]
            return Bags.concat(each, ranges) if each else None

        return Rows(
            dense=np.concatenate([part.dense[rows] for part, rows in pairs]),
            sparse={name: bags(name) for name in first.sparse},
            sequences={
                name: Events.concat([part.sequences[name] for part in parts], ranges) for name in first.sequences
            },
            sequence_keys=first.sequence_keys,
            request_timestamps=np.concatenate([part.request_timestamps[rows] for part, rows in pairs]),
            domain=np.concatenate([part.domain[rows] for part, rows in pairs]),
            labels=np.concatenate([part.labels[rows] for part, rows in pairs]),
            weights=np.concatenate([part.weights[rows] for part, rows in pairs]),
            user=np.concatenate([part.user[rows] for part, rows in pairs]),
            row=np.concatenate([part.row[rows] for part, rows in pairs]),
            single=np.concatenate([part.single[:, rows] for part, rows in pairs if part.single is not None], axis=1),
        )

    def to_batch(self) -> RecBatch:
        """Gathers the ragged values and hands everything to torch."""
        rows = self if self.single is not None else self.compact()
        return RecBatch(
            dense=_tensor(self.dense, np.float32),
            sparse=rows._keyed_jagged() if rows.sparse else None,
            sequences={
                name: _event_sequence(events.compact(), self.sequence_keys[name])
                for name, events in rows.sequences.items()
            },
            request_timestamps=_tensor(self.request_timestamps, np.int64),
            domain=_tensor(self.domain, np.int64),
            labels=_tensor(self.labels, np.float32),
            weights=_tensor(self.weights, np.float32),
            user=_tensor(self.user, np.int64),
            row=_tensor(self.row, np.int64),
        )

    def _keyed_jagged(self) -> KeyedJaggedTensor:
        assert self.single is not None
        if len(self.single) == len(self.sparse):
            values, lengths = self.single.reshape(-1), np.ones(self.single.size, dtype=np.int32)
        else:
            ids = iter(self.single)
            bags = [Bags(next(ids)) if bag is None else bag.compact() for bag in self.sparse.values()]
            values = np.concatenate([bag.values for bag in bags])
            lengths = np.concatenate([bag.row_lengths() for bag in bags], dtype=np.int32)
        return KeyedJaggedTensor(
            keys=list(self.sparse), values=_tensor(values, np.int64), lengths=torch.from_numpy(lengths)
        )


def ranges_to_index(starts: Ints, lengths: Ints) -> Ints:
    """Indices ``starts[0], starts[0] + 1, ..., starts[1], ...`` of all ranges in turn, without a loop over rows."""
    before = np.cumsum(lengths) - lengths
    index = np.repeat(starts - before, lengths)
    index += np.arange(len(index))
    return index


def _take(values: npt.NDArray[Number], index: Ints | slice, axis: int = 0) -> npt.NDArray[Number]:
    """Several times as fast as indexing with an array; the indices are right by construction."""
    if isinstance(index, slice):
        return values[:, index] if axis else values[index]
    return values.take(index, axis=axis, mode="clip")


def _move(values: npt.NDArray[Number], lengths: Ints, order: Ints) -> npt.NDArray[Number]:
    """The ranges of ``lengths`` that make up ``values``, in another order."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # it is only read
        source = torch.from_numpy(values)
    moved = torch.ops.fbgemm.permute_1D_sparse_data(
        torch.from_numpy(order.astype(np.int32)), torch.from_numpy(lengths), source, None, len(values)
    )
    result: npt.NDArray[Number] = moved[1].numpy()
    return result


def _places(starts: Ints, lengths: Ints) -> Ints | slice:
    """Where the ranges lie in an array: a slice if they follow each other."""
    if len(starts) and (starts[1:] == starts[:-1] + lengths[:-1]).all():
        return slice(int(starts[0]), int(starts[-1] + lengths[-1]))
    return ranges_to_index(starts, lengths)


def _event_sequence(events: Events, keys: list[str]) -> EventSequence:
    lengths = events.lengths.astype(np.int32)
    cu_seqlens = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    return EventSequence(
        ids=KeyedJaggedTensor(
            keys=keys,
            values=_tensor(events.ids, np.int64).view(-1),
            lengths=torch.from_numpy(np.tile(lengths, len(keys))),
        ),
        floats=_tensor(events.floats, np.float32),
        timestamps=_tensor(events.timestamps, np.int64),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        lengths_cpu=torch.from_numpy(lengths),
    )


def _tensor(values: npt.NDArray[np.generic], dtype: type) -> torch.Tensor:
    """Shares memory that is the array's own; a view is copied, since writing to a batch must not change its source."""
    own = values.flags.owndata and values.flags.c_contiguous and values.flags.writeable
    return torch.from_numpy(np.array(values, dtype=dtype, order="C", copy=None if own else True))
