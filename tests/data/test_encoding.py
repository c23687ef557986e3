"""Raw Arrow values to ids, numbers, times, labels and keys."""

import datetime
import warnings

import numpy as np
import pyarrow as pa
import pytest

from lightning_gem.data.columns import fetch, flatten
from lightning_gem.data.encoding import encode_dense, encode_ids, encode_keys, encode_labels, encode_times
from lightning_gem.data.fitting import Fitted, fit, fit_statistics, fit_vocabulary
from lightning_gem.data.schema import DenseFeature, Schema, SparseFeature, Task

WHERE = "file x.parquet, row group 3"


def hashed(values: pa.Array, rows: int = 1000, table: str = "t") -> list[int]:
    return encode_ids(SparseFeature("f", rows, table=table), values, None, WHERE).tolist()


def test_hash_depends_on_the_value_only() -> None:
    expected = hashed(pa.array([1, -2, None, 70000], pa.int64()))
    for kind in (pa.int32(), pa.float64()):
        assert hashed(pa.array([1, -2, None, 70000], kind)) == expected
    assert hashed(pa.array([1, 70000], pa.uint64())) == [expected[0], expected[3]]
    assert hashed(pa.array([70000, 1, 1], pa.int64()).dictionary_encode()) == [expected[3], expected[0], expected[0]]
    assert hashed(pa.array([float("nan")])) == [expected[2]]
    assert hashed(pa.array([True, None])) == [expected[0], expected[2]]
    chunks = pa.chunked_array([pa.array([1]), pa.array([-2, None]), pa.array([70000])])
    assert hashed(chunks) == expected
    assert hashed(pa.array([9, 1, -2, None, 70000]).slice(1)) == expected


def test_hash_of_text() -> None:
    expected = hashed(pa.array(["a", None, "b", "ü"]))
    assert hashed(pa.array(["a", None, "b", "ü"], pa.large_string())) == expected
    assert hashed(pa.array(["a", None, "b", "ü"]).dictionary_encode()) == expected
    assert hashed(pa.array([b"a", None, b"b", "ü".encode()])) == expected
    assert expected[1] == hashed(pa.array([None], pa.int64()))[0]
    assert hashed(pa.array([], pa.string())) == []


def test_hash_never_changes() -> None:
    """Checkpoints depend on these numbers."""
    assert hashed(pa.array([0, 1, 2, -1, 1 << 40]), 10**6) == [0, 618236, 892743, 106304, 967857]
    assert hashed(pa.array(["a", "Criteo", ""]), 10**6) == [165317, 578155, 232954]


def test_small_ranges_are_looked_up_with_the_same_result() -> None:
    values = np.arange(1000) % 7 - 3
    assert hashed(pa.array(values)) == hashed(pa.array([*values, 1 << 50]))[:-1]


@pytest.mark.parametrize("scale", [1, 1000, 1 << 20])
def test_hash_is_even_and_depends_on_the_table(scale: int) -> None:
    values = pa.array(np.arange(200_000) * scale)
    first, second = (np.array(hashed(values, 1000, table)) for table in ("a", "b"))
    for rows in (first, second):
        counts = np.bincount(rows, minlength=1000)
        assert counts.min() > 100
        assert counts.max() < 320
    assert np.mean(first == second) < 0.01
    large = np.array(hashed(pa.array(np.arange(10_000)), 1 << 40))
    assert len(np.unique(large)) == 10_000
    assert large.max() > 1 << 38


def test_index() -> None:
    feature = SparseFeature("f", 10, column="raw", encoding="index")
    for values in (pa.array([1, 9], pa.int16()), pa.array([True, False]), pa.array([1.0, 9.0])):
        expected = [1, 0] if pa.types.is_boolean(values.type) else [1, 9]
        ids = encode_ids(feature, values, None, WHERE)
        assert ids.tolist() == expected
        assert ids.dtype == "int64"
    for values, text in (
        ([3, 10], "value 10 is not in 0 .. 9"),
        ([-1], "value -1 is not"),
        ([1, None], "null at position 1"),
        ([1.0, 0.5], "value 0.5 at position 1 is no integer"),
        ([float("nan")], "value nan at position 0 is no integer"),
        ([12.0], "value 12 is not in 0 .. 9"),
        (["a"], "needs integers, not string"),
    ):
        with pytest.raises(ValueError, match=text) as error:
            encode_ids(feature, pa.array(values), None, WHERE)
        assert all(part in str(error.value) for part in ("'f'", "'raw'", WHERE, "encoding: hash"))


