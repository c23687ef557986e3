"""Parquet files to batches, and errors that name the place and the fix."""

import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import jsonargparse
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_gem.data import RecBatch, RecDataModule
from lightning_gem.data import parquet_source as source_module
from lightning_gem.data.fitting import Fitted
from lightning_gem.data.parquet_source import TableEncoder, expand_paths
from lightning_gem.data.parquet_stream import ParquetStream
from lightning_gem.data.schema import DenseFeature, Schema, Sequence, SparseFeature, Task
from lightning_gem.data.stream import BatchStream

NUM_ROWS = 60


def make_schema(**kwargs: Any) -> Schema:
    return Schema(
        tasks=[Task("click"), Task("buy", given="click", weight="weight")],
        sparse=[
            SparseFeature("item", 50, encoding="index"),
            SparseFeature("city", 10, encoding="vocabulary"),
            SparseFeature("tags", 50, encoding="index"),
        ],
        dense=[DenseFeature("price"), DenseFeature("age", transform="standardize")],
        sequences=[
            Sequence(
                "views",
                [
                    SparseFeature("item", 50, column="view_item", encoding="index"),
                    SparseFeature("kind", 9, column="view_kind"),
                ],
                floats=[DenseFeature("seconds", column="view_seconds", fill=0.0)],
                timestamp="view_time",
                max_len=3,
            )
        ],
        timestamp="time",
        user="user",
        domain="surface",
        num_domains=2,
        **kwargs,
    )  # fmt: skip


def make_table(first: int = 0, num_rows: int = NUM_ROWS) -> dict[str, Any]:
    """Columns whose values follow from the row number."""
    rows = range(first, first + num_rows)
    events = [None if r % 7 == 6 else [10 * r + i for i in range(r % 6)] for r in rows]
    return {
        "click": pa.array([r % 2 for r in rows], pa.int8()),
        "buy": pa.array([None if r % 5 == 0 else r % 3 == 0 for r in rows]),
        "weight": pa.array([float(r) for r in rows]),
        "item": pa.array([r % 50 for r in rows], pa.int32()),
        "city": pa.array(["Rome" if r % 3 else None for r in rows]),
        "tags": pa.array([[r % 50] * (r % 3) for r in rows], pa.list_(pa.int16())),
        "price": pa.array([float(r) for r in rows]),
        "age": pa.array([r % 4 for r in rows]),
        "time": pa.array([1000 + r for r in rows], pa.timestamp("s")),
        "user": pa.array([f"u{r % 9}" for r in rows]),
        "surface": pa.array([r % 2 for r in rows], pa.uint8()),
        "view_time": pa.array(events, pa.list_(pa.int64())),
        "view_item": pa.array([e and [x % 50 for x in e] for e in events], pa.large_list(pa.int64())),
        "view_kind": pa.array([e and [str(x) for x in e] for e in events], pa.list_(pa.string())),
        "view_seconds": pa.array([e and [None for _ in e] for e in events], pa.list_(pa.float64())),
        "unused": pa.array([{"a": r} for r in rows]),
    }


def write(path: Path, columns: dict[str, Any], row_group: int = 7) -> str:
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=row_group)
    return str(path)


def make_stream(folder: Path, schema: Schema | None = None, **kwargs: Any) -> ParquetStream:
    data = ParquetStream(schema or make_schema(), **{"batch_size": 8, "cache_dir": str(folder / "cache"), **kwargs})
    data.prepare_data()
    data.setup()
    return data


