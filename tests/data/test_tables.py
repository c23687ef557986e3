import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_gem.data.log_config import Join
from lightning_gem.data.tables import concat_tables, join_table, read_columns, split_lists


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "separator"),
    [("a.csv", ","), ("a.tsv", "\t"), ("a.csv", "\t"), ("a.csv", ";"), ("a.txt", "|"), ("a.txt.gz", "\t")],
)
def test_delimiter_comes_from_extension_or_header(tmp_path: Path, name: str, separator: str) -> None:
    text = "a,b,c\n1,x,2.5\n2,,3\n".replace(",", separator)
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    assert read_columns(path, ["c", "b"]).to_pydict() == {"c": [2.5, 3.0], "b": ["x", None]}


def test_quotes_byte_order_mark_and_values_that_look_null(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfcountry,text\nNA,"a, ""b""\nc"\nDE,NULL\n')
    assert read_columns(path, ["country", "text"]).to_pydict() == {
        "country": ["NA", "DE"],
        "text": ['a, "b"\nc', None],
    }


def test_types_follow_all_rows(tmp_path: Path) -> None:
    rows = [str(i) for i in range(300_000)]
    path = _write(tmp_path / "a.csv", "\n".join(["whole,number,id", *(f"{i},{i},{i}" for i in rows), "7,7.5,x"]))
    table = read_columns(path, ["whole", "number", "id"])
    assert table.schema.types == [pa.int64(), pa.float64(), pa.string()]


def test_parquet_categories_are_plain_values(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": pa.array(["x", None, "x"]).dictionary_encode(), "b": [1, 2, 3]}), tmp_path / "a.pq")
    table = read_columns(tmp_path / "a.pq", ["a"])
    assert table.schema.types == [pa.string()]
    assert table.to_pydict() == {"a": ["x", None, "x"]}


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", r"a\.csv is empty"),
        ("a,b\n", r"a\.csv has no rows"),
        ("a,bb\n1,2\n", r"column 'b' is missing \(.*a\.csv\): did you mean 'bb'\?"),
        ("a,b,b\n1,2,3\n", r"column 'b' occurs 2 times in .*a\.csv"),
        ("a,b\n1,2\n1,2,3\n", r"a\.csv is malformed: .*Row #3"),
        ("a,b\n1,2\n,\n1,two\n", r"column 'b' in .*a\.csv must hold numbers, but has 'two' at position 2"),
    ],
)
def test_bad_text_files(tmp_path: Path, text: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        read_columns(_write(tmp_path / "a.csv", text), ["a", "b"], numeric=["b"])


def test_bad_paths(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such file: .*nothing\.csv"):
        read_columns(tmp_path / "nothing.csv", ["a"])
    with pytest.raises(ValueError, match="is a folder"):
        read_columns(tmp_path, ["a"])
    with pytest.raises(ValueError, match=r"a\.parquet is no readable Parquet file"):
        read_columns(_write(tmp_path / "a.parquet", "a,b\n1,2\n"), ["a"])


def test_concat_names_the_column_and_the_files() -> None:
    whole, real, text = (pa.table({"a": [1], "b": [value]}) for value in (1, 2.5, "x"))
    assert concat_tables([whole, real], ["1.csv", "2.csv"]).to_pydict() == {"a": [1, 1], "b": [1.0, 2.5]}
    with pytest.raises(ValueError, match=r"column 'b' is int64 in 1\.csv, string in 2\.csv"):
        concat_tables([whole, text], ["1.csv", "2.csv"])


def test_join_adds_nulls_for_unseen_keys(tmp_path: Path) -> None:
    path = _write(tmp_path / "users.csv", "id,age\n1,30\n2,40\n,50\n")
    log = pa.table({"user": pa.array([2, 3, None, 1, 2], pa.int32())})
    joined = join_table(log, Join(str(path), ["user", "id"], ["age"], prefix="user_"), [], "log.csv")
    assert joined.column("user_age").to_pylist() == [40, None, None, 30, 40]


@pytest.mark.parametrize(
    ("text", "numeric", "match"),
    [
        ("user,age\n1,30\n1,40\n", [], "key 'user' has the value 1 2 times"),
        ("user,age\nx,30\n", [], r"its key 'user' has type string, but 'user' \(log\.csv\) has type int64"),
        ("user,age\n7,30\n", [], r"no value of 'user' \(log\.csv\) occurs in its key 'user'"),
        ("user,years\n1,30\n", [], r"column 'age' is missing \(.*users\.csv\)"),
        ("user,age\n1,old\n", ["age"], r"column 'age' in .*users\.csv must hold numbers, but has 'old'"),
    ],
)
def test_bad_joins(tmp_path: Path, text: str, numeric: list[str], match: str) -> None:
    path = _write(tmp_path / "users.csv", text)
    with pytest.raises(ValueError, match=match):
        join_table(pa.table({"user": [1, 2]}), Join(str(path), "user", ["age"]), numeric, "log.csv")


def test_split_lists() -> None:
    table = pa.table({"genres": ["a|b", None, "c"], "number": [1, 2, 3]})
    assert split_lists(table, "genres", "|", "x.csv").column("genres").to_pylist() == [["a", "b"], [], ["c"]]
    with pytest.raises(ValueError, match=r"column 'number' \(x\.csv\) has type int64, but text is needed"):
        split_lists(table, "number", "|", "x.csv")