def test_vocabulary() -> None:
    feature = SparseFeature("f", 4, encoding="vocabulary", min_count=2)
    values = pa.array(["z", "y", "x", "y", "z", "x", "y", "once", None, None, None, "w", "w"])
    vocabulary = fit_vocabulary(feature, values)
    assert vocabulary.values.to_pylist() == ["y", "w", "x"]
    assert encode_ids(feature, pa.array(["x", "once", None, "y", "new", "w"]), vocabulary, WHERE).tolist() == [
        3, 0, 0, 1, 0, 2,
    ]  # fmt: skip
    assert encode_ids(feature, pa.array(["w", "x"]).dictionary_encode(), vocabulary, WHERE).tolist() == [2, 3]
    with pytest.raises(ValueError, match="none of the vocabulary, which has type string"):
        encode_ids(feature, pa.array([1]), vocabulary, WHERE)
    with pytest.raises(ValueError, match="needs a vocabulary: fit one"):
        encode_ids(feature, values, None, WHERE)


def test_a_row_for_nulls() -> None:
    feature = SparseFeature("f", 4, encoding="vocabulary", null_row=True)
    vocabulary = fit_vocabulary(feature, pa.array(["y", "x", "y", None, "w", "x", "v"]))
    assert vocabulary.values.to_pylist() == ["x", "y"]
    texts = pa.array(["y", None, "new", "x"])
    assert encode_ids(feature, texts, vocabulary, WHERE).tolist() == [2, 3, 0, 1]
    assert encode_ids(feature, texts.dictionary_encode(), vocabulary, WHERE).tolist() == [2, 3, 0, 1]
    numbers = fit_vocabulary(feature, pa.array([5.0, 7.0, float("nan")]))
    assert encode_ids(feature, pa.array([7.0, float("nan"), None, 6.0]), numbers, WHERE).tolist() == [2, 3, 3, 0]
    nothing = fit_vocabulary(feature, pa.array([None], pa.string()))
    assert encode_ids(feature, pa.array([None, "x"], pa.string()), nothing, WHERE).tolist() == [3, 0]
    for wrong in (SparseFeature("f", 4, null_row=True), SparseFeature("f", 1, encoding="vocabulary", null_row=True)):
        with pytest.raises(ValueError, match="'f': null_row takes a row of two or more of the vocabulary encoding"):
            Schema([Task("click")], [wrong])


def test_vocabulary_of_numbers() -> None:
    feature = SparseFeature("f", 10, encoding="vocabulary")
    vocabulary = fit_vocabulary(feature, pa.chunked_array([[5, 7], [5, None]], pa.int32()))
    assert vocabulary.values.to_pylist() == [5, 7]
    assert encode_ids(feature, pa.array([7.0, 5.0, 5.5, float("nan")]), vocabulary, WHERE).tolist() == [2, 1, 0, 0]
    empty = fit_vocabulary(feature, pa.array([None, None], pa.string()))
    assert encode_ids(feature, pa.array(["a", None]), empty, WHERE).tolist() == [0, 0]


def test_shared_table_shares_the_vocabulary_over_pieces() -> None:
    features = [SparseFeature(name, 10, table="t", encoding="vocabulary") for name in "ab"]
    schema = Schema([Task("y")], features)
    pieces = [
        (pa.table({"a": [1, 1, 2], "b": [3.0, None, 2.0]}), WHERE),
        (pa.table({"a": [2, 3, 4], "b": [3, 3, 3]}), WHERE),
    ]
    fitted = fit(schema, pieces)
    assert [vocabulary.values.to_pylist() for vocabulary in fitted.vocabularies.values()] == [[3, 2, 1, 4]]
    with pytest.raises(ValueError, match="feature 'b'.*type string does not mix with int64"):
        fit(schema, [(pa.table({"a": [1], "b": ["x"]}), WHERE)])
    with pytest.raises(ValueError, match="same encoding, boundaries, min_count and null_row"):
        Schema([Task("y")], [features[0], SparseFeature("b", 10, table="t", encoding="hash")])