def check_content(batch: RecBatch) -> None:
    row = batch.row
    numbers = row.tolist()
    torch.testing.assert_close(batch.dense[:, 0], row.float())
    torch.testing.assert_close(batch.request_timestamps, 1000 + row)
    torch.testing.assert_close(batch.domain, row % 2)
    torch.testing.assert_close(batch.labels[:, 0], (row % 2).float())
    buys = [float("nan") if r % 2 == 0 or r % 5 == 0 else float(r % 3 == 0) for r in numbers]
    torch.testing.assert_close(batch.labels[:, 1], torch.tensor(buys), equal_nan=True)
    torch.testing.assert_close(batch.weights[:, 1], torch.where(batch.labels[:, 1].isnan(), 0, row.float()))
    assert batch.sparse is not None
    torch.testing.assert_close(batch.sparse["item"].values(), row % 50)
    torch.testing.assert_close(batch.sparse["city"].values(), (row % 3 > 0).long())
    torch.testing.assert_close(batch.sparse["tags"].lengths().long(), row % 3)
    torch.testing.assert_close(batch.sparse["tags"].values(), (row % 50).repeat_interleave(row % 3))
    events = [[] if r % 7 == 6 else [10 * r + i for i in range(r % 6)][-3:] for r in numbers]
    views = batch.sequences["views"]
    assert views.lengths_cpu.tolist() == [len(each) for each in events]
    flat = torch.tensor([x for each in events for x in each], dtype=torch.int64)
    torch.testing.assert_close(views.timestamps, flat)
    torch.testing.assert_close(views.ids["views.item"].values(), flat % 50)
    assert views.floats.shape == (len(flat), 1)
    assert not views.floats.any()


@pytest.mark.parametrize("shuffle_rows", [0, 20])
@pytest.mark.parametrize("piece", [3, 8192])
def test_content(tmp_path: Path, shuffle_rows: int, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "_PIECE_ROWS", piece)
    paths = [write(tmp_path / f"d/{i}.parquet", make_table(20 * i, 20)) for i in range(3)]
    data = make_stream(tmp_path, train=paths, shuffle_rows=shuffle_rows)
    assert data.sources["train"].chunk_sizes == [7, 7, 6] * 3
    seen = []
    for batch in data.train_dataloader():
        check_content(batch)
        seen += batch.row.tolist()
    assert sorted(seen) == list(range(NUM_ROWS))
    assert (seen == sorted(seen)) == (shuffle_rows == 0)
    np.testing.assert_allclose(data.fitted.statistics["request/age"], [1.5, np.std(np.arange(60) % 4)])


def test_reads_in_any_order_give_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "_PIECE_ROWS", 4)
    path = write(tmp_path / "a.parquet", make_table(), row_group=25)
    data = make_stream(tmp_path, train=path)
    source = data.sources["train"]
    rng = np.random.default_rng(0)
    for _ in range(60):
        chunk = int(rng.integers(3))
        start = int(rng.integers(source.chunk_sizes[chunk]))
        stop = int(rng.integers(start + 1, source.chunk_sizes[chunk] + 1))
        rows = source.read(chunk, start, stop)
        assert 1 <= len(rows) <= stop - start
        batch = rows.to_batch()
        check_content(batch)
        assert batch.row[0] == 25 * chunk + start


def test_pieces_are_encoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "_PIECE_ROWS", 10)
    path = write(tmp_path / "a.parquet", make_table(), row_group=30)
    data = make_stream(tmp_path, train=path, shuffle_rows=16)
    encoded = []
    original = TableEncoder.encode
    monkeypatch.setattr(TableEncoder, "encode", lambda *args: encoded.append(args[3]) or original(*args))
    list(data.train_dataloader())
    assert sorted(encoded) == [0, 10, 20, 30, 40, 50]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers(tmp_path: Path, num_workers: int) -> None:
    path = write(tmp_path / "a.parquet", make_table())
    data = make_stream(tmp_path, train=path, num_workers=num_workers, shuffle_rows=16)
    # The parent reads too, so that the workers inherit an open file.
    data.sources["train"].read(0, 0, 1)
    batches = list(data.train_dataloader())
    for batch in batches:
        check_content(batch)
    assert sorted(row for batch in batches for row in batch.row.tolist()) == list(range(NUM_ROWS))


def test_worker_that_inherits_nothing(tmp_path: Path) -> None:
    data = make_stream(tmp_path, train=write(tmp_path / "a.parquet", make_table()))
    source = data.sources["train"]
    source.read(0, 0, 1)
    assert len(pickle.loads(pickle.dumps(source)).read(0, 0, 5)) == 5
    loader = DataLoader(BatchStream(source, 30), batch_size=None, num_workers=1, multiprocessing_context="forkserver")
    for batch in loader:
        check_content(batch)


