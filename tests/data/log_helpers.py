"""Small random logs that the tests of InteractionLog share."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lightning_gem.data.interaction_log import Counter, Derived, InteractionLog, Split
from lightning_gem.data.rows import Rows
from lightning_gem.data.schema import DenseFeature, Schema, Sequence, SparseFeature, Task

EVERYTHING = Split(test=0, val=0)
HASH = 1 << 40


def make_schema(encoding: str = "hash", transform: str = "none") -> Schema:
    def sparse(name: str, num: int = HASH) -> SparseFeature:
        return SparseFeature(name, num, encoding=encoding if num == HASH else "index")

    return Schema(
        tasks=[Task("click"), Task("buy", given="click")],
        user="user",
        timestamp="time",
        sparse=[sparse("user"), sparse("item"), sparse("hour", 24)],
        dense=[DenseFeature("price", transform=transform), DenseFeature("gap", fill=-1), DenseFeature("num")],
        sequences=[
            Sequence(
                "all", [sparse("item"), sparse("click", 2)], [DenseFeature("price"), DenseFeature("ratio")], max_len=4
            ),
            Sequence("clicks", [sparse("item")], max_len=3),
        ],
    )


ARGUMENTS: dict[str, Any] = {
    "batch_size": 8,
    "outcomes": ["seconds"],
    "derived": [
        Derived("hour", "hour"),
        Derived("gap", "seconds_since_previous"),
        Derived("num", "num_earlier"),
        Derived("ratio", "ratio", ["seconds", "price"]),
    ],
    "history_filters": {"clicks": {"click": 1}},
    "counters": [
        Counter(["item"], ["click", "buy"], prior=2),
        Counter(["user", "item"], ["click"]),
        Counter([], ["click"]),
        Counter(["user"], ["click"], prior=1, within=2000),
    ],
    "order": ["id"],
}


def random_log(num_rows: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    click = rng.integers(0, 2, num_rows)
    return {
        "id": np.arange(num_rows),
        "user": rng.integers(0, 4, num_rows),
        "item": rng.integers(0, 5, num_rows),
        "time": 1_600_000_000 + 1000 * rng.integers(0, 12, num_rows),
        "price": rng.integers(1, 9, num_rows) / 4,
        "click": click,
        "buy": click * rng.integers(0, 2, num_rows),
        "seconds": rng.integers(0, 100, num_rows) / 8,
    }


def make_module(
    folder: Path, log: dict[str, np.ndarray] | pa.Table, schema: Schema, **arguments: Any
) -> InteractionLog:
    path = folder / "log.parquet"
    pq.write_table(log if isinstance(log, pa.Table) else pa.table(log), path)
    module = InteractionLog(schema, str(path), cache_dir=str(folder / "cache"), **{**ARGUMENTS, **arguments})
    module.prepare_data()
    module.setup()
    return module


def read_rows(module: InteractionLog, split: str) -> Rows:
    source = module.sources[split]
    return Rows.concat([source.read(i, 0, size) for i, size in enumerate(source.chunk_sizes)])


def features_of(rows: Rows, i: int) -> list[bytes]:
    """Everything that a model may see of a row, bit by bit."""
    row = rows.take(slice(i, i + 1))
    arrays = [row.dense, row.request_timestamps, row.domain]
    arrays += [bag.compact().values for bag in row.sparse.values()]
    for events in row.sequences.values():
        compact = events.compact()
        arrays += [compact.ids, compact.floats, compact.timestamps]
    return [array.tobytes() for array in arrays]
