"""Outcomes that are known some time after their event, against plain loops."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_gem.data.interaction_log import Counter, InteractionLog, Split
from lightning_gem.data.schema import Schema, Sequence, SparseFeature, Task
from tests.data.log_helpers import read_rows

DELAY = 30


@pytest.mark.parametrize("unit", ["s", "ms"])
def test_outcomes_are_seen_late_and_the_rest_at_once(tmp_path: Path, unit: str) -> None:
    rng = np.random.default_rng(0)
    n = 150
    user, item, click = rng.integers(0, 4, n), rng.integers(0, 5, n), rng.integers(0, 2, n)
    time = np.sort(rng.integers(10**9, 10**9 + 200, n))
    tags = [rng.choice(4, rng.integers(0, 3), replace=False).tolist() for _ in range(n)]
    scaled = time * {"s": 1, "ms": 1000}[unit]
    log = pa.table({"user": user, "item": item, "click": click, "time": scaled, "tags": pa.array(tags)})
    pq.write_table(log, tmp_path / "log.parquet")
    items = SparseFeature("item", 5, encoding="index")
    schema = Schema(
        tasks=[Task("click")],
        sparse=[items],
        sequences=[
            Sequence("seen", [items]),
            Sequence("rated", [items, SparseFeature("click", 2, encoding="index")]),
            Sequence("clicked", [items]),
        ],
        user="user",
        timestamp="time",
        time_unit=unit,  # type: ignore[arg-type]
    )
    data = InteractionLog(
        schema,
        str(tmp_path / "log.parquet"),
        8,
        history_filters={"clicked": {"click": 1}},
        counters=[Counter(["user"]), Counter(["item"], ["click"]), Counter(["tags"], ["click"], within=100)],
        split=Split(test=0, val=0),
        label_delay=DELAY,
        cache_dir=str(tmp_path / "cache"),
    )
    data.prepare_data()
    data.setup()
    rows = read_rows(data, "train")
    dense = [feature.name for feature in data.schema.dense]
    assert dense[:3] == ["user_count", "item_count", "item_click_rate"]
    for i in range(n):
        at_once = [j for j in range(n) if time[j] < time[i]]
        late = [j for j in range(n) if time[j] < time[i] - DELAY]
        own = [j for j in at_once if user[j] == user[i]]
        known = [j for j in late if user[j] == user[i]]
        for name, expected in (("seen", own), ("rated", known), ("clicked", [j for j in known if click[j]])):
            events = rows.sequences[name]
            first = events.starts[i]
            assert events.ids[0, first : first + events.lengths[i]].tolist() == item[expected].tolist(), name
        same = [j for j in late if item[j] == item[i]]
        overall = click[late].mean() if late else 0.0
        shared = sum(len(set(tags[j]) & set(tags[i])) for j in late if time[j] >= time[i] - 100)
        expected_counts = [len(own), len(same), shared]
        found = rows.dense[i, [dense.index(f"{name}_count") for name in ("user", "item", "tags_within100")]]
        np.testing.assert_allclose(found, np.log1p(expected_counts), rtol=1e-6)
        rate = (click[same].sum() + 10 * overall) / (len(same) + 10)
        assert rows.dense[i, dense.index("item_click_rate")] == pytest.approx(rate)


def test_a_negative_delay_is_refused() -> None:
    schema = Schema(tasks=[Task("click")], sparse=[SparseFeature("item", 5)], user="user", timestamp="time")
    with pytest.raises(ValueError, match="label_delay is a number of seconds, 0 or more, not -1"):
        InteractionLog(schema, "log.parquet", 8, label_delay=-1)
