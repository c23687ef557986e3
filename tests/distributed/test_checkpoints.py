"""Checkpoints of HybridShardedStrategy over gloo: what comes back, and what is left when something goes wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gem.strategies.safetensors import map_tensors
from tests.distributed.ranks import run_ranks

CASES = "tests.distributed.checkpoint_cases"
TWO = ["resumed", "failing", "best", "disagreeing", "grown", "repartitioned", "exported", "requeued", "damaged"]

Results = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all ranks write."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    """Results of two ranks, all cases in the same processes."""
    done: dict[str, list[dict[str, Any]]] = {}

    def get(case: str) -> list[dict[str, Any]]:
        if not done:
            done.update(run_ranks(2, CASES, TWO, folder))
        return done[case]

    return get


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Whether whole weights are equal to the bit."""
    return set(first) == set(second) and all(torch.equal(first[name], second[name]) for name in first)


def test_resumed_run_draws_and_reads_what_the_whole_run_did(results: Results) -> None:
    for rank, result in enumerate(results("resumed")):
        assert "step=8.ckpt" in result["names"]
        assert ".saving" not in result["names"]
        for step in (2, 4):
            own, whole = result[f"losses_{step}"]
            assert own == whole
            assert same(result[f"from_{step}"], result["whole"])
        assert result["data"] == rank


def test_other_number_of_ranks_starts_streams_and_loaders_anew(results: Results, folder: Path) -> None:
    results("resumed")
    (one,) = run_ranks(1, CASES, ["other_size"], folder)["other_size"]
    assert one["step"] == 4
    assert one["data"] is None  # another one on every rank, so no one's


def test_failed_save_stops_all_ranks_and_keeps_the_good_one(results: Results) -> None:
    for result in results("failing"):
        assert "step=2.ckpt could not be written: no space left on device (rank 1)" in result["message"]
        assert result["names"] == [".saving", "step=1.ckpt"]
        assert result["step"] == 2


def test_best_and_last(results: Results) -> None:
    for result in results("best"):
        assert len(result["names"]) == 3
        assert "last.ckpt" in result["names"]
        assert Path(result["best"]).name in result["names"]
        assert result["step"] == 20


def test_last_checkpoint_that_some_ranks_do_not_find(results: Results) -> None:
    for result in results("disagreeing"):
        assert "rank 1 found no checkpoint to go on from, others found" in result["message"]


def test_rows_that_a_table_has_gained(results: Results) -> None:
    for result in results("grown"):
        for kind in ("row_wise", "table_wise"):
            after, fresh, state = (result[kind][key] for key in ("after", "fresh", "state"))
            assert torch.equal(after[:20], result["before"])
            assert torch.equal(after[20:], fresh[20:])
            assert (state[20:] == 0).all()
            assert (state[:20] > 0).any()


def test_states_of_column_parts_are_joined_and_split(results: Results) -> None:
    for result in results("repartitioned"):
        parts, whole, again = result["states"]
        assert set(parts) == set(whole) == set(again)
        for name, value in whole.items():
            two = parts[name].view(2, len(value))
            assert (value > 0).any()
            torch.testing.assert_close(value, two.mean(dim=0), rtol=0, atol=1e-8)
            torch.testing.assert_close(again[name].view(2, len(value)), torch.stack([value, value]), rtol=0, atol=0)


def test_one_file_and_back(results: Results, folder: Path) -> None:
    for result in results("exported"):
        file = map_tensors(folder / "weights.safetensors")
        assert same(file, result["weights"])
        assert same(result["started"], result["weights"])
        assert result["val"] == pytest.approx(result["expected"], abs=1e-6)
        assert "has weights only: give it as `weights` of the strategy" in result["message"]


def test_requeue_waits_for_the_end_of_the_step(results: Results) -> None:
    for result in results("requeued"):
        assert result["called"].endswith("hpc_ckpt_1.ckpt/manifest.json")  # it was complete before the job was ended
        assert result["steps"] == (4, 4)
        assert result["rest"] == result["whole"][-len(result["rest"]) :]
        assert 1 <= len(result["rest"]) <= 2
        assert result["handler"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short", "has 100 bytes instead of"),
        ("no_rank_file", "rank_00001.pt is missing"),
        ("no_manifest", "manifest.json is missing"),
        ("wrong_meta", "is damaged"),
        ("a_file", "was not written by hybrid_sharded"),
    ],
)
def test_damaged_checkpoints_are_refused_on_every_rank(results: Results, name: str, message: str) -> None:
    for result in results("damaged"):
        assert message in result[name]


def test_a_rank_killed_in_the_middle_of_a_save(tmp_path: Path) -> None:
    (rank,) = run_ranks(2, CASES, ["killed_in_save"], tmp_path, survivors=1)["killed_in_save"]
    assert rank["message"] != "nothing was raised"
    assert "last.ckpt" in rank["names"]
    manifest = json.loads((tmp_path / "killed" / "last.ckpt" / "manifest.json").read_text())
    assert manifest["world_size"] == 2
    (rank,) = run_ranks(1, CASES, ["after_killed_save"], tmp_path)["after_killed_save"]
    assert rank["global_step"] == 6
    assert rank["steps"] == 4
    assert "last.ckpt" in rank["names"]
