from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from lightning_gem.data.interaction_log import Counter, Derived, InteractionLog, Join, Split
from lightning_gem.data.schema import DenseFeature, Sequence, SparseFeature
from tests.data.log_helpers import ARGUMENTS, make_module, make_schema, random_log, read_rows


def _replaced(name: str, values: Any) -> Any:
    return lambda log: log.set_column(log.schema.get_field_index(name), name, values(log.column(name)))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda log: log.drop_columns(["price"]), r"column 'price' is missing \(.*log\.parquet\)"),
        (lambda log: log.slice(0, 0), r"log\.parquet has no rows"),
        (_replaced("price", lambda c: c.cast(pa.string())), r"'price'.*log\.parquet.*string are not numbers"),
        (_replaced("price", lambda c: pa.nulls(len(c), pa.float64())), r"column 'price' .*holds only nulls"),
        (_replaced("price", lambda c: pc.if_else(pc.equal(c, c[7]), None, c)), r"feature 'price' .*log\.parquet.*None"),
        (
            _replaced("price", lambda c: pc.if_else(pc.equal(c, c[7]), np.nan, c)),
            r"feature 'price' .*log\.parquet.*nan",
        ),
        (_replaced("click", lambda c: pc.add(c, 1)), r"'click'.*log\.parquet.*2 is not 0, 1 or null|is 2 at position"),
        (_replaced("buy", lambda c: pc.multiply(c, 3)), r"outcome 'buy' is 3 at position \d+ .*log\.parquet"),
        (_replaced("user", lambda c: pa.array([*c.to_pylist()[:-1], None])), r"user column 'user' .*position 49"),
        (_replaced("time", lambda c: pa.array([None, *c.to_pylist()[1:]])), r"time column 'time' .*position 0"),
        (_replaced("time", lambda c: pc.cast(c, pa.string())), r"time column 'time' .*string is no time"),
        (_replaced("click", lambda c: pc.multiply(c, 0)), r"history_filters \(clicks\): no row of .*log\.parquet"),
    ],
)
def test_bad_logs(tmp_path: Path, change: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make_module(tmp_path, change(pa.table(random_log(50, seed=12))), make_schema())
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"outcomes": ["price"]}, "dense feature 'price' reads the column 'price', which is an outcome"),
        ({"counters": [Counter(["click"])]}, r"counter 'click_count' \(by\) reads the column 'click'"),
        (
            {"derived": [*ARGUMENTS["derived"], Derived("click", "at_least", ["price"], 2)]},
            "dense feature 'price' reads",
        ),
        ({"derived": [Derived("gap", "ratio", ["seconds", "price"])]}, "dense feature 'gap' reads"),
        (
            {"derived": [Derived("share", "ratio", ["price", "num"]), Derived("click", "at_least", ["share"], 1)]},
            "dense feature 'price' reads",
        ),
        ({"derived": [Derived("click", "bucket", ["price"], boundaries=[1.0])]}, "dense feature 'price' reads"),
        ({"derived": [*ARGUMENTS["derived"], Derived("x", "hour"), Derived("x", "hour")]}, "column 'x' twice"),
        ({"derived": [Derived("x", "ratio", ["price"])]}, "ratio takes 2 columns"),
        ({"derived": [Derived("x", "at_least", ["price"])]}, "at_least needs a value"),
        ({"history_filters": {"likes": {"click": 1}}}, "'likes', which is not a sequence"),
        ({"history_filters": {"clicks": {"click": "yes"}}}, r"'yes' does not compare with column 'click'"),
        ({"order": ["gap"]}, "order uses the column 'gap', which is computed later"),
        ({"split": Split(test_from=10**12)}, r"the test split of .* is empty \(train: \d+, val: \d+, test: 0 rows\)"),
        ({"split": Split(test_from="yesterday")}, "'yesterday' is neither a number nor an ISO 8601 time"),
        ({"counters": [Counter(["item"], ["seconds"])]}, "outcome 'seconds' is .* not 0, 1 or null"),
        ({"counters": [Counter(["item"], prior=0)]}, "prior must be positive"),
        ({"joins": [Join("x.csv", ["a", "b", "c"], ["d"])]}, "key is one column or a pair"),
    ],
)
def test_bad_arguments(tmp_path: Path, arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make_module(tmp_path, random_log(50, seed=13), make_schema(), **arguments)


def test_joined_columns_must_be_new_and_files_must_exist(tmp_path: Path) -> None:
    side = tmp_path / "items.csv"
    side.write_text("item,price\n1,2\n2,3\n")
    log = random_log(50, seed=14)
    with pytest.raises(ValueError, match=r"make the column 'price', which .*log\.parquet has already"):
        make_module(tmp_path, log, make_schema(), joins=[Join(str(side), "item", ["price"])])
    with pytest.raises(FileNotFoundError, match=r"no such file: .*nothing\.csv"):
        make_module(tmp_path, log, make_schema(), joins=[Join(str(tmp_path / "nothing.csv"), "item", ["x"])])
    schema = replace(make_schema(), dense=[DenseFeature("item_price", fill=-1)])
    rows = read_rows(make_module(tmp_path, log, schema, joins=[Join(str(side), "item", ["price"], "item_")]), "train")
    assert set(rows.dense[:, 0].tolist()) == {-1, 2, 3}
    outcome = Join(str(side), ["click", "item"], ["price"], "item_")
    with pytest.raises(ValueError, match="'item_price' reads the column 'item_price', which is an outcome"):
        make_module(tmp_path, log, schema, joins=[outcome])


def test_schema_must_name_user_and_time(tmp_path: Path) -> None:
    log = random_log(50, seed=15)
    with pytest.raises(ValueError, match=r"schema\.user is missing"):
        make_module(tmp_path, log, replace(make_schema(), user=None))
    with pytest.raises(ValueError, match=r"schema\.timestamp is missing"):
        make_module(tmp_path, log, replace(make_schema(), timestamp=None, sequences=[]))
    other = Sequence("all", [SparseFeature("item")], timestamp="when")
    with pytest.raises(ValueError, match=r"schema\.sequences \(all\): timestamp is 'when'"):
        make_module(tmp_path, log, replace(make_schema(), sequences=[other]), history_filters={})
    module = InteractionLog(make_schema(), str(tmp_path / "log.parquet"), cache_dir=str(tmp_path / "c"), **ARGUMENTS)
    with pytest.raises(RuntimeError, match=r"call prepare_data\(\) first"):
        module.setup()


def test_a_weight_is_an_outcome(tmp_path: Path) -> None:
    schema = make_schema()
    schema = replace(schema, tasks=[replace(schema.tasks[0], weight="price"), *schema.tasks[1:]])
    with pytest.raises(ValueError, match="dense feature 'price' reads the column 'price', which is an outcome"):
        make_module(tmp_path, random_log(50, seed=1), schema)


def test_the_known_side_of_a_ratio_stays_a_feature(tmp_path: Path) -> None:
    """Half of the price was spent in time: `seconds` is an outcome, so `price` need not be one."""
    log = random_log(50, seed=1)
    del log["click"]
    derived = [*ARGUMENTS["derived"][:3], Derived("ratio", "ratio", ["seconds", "price"])]
    derived.append(Derived("click", "at_least", ["ratio"], 0.5))
    module = make_module(tmp_path, log, make_schema(), derived=derived)
    assert module.config.outcome_columns >= {"click", "ratio", "seconds"}
    assert "price" not in module.config.outcome_columns


def test_bad_labels_carry_their_row(tmp_path: Path) -> None:
    log = random_log(50, seed=1)
    log["click"][17] = 2
    with pytest.raises(ValueError, match=r"log\.parquet.*label 2 at position 17 is not 0, 1 or null"):
        make_module(tmp_path, log, make_schema(), counters=[], history_filters={})


def test_a_missing_split_says_what_to_do(tmp_path: Path) -> None:
    module = make_module(tmp_path, random_log(50, seed=1), make_schema(), split=Split(test=0, val=0.2))
    message = r"no 'test' split \(there are train, val\): set data.init_args.split.test above 0"
    with pytest.raises(ValueError, match=message):
        module.test_dataloader()


def test_original_columns_follow_the_rows(tmp_path: Path) -> None:
    log = random_log(50, seed=1)
    module = make_module(tmp_path, log, make_schema())
    rows = read_rows(module, "test")
    table = module.original_columns("test", ["id", "seconds"])(rows.row)
    assert table.column_names == ["id", "seconds"]
    ids = table["id"].to_numpy()
    assert (log["time"][ids] == rows.request_timestamps).all()
    assert (log["user"][ids] == rows.user).all()
    assert (log["seconds"][ids] == table["seconds"].to_numpy()).all()
    with pytest.raises(ValueError, match="column 'absent' is missing"):
        module.original_columns("test", ["absent"])
