import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule, Trainer
from torch import nn, optim

from lightning_gem.data.interaction_log import Derived, InteractionLog, Join, Split
from lightning_gem.data.schema import DenseFeature, Schema, SparseFeature, Task
from tests.data.log_helpers import (
    ARGUMENTS,
    EVERYTHING,
    features_of,
    make_module,
    make_schema,
    random_log,
    read_rows,
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(2, 30), st.integers(0, 10**6))
def test_rows_equal_a_loop(tmp_path: Path, num_rows: int, seed: int) -> None:
    log = random_log(num_rows, seed)
    # A click and a second event of one user: no column is empty.
    log["click"][0], log["user"][1], log["time"][1] = 1, log["user"][0], log["time"][0] + 500
    rows = read_rows(make_module(tmp_path, log, make_schema("index"), split=EVERYTHING), "train")
    order = np.lexsort([log["id"], log["time"]])
    log = {name: column[order] for name, column in log.items()}
    assert rows.row.tolist() == list(range(num_rows))
    assert rows.user.tolist() == log["user"].tolist()
    for i in range(num_rows):
        earlier = [j for j in range(num_rows) if log["time"][j] < log["time"][i]]
        own = [j for j in earlier if log["user"][j] == log["user"][i]]
        for name, kept in (("all", own), ("clicks", [j for j in own if log["click"][j] == 1])):
            events = rows.sequences[name]
            cut = slice(events.starts[i], events.starts[i] + events.lengths[i])
            kept = kept[-{"all": 4, "clicks": 3}[name] :]
            assert events.ids[0, cut].tolist() == log["item"][kept].tolist()
            assert events.timestamps[cut].tolist() == log["time"][kept].tolist()
        events = rows.sequences["all"]
        cut, kept = slice(events.starts[i], events.starts[i] + events.lengths[i]), own[-4:]
        assert events.ids[1, cut].tolist() == log["click"][kept].tolist()
        expected = np.stack([log["price"][kept], log["seconds"][kept] / log["price"][kept]], axis=1)
        np.testing.assert_array_equal(events.floats[cut], expected.astype(np.float32))
        item = [j for j in earlier if log["item"][j] == log["item"][i]]
        both = [j for j in item if log["user"][j] == log["user"][i]]
        recent = [j for j in own if log["time"][j] >= log["time"][i] - 2000]
        rate = {name: log[name][earlier].mean() if earlier else 0 for name in ("click", "buy")}
        dense = [
            log["price"][i],
            log["time"][i] - log["time"][own[-1]] if own else -1,
            len(own),
            np.log1p(np.float32(len(item))),
            (log["click"][item].sum() + 2 * rate["click"]) / (len(item) + 2),
            (log["buy"][item].sum() + 2 * rate["buy"]) / (len(item) + 2),
            np.log1p(np.float32(len(both))),
            (log["click"][both].sum() + 10 * rate["click"]) / (len(both) + 10),
            np.log1p(np.float32(len(earlier))),
            rate["click"],
            np.log1p(np.float32(len(recent))),
            (log["click"][recent].sum() + rate["click"]) / (len(recent) + 1),
        ]
        np.testing.assert_allclose(rows.dense[i], dense, rtol=1e-6)
        assert rows.labels[i, 0] == log["click"][i]
        assert rows.weights[i].tolist() == [1, log["click"][i]]


@pytest.mark.parametrize(("encoding", "transform"), [("hash", "none"), ("vocabulary", "standardize")])
def test_nothing_at_or_after_a_row_changes_its_features(tmp_path: Path, encoding: str, transform: str) -> None:
    log = random_log(200, seed=1)
    split = Split(val=0, test_from=int(np.median(log["time"])))
    (tmp_path / "a").mkdir()
    base = make_module(tmp_path / "a", log, make_schema(encoding, transform), split=split)
    # Vocabularies and statistics see all training rows, so for them only later rows of the test period may change.
    parts = ["test"] if encoding == "vocabulary" else ["train", "test"]
    rng = np.random.default_rng(2)
    times = np.sort(log["time"])
    for trial in range(12):
        part = parts[trial % len(parts)]
        rows = read_rows(base, part)
        i = int(rng.integers(len(rows)))
        position = int(rows.row[i])
        number = np.lexsort([log["id"], log["time"]])[position]
        late = (log["time"] >= times[position]) & (log["id"] != number)
        changed = {name: column.copy() for name, column in log.items()}
        for name in ("user", "item", "price", "click", "buy", "seconds"):
            changed[name][late] = rng.permutation(changed[name])[late]
        changed["buy"] *= changed["click"]
        for name in ("click", "buy", "seconds"):
            changed[name][number] = 1 - log[name][number]
        (folder := tmp_path / str(trial)).mkdir()
        after = read_rows(make_module(folder, changed, make_schema(encoding, transform), split=split), part)
        assert after.row[i] == position
        assert features_of(after, i) == features_of(rows, i)