def test_fitted_survives_storage(tmp_path) -> None:
    schema = Schema(
        [Task("y")],
        [SparseFeature("a", 5, encoding="vocabulary"), SparseFeature("b", 5, encoding="vocabulary")],
        [DenseFeature("d", transform="standardize")],
    )
    fitted = fit(schema, [(pa.table({"a": ["x", "x", "y"], "b": [2, 1, 1], "d": [1.0, 2.0, 6.0]}), WHERE)])
    fitted.save(tmp_path)
    loaded = Fitted.load(tmp_path)
    assert loaded.digest() == fitted.digest()
    assert loaded.statistics == fitted.statistics
    other = fit(schema, [(pa.table({"a": ["x", "y", "y"], "b": [2, 1, 1], "d": [1.0, 2.0, 6.0]}), WHERE)])
    assert other.digest() != fitted.digest()


def test_many_values_are_counted_in_bounded_memory() -> None:
    schema = Schema([Task("y")], [SparseFeature("a", 10, encoding="vocabulary")])
    pieces = (
        (pa.table({"a": np.append(np.arange(i, i + 30_000), [7, 8, 8])}), WHERE) for i in range(0, 300_000, 30_000)
    )
    fitted = fit(schema, pieces)
    assert fitted.vocabularies["request/a"].values.to_pylist() == [8, 7, 0, 1, 2, 3, 4, 5, 6]


def test_bucket() -> None:
    values = pa.array([-1.0, 0.0, 0.5, 1.0, None, float("nan"), 9.0])
    feature = SparseFeature("f", 4, encoding="bucket", boundaries=[0.0, 1.0])
    assert encode_ids(feature, values, None, WHERE).tolist() == [0, 1, 1, 2, 3, 3, 2]
    tight = SparseFeature("f", 3, encoding="bucket", boundaries=[0.0, 1.0])
    assert encode_ids(tight, values, None, WHERE).tolist() == [0, 1, 1, 2, 2, 2, 2]
    assert encode_ids(feature, pa.array([None, 1]), None, WHERE).tolist() == [3, 2]
    with pytest.raises(ValueError, match="values of type string are not numbers"):
        encode_ids(feature, pa.array(["a"]), None, WHERE)


def test_result_can_be_written_in_place() -> None:
    for feature, values in (
        (SparseFeature("f", 10), pa.array([1, 2])),
        (SparseFeature("f", 10), pa.array(["a", "b"])),
        (SparseFeature("f", 10, encoding="index"), pa.array([1, 2])),
    ):
        out = np.zeros(2, dtype=np.int64)
        assert encode_ids(feature, values, None, WHERE, out=out) is out
        assert out.tolist() == encode_ids(feature, values, None, WHERE).tolist()


def test_dense() -> None:
    numbers = encode_dense(DenseFeature("d"), pa.array([1, 2], pa.int8()), None, WHERE)
    assert numbers.dtype == np.float32
    assert numbers.tolist() == [1, 2]
    log = encode_dense(DenseFeature("d", transform="log1p"), pa.array([0.0, 9.0, -9.0]), None, WHERE)
    np.testing.assert_allclose(log, [0, np.log(10), -np.log(10)], rtol=1e-6)
    filled = encode_dense(DenseFeature("d", fill=-1), pa.array([None, 2, float("nan"), float("inf")]), None, WHERE)
    assert filled.tolist() == [-1, 2, -1, -1]
    assert encode_dense(DenseFeature("d", fill=5), pa.array([True, None, False]), None, WHERE).tolist() == [1, 5, 0]


def test_standardize_keeps_precision() -> None:
    feature = DenseFeature("d", transform="standardize")
    values = pa.array(np.arange(1000) + 1_700_000_000)
    statistics = fit_statistics(feature, values)
    numbers = encode_dense(feature, values, statistics, WHERE)
    np.testing.assert_allclose(numbers[[0, -1]], [-1.7303, 1.7303], atol=1e-4)
    assert len(np.unique(numbers)) == 1000
    with pytest.raises(ValueError, match="standardize needs statistics"):
        encode_dense(feature, values, None, WHERE)


