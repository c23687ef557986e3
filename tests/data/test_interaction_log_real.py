from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_gem.data.interaction_log import Derived, InteractionLog, Join, Split
from lightning_gem.data.schema import Schema, Sequence, SparseFeature, Task
from tests.data.log_helpers import HASH, read_rows

SHARED = Path(__file__).parents[3] / "shared" / "data"


def _real(name: str) -> Path:
    if not (SHARED / name).is_dir():
        pytest.skip(f"{SHARED / name} is absent: this test reads a real data set that is not part of the repository")
    return SHARED / name


def test_kuairand_facts(tmp_path: Path) -> None:
    folder = _real("kuairand27k_explicit")
    schema = Schema(
        tasks=[Task("is_click"), Task("long_view", given="is_click")],
        user="user_id",
        timestamp="time_ms",
        time_unit="ms",
        sparse=[SparseFeature("user_active_degree", 10, encoding="vocabulary"), SparseFeature("user_id", HASH)],
        sequences=[Sequence("all", [SparseFeature("video_id", HASH)], max_len=10_000)],
    )
    module = InteractionLog(
        schema,
        str(folder / "interactions.tsv.gz"),
        256,
        joins=[Join(str(folder / "user_features_pure.csv.gz"), "user_id", ["user_active_degree"])],
        drop_duplicates=["user_id", "video_id", "time_ms"],
        order=["user_id", "video_id"],
        split=Split(test_from=1650209615879, val=0),
        cache_dir=str(tmp_path),
    )
    module.prepare_data()
    module.setup()
    train, test = read_rows(module, "train"), read_rows(module, "test")
    assert (len(train), len(test)) == (33_363, 8_341)
    lengths = test.sequences["all"].compact().lengths
    assert np.percentile(lengths, [25, 50, 75, 90, 99]).tolist() == pytest.approx([39, 72, 129, 215, 524], abs=1)
    assert lengths.max() == 607
    assert np.isin(test.user, train.user).mean() == pytest.approx(0.995, abs=5e-4)
    assert test.labels[:, 0].sum() == 5522
    assert int(test.row[0]) == 33_363
    module = InteractionLog(
        schema,
        str(folder / "interactions.tsv.gz"),
        256,
        joins=module.config.joins,
        drop_duplicates=module.config.drop_duplicates,
        split=Split(val=0),
        cache_dir=str(tmp_path),
    )
    module.prepare_data()
    module.setup()
    assert sum(module.sources["test"].chunk_sizes) == 8_341


def test_movielens_facts(tmp_path: Path) -> None:
    folder = _real("ml_latest_small")
    schema = Schema(
        tasks=[Task("liked")],
        user="userId",
        timestamp="timestamp",
        sparse=[SparseFeature("genres", 24, encoding="vocabulary")],
    )
    arguments: dict[str, Any] = {
        "log": str(folder / "ratings.csv.gz"),
        "batch_size": 256,
        "joins": [Join(str(folder / "movies.csv.gz"), "movieId", ["genres"])],
        "list_separators": {"genres": "|"},
        "derived": [Derived("liked", "at_least", ["rating"], 4)],
        "cache_dir": str(tmp_path),
    }
    module = InteractionLog(schema, split=Split(by="user", val=0), **arguments)
    module.prepare_data()
    module.setup()
    test = read_rows(module, "test")
    assert len(test) == 20_417
    assert test.labels.sum() == 9509
    assert test.sparse["genres"].row_lengths().max() == 7
    module = InteractionLog(schema, split=Split(test_from=1458635171, val=0), **arguments)
    module.prepare_data()
    module.setup()
    assert sum(module.sources["test"].chunk_sizes) == 20_168
