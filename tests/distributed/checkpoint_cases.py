"""What the ranks do in test_checkpoints.py."""

import os
import random
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch.distributed.checkpoint import FileSystemWriter

from lightning_gem.strategies import HybridShardedStrategy, TableConfig
from lightning_gem.strategies.checkpoint import full_state_dict
from lightning_gem.strategies.embeddings import local_shards
from lightning_gem.strategies.export import export
from tests.distributed.foreign import ClickData, LitDLRM, collate, sample
from tests.distributed.hybrid_cases import Record, trainer

STEPS = 4
TABLES: dict[str, Any] = {"lr": 0.1, "sharding": "table_wise"}


class NoisyDLRM(LitDLRM):
    """Draws from all generators in every step."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        """With noise of its own on every rank."""
        noise = torch.rand(()).item() + random.random() + float(np.random.rand())
        batch["dense"] = torch.nn.functional.dropout(batch["dense"] + noise, 0.5)
        return super().training_step(batch, batch_idx)


class Positioned:
    """A loader with a state, as torchdata's; its samples are those of the rank and the step."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.position, self.started = rank, world, 0, False

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[dict[str, Any]]:
        torch.rand(())  # as any loader does for its workers
        self.position %= STEPS
        while self.position < STEPS:
            self.position += 1
            first = 8 * self.position + self.rank * 8 // self.world
            yield collate([sample(first + i) for i in range(8 // self.world)])

    def state_dict(self) -> dict[str, Any]:
        """Where it is; the number of ranks tells apart what is another rank's."""
        return {"position": self.position, "rank": self.rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there."""
        assert state["rank"] == self.rank
        self.position = state["position"]


class PositionedData(LightningDataModule):
    """With a loader that has a position, and something of its own for every rank."""

    seen: Any = None

    def train_dataloader(self) -> Any:
        """The loader."""
        assert self.trainer is not None
        return Positioned(self.trainer.global_rank, self.trainer.world_size)

    def state_dict(self) -> dict[str, Any]:
        """The rank."""
        return {"rank": self.trainer.global_rank if self.trainer is not None else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remembers what came back."""
        self.seen = state["rank"]


class Snapshot(Callback):
    """Whole weights after a step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.weights: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Gathers them."""
        if trainer.global_step == self.step:
            self.weights = full_state_dict(pl_module, trainer.strategy.tables)  # type: ignore[attr-defined]


def strategy(**options: Any) -> HybridShardedStrategy:
    """The strategy with small timeouts."""
    tables = options.pop("tables", TableConfig(**TABLES))
    return HybridShardedStrategy(tables=tables, timeout_seconds=60, **options)


def fit(folder: Path, model: Any = None, data: Any = None, ckpt_path: Any = None, **options: Any) -> Any:
    """Trains and returns the trainer with its record."""
    arguments = {key: options.pop(key) for key in ("callbacks", "max_epochs", "max_steps", "plugins") if key in options}
    record = Record()
    seed_everything(0, verbose=False)
    saves = any(isinstance(callback, ModelCheckpoint) for callback in arguments.get("callbacks", []))
    arguments["callbacks"] = [record, *arguments.get("callbacks", [])]
    run = trainer(folder, strategy(**options), enable_checkpointing=saves, **arguments)
    # Streams of their own, as workers and augmentations have.
    torch.manual_seed(run.global_rank)
    random.seed(run.global_rank)
    np.random.seed(run.global_rank)
    run.fit(model or NoisyDLRM(dense_lr=0.01), data or PositionedData(), ckpt_path=ckpt_path)
    return run, record


def resumed(folder: Path) -> dict[str, Any]:
    """Two epochs saved beside the training, and resumed from the middle of the first and from its end."""
    saves = folder / "resumed"
    keep = ModelCheckpoint(saves, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    _, whole = fit(folder, callbacks=[keep], max_epochs=2, async_checkpoints=True)
    result: dict[str, Any] = {"whole": whole.weights, "names": sorted(file.name for file in saves.iterdir())}
    for step in (2, STEPS):
        data = PositionedData()
        _, record = fit(folder, data=data, ckpt_path=saves / f"step={step}.ckpt", max_epochs=2)
        result[f"from_{step}"] = record.weights
        result[f"losses_{step}"] = (record.losses, whole.losses[step:])
        result["data"] = data.seen
    return result


def other_size(folder: Path) -> dict[str, Any]:
    """What was saved by two ranks, resumed by another number."""
    data = PositionedData()
    run, record = fit(folder, data=data, ckpt_path=folder / "resumed" / "step=2.ckpt", max_steps=STEPS)
    return {"data": data.seen, "draw": torch.rand(()).item(), "step": run.global_step, "losses": record.losses}


def failing(folder: Path) -> dict[str, Any]:
    """A disk that fills up on the last rank in the second save."""
    saves = folder / "failing"
    write = FileSystemWriter.write_data
    last = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)

    def full(self: FileSystemWriter, *args: Any) -> Any:
        if last and "step=2" in str(self.path):
            raise OSError("no space left on device")
        return write(self, *args)

    keep = ModelCheckpoint(saves, filename="{step}", every_n_train_steps=1, save_top_k=1)
    result = {}
    with mock.patch.object(FileSystemWriter, "write_data", full):
        try:
            fit(folder, callbacks=[keep], async_checkpoints=True)
        except RuntimeError as error:
            result["message"] = str(error)
    dist.barrier()
    result["names"] = sorted(file.name for file in saves.iterdir())
    run, _ = fit(folder, ckpt_path=saves / "step=1.ckpt", max_steps=2)
    return {**result, "step": run.global_step}


def best(folder: Path) -> dict[str, Any]:
    """The two best of many, and the last one."""
    saves = folder / "best"
    keep = ModelCheckpoint(
        saves, filename="{step}", monitor="train_loss", every_n_train_steps=5, save_top_k=2, save_last=True
    )
    run, record = fit(folder, model=LitDLRM(), data=ClickData(), callbacks=[keep], async_checkpoints=True)
    names = sorted(file.name for file in saves.iterdir())
    run.validate(datamodule=ClickData(), ckpt_path="best", verbose=False)
    losses = record.losses
    again, _ = fit(folder, model=LitDLRM(), data=ClickData(), callbacks=[keep], ckpt_path="last", max_epochs=1)
    return {"names": names, "best": keep.best_model_path, "losses": losses, "step": again.global_step}


def disagreeing(folder: Path) -> dict[str, Any]:
    """Only the first rank sees the folder with the last checkpoint."""
    mine = folder / ("best" if os.environ["RANK"] == "0" else "elsewhere")
    try:
        fit(folder, data=ClickData(), callbacks=[ModelCheckpoint(mine, save_last=True)], ckpt_path="last")
    except FileNotFoundError as error:
        return {"message": str(error)}
    return {"message": "nothing was raised"}


def grown(folder: Path) -> dict[str, Any]:
    """A table of 20 rows becomes one of 33, under another placement."""
    run, record = fit(folder, model=LitDLRM(dense_lr=0.01), data=ClickData(), max_steps=4)
    run.save_checkpoint(folder / "rows.ckpt")
    key = "model.sparse_arch.embedding_bag_collection.embedding_bags.t_small.weight"
    result: dict[str, Any] = {"before": record.weights[key]}
    for kind in ("row_wise", "table_wise"):
        seed_everything(1, verbose=False)
        model, tables = LitDLRM(dense_lr=0.01, rows=33), TableConfig(lr=0.1, sharding=kind)  # type: ignore[arg-type]
        own = strategy(tables=tables, grow_tables=True)
        run = trainer(folder, own, max_steps=4)
        fresh = model.model.sparse_arch.embedding_bag_collection.embedding_bags["t_small"].weight.detach().clone()
        run.fit(model, ClickData(), ckpt_path=str(folder / "rows.ckpt"))
        state = torch.zeros(33)
        assert own.tables is not None
        for name, value in own.tables.optimizer_state().items():
            if "t_small" in name and "momentum1" in name:
                for shard, (row, *_) in local_shards(value):
                    state[row : row + len(shard)] = shard.flatten()
        dist.all_reduce(state)
        result[kind] = {"after": full_state_dict(model, own.tables)[key], "fresh": fresh, "state": state}
    return result


def _states(own: HybridShardedStrategy) -> dict[str, torch.Tensor]:
    """Whole states of the tables' optimizers."""
    assert own.tables is not None
    shapes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shapes, {name: tuple(value.shape) for name, value in own.tables.optimizer_state().items()})
    whole = {name: torch.zeros(shape) for shape_of in shapes for name, shape in sorted(shape_of.items())}
    for name, value in own.tables.optimizer_state().items():
        for shard, (row, *_) in local_shards(value):
            whole[name][row : row + len(shard)] = shard
    for name in sorted(whole):
        dist.all_reduce(whole[name])
    return {name: value for name, value in whole.items() if name.endswith("momentum1")}


def repartitioned(folder: Path) -> dict[str, Any]:
    """Row-wise AdaGrad of tables in two column parts, loaded into whole tables, and back."""
    states = []
    path = None
    for i, kind in enumerate(("column_wise", "row_wise", "column_wise")):
        seed_everything(0, verbose=False)
        own = strategy(tables=TableConfig(lr=0.1, sharding=kind))  # type: ignore[arg-type]
        run = trainer(folder, own, max_steps=3)
        run.fit(LitDLRM(dense_lr=0.01), ClickData(), ckpt_path=path)
        states.append(_states(own))
        path = str(folder / f"parts_{i}.ckpt")
        run.save_checkpoint(path)
    return {"states": states}


def exported(folder: Path) -> dict[str, Any]:
    """To one file and back, under another placement."""
    file = folder / "weights.safetensors"
    run, record = fit(folder, model=LitDLRM(), data=ClickData(), tables=TableConfig(lr=0.1, sharding="column_wise"))
    run.save_checkpoint(folder / "export.ckpt")
    if run.global_rank == 0:
        export(folder / "export.ckpt", file)
    dist.barrier()
    own = strategy(weights=str(file), tables=TableConfig(lr=0.1, sharding="row_wise"))
    other = trainer(folder, own)
    other.validate(LitDLRM(), ClickData(), verbose=False)
    started = full_state_dict(other.lightning_module, own.tables)
    validated = float(other.callback_metrics["val_loss"])
    try:
        fit(folder, model=LitDLRM(), data=ClickData(), ckpt_path=str(file))
        message = "nothing was raised"
    except ValueError as error:
        message = str(error)
    expected = float(run.callback_metrics["val_loss"])
    return {"weights": record.weights, "started": started, "val": validated, "expected": expected, "message": message}


class Signal(Callback):
    """SLURM's signal reaches the ranks at different places of a step."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """The first rank is asked before the step."""
        if batch_idx == 1 and trainer.global_rank == 0:
            signal.raise_signal(signal.SIGUSR1)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """The others in the middle of it."""
        if trainer.global_step == 1 and trainer.global_rank > 0:
            signal.raise_signal(signal.SIGUSR1)


def requeued(folder: Path) -> dict[str, Any]:
    """A job that is told to make room, and started again."""
    folder = folder / "requeued"
    folder.mkdir(exist_ok=True)
    command = folder / "scontrol"
    if os.environ["RANK"] == "0":
        command.write_text(f'#!/bin/sh\nls -d {folder}/hpc_ckpt_1.ckpt/manifest.json > {folder}/called\necho "$@"\n')
        command.chmod(command.stat().st_mode | stat.S_IEXEC)
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": os.environ["WORLD_SIZE"],
        "SLURM_NTASKS_PER_NODE": os.environ["WORLD_SIZE"],
        "SLURM_PROCID": os.environ["RANK"],
        "SLURM_LOCALID": os.environ["LOCAL_RANK"],
        "SLURM_NODEID": "0",
        "SLURM_JOB_NAME": "train",
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    with mock.patch.dict(os.environ, job):
        run, whole = fit(folder, callbacks=[Signal()], plugins=[SLURMEnvironment()], async_checkpoints=True)
        again, record = fit(folder, plugins=[SLURMEnvironment()])
    handler = signal.getsignal(signal.SIGUSR1)
    return {
        "whole": whole.losses,
        "rest": record.losses,
        "called": (folder / "called").read_text().strip(),
        "handler": handler == signal.SIG_DFL,
        "steps": (run.global_step, again.global_step),
    }


def damaged(folder: Path) -> dict[str, Any]:
    """Messages about checkpoints with parts that are missing, short or wrong."""
    import shutil

    good = folder / "resumed" / "step=2.ckpt"
    first = os.environ["RANK"] == "0"
    messages = {}
    for name in ("short", "no_rank_file", "no_manifest", "wrong_meta", "a_file"):
        path = folder / f"{name}.ckpt"
        if first:
            if name == "a_file":
                path.write_text("nothing")
            else:
                shutil.copytree(good, path)
            shard = max(good.glob("*.distcp"), key=lambda file: file.stat().st_size).name
            if name == "short":
                os.truncate(path / shard, 100)
            elif name == "wrong_meta":
                (path / "meta.pt").write_bytes(b"nothing")
            elif name != "a_file":
                (path / {"no_rank_file": "rank_00001.pt", "no_manifest": "manifest.json"}[name]).unlink()
        dist.barrier()
        try:
            fit(folder, ckpt_path=path)
        except (ValueError, FileNotFoundError) as error:
            messages[name] = str(error)
    return messages


def killed_in_save(folder: Path) -> dict[str, Any]:
    """The last rank is killed while the second checkpoint is written over the first one."""
    write = FileSystemWriter.write_data
    saves = folder / "killed"
    marker = saves / "first"

    def dying(self: FileSystemWriter, *args: Any) -> Any:
        if marker.exists() and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return write(self, *args)

    class Mark(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 3:
                while not (saves / "last.ckpt").is_dir():
                    time.sleep(0.05)
                marker.touch()

    keep = ModelCheckpoint(saves, every_n_train_steps=2, save_last=True, save_top_k=0)
    with mock.patch.object(FileSystemWriter, "write_data", dying):
        try:
            fit(folder, data=ClickData(), callbacks=[keep, Mark()], async_checkpoints=True)
        except RuntimeError as error:
            return {"message": str(error), "names": sorted(file.name for file in saves.iterdir())}
    return {"message": "nothing was raised"}


def after_killed_save(folder: Path) -> dict[str, Any]:
    """Goes on from what is left."""
    keep = ModelCheckpoint(folder / "killed", save_last=True, save_top_k=0)
    run, record = fit(folder, data=ClickData(), callbacks=[keep], ckpt_path="last", max_steps=6)
    names = sorted(file.name for file in (folder / "killed").iterdir())
    return {"steps": len(record.losses), "global_step": run.global_step, "names": names}


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "resumed": resumed,
    "other_size": other_size,
    "failing": failing,
    "best": best,
    "disagreeing": disagreeing,
    "grown": grown,
    "repartitioned": repartitioned,
    "exported": exported,
    "requeued": requeued,
    "damaged": damaged,
    "killed_in_save": killed_in_save,
    "after_killed_save": after_killed_save,
}