def test_paths(tmp_path: Path) -> None:
    files = [write(tmp_path / name, {"x": [1]}) for name in ("p/part-10.parquet", "p/part-9.parquet", "q/a.parquet")]
    (tmp_path / "p/_SUCCESS").touch()
    assert expand_paths(str(tmp_path / "p")) == [files[1], files[0]]
    assert expand_paths(str(tmp_path / "*/part-*.parquet")) == [files[1], files[0]]
    assert expand_paths([files[2], str(tmp_path)]) == [files[2], files[1], files[0]]
    for nothing in (str(tmp_path / "absent.parquet"), str(tmp_path / "*.csv")):
        with pytest.raises(FileNotFoundError, match="no file at .*check the path"):
            expand_paths(nothing)


def test_splits_by_stage(tmp_path: Path) -> None:
    paths = {split: write(tmp_path / f"{split}.parquet", make_table()) for split in ("train", "val", "test", "predict")}
    for stage, splits in (
        ("fit", {"train", "val"}),
        ("validate", {"val"}),
        ("test", {"test"}),
        ("predict", {"predict", "test"}),
    ):
        data = ParquetStream(make_schema(), **paths, cache_dir=str(tmp_path))
        data.setup(stage)
        assert set(data.sources) == splits
    with pytest.raises(ValueError, match=r"no 'train' split \(there are predict, test\): name its files as train"):
        data.train_dataloader()
    with pytest.raises(ValueError, match=r"no 'val' split \(none is open yet\)"):
        ParquetStream(make_schema(), **paths, cache_dir=str(tmp_path)).val_dataloader()


def test_events_after_the_request_are_refused(tmp_path: Path) -> None:
    columns = make_table()
    events = columns["view_time"].to_pylist()
    events[30], events[31] = [1, 2, 1030], [1, 1032]  # the first is at the time of its request
    for name in ("view_item", "view_kind", "view_seconds"):
        values = columns[name].to_pylist()
        values[30], values[31] = [values[3][0]] * 3, [values[3][0]] * 2
        columns[name] = pa.array(values, columns[name].type)
    columns["view_time"] = pa.array(events, columns["view_time"].type)
    path = write(tmp_path / "a.parquet", columns)
    data = make_stream(tmp_path, train=path, shuffle_rows=0)
    with pytest.raises(ValueError, match="later than its request at 1031 s in 'time'") as error:
        list(data.train_dataloader())
    assert all(part in str(error.value) for part in ("a.parquet, row group 4", "row 3 ", "'view_time'", "1032 s"))
    data = make_stream(tmp_path, train=path, allow_future_events=True)
    assert sum(len(batch) for batch in data.train_dataloader()) == NUM_ROWS


def test_rows_without_a_user_are_different_users(tmp_path: Path) -> None:
    columns = make_table()
    columns["user"] = pa.array([None if r % 2 else f"u{r % 9}" for r in range(NUM_ROWS)])
    data = make_stream(tmp_path, train=write(tmp_path / "a.parquet", columns))
    keys = torch.cat([batch.user for batch in data.train_dataloader()])
    unknown = keys[keys < 0]
    assert len(unknown.unique()) == len(unknown) == NUM_ROWS // 2


