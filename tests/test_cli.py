"""The command line on a small log: all subcommands, resume, interruption, misspelt keys."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from lightning_gem.cli import main


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A log of 600 events by 20 users, and a configuration that trains on it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    log = pa.table(
        {
            "user": rng.integers(0, 20, 600),
            "item": rng.integers(0, 50, 600),
            "time": np.sort(rng.integers(10**9, 10**9 + 10**6, 600)),
            "price": rng.random(600),
            "click": rng.integers(0, 2, 600),
        }
    )
    pq.write_table(log, "log.parquet")
    return {
        "data": {
            "class_path": "lightning_gem.data.InteractionLog",
            "init_args": {
                "log": "log.parquet",
                "batch_size": 32,
                "split": {"test": 0.2, "val": 0.2},
                "schema": {
                    "user": "user",
                    "timestamp": "time",
                    "tasks": [{"name": "click"}],
                    "dense": [{"name": "price"}],
                    "sparse": [{"name": "item", "num_embeddings": 100}],
                    "sequences": [
                        {
                            "name": "past",
                            "features": [
                                {"name": "item", "num_embeddings": 100},
                                {"name": "click", "num_embeddings": 2, "encoding": "index"},
                            ],
                        }
                    ],
                },
            },
        },
        "model": {
            "network": {"class_path": "lightning_gem.models.GEM", "init_args": {"config": {"width": 16}}},
            "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.001}},
        },
        "trainer": {
            "accelerator": "cpu",
            "max_epochs": 2,
            "enable_progress_bar": False,
            "default_root_dir": "run",
            "logger": [{"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "run"}}],
            "log_every_n_steps": 5,
        },
    }


def write(config: dict[str, Any]) -> list[str]:
    Path("config.yaml").write_text(yaml.safe_dump(config))
    return ["--config", "config.yaml"]


def test_fit_validate_test_predict(config: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = write(config)
    main(["fit", *arguments])
    printed = capsys.readouterr().out
    assert "val task" in printed
    assert all(name in printed for name in ("NE", "AUC", "GAUC", "calibration", "log loss"))
    assert Path("run/checkpoints/last.ckpt").exists()
    (log_folder,) = Path("run/lightning_logs").iterdir()
    columns = pc.read_csv(log_folder / "metrics.csv").column_names
    assert {"train/loss", "train/click/ne", "val/click/auc", "val/ne"} <= set(columns)
    # The saved configuration reproduces the run.
    main(["validate", "--config", str(log_folder / "config.yaml"), "--ckpt_path", "run/checkpoints/last.ckpt"])
    assert "val task" in capsys.readouterr().out
    main(["test", *arguments, "--ckpt_path", "last"])
    assert "test task" in capsys.readouterr().out
    Path("predictions").mkdir()
    Path("predictions/part-00001.parquet").write_text("of an earlier run on more ranks")
    main(["predict", *arguments, "--ckpt_path", "run/checkpoints/last.ckpt"])
    predictions = pq.read_table("predictions")
    assert predictions.num_rows == 120
    assert predictions.column_names == ["row", "user", "time", "click_prediction", "click_label"]
    assert len(predictions["row"].unique()) == 120
    (path,) = Path("predictions").iterdir()
    assert pq.ParquetFile(path).num_row_groups == 1
    carried = ["--predictions.columns", "[item, user, price]", "--predictions.row_group_rows", "50"]
    main(["predict", *arguments, "--ckpt_path", "last", *carried])
    identified = pq.read_table("predictions")
    assert identified.column_names == ["row", "item", "user", "price", "time", "click_prediction", "click_label"]
    log = pq.read_table("log.parquet").take(identified["row"])  # sorted by time already
    assert all(identified[name].equals(log[name]) for name in ("item", "user", "price", "time"))
    assert identified["click_prediction"].equals(predictions["click_prediction"])
    metadata = pq.ParquetFile(path).metadata
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [50, 50, 20]


@pytest.mark.parametrize("subcommand", ["validate", "test", "predict"])
def test_an_untrained_network_is_not_evaluated(config: dict[str, Any], subcommand: str) -> None:
    arguments = write(config)
    with pytest.raises(ValueError, match="needs a checkpoint"):
        main([subcommand, *arguments])
    with pytest.raises(FileNotFoundError, match="there is no last.ckpt"):
        main([subcommand, *arguments, "--ckpt_path", "last"])


@pytest.mark.parametrize("stop_at", [6, 12])
def test_resume_from_last_is_bit_equal(config: dict[str, Any], stop_at: int) -> None:
    """A run that ``max_steps`` stopped, in the middle (6) or at the end (12) of an epoch, and one that went on."""

    def weights() -> dict[str, torch.Tensor]:
        return torch.load("run/checkpoints/last.ckpt", weights_only=True)["state_dict"]

    arguments = write(config)
    main(["fit", *arguments, "--trainer.max_steps", "17"])
    whole = weights()
    for path in Path("run/checkpoints").iterdir():
        path.unlink()
    main(["fit", *arguments, "--trainer.max_steps", str(stop_at)])
    main(["fit", *arguments, "--trainer.max_steps", "17", "--ckpt_path", "last"])
    resumed = weights()
    assert set(whole) == set(resumed)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_an_interrupted_run_leaves_a_checkpoint_that_loads(config: dict[str, Any], name: str) -> None:
    config["trainer"]["max_epochs"] = 10_000
    arguments = write(config)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-m", "lightning_gem", "fit", *arguments, "--trainer.limit_val_batches=0"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not list(Path("run").glob("lightning_logs/*/metrics.csv")) and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(getattr(signal, name))
    process.wait(timeout=60)
    step = torch.load("run/checkpoints/last.ckpt", weights_only=True)["global_step"]
    assert step >= 5
    main(["fit", *arguments, "--ckpt_path", "last", "--trainer.max_epochs=-1", f"--trainer.max_steps={step + 3}"])
    assert torch.load("run/checkpoints/last.ckpt", weights_only=True)["global_step"] == step + 3


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("model", "network", "init_args", "config", "widht"), 16, "widht"),
        (("data", "init_args", "schema", "sparse", 0, "num_embedings"), 3, "num_embedings"),
        (("trainer", "max_epoch"), 3, "max_epoch"),
        (("model", "table_learning_rate"), 3, "table_learning_rate"),
    ],
)
def test_a_misspelt_key_is_named(
    config: dict[str, Any], path: tuple[Any, ...], value: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    node: Any = config
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises(SystemExit):
        main(["fit", *write(config)])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "status", "last_line"),
    [
        (
            lambda config: config["data"]["init_args"]["schema"]["sparse"][0].update(num_embedings=3),
            2,
            "error: data.schema.sparse: Option 'num_embedings' is not accepted by lightning_gem.data.SparseFeature: "
            "did you mean 'num_embeddings'?",
        ),
        (
            lambda config: config["data"]["init_args"]["schema"].update(tasks=[]),
            1,
            "error: schema.tasks is empty: name at least one label to predict",
        ),
        (
            lambda config: config["data"]["init_args"]["schema"]["dense"].append({"name": "prise"}),
            1,
            "error: column 'prise' is missing (log.parquet): did you mean 'price'? the columns are user, item, time, "
            "price, click",
        ),
    ],
)
def test_a_mistake_is_told_in_the_last_line(
    config: dict[str, Any],
    change: Any,
    status: int,
    last_line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change(config)
    monkeypatch.setattr(sys, "argv", ["lightning-gem", "fit", *write(config)])
    with pytest.raises(SystemExit) as stopped:
        main()
    # The interpreter prints what is no number, and exits with 1.
    code = stopped.value.code
    printed = capsys.readouterr().err if isinstance(code, int) else str(code)
    assert (code if isinstance(code, int) else 1) == status
    assert printed.splitlines()[-1] == last_line
    if status == 1:
        monkeypatch.setenv("LIGHTNING_GEM_DEBUG", "1")
        with pytest.raises(ValueError, match=re.escape(last_line.removeprefix("error: ").split(":")[0])):
            main()


def test_a_mistake_in_a_process_of_its_own(config: dict[str, Any]) -> None:
    config["data"]["init_args"]["schema"]["dense"].append({"name": "prise"})
    result = subprocess.run(
        [sys.executable, "-m", "lightning_gem", "fit", *write(config)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("error: column 'prise' is missing (log.parquet)")
    assert "Traceback" not in result.stderr


def test_errors_that_are_no_mistakes_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        json.loads("{")

    monkeypatch.setattr("lightning_gem.cli.GEMCLI", fail)
    with pytest.raises(json.JSONDecodeError):
        main()


def test_wandb_stays_offline_without_a_key(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(Path.cwd()))
    logger = {"class_path": "lightning.pytorch.loggers.WandbLogger", "init_args": {"save_dir": "run"}}
    config["trainer"]["logger"].append(logger)
    main(["fit", *write(config), "--trainer.max_epochs=1"])
    assert os.environ["WANDB_MODE"] == "offline"
    (folder,) = Path("run/wandb").glob("offline-run-*")
    assert list(folder.glob("*.wandb"))
    assert f"wandb sync {folder}" in caplog.text


def test_no_validation_split(config: dict[str, Any]) -> None:
    config["data"]["init_args"]["split"]["val"] = 0.0
    config["checkpoint"] = {"monitor": None}
    main(["fit", *write(config), "--trainer.max_epochs=1"])
    assert Path("run/checkpoints/last.ckpt").exists()
