"""HybridShardedStrategy over gloo: every layout equals one process, whatever the ranks are given."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything

from tests.distributed.hybrid_cases import FOUR, MODELS, RESUMED, TWO, Case, fit_dlrm, models, shares, uneven
from tests.distributed.ranks import run_ranks

CASES = "tests.distributed.hybrid_cases"
TOLERANCE = {"rtol": 0.0, "atol": 1e-5}
EXTRA = {
    4: ["save", "resume_copies", "uneven", "exchange"],
    3: ["resume_whole"],
    2: ["resume_rows", "poisoned", "meta", "refused", "models", "precisions"],
    1: ["resume_auto", "command_line", "out_of_range", "interrupted"],
}

Results = Callable[[int, str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results of a case on a number of ranks; all cases of a number run in the same processes."""
    folder = tmp_path_factory.mktemp("ranks")
    done: dict[int, dict[str, list[dict[str, Any]]]] = {}

    def get(size: int, case: str) -> list[dict[str, Any]]:
        # The checkpoint is saved on four ranks.
        for number in sorted({4, size} - set(done), reverse=True):
            cases = [*{2: TWO, 4: FOUR}.get(number, {}), *EXTRA[number]]
            done[number] = run_ranks(number, CASES, cases, folder)
        return done[size][case]

    return get


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], dict[str, Any]]:
    """One process without the strategy, trained once for all cases that differ in their layout only."""
    folder = tmp_path_factory.mktemp("reference")
    known: list[tuple[Any, dict[str, Any]]] = []

    def get(case: Case) -> dict[str, Any]:
        key = (case.fit, case._arguments())
        for other, result in known:
            if other == key:
                return result
        known.append((key, case.reference(folder)))
        return known[-1][1]

    return get


def check(ranks: list[dict[str, Any]], one: dict[str, Any]) -> None:
    """Compares losses, gradient norms and weights."""
    losses = torch.tensor([rank["losses"] for rank in ranks]).mean(dim=0)
    torch.testing.assert_close(losses, torch.tensor(one["losses"]), **TOLERANCE)
    compare_weights(ranks, one)
    for rank in ranks:
        if rank["norms"]:
            torch.testing.assert_close(torch.tensor(rank["norms"]), torch.tensor(one["norms"]), **TOLERANCE)
        if "val_loss" in one["metrics"]:
            assert rank["metrics"]["val_loss"] == pytest.approx(one["metrics"]["val_loss"], abs=1e-5)


def compare_weights(ranks: list[dict[str, Any]], one: dict[str, Any]) -> None:
    """Compares gathered weights."""
    for rank in ranks:
        assert set(rank["weights"]) == set(one["weights"])
        for name, value in one["weights"].items():
            torch.testing.assert_close(rank["weights"][name], value, msg=lambda m, n=name: f"{n}: {m}", **TOLERANCE)


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_equal_one(results: Results, references: Callable[[Case], dict[str, Any]], name: str) -> None:
    check(results(4, name), references(FOUR[name]))


@pytest.mark.parametrize("name", TWO)
def test_two_ranks_equal_one(results: Results, references: Callable[[Case], dict[str, Any]], name: str) -> None:
    check(results(2, name), references(TWO[name]))


def test_experts_with_unequal_batches(results: Results) -> None:
    assert all(rank["worst"] < 1e-5 for rank in results(4, "exchange"))


def test_uneven_ranks_use_every_sample_once(results: Results, tmp_path: Path) -> None:
    ranks, one = results(4, "uneven"), uneven(tmp_path)
    compare_weights(ranks, one)
    for rank in ranks:
        assert len(rank["losses"]) == 10
        assert rank["metrics"]["val_loss"] == pytest.approx(one["metrics"]["val_loss"], abs=1e-5)


@pytest.mark.parametrize(
    ("size", "case"),
    [(4, "resume_copies"), (3, "resume_whole"), (2, "resume_rows"), (1, "resume_auto")],
)
def test_checkpoint_of_four_ranks_continues_on_any_number(results: Results, size: int, case: str) -> None:
    whole = results(4, "save")[0]
    for rank in results(size, case):
        compare_weights([rank], whole)
        assert rank["metrics"]["val_loss"] == pytest.approx(whole["metrics"]["val_loss"], abs=1e-5)
        assert rank["validated"] == pytest.approx(whole["metrics"]["val_loss"], abs=1e-5)
        torch.testing.assert_close(torch.tensor(rank["norms"]), torch.tensor(whole["norms"][-10:]), **TOLERANCE)


def test_loss_that_is_not_finite_changes_no_weight(results: Results) -> None:
    for rank in results(2, "poisoned"):
        assert "not finite on rank 1" in rank["message"]
        for setting in ("raise", "skip"):
            assert all(value.isfinite().all() for value in rank[setting].values())
        assert any((rank["raise"][name] != value).any() for name, value in rank["skip"].items())


