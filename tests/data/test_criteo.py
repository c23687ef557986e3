"""Criteo's text formats: conversion, splits, encodings, errors, races."""

import gzip
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import jsonargparse
import numpy as np
import pytest
import torch

from lightning_gem.data import RecBatch, RecDataModule, criteo_convert
from lightning_gem.data import cache as cache_module
from lightning_gem.data.criteo import CriteoTSV

REAL = Path(__file__).parents[2] / "../shared/data/criteo_kaggle_20k"
real = pytest.mark.skipif(not REAL.is_dir(), reason="the Criteo sample is not in ../shared/data")


def line(number: int) -> list[str]:
    """A line whose values follow from its number; I2 and C2 are missing in every third."""
    counts = [str(number), "" if number % 3 == 0 else "-1", *["7"] * 11]
    categories = [f"{number % 5:08x}", "" if number % 3 == 0 else "deadbeef", *["ffffffff"] * 24]
    return [str(number % 2), *counts, *categories]


def write(path: Path, numbers: range, delimiter: str = "\t", head: list[str] | None = None, order: bool = False) -> str:
    path.parent.mkdir(exist_ok=True)
    rows = [[str(n), *line(n)] if order else line(n) for n in numbers]
    text = "".join(delimiter.join(row) + "\n" for row in ([head] if head else []) + rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def make(folder: Path, train: str | list[str], **kwargs: Any) -> CriteoTSV:
    options = {"batch_size": 16, "min_count": 1, "num_embeddings": 50, "cache_dir": str(folder / "cache"), **kwargs}
    data = CriteoTSV(train, **options)
    data.prepare_data()
    data.setup()
    return data


def rows(data: CriteoTSV, split: str) -> RecBatch:
    source = data.sources[split]
    parts = [source.read(chunk, 0, size) for chunk, size in enumerate(source.chunk_sizes)]
    assert [len(part) for part in parts] == source.chunk_sizes
    return type(parts[0]).concat(parts).to_batch()


def numbers(data: CriteoTSV, split: str) -> list[int]:
    """Numbers of the lines, from I1."""
    return torch.expm1(rows(data, split).dense[:, 0]).round().long().tolist()


@pytest.mark.parametrize("suffix", ["tsv", "tsv.gz"])
def test_split_by_lines(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criteo_convert, "_ROW_GROUP", 16)
    monkeypatch.setattr(criteo_convert, "_BLOCK_BYTES", 2000)
    files = [write(tmp_path / f"d/day_{i}.{suffix}", range(20 * i, 20 * i + 20)) for i in range(11)]
    data = make(tmp_path, str(tmp_path / "d"), val_fraction=0.1, test_fraction=0.3)
    assert numbers(data, "train") == list(range(132))
    assert numbers(data, "val") == list(range(132, 154))
    assert numbers(data, "test") == list(range(154, 220))
    assert data.sources["train"].chunk_sizes == [16] * 8 + [4]
    explicit = make(tmp_path, files, val_fraction=0, test_fraction=0)
    assert numbers(explicit, "train") == list(range(220))
    assert set(explicit.sources) == {"train"}


def test_split_by_files(tmp_path: Path) -> None:
    days = [write(tmp_path / f"day_{i}", range(10 * i, 10 * i + 10)) for i in range(4)]
    data = make(tmp_path, days[:2], val=days[2], test=days[3])
    assert [numbers(data, split) for split in ("train", "val", "test")] == [
        list(range(20)),
        list(range(20, 30)),
        list(range(30, 40)),
    ]
    data = make(tmp_path, days[:2], test=days[3], val_fraction=0.25)
    assert [len(numbers(data, split)) for split in ("train", "val", "test")] == [15, 5, 10]


def test_encodings(tmp_path: Path) -> None:
    data = make(tmp_path, write(tmp_path / "a.tsv", range(30)), val_fraction=0, test_fraction=0.1)
    batch = rows(data, "train")
    number = torch.arange(27)
    torch.testing.assert_close(batch.labels[:, 0], (number % 2).float())
    torch.testing.assert_close(batch.dense[:, 0], torch.log1p(number.float()))
    torch.testing.assert_close(batch.dense[:, 1], torch.where(number % 3 == 0, 0, -np.log(2)).float())
    assert batch.sparse is not None
    # Values 0 and 1 occur six times, 2 to 4 five times.
    torch.testing.assert_close(batch.sparse["C1"].values(), number % 5 + 1)
    torch.testing.assert_close(batch.sparse["C2"].values(), torch.where(number % 3 == 0, 49, 1))
    buckets = torch.floor(torch.log2(number.clamp(min=1))).long() + 2
    torch.testing.assert_close(batch.sparse["I1_bucket"].values(), torch.where(number == 0, 1, buckets))
    torch.testing.assert_close(batch.sparse["I2_bucket"].values(), torch.where(number % 3 == 0, 33, 0))
    assert {table.name: table.num_embeddings for table in data.schema.request_tables}["I1_bucket"] == 34


def test_squared_log(tmp_path: Path) -> None:
    data = make(tmp_path, write(tmp_path / "a.tsv", range(300)), buckets="squared_log", val_fraction=0, test_fraction=0)
    batch = rows(data, "train")
    assert batch.sparse is not None
    number = torch.arange(300)
    squares = torch.floor(torch.log1p(number.double()) ** 2).long()
    torch.testing.assert_close(batch.sparse["I1_bucket"].values(), 1 + squares)
    torch.testing.assert_close(batch.sparse["I2_bucket"].values(), torch.where(number % 3 == 0, 434, 0))


def test_schema_follows_from_the_arguments(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", range(10))
    both = CriteoTSV(path).schema
    assert (len(both.sparse), len(both.dense)) == (39, 13)
    assert [task.name for task in both.tasks] == ["click"]
    dense = CriteoTSV(path, numeric="dense", num_embeddings=list(range(2, 28)), embedding_dim=8, min_count=3).schema
    assert (len(dense.sparse), len(dense.dense)) == (26, 13)
    assert [feature.num_embeddings for feature in dense.sparse] == list(range(2, 28))
    assert {(f.embedding_dim, f.min_count, f.encoding) for f in dense.sparse} == {(8, 3, "vocabulary")}
    bucket = CriteoTSV(path, numeric="bucket", categorical="hash").schema
    assert (len(bucket.sparse), len(bucket.dense)) == (39, 0)
    assert bucket.sparse[0].encoding == "hash"
    for arguments, text in (
        ({"num_embeddings": [3]}, "list of 26, not of 1"),
        ({"test_fraction": 1.0}, "test_fraction is a share of lines from 0 to below 1, not 1.0"),
        ({"val_fraction": 0.6, "test_fraction": 0.5}, "leave no line for training"),
    ):
        with pytest.raises(ValueError, match=text):
            CriteoTSV(path, **arguments)


def test_order_column(tmp_path: Path) -> None:
    head = ["", *map(str, range(40))]
    a = write(tmp_path / "a.csv.gz", range(39, 19, -1), ",", head, order=True)
    b = write(tmp_path / "b.csv.gz", range(20), ",", head, order=True)
    data = make(tmp_path, [a, b], val_fraction=0.1, test_fraction=0.2, delimiter=",", header=True, order_column=0)
    assert numbers(data, "train") + numbers(data, "val") + numbers(data, "test") == list(range(40))
    assert [len(numbers(data, split)) for split in ("train", "val", "test")] == [28, 4, 8]


def broken(number: int, column: int, value: str | None) -> str:
    fields = [line(n) for n in range(20)]
    if value is None:
        del fields[number - 1][column:]
    else:
        fields[number - 1][column] = value
    return "".join("\t".join(row) + "\n" for row in fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (broken(13, 39, None), "line 13 has 39 columns, but should have 40"),
        (broken(13, 39, "a\tb"), "line 13 has 41 columns, but should have 40"),
        (broken(13, 3, "many"), "line 13, column I3.*'many'"),
        (broken(13, 0, "2"), "line 13 has the label 2, but it should be 0 or 1"),
        (broken(13, 0, ""), "line 13 has the label None"),
        (broken(13, 0, "x"), "line 13, column label.*'x'"),
        (broken(13, 20, "xyz"), "line 13, column C7: 'xyz' is not a hexadecimal number"),
        (broken(13, 20, "123456789"), "line 13, column C7: '123456789' is not a hexadecimal"),
        (broken(20, 39, "f\n"), "line 21 has the label None"),
        ("", "has no lines: remove it"),
        (",".join(line(1)) + "\n", "line 1 has 1 columns, but should have 40"),
    ],
)
@pytest.mark.parametrize("block", [1 << 20, 1500])
def test_malformed_lines(tmp_path: Path, text: str, message: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criteo_convert, "_BLOCK_BYTES", block)
    good = write(tmp_path / "good.tsv", range(20))
    bad = tmp_path / "bad.tsv"
    bad.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        make(tmp_path, [good, str(bad)], val_fraction=0, test_fraction=0)
    assert str(error.value).startswith(str(bad))
    assert not list((tmp_path / "cache").iterdir())


def test_lines_are_counted_with_a_header(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("header\n" + broken(13, 0, "3").replace("\t", ","))
    with pytest.raises(ValueError, match="bad.csv: line 14 has the label 3"):
        make(tmp_path, str(path), delimiter=",", header=True)
    path.write_text("header\n")
    with pytest.raises(ValueError, match="bad.csv has no lines"):
        make(tmp_path, str(path), header=True, val_fraction=0, test_fraction=0)


def test_other_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        make(tmp_path, str(tmp_path / "absent"))
    path = write(tmp_path / "a.tsv", range(4))
    with pytest.raises(ValueError, match="val_fraction=0.1 of 4 lines is no line"):
        make(tmp_path, path)
    with pytest.raises(ValueError, match="of 4 lines .* would leave none for training"):
        make(tmp_path, path, val_fraction=0.45, test_fraction=0.5)
    whole = write(tmp_path / "b.tsv.gz", range(2000))
    content = Path(whole).read_bytes()
    Path(whole).write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="b.tsv.gz"):
        make(tmp_path, whole, val_fraction=0, test_fraction=0)


def test_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.tsv", range(40))
    make(tmp_path, path)
    with monkeypatch.context() as patch:
        patch.setattr("lightning_gem.data.criteo.convert", lambda *args: pytest.fail("converted again"))
        # Encodings are applied when reading.
        make(tmp_path, path, min_count=3, categorical="hash", numeric="dense")
    assert len(list((tmp_path / "cache").glob("criteo-*"))) == 1
    write(tmp_path / "a.tsv", range(50))
    assert len(numbers(make(tmp_path, path), "train")) == 40
    assert len(list((tmp_path / "cache").glob("criteo-*"))) == 2


def _convert(folder: Path, path: str, barrier: Any) -> None:
    barrier.wait()
    assert numbers(make(folder, path), "train") == list(range(1600))


def test_racing_processes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv.gz", range(2000))
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    racers = [context.Process(target=_convert, args=(tmp_path, path, barrier)) for _ in range(3)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert [racer.exitcode for racer in racers] == [0, 0, 0]
    assert sorted(path.name.split("-")[0] for path in (tmp_path / "cache").iterdir()) == ["criteo", "fitted"]


def _convert_slowly(folder: Path, path: str) -> None:
    original = criteo_convert._checked

    def slow(*args: Any) -> Any:
        (folder / "started").touch()
        time.sleep(60)
        return original(*args)

    criteo_convert._checked = slow
    make(folder, path)


def test_a_killed_run_leaves_nothing_that_looks_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.tsv", range(40))
    victim = multiprocessing.get_context("fork").Process(target=_convert_slowly, args=(tmp_path, path))
    victim.start()
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    os.kill(victim.pid or 0, signal.SIGKILL)
    victim.join()
    (leftover,) = (tmp_path / "cache").iterdir()
    assert leftover.suffix == ".tmp"
    monkeypatch.setattr(cache_module, "STALE_SECONDS", -1)
    assert len(numbers(make(tmp_path, path), "train")) == 32
    assert not leftover.exists()


def test_yaml(tmp_path: Path) -> None:
    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--data", type=RecDataModule)
    config = {
        "class_path": "lightning_gem.data.criteo.CriteoTSV",
        "init_args": {"train": write(tmp_path / "a.tsv", range(40)), "cache_dir": str(tmp_path / "cache"), "seed": 3},
    }
    data = parser.instantiate_classes(parser.parse_object({"data": config})).data
    data.prepare_data()
    data.setup("fit")
    assert isinstance(next(iter(data.train_dataloader())), RecBatch)
    assert len(data.schema.sparse) == 39


@real
def test_kaggle_sample(tmp_path: Path) -> None:
    files = [str(REAL / f"criteo_small_{part}.csv.gz") for part in ("train", "test")]
    arguments = {"delimiter": ",", "header": True, "order_column": 0, "val_fraction": 0, "test_fraction": 0.2}
    data = make(tmp_path, files, **arguments, num_embeddings=100_000)
    train, test = rows(data, "train"), rows(data, "test")
    assert (len(train), len(test)) == (16_000, 4_000)
    assert (int(train.labels.sum()), int(test.labels.sum())) == (4_122, 986)
    assert train.sparse is not None
    assert test.sparse is not None
    missing = [float((train.sparse[f"I{i}_bucket"].values() == 33).float().mean()) for i in range(1, 14)]
    expected = [0.46, 0, 0.212, 0.215, 0.024, 0.224, 0.044, 0.001, 0.044, 0.46, 0.044, 0.768, 0.215]
    np.testing.assert_allclose(missing, expected, atol=0.01)
    everything = make(tmp_path, files, **{**arguments, "test_fraction": 0}, num_embeddings=100_000)
    sizes = [len(everything.fitted.vocabularies[f"request/C{i}"]) for i in range(1, 27)]
    assert sum(sizes) == 75_920
    assert sizes[:6] == [234, 453, 10973, 7328, 72, 10]