def test_later_rows_may_be_absent(tmp_path: Path) -> None:
    log = random_log(100, seed=3)
    rows = read_rows(make_module(tmp_path, log, make_schema(), split=EVERYTHING), "train")
    now = np.sort(log["time"])[60]
    known = {name: column[log["time"] <= now] for name, column in log.items()}
    before = read_rows(make_module(tmp_path, known, make_schema(), split=EVERYTHING), "train")
    assert 60 < len(before) < 100
    assert [features_of(before, i) for i in range(len(before))] == [features_of(rows, i) for i in range(len(before))]


def test_vocabulary_and_statistics_come_from_training(tmp_path: Path) -> None:
    log = random_log(100, seed=4)
    log["time"] = np.sort(log["time"]) + np.arange(100)
    log["item"][80:] = 77
    log["price"][80:] = 1000
    rows = read_rows(
        make_module(tmp_path, log, make_schema("vocabulary", "standardize"), split=Split(val=0.25)), "test"
    )
    assert (rows.sparse["item"].values == 0).all()
    prices = log["price"][:60]
    np.testing.assert_allclose(rows.dense[:, 0], (1000 - prices.mean()) / prices.std(), rtol=1e-5)


def test_splits_by_time_keep_ties_together(tmp_path: Path) -> None:
    log = random_log(10, seed=5)
    log["time"] = np.array([1, 2, 3, 4, 5, 5, 5, 5, 6, 7])
    module = make_module(tmp_path, log, make_schema(), split=Split(test=0.4, val=0.25))
    assert {name: read_rows(module, name).row.tolist() for name in module.sources} == {
        "train": [0, 1, 2],
        "val": [3],
        "test": [4, 5, 6, 7, 8, 9],
    }
    module = make_module(tmp_path, log, make_schema(), split=Split(val_from=3, test_from="1970-01-01T00:00:05.5Z"))
    assert {name: read_rows(module, name).row.tolist() for name in module.sources} == {
        "train": [0, 1],
        "val": [2, 3, 4, 5, 6, 7],
        "test": [8, 9],
    }


def test_split_by_user(tmp_path: Path) -> None:
    log = random_log(15, seed=6)
    log["user"] = np.array([0] * 10 + [1] * 5)
    log["time"] = np.arange(15) * 2 % 15
    module = make_module(tmp_path, log, make_schema(), split=Split(by="user", test=0.2, val=0.25))
    splits = {name: read_rows(module, name) for name in ("train", "val", "test")}
    for user, sizes in ((0, [6, 2, 2]), (1, [3, 1, 1])):
        times = [rows.request_timestamps[rows.user == user] for rows in splits.values()]
        assert [len(part) for part in times] == sizes
        assert times[0].max() < times[1].min() <= times[1].max() < times[2].min()


def test_timestamps_and_fine_units(tmp_path: Path) -> None:
    log = pa.table(random_log(6, seed=7))
    micro = pa.array([1_600_000_000_000_000 + i for i in (0, 0, 1, 2, 2, 3)])
    log = log.set_column(log.schema.get_field_index("time"), "time", micro.cast(pa.timestamp("us", "UTC")))
    log = log.set_column(log.schema.get_field_index("user"), "user", pa.array(["a"] * 6))
    module = make_module(tmp_path, log, make_schema(), split=Split(test_from="2020-09-13T12:26:40.000002+00:00", val=0))
    assert read_rows(module, "train").sequences["all"].lengths.tolist() == [0, 0, 2]
    assert read_rows(module, "test").sequences["all"].lengths.tolist() == [3, 3, 4]
    assert set(read_rows(module, "train").request_timestamps.tolist()) == {1_600_000_000}


