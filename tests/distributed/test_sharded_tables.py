"""Copies of tables over gloo: fully sharded ones equal whole ones, scaled squares equal their rule in one process."""

from typing import Any

import pytest
import torch

from tests.distributed.ranks import run_ranks
from tests.distributed.table_cases import FOREIGN, foreign, simulate_squares

CASES = "tests.distributed.table_cases"
COPIES = ("sharded_copies", "whole_copies")
TOLERANCE = {"rtol": 0.0, "atol": 1e-5}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Results of the cases for two ranks."""
    return run_ranks(
        2, CASES, ["squares", "accumulated", "pipelined", "quantised", "foreign"], tmp_path_factory.mktemp("two")
    )


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Results of the cases for four ranks."""
    return run_ranks(4, CASES, ["copies"], tmp_path_factory.mktemp("four"))


def test_sharded_copies_equal_whole_ones(four: dict[str, list[Any]]) -> None:
    for rank in four["copies"]:
        whole = rank["whole"]
        for other in ("sharded", "whole_resumed", "sharded_resumed"):
            steps = len(rank[other]["losses"])
            torch.testing.assert_close(rank[other]["losses"], whole["losses"][-steps:], rtol=0, atol=1e-7)
            for name, value in whole["weights"].items():
                torch.testing.assert_close(rank[other]["weights"][name], value, rtol=0, atol=1e-6)
            assert rank[other]["metrics"]["val_loss"] == pytest.approx(whole["metrics"]["val_loss"], abs=1e-6)


def test_sharded_copies_take_their_part_of_the_memory(four: dict[str, list[Any]]) -> None:
    for rank in four["copies"]:
        whole, sharded = set(rank["whole"]["at_rest"]), set(rank["sharded"]["at_rest"])
        assert len(whole) == len(sharded) == 1
        # A buffer of an odd number of elements is padded.
        assert sharded.pop() <= whole.pop() / 2 + 32


def test_copies_exchange_what_the_report_says(four: dict[str, list[Any]]) -> None:
    for rank in four["copies"]:
        for kind in ("whole", "sharded"):
            # Buffers are padded to equal parts.
            assert rank[kind]["sent"] == pytest.approx(rank[kind]["expected"], abs=64)


@pytest.mark.parametrize(("setting", "scale"), [("1.0", 1.0), ("auto", 0.5)])
def test_scaled_squares_equal_their_rule(two: dict[str, list[Any]], setting: str, scale: float) -> None:
    expected = simulate_squares(2, scale)
    for rank in two["squares"]:
        for name, value in rank[setting].items():
            torch.testing.assert_close(value, expected[name], **TOLERANCE)


def test_gradients_of_several_batches_equal_one_batch(two: dict[str, list[Any]]) -> None:
    for rank in two["accumulated"]:
        for parts, whole in (("parts", "whole"), ("manual", "whole"), ("manual_parts", "whole"), COPIES):
            for name, value in rank[whole].items():
                torch.testing.assert_close(
                    rank[parts][name], value, msg=lambda m, n=f"{parts} {name}": f"{n}: {m}", **TOLERANCE
                )


def test_pipeline_changes_no_number(two: dict[str, list[Any]]) -> None:
    for rank in two["pipelined"]:
        plain, ahead = rank["False"], rank["True"]
        assert plain["sent"] == 0
        assert ahead["sent"] == 11  # of 14 steps, all but the first and the last of each epoch
        assert ahead["losses"] == plain["losses"]
        assert ahead["metrics"] == plain["metrics"]
        for name, value in plain["weights"].items():
            assert torch.equal(ahead["weights"][name], value)


def test_quantised_communication_stays_close(two: dict[str, list[Any]]) -> None:
    for rank in two["quantised"]:
        assert rank["float16"] != rank["float32"]
        torch.testing.assert_close(rank["float16"], rank["float32"], rtol=0, atol=1e-3)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The foreign models in one process without the strategy."""
    return foreign(tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_models_equal_one_process(two: dict[str, list[Any]], one: dict[str, Any], name: str) -> None:
    for rank in two["foreign"]:
        assert set(rank[name]["weights"]) == set(one[name]["weights"])
        for key, value in one[name]["weights"].items():
            torch.testing.assert_close(rank[name]["weights"][key], value, **TOLERANCE)
