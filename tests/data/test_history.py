import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from lightning_gem.data.history import earlier_rows, group_codes, histories, running_rate

# Few users and few times: many ties.
LOGS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 6), st.sampled_from([0.0, 1.0, float("nan")])), min_size=1, max_size=40
)


def _columns(log: list[tuple[int, int, float]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    log = sorted(log, key=lambda row: row[1])
    users, times, outcomes = (np.array(column) for column in zip(*log, strict=True))
    return users, times, outcomes


@given(LOGS)
def test_earlier_rows_equal_a_loop(log: list[tuple[int, int, float]]) -> None:
    users, times, _ = _columns(log)
    earlier = earlier_rows(users, times)
    for row in range(len(log)):
        expected = [j for j in range(len(log)) if users[j] == users[row] and times[j] < times[row]]
        assert earlier.order[earlier.begins[row] : earlier.ends[row]].tolist() == expected
        assert earlier.latest()[row] == (expected[-1] if expected else -1)
        assert earlier.sums(times)[row] == sum(times[expected])


@given(LOGS, st.integers(1, 4), st.integers(1, 3))
def test_windows_equal_a_loop(log: list[tuple[int, int, float]], span: int, count: int) -> None:
    users, times, _ = _columns(log)
    recent = earlier_rows(users, times).since(np.searchsorted(times, times - span))
    for row in range(len(log)):
        expected = [j for j in range(len(log)) if users[j] == users[row] and 0 < times[row] - times[j] <= span]
        assert recent.order[recent.begins[row] : recent.ends[row]].tolist() == expected
        latest = recent.last(count)
        assert latest.order[latest.begins[row] : latest.ends[row]].tolist() == expected[-count:]


@given(LOGS, st.integers(1, 5))
def test_histories_equal_a_loop(log: list[tuple[int, int, float]], max_len: int) -> None:
    users, times, outcomes = _columns(log)
    events, starts, lengths = histories(earlier_rows(users, times), max_len, outcomes == 1)
    for row in range(len(log)):
        expected = [j for j in range(len(log)) if users[j] == users[row] and times[j] < times[row] and outcomes[j] == 1]
        assert events[starts[row] : starts[row] + lengths[row]].tolist() == expected[-max_len:]


@given(LOGS, st.sampled_from([0.5, 10.0]))
def test_running_rate_equals_a_loop(log: list[tuple[int, int, float]], prior: float) -> None:
    users, times, outcomes = _columns(log)
    everyone = earlier_rows(np.zeros_like(users), times)
    rates = running_rate(earlier_rows(users, times), everyone, outcomes, prior)
    for row in range(len(log)):
        known = [j for j in range(len(log)) if times[j] < times[row] and not np.isnan(outcomes[j])]
        overall = np.mean(outcomes[known]) if known else 0.0
        own = [outcomes[j] for j in known if users[j] == users[row]]
        assert rates[row] == (sum(own) + prior * overall) / (len(own) + prior)


def test_group_codes_tell_apart_all_columns_and_nulls() -> None:
    a = pa.array(["x", "x", None, "y", None, "x"])
    b = pa.array([1, 2, 1, 1, 1, 1])
    codes = group_codes([a, b], 6)
    assert codes[0] == codes[5]
    assert codes[2] == codes[4]
    assert len(set(codes.tolist())) == 4
    assert group_codes([], 3).tolist() == [0, 0, 0]


def test_group_codes_do_not_overflow() -> None:
    rows = np.arange(50_000)
    columns = [pa.array(rows), pa.array(rows[::-1]), pa.array(rows), pa.array(rows), pa.array(rows)]
    assert len(np.unique(group_codes(columns, len(rows)))) == len(rows)


@given(LOGS, st.integers(0, 4), st.integers(1, 4))
def test_delayed_rows_equal_a_loop(log: list[tuple[int, int, float]], delay: int, span: int) -> None:
    users, times, _ = _columns(log)
    known = earlier_rows(users, times).before(np.searchsorted(times, times - delay))
    recent = known.since(np.searchsorted(times, times - span))
    for row in range(len(log)):
        expected = [j for j in range(len(log)) if users[j] == users[row] and times[j] < times[row] - delay]
        assert known.order[known.begins[row] : known.ends[row]].tolist() == expected
        expected = [j for j in expected if times[j] >= times[row] - span]
        assert recent.order[recent.begins[row] : recent.ends[row]].tolist() == expected