def test_statistics_of_pieces_equal_those_of_the_whole() -> None:
    feature = DenseFeature("d", transform="standardize")
    values = np.random.default_rng(0).normal(1e6, 3, 1000)
    fitted = fit(
        Schema([Task("y")], dense=[feature]), [(pa.table({"d": part}), WHERE) for part in np.split(values, [10, 500])]
    )
    np.testing.assert_allclose(fitted.statistics["request/d"], [values.mean(), values.std()], rtol=1e-9)
    assert fit_statistics(feature, pa.array([3, 3, None])) == (3.0, 1.0)
    with pytest.raises(ValueError, match="'d'.*no finite value in the training split"):
        fit_statistics(feature, pa.array([None, float("nan")], pa.float64()))


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf"), 1e300])
def test_dense_without_fill_rejects(bad: float | None) -> None:
    with pytest.raises(ValueError, match="not a finite float32 number: give the feature a fill") as error:
        encode_dense(DenseFeature("d", "raw"), pa.array([1.0, bad]), None, WHERE)
    assert all(part in str(error.value) for part in ("'d'", "'raw'", WHERE, "position 1"))
    with pytest.raises(ValueError, match="values of type string are not numbers"):
        encode_dense(DenseFeature("d"), pa.array(["1"]), None, WHERE)


def test_times() -> None:
    for unit, factor in (("s", 1), ("ms", 1000), ("us", 10**6), ("ns", 10**9)):
        assert encode_times("t", pa.array([5 * factor, -1]), unit, WHERE).tolist() == [5, -1]
    assert encode_times("t", pa.array([5.9, -0.5]), "s", WHERE).tolist() == [5, -1]
    moment = datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone.utc)
    seconds = int(moment.timestamp())
    for unit in ("s", "ms", "us", "ns"):
        assert encode_times("t", pa.array([moment], pa.timestamp(unit, "UTC")), "ns", WHERE).tolist() == [seconds]
    for kind in (pa.date32(), pa.date64()):
        assert encode_times("t", pa.array([moment.date()], kind), "s", WHERE).tolist() == [seconds]
    for values, text in (
        ([1, None], "null at position 1"),
        ([1.0, float("nan")], "NaN or infinite"),
        (["2024"], "type string is no time"),
    ):
        with pytest.raises(ValueError, match=text) as error:
            encode_times("when", pa.array(values), "s", WHERE)
        assert "'when'" in str(error.value)
        assert WHERE in str(error.value)


def test_times_in_another_unit_are_suspected() -> None:
    milliseconds = pa.array([0, 1_700_000_000_000])
    for values, unit, right in (
        (milliseconds, "s", "ms"),
        (milliseconds.cast(pa.float64()), "s", "ms"),
        (pa.array([1_700_000_000_000_000]), "ms", "us"),
        (pa.array([1_700_000_000_000_000_000]), "s", "ns"),
    ):
        with pytest.warns(UserWarning, match=f"column 't' read in {unit} .* set schema.time_unit: {right}"):
            encode_times("t", values, unit, WHERE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encode_times("t", milliseconds, "ms", WHERE)
        encode_times("t", pa.array([1, 2]), "ns", WHERE)
        encode_times("t", pa.array([], pa.int64()), "s", WHERE)
        encode_times("t", milliseconds.cast(pa.timestamp("s")), "s", WHERE)


def test_labels_and_weights() -> None:
    tasks = [Task("click", weight="w"), Task("buy", column="bought", given="click"), Task("return", given="buy")]
    table = pa.table(
        {
            "click": pa.array([True, True, False, None, True]),
            "bought": pa.array([1, 0, 1, 1, None], pa.int8()),
            "return": [1.0, 1.0, 1.0, 1.0, float("nan")],
            "w": [2.0, 0.0, 3.0, 4.0, 1.0],
        }
    )
    labels, weights = encode_labels(tasks, table, WHERE)
    nan = float("nan")
    np.testing.assert_array_equal(labels, [[1, 1, 1], [1, 0, nan], [0, nan, nan], [nan, nan, nan], [1, nan, nan]])
    np.testing.assert_array_equal(weights, [[2, 1, 1], [0, 1, 0], [3, 0, 0], [0, 0, 0], [1, 0, 0]])


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"y": [0, 2], "w": [1, 1]}, "label column 'y'.*label 2 at position 1 is not 0, 1 or null"),
        ({"y": [0.5, 1], "w": [1, 1]}, "label 0.5 at position 0 is not"),
        ({"y": ["0", "1"], "w": [1, 1]}, "values of type string are not numbers"),
        ({"y": [0, 1], "w": [1, -1]}, "weight column 'w'.*weight -1 at position 1 is not a finite number >= 0"),
        ({"y": [0, 1], "w": [1, float("nan")]}, "weight nan at position 1 is not"),
        ({"y": [0, 1], "w": [1, None]}, "weight None at position 1 is not"),
        ({"y": [0, 1]}, "column 'w' is missing"),
        ({"w": [0, 1]}, "column 'y' is missing"),
    ],
)
def test_bad_labels_and_weights(columns: dict[str, list[object]], text: str) -> None:
    with pytest.raises(ValueError, match=text) as error:
        encode_labels([Task("y", weight="w")], pa.table(columns), WHERE)
    assert WHERE in str(error.value)