def test_original_columns(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{i}.parquet", make_table(30 * i, 30)) for i in range(2)]
    data = make_stream(tmp_path, train=paths)
    read = data.original_columns("train", ["user", "tags", "unused"])
    rows = np.array([0, 5, 7, 29, 30, 31, 59])
    table = read(rows)
    assert table.column_names == ["user", "tags", "unused"]
    assert table["user"].to_pylist() == [f"u{r % 9}" for r in rows]
    assert table["unused"].to_pylist() == [{"a": r} for r in rows]
    assert read(np.array([3, 58]))["tags"].to_pylist() == [[], [58 % 50] * (58 % 3)]
    with pytest.raises(ValueError, match="column 'usr' is missing .*did you mean 'user'"):
        data.original_columns("train", ["usr"])


def test_predict_needs_no_labels(tmp_path: Path) -> None:
    columns = make_table()
    train = write(tmp_path / "a.parquet", columns)
    for name in ("click", "buy", "weight"):
        del columns[name]
    predict = write(tmp_path / "b.parquet", columns)
    data = make_stream(tmp_path, train=train, predict=predict)
    for batch in data.predict_dataloader():
        assert batch.labels.isnan().all()
        assert not batch.weights.any()
    with pytest.raises(ValueError, match="column 'click' is missing"):
        make_stream(tmp_path, train=predict)


def test_fitted_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = write(tmp_path / "a.parquet", make_table())
    state = make_stream(tmp_path, train=train).state_dict()
    monkeypatch.setattr("lightning_gem.data.parquet_stream.fit", lambda *args: pytest.fail("fitted again"))
    again = make_stream(tmp_path, train=train)
    again.load_state_dict(state)
    monkeypatch.undo()
    columns = make_table()
    columns["city"] = pa.array(["Rome", "Oslo"] * 30)
    other = make_stream(tmp_path, train=write(tmp_path / "b.parquet", columns))
    with pytest.raises(ValueError, match="trained with other vocabularies or statistics"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="'city' learns its encoding from the training split: give train"):
        make_stream(tmp_path, test=train)


def test_columns_to_fit_are_checked(tmp_path: Path) -> None:
    for columns, text in (
        (bad(city=None), "column 'city' is missing.*a.parquet"),
        (bad(age=pa.array(["old"] * NUM_ROWS)), "'age'.*row group 0.*values of type string are not numbers"),
        (bad(age=pa.nulls(NUM_ROWS, pa.int8())), "'age' has no finite value in the training split"),
    ):
        with pytest.raises(ValueError, match=text):
            make_stream(tmp_path, train=write(tmp_path / "a.parquet", columns))


def _fit(folder: Path, path: str, barrier: Any) -> None:
    barrier.wait()
    data = make_stream(folder, train=path)
    assert sum(len(batch) for batch in data.train_dataloader()) == NUM_ROWS


def test_racing_processes_fit_together(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", make_table())
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    racers = [context.Process(target=_fit, args=(tmp_path, path, barrier)) for _ in range(3)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert [racer.exitcode for racer in racers] == [0, 0, 0]
    assert len(list((tmp_path / "cache").iterdir())) == 1


def bad(**changes: Any) -> dict[str, Any]:
    columns = {**make_table(), **changes}
    return {name: column for name, column in columns.items() if column is not None}


def lists(*values: Any, of: str = "view_time", row: int = 30) -> pa.Array:
    """A list column with another value in one row, which is the third of row group 4."""
    column = make_table()[of]
    return pa.array([*column.to_pylist()[:row], *values, *column.to_pylist()[row + 1 :]], column.type)


# Name of the case: columns, text of the error, whether opening the file finds it already.
BAD_FILES: dict[str, tuple[dict[str, Any], str, bool]] = {
    "decreasing times": (
        bad(view_time=lists([5, 4, 9, 9, 1], row=29)),
        "sequence 'views'.*times in 'view_time' of row 1 decrease from 5 s to 4 s: sort each history",
        False,
    ),
    "unequal lengths": (
        bad(view_item=lists([1], of="view_item", row=29)),
        "'views'.*row 1 has 5 values in 'view_time', but 1 in 'view_item'",
        False,
    ),
    "null time": (bad(view_time=lists([1, None, 3, 4, 5], row=29)), "'view_time'.*null at position 5", False),
    "missing column": (bad(item=None), "column 'item' is missing.*the columns are click, buy", True),
    "misspelt column": (bad(price=None, prices=pa.array([1.0] * 60)), "'price' is missing.*you mean 'prices'", True),
    "missing label": (bad(buy=None), "column 'buy' is missing", True),
    "missing list column": (bad(view_kind=None), "column 'view_kind' is missing", True),
    "flat history": (bad(view_item=pa.array([1] * 60)), "'view_item'.*type int64, but a list column is needed", True),
    "list label": (bad(click=pa.array([[1]] * 60)), "'click'.*a flat column is needed", True),
    "wrong type": (bad(item=pa.array(["a"] * 60)), "'item'.*index encoding needs integers, not string", True),
    "text numbers": (bad(price=pa.array(["1"] * 60)), "'price'.*values of type string are not numbers", True),
    "text times": (bad(time=pa.array(["now"] * 60)), "'time'.*type string is no time", True),
    "all null": (bad(item=pa.nulls(60, pa.int64())), "column 'item'.*holds only nulls: fill it", True),
    "null type": (bad(item=pa.nulls(60)), "column 'item'.*holds only nulls: fill it", True),
    "all null lists": (bad(tags=pa.nulls(60, pa.list_(pa.int64()))), "column 'tags'.*holds only nulls", True),
    "label": (bad(click=pa.array([0] * 29 + [2] + [0] * 30)), "label column 'click'.*label 2 at position 1", False),
    "weight": (bad(weight=pa.array([0.0] * 29 + [-2] + [0] * 30)), "column 'weight'.*-2.0 at position 1 is not", False),
    "id": (bad(item=pa.array([0] * 29 + [50] + [0] * 30)), "'item'.*value 50 is not in 0 .. 49: raise", False),
    "event id": (bad(view_item=lists([1, 2, 3, 50, 1], of="view_item", row=29)), "'view_item'.*value 50 is not", False),
    "surface": (bad(surface=pa.array([0] * 29 + [2] + [0] * 30)), "'surface'.*value 2 is not in 0 .. 1", False),
    "NaN": (bad(price=pa.array([0.0] * 29 + [float("nan")] + [0.0] * 30)), "'price'.*value nan at position 1", False),
    "null": (bad(price=pa.array([0.0] * 29 + [None] + [0.0] * 30)), "'price'.*value None at position 1", False),
    "null request time": (bad(time=pa.array([1000] * 29 + [None] + [1000] * 30)), "'time'.*null at position 1", False),
}  # fmt: skip


def read_test(data: ParquetStream) -> None:
    data.setup("test")
    list(data.test_dataloader())


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files(tmp_path: Path, case: str) -> None:
    columns, text, at_once = BAD_FILES[case]
    good = write(tmp_path / "good.parquet", make_table())
    path = write(tmp_path / "bad.parquet", columns)
    data = ParquetStream(make_schema(), train=good, test=path, batch_size=8, cache_dir=str(tmp_path / "cache"))
    if not at_once:
        data.setup("test")
    with pytest.raises(ValueError, match=text) as error:
        read_test(data)
    assert f"file {path}" in str(error.value)
    assert at_once or "row group 4" in str(error.value)


def test_a_row_group_of_nulls_and_files_of_empty_histories_are_legal(tmp_path: Path) -> None:
    columns = make_table()
    columns["city"] = pa.array([None] * 30 + ["Rome"] * 30)
    for name in ("view_time", "view_item", "view_kind", "view_seconds"):
        columns[name] = pa.array([[]] * 60, columns[name].type)
    data = make_stream(tmp_path, train=write(tmp_path / "a.parquet", columns))
    for batch in data.train_dataloader():
        assert batch.sequences["views"].max_seqlen == 0


def test_empty_files_and_splits(tmp_path: Path) -> None:
    no_rows = write(tmp_path / "a.parquet", {name: column[:0] for name, column in make_table().items()})
    no_groups = tmp_path / "b.parquet"
    with pq.ParquetWriter(no_groups, pa.table(make_table()).schema):
        pass
    good = write(tmp_path / "c.parquet", make_table())
    for path in (no_rows, str(no_groups)):
        with pytest.raises(ValueError, match="has no rows.*remove it from the split or write it again"):
            make_stream(tmp_path, train=[good, path])
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileNotFoundError, match="folder"):
        make_stream(tmp_path, train=str(tmp_path / "folder"))
    (tmp_path / "zero.parquet").touch()
    with pytest.raises(ValueError, match="zero.parquet is not readable Parquet.*write it again"):
        make_stream(tmp_path, train=str(tmp_path / "zero.parquet"))


def test_truncated_and_corrupt_files(tmp_path: Path) -> None:
    columns = make_table()
    columns["view_seconds"] = columns["view_time"].cast(pa.list_(pa.float64()))
    good = write(tmp_path / "good.parquet", columns)
    content = Path(good).read_bytes()
    path = tmp_path / "bad.parquet"
    path.write_bytes(content[:-100])
    with pytest.raises(ValueError, match="bad.parquet is not readable Parquet.*truncated or corrupt"):
        make_stream(tmp_path, train=good, test=str(path))
    # The footer is whole, but pages are not.
    path.write_bytes(content[:500] + b"\xff" * 1500 + content[2000:])
    data = ParquetStream(make_schema(), train=good, test=str(path), cache_dir=str(tmp_path))
    with pytest.raises(ValueError, match="bad.parquet, row group 0 is not readable Parquet"):
        read_test(data)
    path.write_bytes(b"user,item\n1,2\n")
    with pytest.raises(ValueError, match="bad.parquet is not readable Parquet"):
        make_stream(tmp_path, train=good, test=str(path))


def test_a_file_that_vanishes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", make_table())
    data = make_stream(tmp_path, train=path)
    Path(path).unlink()
    with pytest.raises(FileNotFoundError):
        list(data.train_dataloader())


def test_mixed_list_and_flat_columns(tmp_path: Path) -> None:
    first = write(tmp_path / "a.parquet", make_table())
    second = write(tmp_path / "b.parquet", bad(tags=pa.array([1] * 60)))
    with pytest.raises(ValueError, match="column 'tags' is a list column in one of .*a.parquet and .*b.parquet"):
        make_stream(tmp_path, train=[first, second])


def test_types_may_differ_between_files(tmp_path: Path) -> None:
    first = write(tmp_path / "a.parquet", make_table(0, 30))
    columns = make_table(30, 30)
    columns["item"] = columns["item"].cast(pa.int64())
    columns["city"] = columns["city"].dictionary_encode()
    columns["time"] = columns["time"].cast(pa.timestamp("ns"))
    columns["view_time"] = columns["view_time"].cast(pa.large_list(pa.int32()))
    second = write(tmp_path / "b.parquet", columns)
    for batch in make_stream(tmp_path, train=[first, second]).train_dataloader():
        check_content(batch)


def test_minimal_schema(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"y": [0, 1, None], "a.b": [1, 2, 3]})
    data = make_stream(
        tmp_path, Schema([Task("y")], [SparseFeature("x", 5, column="a.b", encoding="index")]), train=path
    )
    (batch,) = data.train_dataloader()
    assert batch.sparse is not None
    assert sorted(batch.sparse.values().tolist()) == [1, 2, 3]
    assert not torch.stack([batch.user, batch.domain, batch.request_timestamps]).any()
    bare = make_stream(tmp_path, Schema([Task("y")]), train=path)
    (batch,) = bare.train_dataloader()
    assert batch.sparse is None
    assert batch.dense.shape == (3, 0)


def test_yaml(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"y": [0, 1], "city": ["a", "b"]})
    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--data", type=RecDataModule)
    config = {
        "class_path": "lightning_gem.data.parquet_stream.ParquetStream",
        "init_args": {
            "schema": {
                "tasks": [{"name": "y"}],
                "sparse": [{"name": "city", "num_embeddings": 10, "encoding": "hash"}],
            },
            "train": [path],
            "val": path,
            "batch_size": 2,
        },
    }
    data = parser.instantiate_classes(parser.parse_object({"data": config})).data
    data.prepare_data()
    data.setup("fit")
    (batch,) = data.train_dataloader()
    assert isinstance(batch, RecBatch)


def test_no_needless_columns_are_read() -> None:
    encoder = TableEncoder(make_schema(), Fitted())
    names = list(make_table())
    columns = encoder.columns(names)
    assert sorted(columns) == sorted(set(names) - {"unused"})
    assert len(columns) == len(set(columns))
