"""A source of rows whose content follows from their number, and a check of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_gem.data import RecBatch
from lightning_gem.data import stream as stream_module
from lightning_gem.data.rows import Bags, Events, Rows
from lightning_gem.data.stream import BatchStream


@dataclass
class CountingSource:
    """Chunks of rows 0, 1, 2, ...; reads give at most ``piece`` rows."""

    chunk_sizes: list[int]
    piece: int = 10**9

    def read(self, chunk: int, start: int, stop: int) -> Rows:
        first = sum(self.chunk_sizes[:chunk])
        assert 0 <= start < stop <= self.chunk_sizes[chunk]
        return make_rows(np.arange(first + start, first + min(stop, start + self.piece)))


def make_rows(row: np.ndarray) -> Rows:
    lengths = row % 4
    events = np.repeat(row, lengths) * 10 + np.concatenate([np.arange(n) for n in lengths] or [[]]).astype(int)
    bags = Bags(np.repeat(row, row % 3), np.cumsum(row % 3) - row % 3, row % 3)
    return Rows(
        dense=np.stack([row, -row], axis=1).astype(np.float32),
        sparse={"a": Bags.single(row * 2), "b": bags, "c": Bags.single(row * 3)},
        sequences={
            "s": Events(
                ids=np.stack([events, events + 1]),
                floats=events[:, None].astype(np.float32),
                timestamps=events,
                starts=np.cumsum(lengths) - lengths,
                lengths=lengths,
            )
        },
        sequence_keys={"s": ["x", "y"]},
        request_timestamps=row + 5,
        domain=row % 2,
        labels=(row[:, None] % 2).astype(np.float32),
        weights=np.ones((len(row), 1), dtype=np.float32),
        user=row // 2,
        row=row,
    )


def check_content(batch: RecBatch) -> None:
    """Every field must be that of the batch's rows."""
    row = batch.row
    torch.testing.assert_close(batch.dense, torch.stack([row, -row], 1).float())
    torch.testing.assert_close(batch.request_timestamps, row + 5)
    torch.testing.assert_close(batch.domain, row % 2)
    torch.testing.assert_close(batch.user, row // 2)
    torch.testing.assert_close(batch.labels[:, 0], (row % 2).float())
    assert batch.sparse is not None
    assert batch.sparse.keys() == ["a", "b", "c"]
    torch.testing.assert_close(batch.sparse["a"].values(), row * 2)
    torch.testing.assert_close(batch.sparse["c"].values(), row * 3)
    torch.testing.assert_close(batch.sparse["b"].lengths().long(), row % 3)
    torch.testing.assert_close(batch.sparse["b"].values(), row.repeat_interleave(row % 3))
    events = batch.sequences["s"]
    torch.testing.assert_close(events.lengths_cpu.long(), row % 4)
    torch.testing.assert_close(events.cu_seqlens[1:].long(), (row % 4).cumsum(0))
    expected = torch.tensor([10 * r + i for r in row.tolist() for i in range(r % 4)], dtype=torch.int64)
    torch.testing.assert_close(events.timestamps, expected)
    torch.testing.assert_close(events.floats[:, 0], expected.float())
    torch.testing.assert_close(events.ids["x"].values(), expected)
    torch.testing.assert_close(events.ids["y"].values(), expected + 1)
    torch.testing.assert_close(events.ids["y"].lengths(), events.lengths_cpu)


def in_workers(stream: BatchStream, num_workers: int) -> Iterator[RecBatch]:
    """The batches in the order in which a DataLoader with that many workers gives them, but in this process."""
    if num_workers == 0:
        yield from stream
        return
    running = []
    with pytest.MonkeyPatch.context() as patch:
        for worker in range(num_workers):
            info = SimpleNamespace(id=worker, num_workers=num_workers)
            patch.setattr(stream_module, "get_worker_info", lambda info=info: info)
            running.append(iter(list(stream)))
    while running:
        for worker in list(running):
            batch = next(worker, None)
            if batch is None:
                running.remove(worker)
            else:
                yield batch


def rows_of(batches: Iterator[RecBatch]) -> list[list[int]]:
    return [batch.row.tolist() for batch in batches]
