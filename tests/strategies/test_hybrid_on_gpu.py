"""GEM `small` with its tables on one GPU, world size 1 over NCCL: equal to the CPU, and across a checkpoint.

Run alone, in a process of its own, with TorchRec's packages for the GPU on PYTHONPATH:

    python3 -m pytest -q -s -p no:cacheprovider tests/strategies/test_hybrid_on_gpu.py
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

try:
    import pyarrow  # noqa: F401
except ImportError:  # machines for GPU tests may lack it, and synthetic data need none
    sys.modules.update({f"pyarrow{part}": mock.MagicMock() for part in ("", ".parquet", ".compute", ".csv")})

from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_gem.cli import GEMCLI
from lightning_gem.strategies import HybridShardedStrategy, TableConfig, embeddings
from lightning_gem.strategies.table_copies import ShardedCopies

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
STEPS = 6
OPTIONS = [
    "--config=configs/small.yaml",
    "--trainer.logger=false",
    "--model.warmup_steps=2",
    "--model.table_warmup_steps=2",
    "--model.optimizer.init_args.lr=0.00002",  # AdamW turns rounding of tiny gradients into whole steps
    "--data.init_args.num_embeddings=5000",
    f"--data.init_args.num_train={16 * STEPS}",
    "--data.init_args.num_val=32",
    "--data.init_args.batch_size=16",
    "--data.init_args.num_workers=0",
]
# Settings of the tables, of the strategy, and how close the losses have to be.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "row_wise": ({"sharding": "row_wise"}, {}, 1e-3),
    "torchrec_copies": ({"copies": "torchrec"}, {}, 1e-3),
    "sharded_copies": ({"copies": "sharded"}, {}, 1e-3),
    "update_at_step": ({"update": "step"}, {}, 1e-3),
    "without_pipeline": ({}, {"pipeline": False}, 1e-3),
    "bfloat16": ({"forward_communication": "bfloat16", "backward_communication": "bfloat16"}, {}, 2e-2),
    "float8": ({"forward_communication": "float8", "backward_communication": "float8"}, {}, 1e-1),
}


class Losses(Callback):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any) -> None:
        """Keeps it."""
        self.values.append(float(outputs["loss"]))


def train(
    folder: Path, accelerator: str, strategy: Any, ckpt_path: str | None = None, checkpoints: bool = False
) -> tuple[list[float], Trainer]:
    """Losses of GEM `small` in fp32, with a checkpoint half-way."""
    keep = [ModelCheckpoint(folder, filename="{step}", every_n_train_steps=STEPS // 2, save_top_k=-1)] * checkpoints
    made = GEMCLI(args=[*OPTIONS, f"--trainer.default_root_dir={folder}"], run=False)
    seed_everything(0)
    losses = Losses()
    trainer = Trainer(
        accelerator=accelerator,
        devices=1,
        strategy=strategy,
        max_steps=STEPS,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        gradient_clip_val=1.0,
        enable_checkpointing=checkpoints,
        callbacks=[losses, *keep],
    )
    trainer.fit(made.model, made.datamodule, ckpt_path=ckpt_path)
    return losses.values, trainer


def hybrid(tables: dict[str, Any] | None = None, **options: Any) -> HybridShardedStrategy:
    """The strategy with its tables on the GPU."""
    config = TableConfig(**(tables or {}))
    return HybridShardedStrategy(tables=config, wrap_min_parameters=10**6, timeout_seconds=60, **options)


@pytest.fixture(scope="module", autouse=True)
def _exact() -> Iterator[None]:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of plain Lightning on the CPU."""
    return train(tmp_path_factory.mktemp("cpu"), "cpu", "auto")[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the checkpoint of :func:`on_gpu`."""
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture(scope="module")
def on_gpu(folder: Path) -> list[float]:
    """Losses of the strategy on the GPU."""
    return train(folder, "gpu", hybrid(), checkpoints=True)[0]


def test_equals_the_cpu(on_gpu: list[float], on_cpu: list[float]) -> None:
    print("\ncpu", on_cpu, "\ngpu", on_gpu)
    torch.testing.assert_close(on_gpu, on_cpu, rtol=0, atol=5e-3)
    assert on_gpu[-1] != on_gpu[0]


def test_continues_from_a_checkpoint(on_gpu: list[float], folder: Path, tmp_path: Path) -> None:
    path = str(folder / f"step={STEPS // 2}.ckpt")
    rest, trainer = train(tmp_path, "gpu", hybrid({"sharding": "row_wise"}), ckpt_path=path)
    tables: Any = trainer.strategy.tables  # type: ignore[attr-defined]
    assert {shard.device.type for _, shard, _ in tables.shards()} == {"cuda"}
    print("\nwhole", on_gpu, "\nrest ", rest)
    torch.testing.assert_close(rest, on_gpu[STEPS // 2 :], rtol=0, atol=1e-3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_equal_the_plain_strategy(on_gpu: list[float], tmp_path: Path, variant: str) -> None:
    tables, options, tolerance = VARIANTS[variant]
    # A single copy would be left whole.
    always = mock.patch.object(embeddings, "make_copies", lambda kind, *arguments, **rest: ShardedCopies(*arguments))
    with always if variant == "sharded_copies" else contextlib.nullcontext():
        losses, trainer = train(tmp_path, "gpu", hybrid(tables, **options))
    made: Any = trainer.strategy.tables  # type: ignore[attr-defined]
    print(f"\n{variant} {type(made.copies).__name__} {made.copies.num_bytes():,} bytes", losses)
    assert isinstance(made.copies, ShardedCopies) == (variant == "sharded_copies")
    torch.testing.assert_close(losses, on_gpu, rtol=0, atol=tolerance)
