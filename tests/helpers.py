"""Small schemas and batches that tests of several packages share."""

import numpy as np

from lightning_gem.data import DenseFeature, RecBatch, RecDataModule, Schema, Sequence, SparseFeature, Task
from lightning_gem.data.rows import Bags, Events, Rows


def make_schema(
    num_sparse: int = 4, num_dense: int = 3, num_domains: int = 1, dims: tuple[int, ...] = (8, 16)
) -> Schema:
    """Two tasks (click, conversion given click) and two sequences with a shared event table."""
    return Schema(
        tasks=[Task("click"), Task("conversion", given="click")],
        sparse=[
            SparseFeature(f"f{i}", num_embeddings=20, embedding_dim=dims[i % len(dims)], encoding="index")
            for i in range(num_sparse)
        ],
        dense=[DenseFeature(f"d{i}") for i in range(num_dense)],
        sequences=[
            Sequence(
                "views",
                [
                    SparseFeature("item", 30, 8, table="items", encoding="index"),
                    SparseFeature("surface", 5, 8, encoding="index"),
                ],
                floats=[DenseFeature("seconds")],
                max_len=40,
            ),
            Sequence("clicks", [SparseFeature("item", 30, 8, table="items", encoding="index")], max_len=20),
        ],
        timestamp="time",
        user="user",
        domain="surface" if num_domains > 1 else None,
        num_domains=num_domains,
    )


def make_rows(schema: Schema, lengths: dict[str, list[int]], seed: int = 0) -> Rows:
    """Random rows of a schema with the given history lengths."""
    rng = np.random.default_rng(seed)
    num_rows = len(next(iter(lengths.values())))
    now = rng.integers(10**9, 10**9 + 10**6, num_rows)
    sequences = {}
    for sequence in schema.sequences:
        length = np.asarray(lengths[sequence.name], dtype=np.int64)
        starts = np.cumsum(length) - length
        ages = [np.sort(rng.integers(1, 10**6, n))[::-1] for n in length]
        sequences[sequence.name] = Events(
            ids=np.stack([rng.integers(0, f.num_embeddings, length.sum()) for f in sequence.features]),
            floats=rng.standard_normal((int(length.sum()), len(sequence.floats)), dtype=np.float32),
            timestamps=np.repeat(now, length) - np.concatenate([*ages, []]).astype(np.int64),
            starts=starts,
            lengths=length,
        )
    sparse = {}
    for feature in schema.sparse:
        counts = rng.integers(0, 3, num_rows)
        values = rng.integers(0, feature.num_embeddings, counts.sum())
        sparse[feature.name] = Bags(values, np.cumsum(counts) - counts, counts)
    click = rng.integers(0, 2, num_rows).astype(np.float32)
    conversion = np.where(click == 1, rng.integers(0, 2, num_rows), np.nan)
    return Rows(
        dense=rng.standard_normal((num_rows, len(schema.dense)), dtype=np.float32),
        sparse=sparse,
        sequences=sequences,
        sequence_keys={s.name: s.keys for s in schema.sequences},
        request_timestamps=now,
        domain=rng.integers(0, schema.num_domains, num_rows),
        labels=np.stack([click, conversion], axis=1).astype(np.float32),
        weights=np.stack([np.ones(num_rows), click], axis=1).astype(np.float32),
        user=rng.integers(0, 4, num_rows),
        row=np.arange(num_rows),
    )


def make_batch(schema: Schema, lengths: dict[str, list[int]], seed: int = 0) -> RecBatch:
    """A random batch of a schema with the given history lengths."""
    return make_rows(schema, lengths, seed).to_batch()


class ToySource:
    """Random rows in chunks; the label depends on the first dense feature and the length of the first sequence."""

    def __init__(self, schema: Schema, num_rows: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        lengths = {s.name: rng.integers(0, 8, num_rows).tolist() for s in schema.sequences}
        self.rows = make_rows(schema, lengths, seed)
        score = self.rows.dense[:, 0] + self.rows.sequences[schema.sequences[0].name].lengths / 4 - 1
        click = (score + rng.logistic(size=num_rows) / 2 > 0).astype(np.float32)
        conversion = np.where(click == 1, rng.integers(0, 2, num_rows), np.nan)
        self.rows.labels = np.stack([click, conversion], axis=1).astype(np.float32)
        self.rows.weights = np.stack([np.ones(num_rows), click], axis=1).astype(np.float32)
        self.chunk_sizes = [len(chunk) for chunk in np.array_split(np.arange(num_rows), 5)]

    def read(self, chunk: int, start: int, stop: int) -> Rows:
        """Rows of a chunk."""
        first = sum(self.chunk_sizes[:chunk])
        return self.rows.take(slice(first + start, first + stop))


class ToyData(RecDataModule):
    """A data module over :class:`ToySource`."""

    def __init__(self, num_rows: int = 96, batch_size: int = 16, num_workers: int = 0, num_domains: int = 1) -> None:
        super().__init__(make_schema(num_domains=num_domains), batch_size, num_workers)
        self.num_rows = num_rows

    def setup(self, stage: str) -> None:
        """Makes the splits."""
        self.sources = {
            split: ToySource(self.schema, self.num_rows, i) for i, split in enumerate(["train", "val", "test"])
        }