def test_meta_init_does_not_depend_on_the_layout(results: Results) -> None:
    for rank in results(2, "meta"):
        first, second = rank["0"], rank["1"]
        compare_weights([{"weights": first}], {"weights": second})
        assert any(value.abs().max() > 0.1 for value in first.values())


@pytest.mark.parametrize("name", MODELS)
def test_other_modules_equal_one_process(results: Results, tmp_path: Path, name: str) -> None:
    one = models(tmp_path)
    for rank in results(2, "models"):
        compare_weights([rank[name]], one[name])


def test_lower_precision_stays_close(results: Results, references: Callable[[Case], dict[str, Any]]) -> None:
    one = torch.tensor(references(TWO["dlrm_row_wise"])["losses"])
    ranks = results(2, "precisions")
    for name in ranks[0]:
        losses = torch.tensor([rank[name] for rank in ranks]).mean(dim=0)
        torch.testing.assert_close(losses, one, rtol=0, atol=0.01)
        assert (losses != one).any()


def test_id_outside_of_its_table_stops(results: Results) -> None:
    (rank,) = results(1, "out_of_range")
    assert "idx < num_rows" in rank["message"]


def test_interrupted_save_keeps_the_old_checkpoint(results: Results) -> None:
    (rank,) = results(1, "interrupted")
    compare_weights([rank], {"weights": rank["before"]})
    assert rank["names"] == [".saving/again.ckpt", "again.ckpt"]


def test_a_killed_rank_is_named_and_the_last_checkpoint_loads(tmp_path: Path) -> None:
    start = time.monotonic()
    (rank,) = run_ranks(2, CASES, ["killed"], tmp_path, survivors=1)["killed"]
    assert time.monotonic() - start < 60
    assert rank["message"] == "nothing can be saved: rank 1 gives no sign of life"
    (rank,) = run_ranks(1, CASES, ["after_kill"], tmp_path)["after_kill"]
    assert rank["step"] == 6


def test_torchrun_restarts_from_the_last_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    subprocess.run(
        [*command, "-m", "tests.distributed.elastic", str(tmp_path)], check=True, timeout=180, capture_output=True
    )
    assert json.loads((tmp_path / "result.json").read_text()) == {"step": 8, "attempt": "1"}


def test_foreign_module_in_plain_lightning_cli(results: Results, tmp_path: Path) -> None:
    (rank,) = results(1, "command_line")
    assert rank["strategy"] == "HybridShardedStrategy"
    one = fit_dlrm(tmp_path)
    torch.testing.assert_close(torch.tensor(rank["losses"]), torch.tensor(one["losses"]), **TOLERANCE)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        ("interval", "tables.sync_interval=2"),
        ("cuda", "tables.copies: torchrec works on CUDA only"),
        ("squares", "tables.square_scale=0.5, but the module attached"),
        ("no_squares", "SGD adds up no squares"),
        ("precision", "bf16-true"),
        ("anomaly", "detect_anomaly=True"),
        ("swa", "StochasticWeightAveraging"),
        ("ema", "callback EMAWeightAveraging copies whole weights"),
        ("link", 'save_last="link" of ModelCheckpoint'),
        ("tier", "expert=2 is larger than the host of 1 ranks"),
        ("symmetric", 'sm_free_collectives="require", but there is no symmetric memory here'),
        ("borrowed", "are the same parameter, but a table is sharded by TorchRec"),
        ("two_meshes", "are the same parameter in two FSDP units"),
        ("batchnorm", "sync_batchnorm=True"),
        ("manual", "factor is in no module that is called"),
        ("experts", "declares no experts"),
        ("wrap", "wrap names no module"),
        ("size", "shard=3 does not divide the world size=2"),
        ("table", "tables.per_table names 'missing'"),
        ("twice", "are the same table"),
        ("tied", "are the same parameter in two FSDP units"),
        ("checkpoint", "there is no checkpoint"),
        ("other_model", "is a checkpoint of another model or optimizer: it lacks"),
        ("other_rows", "num_embeddings"),
        ("no_shard", "is missing: take another checkpoint"),
        ("unequal", "have [3, 2] samples"),
    ],
)
def test_refused_on_every_rank_before_the_first_step(results: Results, attempt: str, message: str) -> None:
    for rank in results(2, "refused"):
        assert message in rank.get(attempt, "nothing was raised")


def test_reference_of_the_resumed_run_is_one_process(results: Results, tmp_path: Path) -> None:
    """The uninterrupted run on four ranks, with AdamW and AdaGrad, equals one process too."""
    seed_everything(0)
    options = {**RESUMED, "module": {**RESUMED["module"], "table_lr": 0.1}}
    check(results(4, "save"), fit_dlrm(tmp_path, data=shares(1), **options))
