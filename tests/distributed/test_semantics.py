"""Trainer options, schedules and collectives under HybridShardedStrategy, over gloo."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import semantics_cases
from tests.distributed.ranks import run_ranks

CASES = "tests.distributed.semantics_cases"

Results = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results of two ranks, all cases in the same processes."""
    folder = tmp_path_factory.mktemp("semantics")
    done: dict[str, list[dict[str, Any]]] = {}

    def get(case: str) -> list[dict[str, Any]]:
        if not done:
            done.update(
                run_ranks(2, CASES, ["symmetric", "expert_layouts", "stopping", "by_value", "schedules"], folder)
            )
        return done[case]

    return get


def test_symmetric_memory_changes_no_result(results: Results) -> None:
    for result in results("symmetric"):
        for layout in ("experts", "dense"):
            assert result[layout]["worst"] < 1e-6
            assert result[layout]["policy"] == "2"
        # Experts of two ranks on two ranks have nothing to gather.
        assert 0 < result["experts"]["registered"] < result["dense"]["registered"]


def test_experts_load_under_another_layout(results: Results) -> None:
    for result in results("expert_layouts"):
        assert result == {"worst": [0, 0, 0], "step": 3}


def test_early_stopping_and_limits(results: Results) -> None:
    for result in results("stopping"):
        assert result == {"epochs": 2, "number": 3, "fast": 2, "interval": 8}


def test_clipping_by_value(results: Results, tmp_path: Path) -> None:
    one = semantics_cases.by_value(tmp_path)["weights"]
    for result in results("by_value"):
        for name, value in one.items():
            torch.testing.assert_close(result["weights"][name], value, rtol=0, atol=1e-5)


def test_schedule_by_validation_loss_moves_the_tables(results: Results) -> None:
    for result in results("schedules"):
        assert result["dense"] == 0.5 / 8  # after three validations
        assert result["fused"] == {0.25 / 4}  # as in the last step, before the third
