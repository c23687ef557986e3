"""Rows per second of ParquetStream next to a bare pyarrow scan of the same columns, in one process.

    python benchmarks/parquet_stream.py --rows 200000 --threads 1

Both sides take turns, so that other load on the machine hits them alike; the medians are printed. On a busy machine the
ratio of processor times says more than that of wall times.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from lightning_gem.data.parquet_stream import ParquetStream
from lightning_gem.data.schema import DenseFeature, Schema, Sequence, SparseFeature, Task

NUM_DENSE, NUM_SPARSE = 13, 26
SEQUENCES = {"click": 20, "view": 60}


def make_file(path: Path, rows: int, row_group: int) -> None:
    """Writes dense, sparse and sequence columns with the skew of real ids; all options as pyarrow has them."""
    rng = np.random.default_rng(0)
    columns: dict[str, object] = {f"d{i}": rng.lognormal(size=rows).astype(np.float32) for i in range(NUM_DENSE)}
    columns |= {f"c{i}": rng.zipf(1.3, rows) % 1_000_000 for i in range(NUM_SPARSE)}
    time = rng.integers(1_600_000_000, 1_700_000_000, rows)
    columns |= {"label": (rng.random(rows) < 0.2).astype(np.int8), "user": rng.integers(0, 1 << 40, rows), "time": time}
    for name, mean in SEQUENCES.items():
        lengths = rng.integers(0, 2 * mean, rows)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        # Times rise within a row and end before its request.
        ages = rng.integers(1, 3600, offsets[-1]).cumsum()
        last = np.repeat(ages[np.maximum(offsets[1:] - 1, 0)], lengths)
        events = {
            "item": rng.zipf(1.2, offsets[-1]) % (1 << 30),
            "category": rng.integers(0, 500, offsets[-1]),
            "time": np.repeat(time, lengths) - 1 - (last - ages),
        }
        for field, values in events.items():
            columns[f"{name}_{field}"] = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)
    pq.write_table(pa.table(columns), path, row_group_size=row_group)


def make_schema() -> Schema:
    """All columns of the file; every id is hashed."""
    return Schema(
        tasks=[Task("label")],
        dense=[DenseFeature(f"d{i}", transform="log1p") for i in range(NUM_DENSE)],
        sparse=[SparseFeature(f"c{i}", 100_000) for i in range(NUM_SPARSE)],
        sequences=[
            Sequence(
                name,
                [
                    SparseFeature("item", 1_000_000, column=f"{name}_item", table="item"),
                    SparseFeature("category", 1000, column=f"{name}_category", table="category"),
                ],
                timestamp=f"{name}_time",
            )
            for name in SEQUENCES
        ],
        timestamp="time",
        user="user",
    )


def scan(path: Path, columns: list[str], threads: int) -> int:
    """Reads row group by row group."""
    file = pq.ParquetFile(path)
    return sum(
        file.read_row_group(group, columns=columns, use_threads=threads > 1).num_rows
        for group in range(file.num_row_groups)
    )


def stream(path: Path, schema: Schema, batch_size: int, shuffle_rows: int) -> int:
    """Makes all batches of one epoch."""
    data = ParquetStream(schema, train=str(path), batch_size=batch_size, shuffle_rows=shuffle_rows)
    data.setup("fit")
    return sum(len(batch) for batch in data.train_dataloader())


def main() -> None:
    """Prints the rates and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--row_group", type=int, default=50_000)
    parser.add_argument("--batch_size", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    pa.set_cpu_count(args.threads)
    torch.set_num_threads(args.threads)
    schema = make_schema()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        make_file(path, args.rows, args.row_group)
        columns = pq.read_schema(path).names
        sides = {
            "pyarrow scan": lambda: scan(path, columns, args.threads),
            "ParquetStream, in order": lambda: stream(path, schema, args.batch_size, 0),
            "ParquetStream, shuffled": lambda: stream(path, schema, args.batch_size, 65536),
        }
        wall: dict[str, list[float]] = {name: [] for name in sides}
        processor: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(args.repeats):
            for name, side in sides.items():
                begin = time.perf_counter(), time.process_time()
                assert side() == args.rows
                wall[name].append(time.perf_counter() - begin[0])
                processor[name].append(time.process_time() - begin[1])
    print(f"{args.rows} rows, {len(columns)} columns, batch size {args.batch_size}, {args.threads} thread(s)")
    for name in sides:
        rate = args.rows / statistics.median(wall[name])
        ratios = [
            statistics.median(bare / own for bare, own in zip(times["pyarrow scan"], times[name], strict=True))
            for times in (wall, processor)
        ]
        print(f"{name:<24} {rate:>10,.0f} rows/s   ratio {ratios[0]:.2f}   of processor times {ratios[1]:.2f}")


if __name__ == "__main__":
    main()
