"""Deterministic batches for any number of ranks and workers, with exact resume in the middle of an epoch.

An epoch is one order of all rows: the chunks of the source (row groups, say) in a random order. Rank ``r`` of ``R``
takes the rows from ``r * N / R`` to ``(r + 1) * N / R`` of that order, so that no row is lost or repeated and the ranks
differ by one row at most, whatever the sizes of the chunks. All ranks take the same number of steps; the rows of a rank
are spread evenly over them, so batches may hold a row less than ``batch_size``. Inside a rank, rows are shuffled within
windows of ``shuffle_rows`` rows. Everything follows from (seed, epoch, rank, step): a position is one integer.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, get_worker_info

from lightning_gem.data.batch import RecBatch
from lightning_gem.data.rows import Ints, Rows

_READ_ROWS = 16384


class RowSource(Protocol):
    """Rows of one split, readable in chunks. It is sent to the workers, so it must be picklable."""

    @property
    def chunk_sizes(self) -> Sequence[int]:
        """Rows of every chunk."""
        ...

    def read(self, chunk: int, start: int, stop: int) -> Rows:
        """Rows ``start`` to ``stop`` of a chunk, or as many of the first of them as are cheap to read at once."""
        ...


class BatchStream(IterableDataset[RecBatch]):
    """The batches of one rank.

    Args:
        source: Where the rows come from.
        batch_size: Rows per batch and rank, at most.
        rank: Rank of this process among the data-parallel ranks.
        world_size: Number of data-parallel ranks.
        shuffle_rows: Rows of the shuffle window; 0 keeps the order of the source.
        seed: Seed of the shuffles.

    Raises:
        ValueError: If the source has fewer rows than there are ranks, or a rank would get a batch without rows.
    """

    def __init__(
        self,
        source: RowSource,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        shuffle_rows: int = 0,
        seed: int = 0,
    ) -> None:
        if seed < 0:
            raise ValueError(f"seed must not be negative, but is {seed}")
        self.source = source
        self.rank = rank
        self.shuffle_rows = shuffle_rows
        self.seed = seed
        self.epoch = 0
        self.first_batch = 0
        num_rows = int(sum(source.chunk_sizes))
        if num_rows < world_size:
            raise ValueError(
                f"the split has {num_rows} rows, fewer than the {world_size} ranks that share it: add rows or use "
                "fewer ranks"
            )
        self.start = rank * num_rows // world_size
        self.stop = (rank + 1) * num_rows // world_size
        most_rows = -(-num_rows // world_size)
        self.num_batches = -(-most_rows // batch_size)
        if num_rows // world_size < self.num_batches:
            raise ValueError(
                f"batch_size=1 would leave a rank without a row in its last batch, for {num_rows} rows do not divide "
                f"by {world_size} ranks: use batch_size=2 or another number of ranks"
            )
        self.batches_per_window = max(1, shuffle_rows // batch_size)
        # What a position depends on, for the check at resume.
        self.layout = {
            "num_rows": num_rows,
            "num_ranks": world_size,
            "batch_size": batch_size,
            "shuffle_rows": shuffle_rows,
            "seed": seed,
        }

    def __len__(self) -> int:
        return self.num_batches

    def _boundary(self, batch: int) -> int:
        """Position in the epoch's order at which ``batch`` begins."""
        return self.start + batch * (self.stop - self.start) // self.num_batches

    def __iter__(self) -> Iterator[RecBatch]:
        """Yields the batches of this worker from ``first_batch`` (a count over all workers) on.

        A worker takes a contiguous block of batches, so that windows are read once. The blocks of earlier workers are
        the longer ones, hence the loader's round robin never waits for an exhausted worker before the end, and the
        first ``first_batch`` batches are those with the lowest positions in the blocks.
        """
        info = get_worker_info()
        num_workers = 1 if info is None else info.num_workers
        # After a resume the loader asks worker 0 first, so it must stand in for the worker whose turn it is.
        worker = 0 if info is None else (info.id + self.first_batch) % num_workers
        blocks = [len(range(w, self.num_batches, num_workers)) for w in range(num_workers)]
        block_start = sum(blocks[:worker])
        skipped = len(range(worker, self.first_batch, num_workers))
        yield from self._batches(block_start + skipped, block_start + blocks[worker])

    def _batches(self, first: int, last: int) -> Iterator[RecBatch]:
        sizes = np.asarray(self.source.chunk_sizes, dtype=np.int64)
        chunks = np.arange(len(sizes))
        if self.shuffle_rows:
            np.random.default_rng((self.seed, self.epoch)).shuffle(chunks)
        ends = np.cumsum(sizes[chunks])
        if not self.shuffle_rows:
            yield from self._in_order(first, last, chunks, ends)
            return
        while first < last:
            window = first // self.batches_per_window
            start = window * self.batches_per_window
            stop = min(start + self.batches_per_window, self.num_batches)
            # A window is shuffled whole, even where only some of its batches are needed.
            yield from self._window(window, range(start, stop), range(first, min(stop, last)), chunks, ends)
            first = stop

    def _in_order(self, first: int, last: int, chunks: Ints, ends: Ints) -> Iterator[RecBatch]:
        """Cuts batches as the rows are read: no more than a batch and a part of the source are in memory."""
        pieces: list[Rows] = []
        missing = self._boundary(first + 1) - self._boundary(first)
        for part in self._read(self._boundary(first), self._boundary(last), chunks, ends, _READ_ROWS):
            part, done = part.compact(), 0
            while len(part) - done >= missing:
                pieces.append(part.take(slice(done, done + missing)))
                yield Rows.concat(pieces).to_batch()
                pieces, done, first = [], done + missing, first + 1
                missing = self._boundary(first + 1) - self._boundary(first)
            if done < len(part):
                pieces.append(part.take(slice(done, len(part))))
                missing -= len(part) - done

    def _window(self, window: int, read: range, wanted: range, chunks: Ints, ends: Ints) -> Iterator[RecBatch]:
        bounds = np.array([self._boundary(batch) for batch in range(read.start, read.stop + 1)])
        batch_of_row = np.repeat(np.arange(len(read)), np.diff(bounds))
        np.random.default_rng((self.seed, self.epoch, self.rank, window)).shuffle(batch_of_row)
        parts, cuts, done = [], [], 0
        for part in self._read(int(bounds[0]), int(bounds[-1]), chunks, ends):
            batches = batch_of_row[done : done + len(part)]
            done += len(part)
            # Which rows share a batch is random, not their order in it: each part is brought into the order of the
            # batches at once, while it is in the caches, and a batch is then cut from contiguous memory.
            order = np.argsort(batches, kind="stable")
            parts.append(part.compact().reorder(order))
            cuts.append(np.searchsorted(batches[order], np.arange(len(read) + 1)).tolist())
        for i in range(wanted.start - read.start, wanted.stop - read.start):
            used = [
                (part, slice(cut[i], cut[i + 1])) for part, cut in zip(parts, cuts, strict=True) if cut[i] < cut[i + 1]
            ]
            yield Rows.concat([part for part, _ in used], [rows for _, rows in used]).to_batch()

    def _read(self, start: int, stop: int, chunks: Ints, ends: Ints, most: int | None = None) -> Iterator[Rows]:
        """Rows at positions ``start`` to ``stop`` of the order of ``chunks`` with ``ends``, at most ``most`` a time."""
        i = int(np.searchsorted(ends, start, side="right"))
        while start < stop:
            begin = int(ends[i]) - int(self.source.chunk_sizes[chunks[i]])
            end = min(stop, int(ends[i]))
            while start < end:
                to = end if most is None else min(end, start + most)
                part = self.source.read(int(chunks[i]), start - begin, to - begin)
                start += len(part)
                yield part
            i += 1