def test_derived_columns_and_domain(tmp_path: Path) -> None:
    log = pa.table(
        {
            "time": pa.array(["2024-01-01 05:30", "2024-01-07 23:59", "2024-01-08 00:00"]),
            "a": [1.0, None, 3.0],
            "b": [0, 2, 2],
            "c": ["x", None, "z"],
            "label": [0, 1, 0],
        }
    )
    paths = [str(tmp_path / name) for name in ("one.csv", "two.tsv")]
    pa_csv.write_csv(log.slice(0, 1), paths[0])
    pa_csv.write_csv(log.slice(1), paths[1], pa_csv.WriteOptions(delimiter="\t"))
    schema = Schema(
        [Task("label")],
        timestamp="time",
        domain="part",
        num_domains=2,
        sparse=[
            SparseFeature("crossed", 10, encoding="vocabulary"),
            SparseFeature("hour", 24, encoding="index"),
            SparseFeature("weekday", 7, encoding="index"),
        ],
        dense=[DenseFeature("ratio", fill=-1), DenseFeature("big", fill=-1)],
    )
    module = InteractionLog(
        schema,
        paths,
        2,
        derived=[
            Derived("part", "file"),
            Derived("crossed", "cross", ["c", "part"]),
            Derived("hour", "hour"),
            Derived("weekday", "weekday"),
            Derived("ratio", "ratio", ["a", "b"]),
            Derived("big", "at_least", ["a"], 2),
        ],
        split=EVERYTHING,
        cache_dir=str(tmp_path / "cache"),
    )
    module.prepare_data()
    module.setup()
    rows = read_rows(module, "train")
    assert {name: bag.values.tolist() for name, bag in rows.sparse.items()} == {
        "crossed": [2, 1, 3],
        "hour": [5, 23, 0],
        "weekday": [0, 6, 0],
    }
    assert rows.dense.tolist() == [[-1, 0], [-1, -1], [1.5, 1]]
    assert rows.domain.tolist() == [0, 1, 1]
    assert rows.user.tolist() == [0, 0, 0]
    assert pq.read_table(next((tmp_path / "cache").glob("*/0.parquet"))).column(0).to_pylist() == [
        "null|1",
        "x|0",
        "z|1",
    ]


def test_lists_follow_their_rows(tmp_path: Path) -> None:
    log = pa.table(random_log(3000, seed=8)).append_column("tags", pa.array(["a|b", "", "c", None, "a"] * 600))
    schema = replace(make_schema(), sparse=[SparseFeature("tags", 4, encoding="vocabulary")])
    module = make_module(tmp_path, log, schema, split=EVERYTHING, list_separators={"tags": "|"})
    found = read_rows(module, "train").sparse["tags"].compact().values
    ids = {"a": 1, "": 2, "b": 3, "c": 0}
    texts = log.sort_by([("time", "ascending"), ("id", "ascending")]).column("tags").to_pylist()
    assert found.tolist() == [ids[tag] for text in texts if text is not None for tag in text.split("|")]


def test_duplicates_and_order(tmp_path: Path) -> None:
    log = random_log(6, seed=9)
    log |= {"user": np.zeros(6, int), "time": np.array([5, 5, 5, 9, 9, 1]), "item": np.array([3, 1, 3, 2, 2, 4])}
    log["price"] = np.arange(6) / 2 + 1
    module = make_module(
        tmp_path, log, make_schema("index"), split=EVERYTHING, drop_duplicates=["user", "item", "time"], order=["item"]
    )
    rows = read_rows(module, "train")
    assert rows.sparse["item"].values.tolist() == [4, 1, 3, 2]
    assert rows.dense[:, 0].tolist() == [3.5, 1.5, 1.0, 2.5]
    assert rows.sequences["all"].lengths.tolist() == [0, 1, 1, 3]