def test_keys() -> None:
    lowest = np.iinfo(np.int64).min
    assert encode_keys("u", pa.array([5, None, -7], pa.int32()), WHERE).tolist() == [5, lowest + 1, -7]
    keys = encode_keys("u", pa.array(["a", "b", None, "a"]), WHERE)
    assert keys[0] == keys[3] != keys[1]
    assert keys[2] == lowest + 2
    # Unknown users are different people, also from one piece of a split to the next.
    nulls = [encode_keys("u", pa.nulls(3, kind), WHERE, first) for kind, first in ((pa.int64(), 0), (pa.string(), 3))]
    assert len(np.unique(np.concatenate(nulls))) == 6
    assert (keys[[0, 1]] >= 0).all()
    assert encode_keys("u", pa.array(["a", "b", None, "a"]).dictionary_encode(), WHERE).tolist() == keys.tolist()
    with pytest.raises(ValueError, match="key column 'u'.*type double: store integers or strings"):
        encode_keys("u", pa.array([1.5]), WHERE)


def test_fetch() -> None:
    table = pa.table({"user_id": [1], "nothing": pa.nulls(1, pa.int64()), "list": [[1]], "struct": [{"a": 1}]})
    assert fetch(table, "user_id", WHERE).to_pylist() == [1]
    for column, lists, text in (
        ("userid", False, "'userid' is missing.*did you mean 'user_id'. the columns are user_id, nothing"),
        ("nothing", False, "holds only nulls: fill it or leave it out"),
        ("list", False, "a flat column is needed"),
        ("struct", False, "a flat column is needed"),
        ("user_id", True, "type int64, but a list column is needed"),
    ):
        with pytest.raises(ValueError, match=text) as error:
            fetch(table, column, WHERE, lists=lists)
        assert WHERE in str(error.value)
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(ValueError, match="occurs several times"):
        fetch(twice, "a", WHERE)


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.large_list(pa.int64()), pa.list_(pa.int64(), 2)])
def test_lists_respect_slices_and_nulls(kind: pa.DataType) -> None:
    array = pa.array([[1, 2], None, [3, 4], [5, 6]], kind)
    values, lengths = flatten(array)
    assert (values.to_pylist(), lengths.tolist()) == ([1, 2, 3, 4, 5, 6], [2, 0, 2, 2])
    values, lengths = flatten(array.slice(1, 2))
    assert (values.to_pylist(), lengths.tolist()) == ([3, 4], [0, 2])


def test_null_lists_may_hide_values() -> None:
    array = pa.ListArray.from_arrays(pa.array([0, 2, 3]), pa.array([1, 2, 3]), mask=pa.array([True, False]))
    values, lengths = flatten(array)
    assert (values.to_pylist(), lengths.tolist()) == ([3], [0, 1])