class _EpochSampler(SequentialSampler):
    """Hands the epoch on. Lightning tries to replace other samplers than sequential ones for ``overfit_batches``."""

    def __init__(self, loader: "StreamLoader") -> None:
        super().__init__(())
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        self._loader.set_epoch(epoch)


class StreamLoader:
    """Loads a :class:`BatchStream` and remembers the position: Lightning saves and restores it with the checkpoint.

    Without Lightning, call :meth:`set_epoch` before each epoch, as for ``DistributedSampler``.

    Args:
        stream: The batches of this rank.
        num_workers: Worker processes; 0 reads in this process.
        pin_memory: Copy batches to page-locked memory.
    """

    def __init__(self, stream: BatchStream, num_workers: int = 0, pin_memory: bool = False) -> None:
        self.stream = stream
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.batch = 0
        self.pending: Callable[[], int] = lambda: 0
        self._resume: dict[str, Any] | None = None

    def __len__(self) -> int:
        return len(self.stream)

    @property
    def dataset(self) -> BatchStream:
        """Lightning leaves loaders of an ``IterableDataset`` as they are."""
        return self.stream

    @property
    def sampler(self) -> "_EpochSampler":
        """Lightning announces each epoch to ``loader.sampler.set_epoch``."""
        return _EpochSampler(self)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next iteration; a new epoch begins at its first batch."""
        if epoch != self.stream.epoch:
            self.stream.epoch = epoch
            self.batch = 0
            self._resume = None

    def __iter__(self) -> Iterator[RecBatch]:
        """Yields the epoch's batches, or those left after a resume.

        Raises:
            ValueError: If the batches are cut differently than in the run that is resumed.
        """
        self.batch = self._first_batch()
        self.stream.first_batch = self.batch
        # The generator's own random numbers: starting a loader must not advance those of the model.
        loader = DataLoader(
            self.stream,
            batch_size=None,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            generator=torch.Generator(),
        )
        # The loader warns when an IterableDataset yields more than its length: after a resume it yields less.
        for batch in loader:
            self.batch += 1
            yield batch

    def _first_batch(self) -> int:
        state, self._resume = self._resume, None
        if not state or not state["batch"]:
            return 0
        for name, now in self._layout().items():
            if state["layout"][name] != now:
                raise ValueError(
                    f"the checkpoint was taken in the middle of an epoch with {name}={state['layout'][name]}, now it "
                    f"is {now}: set it back, or start from a checkpoint taken at the end of an epoch"
                )
        return state["batch"]

    def _layout(self) -> dict[str, int]:
        return {**self.stream.layout, "num_workers": self.num_workers}

    def state_dict(self) -> dict[str, Any]:
        """Position after the latest batch that was handed out, less those that ``pending`` says were not used."""
        return {"epoch": self.stream.epoch, "batch": self.batch - self.pending(), "layout": self._layout()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues after the batch at which :meth:`state_dict` was taken.

        A different layout is an error when the iteration starts, unless another epoch is chosen before.
        """
        self.stream.epoch = state["epoch"]
        self.batch = state["batch"]
        self._resume = state