def test_batches_workers_and_cache(tmp_path: Path) -> None:
    log = random_log(5000, seed=10) | {"time": np.random.default_rng(0).permutation(5000)}
    module = make_module(tmp_path, log, make_schema("index"))
    (folder,) = (tmp_path / "cache").iterdir()
    stamp = (folder / "dense.npy").stat().st_mtime_ns
    again = InteractionLog(
        make_schema("index"), str(tmp_path / "log.parquet"), cache_dir=str(tmp_path / "cache"), **ARGUMENTS
    )
    again.prepare_data()
    assert [folder] == list((tmp_path / "cache").iterdir())
    assert (folder / "dense.npy").stat().st_mtime_ns == stamp
    source = module.sources["train"]
    assert len(pickle.dumps(source)) < 10_000
    copy = pickle.loads(pickle.dumps(source)).read(1, 3, 7)
    assert features_of(copy, 2) == features_of(source.read(1, 3, 7), 2)
    assert [feature.name for feature in module.schema.dense][-2:] == [
        "user_within2000_count",
        "user_within2000_click_rate",
    ]
    batches = list(module.train_dataloader())
    assert sorted(np.concatenate([batch.row for batch in batches]).tolist()) == list(range(3600))
    batch = batches[0]
    assert batch.dense.shape == (8, len(module.schema.dense))
    assert batch.sequences["all"].ids.keys() == ["all.item", "all.click"]
    assert all(batch.row.diff().gt(0).all() for batch in module.test_dataloader())
    module.num_workers = 2
    parallel = list(module.test_dataloader())
    module.num_workers = 0
    expected = list(module.test_dataloader())
    assert sum(len(batch) for batch in parallel) == 1000
    assert {int(batch.row[0]) for batch in parallel} == {int(batch.row[0]) for batch in expected}


def test_no_validation_split_means_no_validation(tmp_path: Path) -> None:
    class Small(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LazyLinear(1)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.layer(batch.dense).square().mean()

        def validation_step(self, batch: Any, index: int) -> None:
            raise AssertionError("there is nothing to validate on")

        def configure_optimizers(self) -> Any:
            return optim.SGD(self.parameters(), 0.0)

    module = make_module(tmp_path, random_log(60, seed=11), make_schema(), split=Split(val=0))
    assert sorted(module.sources) == ["test", "train"]
    model = Small()
    model.layer(next(iter(module.train_dataloader())).dense)
    trainer = Trainer(
        max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(model, module)
    assert trainer.global_step == 2
    with pytest.raises(ValueError, match="no 'val' split"):
        trainer.validate(model, module)


def test_checkpoints_know_their_vocabularies(tmp_path: Path) -> None:
    log = random_log(60, seed=16)
    state = make_module(tmp_path, log, make_schema("vocabulary")).state_dict()
    same = make_module(tmp_path, log, make_schema("vocabulary"), batch_size=4)
    same.load_state_dict(state)
    log["item"] += 1
    other = make_module(tmp_path, log, make_schema("vocabulary"))
    with pytest.raises(ValueError, match="trained with other vocabularies"):
        other.load_state_dict(state)


def test_yaml(tmp_path: Path) -> None:
    text = """
    schema:
      user: u
      timestamp: t
      tasks: [{name: click}]
      sequences: [{name: clicks, features: [{name: item}]}]
    log: a.csv
    batch_size: 4
    joins: [{path: b.csv, key: [u, id], columns: [age]}]
    derived: [{name: big, op: at_least, columns: [age], value: 30}]
    history_filters: {clicks: {click: 1, kind: ad}}
    counters: [{by: [item], outcomes: [click], prior: 2}, {}]
    split: {test_from: 2024-01-31, val_from: 1700000000}
    list_separators: {tags: "|"}
    """
    (tmp_path / "a.yaml").write_text(text)
    parser = ArgumentParser()
    parser.add_class_arguments(InteractionLog, "data")
    (tmp_path / "a.yaml").write_text("data:" + text.replace("\n", "\n  "))
    module = parser.instantiate_classes(parser.parse_path(str(tmp_path / "a.yaml"))).data
    assert module.config.joins == [Join("b.csv", ["u", "id"], ["age"])]
    assert module.config.history_filters == {"clicks": {"click": 1, "kind": "ad"}}
    assert module.config.split == Split(test_from="2024-01-31", val_from=1700000000)
    assert [feature.name for feature in module.schema.dense] == ["item_count", "item_click_rate", "all_count"]
