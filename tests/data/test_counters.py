"""Counters over the latest events and in log odds, and bucketed columns to count by, against plain loops."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_gem.data.interaction_log import Counter, Derived, InteractionLog, Split
from lightning_gem.data.schema import DenseFeature, Schema, SparseFeature, Task
from tests.data.log_helpers import read_rows


def make_log(folder: Path, unit: str = "s", **arguments: object) -> InteractionLog:
    rng = np.random.default_rng(0)
    log = pa.table(
        {
            "user": rng.integers(0, 5, 200),
            "time": np.sort(rng.integers(0, 120, 200)) * {"s": 1, "ms": 1000}[unit],
            "price": pa.array(rng.random(200), mask=rng.random(200) < 0.1),
            "click": rng.integers(0, 2, 200),
        }
    )
    pq.write_table(log, folder / "log.parquet")
    schema = Schema(
        tasks=[Task("click")],
        dense=[DenseFeature("price", fill=-1)],
        sparse=[SparseFeature("user", 5, encoding="index")],
        user="user",
        timestamp="time",
        time_unit=unit,  # type: ignore[arg-type]
    )
    data = InteractionLog(
        schema,
        str(folder / "log.parquet"),
        8,
        split=Split(test=0, val=0),
        cache_dir=str(folder / "cache"),
        **arguments,  # type: ignore[arg-type]
    )
    data.prepare_data()
    data.setup()
    return data


def log_odds(rate: float) -> float:
    rate = min(max(rate, 1e-3), 1 - 1e-3)
    return float(np.log(rate / (1 - rate)))


@pytest.mark.parametrize("last", [None, 3])
def test_log_odds_of_the_latest_events(tmp_path: Path, last: int | None) -> None:
    data = make_log(tmp_path, counters=[Counter(["user"], ["click"], prior=2, last=last, log_odds=True)])
    rows = read_rows(data, "train")
    names = [feature.name for feature in data.schema.dense]
    prefix = "user" if last is None else "user_last3"
    assert names == ["price", f"{prefix}_count", f"{prefix}_click_rate"]
    log = pq.read_table(tmp_path / "log.parquet").to_pydict()
    for i in range(200):
        earlier = [j for j in range(200) if log["time"][j] < log["time"][i]]
        own = [j for j in earlier if log["user"][j] == log["user"][i]][-(last or 200) :]
        overall = sum(log["click"][j] for j in earlier) / max(len(earlier), 1)
        rate = (sum(log["click"][j] for j in own) + 2 * overall) / (len(own) + 2)
        expected = [np.log1p(len(own)), log_odds(rate) - log_odds(overall)]
        np.testing.assert_allclose(rows.dense[i, 1:], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("unit", ["s", "ms"])
def test_within_seconds_whatever_the_unit(tmp_path: Path, unit: str) -> None:
    data = make_log(tmp_path, unit, counters=[Counter(["user"], ["click"], prior=1, last=2, within=15)])
    rows = read_rows(data, "train")
    assert data.config.counters[0].names == ["user_last2_within15_count", "user_last2_within15_click_rate"]
    log = pq.read_table(tmp_path / "log.parquet").to_pydict()
    second = {"s": 1, "ms": 1000}[unit]
    for i in range(200):
        earlier = [j for j in range(200) if log["time"][j] < log["time"][i]]
        near = [
            j for j in earlier if log["user"][j] == log["user"][i] and log["time"][j] >= log["time"][i] - 15 * second
        ]
        overall = sum(log["click"][j] for j in earlier) / max(len(earlier), 1)
        rate = (sum(log["click"][j] for j in near[-2:]) + overall) / (len(near[-2:]) + 1)
        np.testing.assert_allclose(rows.dense[i, 1:], [np.log1p(len(near[-2:])), rate], rtol=1e-5)


def test_counting_by_bucket(tmp_path: Path) -> None:
    data = make_log(
        tmp_path,
        derived=[Derived("level", "bucket", ["price"], boundaries=[0.3, 0.6])],
        counters=[Counter(["level"], [])],
    )
    counts = np.expm1(read_rows(data, "train").dense[:, 1]).round()
    log = pq.read_table(tmp_path / "log.parquet").to_pydict()
    # Null is a level of its own.
    level = [None if price is None else (price >= 0.3) + (price >= 0.6) for price in log["price"]]
    for i in range(200):
        assert counts[i] == sum(level[j] == level[i] for j in range(200) if log["time"][j] < log["time"][i])


def write_films(path: Path, change_after: int | None = None) -> dict[str, list[Any]]:
    """A log of rated films; with ``change_after``, everything is different after that time."""
    rng, other = np.random.default_rng(0), np.random.default_rng(1)
    log: dict[str, list[Any]] = {"user": [], "time": [], "title": [], "genres": [], "liked": []}
    for time in np.sort(rng.integers(0, 60, 150)).tolist():
        source = rng if change_after is None or time <= change_after else other
        genres = source.permutation(["Drama", "War", "Comedy"])[: source.integers(0, 4)].tolist()
        year = int(source.integers(1990, 2010))
        title = [f"Heat ({year})", f"(500) Days ({year}) ", "Nameless"][source.integers(0, 3)]
        for name, value in zip(
            log, (int(source.integers(0, 3)), time, title, "|".join(genres) or None, 0), strict=True
        ):
            log[name].append(value)
        log["liked"][-1] = int(source.integers(0, 2))
    pq.write_table(pa.table(log), path)
    return log


def film_log(path: Path, **arguments: Any) -> InteractionLog:
    schema = Schema(
        [Task("liked")],
        dense=[DenseFeature("year", fill=0)],
        user="user",
        timestamp="time",
    )
    options: dict[str, Any] = {
        "derived": [Derived("year", "number", ["title"], pattern=r"\((?P<year>\d{4})\)\s*$")],
        "counters": [
            Counter(["user", "genres"], ["liked"], prior=2),
            Counter(["genres"], ["liked"], prior=2, last=3, within=20),
        ],
        "list_separators": {"genres": "|"},
        "split": Split(test=0, val=0),
        "cache_dir": str(path.parent / "cache"),
        **arguments,
    }
    data = InteractionLog(schema, str(path), 8, **options)
    data.prepare_data()
    data.setup()
    return data


def test_counting_by_the_values_of_a_list(tmp_path: Path) -> None:
    log = write_films(tmp_path / "films.parquet")
    dense = read_rows(film_log(tmp_path / "films.parquet"), "train").dense
    lists = [(text or "").split("|") if text else [] for text in log["genres"]]
    for i, genres in enumerate(lists):
        earlier = [j for j in range(150) if log["time"][j] < log["time"][i]]
        overall = sum(log["liked"][j] for j in earlier) / max(len(earlier), 1)
        own = [j for g in genres for j in earlier if g in lists[j] and log["user"][j] == log["user"][i]]
        near = [j for j in earlier if log["time"][j] >= log["time"][i] - 20]
        recent = [j for g in genres for j in [k for k in near if g in lists[k]][-3:]]
        expected = [float(log["title"][i].strip()[-5:-1]) if ")" in log["title"][i] else 0]
        for events in (own, recent):
            rate = (sum(log["liked"][j] for j in events) + 2 * overall) / (len(events) + 2)
            expected += [np.log1p(len(events)), rate]
        np.testing.assert_allclose(dense[i], expected, rtol=1e-5)


def test_lists_of_later_events_change_nothing(tmp_path: Path) -> None:
    log = write_films(tmp_path / "films.parquet")
    now = sorted(log["time"])[75]
    write_films(tmp_path / "changed.parquet", change_after=now)
    known = sum(time <= now for time in log["time"])
    dense = [read_rows(film_log(tmp_path / f"{name}.parquet"), "train").dense for name in ("films", "changed")]
    assert 75 < known < 150
    np.testing.assert_array_equal(dense[0][:known], dense[1][:known])
    assert (dense[0][known:] != dense[1][known:]).any()


def test_patterns_and_lists_that_do_not_fit(tmp_path: Path) -> None:
    write_films(path := tmp_path / "films.parquet")
    for derived, message in (
        (Derived("year", "number", ["title"]), "number needs a pattern"),
        (Derived("year", "bucket", ["title"], boundaries=[1], pattern="a"), "other ops take none"),
        (Derived("year", "number", ["title"], pattern="("), "'year': pattern '\\('"),
        (Derived("year", "number", ["title"], pattern="(a)"), "has 0 named groups"),
        (Derived("year", "number", ["title"], pattern="(?P<x>a)(?!b)"), "perl operator"),
        (Derived("year", "number", ["user"], pattern="(?P<x>a)"), "column 'user'.*no text"),
        (Derived("year", "number", ["title"], pattern="(?P<x>Heat)"), "to one number per row"),
    ):
        with pytest.raises(ValueError, match=message):
            film_log(path, derived=[derived])
    lists = {"genres": "|", "title": " "}
    with pytest.raises(ValueError, match="are list columns .* but by takes only one"):
        film_log(
            path, counters=[Counter(["genres", "title"])], list_separators=lists, derived=[Derived("year", "hour")]
        )


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="last must be positive"):
        make_log(tmp_path, counters=[Counter(["user"], last=0)])
    with pytest.raises(ValueError, match="user_within-1_count: within must be positive, not -1"):
        make_log(tmp_path, counters=[Counter(["user"], within=-1)])
    with pytest.raises(ValueError, match="needs ascending boundaries"):
        make_log(tmp_path, derived=[Derived("level", "bucket", ["price"])])
    with pytest.raises(ValueError, match="needs ascending boundaries"):
        make_log(tmp_path, derived=[Derived("level", "bucket", ["price"], boundaries=[2, 1])])
    with pytest.raises(ValueError, match="outcome of the same row"):
        make_log(
            tmp_path,
            derived=[Derived("level", "bucket", ["click"], boundaries=[0.5])],
            counters=[Counter(["level"], ["click"])],
        )
