"""What the ranks do in test_semantics.py."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor

from lightning_gem.models import GEM, ExpertsConfig, GEMConfig, GEMModule
from lightning_gem.strategies import HybridShardedStrategy, TableConfig, collectives
from lightning_gem.strategies.checkpoint import full_state_dict
from lightning_gem.strategies.collectives import Offer
from lightning_gem.strategies.export import export
from tests.distributed.foreign import ClickData, LitDLRM
from tests.distributed.hybrid_cases import OnlyDense, Record, gem, trainer
from tests.helpers import ToyData


class Ledger:
    """Stands in for symmetric memory: remembers what was allocated and registered."""

    def __init__(self) -> None:
        self.allocated: set[int] = set()
        self.registered: list[tuple[int, int]] = []

    def allocate(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """From the heap."""
        tensor = torch.empty(*size, dtype=dtype, device=device)
        self.allocated.add(tensor.untyped_storage().data_ptr())
        return tensor

    def register(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        """Only what was allocated here lies in a window."""
        assert tensor.untyped_storage().data_ptr() in self.allocated
        self.registered.append((tensor.numel(), dist.get_world_size(group)))


EXPERTS: dict[str, Any] = {"expert": 2, "clip": 1.0, "steps": 5, "wrap_min_parameters": 1000}


def symmetric(folder: Path) -> dict[str, Any]:
    """GEM and DLRM through symmetric memory, and plainly."""
    result: dict[str, Any] = {}
    for name, options in {"experts": EXPERTS, "dense": {**EXPERTS, "expert": 1}}.items():
        ledger = Ledger()
        with (
            mock.patch.object(collectives, "offered", return_value=Offer("symmetric", "a test")),
            mock.patch.object(collectives, "NCCLWindows", return_value=ledger),
        ):
            own = gem({}, sm_free_collectives="require", **options)(folder)
        policy = os.environ.pop("NCCL_CTA_POLICY", None)
        plain = gem({}, sm_free_collectives="auto", **options)(folder)
        worst = max(float((own["weights"][key] - value).abs().max()) for key, value in plain["weights"].items())
        result[name] = {"worst": worst, "registered": len(ledger.registered), "policy": policy}
    return result


def expert_layouts(folder: Path) -> dict[str, Any]:
    """GEM whose experts lie on two ranks, in a checkpoint and in one file, with whole experts everywhere afterwards."""

    def build() -> Any:
        data = ToyData(num_rows=32, batch_size=4)
        config = GEMConfig(width=16, experts=ExpertsConfig(num_experts=4, hidden=16), num_context_tokens=8)
        module = GEMModule(
            data.schema, network=partial(GEM, config=config), optimizer=partial(torch.optim.AdamW, lr=0.1)
        )
        return module, data

    seed_everything(0)
    first = HybridShardedStrategy(expert=2, timeout_seconds=60)
    run = trainer(folder, first, max_steps=2)
    run.fit(*build())
    run.save_checkpoint(folder / "experts.ckpt")
    saved = full_state_dict(run.lightning_module, first.tables)
    if run.global_rank == 0:
        export(folder / "experts.ckpt", folder / "experts.safetensors")
    dist.barrier()
    worst = []
    for expert, path, weights in ((1, "experts.ckpt", None), (1, None, "experts"), (2, None, "experts")):
        file = str(folder / f"{weights}.safetensors") if weights else None
        other = HybridShardedStrategy(expert=expert, weights=file, timeout_seconds=60)
        run = trainer(folder, other)
        run.validate(*build(), ckpt_path=str(folder / path) if path else None, verbose=False)
        loaded = full_state_dict(run.lightning_module, other.tables)
        assert set(loaded) == set(saved)
        names = [name for name in saved if name.startswith("network.")]
        worst.append(max(float((loaded[name] - saved[name]).abs().max()) for name in names))
    again = trainer(folder, HybridShardedStrategy(expert=1, timeout_seconds=60), max_steps=3, max_epochs=2)
    again.fit(*build(), ckpt_path=str(folder / "experts.ckpt"))
    return {"worst": worst, "step": again.global_step}


def stopping(folder: Path) -> dict[str, Any]:
    """Early stopping and limits."""
    result: dict[str, Any] = {}
    seed_everything(0)
    record = Record()
    stop = EarlyStopping("val_loss", patience=1, min_delta=10.0)
    run = trainer(folder, HybridShardedStrategy(timeout_seconds=60), callbacks=[record, stop], max_epochs=9)
    run.fit(LitDLRM(), ClickData())
    result["epochs"] = run.current_epoch
    limits: dict[str, dict[str, Any]] = {
        "number": {"limit_train_batches": 3, "limit_val_batches": 1},
        "fast": {"fast_dev_run": 2},
        "interval": {"val_check_interval": 4, "limit_train_batches": 8},
    }
    uneven = ClickData([[4, 4]] * 5 + [[4, 0]] * 3)
    for name, limit in limits.items():
        record = Record()
        strategy = HybridShardedStrategy(timeout_seconds=60, tables=TableConfig(sharding="table_wise"))
        run = trainer(folder, strategy, callbacks=[record], **limit)
        run.fit(LitDLRM(), uneven)
        result[name] = len(record.losses)
    return result


def by_value(folder: Path) -> dict[str, Any]:
    """Gradients clipped by value, with the same in one process."""
    seed_everything(0)
    record = Record()
    strategy: Any = HybridShardedStrategy(timeout_seconds=60) if "TORCHELASTIC_RUN_ID" in os.environ else "auto"
    arguments = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    trainer(folder, strategy, callbacks=[record], **arguments).fit(OnlyDense(), ClickData())
    return {"weights": record.weights}


class Plateau(LitDLRM):
    """Its schedule looks at the validation loss."""

    def configure_optimizers(self) -> Any:
        """The learning rate is halved after every validation."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


def schedules(folder: Path) -> dict[str, Any]:
    """The learning rate that the lookups have after a schedule by validation loss."""
    strategy = HybridShardedStrategy(timeout_seconds=60, tables=TableConfig(optimizer="sgd", lr=0.25))
    run = trainer(folder, strategy, max_epochs=3, limit_train_batches=2)
    run.fit(Plateau(), ClickData())
    assert strategy.tables is not None
    group = run.optimizers[0].param_groups
    fused = {g["lr"] for optimizer in strategy.tables.optimizers.values() for g in optimizer.param_groups}
    return {"dense": group[0]["lr"], "tables": group[-1]["lr"], "fused": fused}


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "symmetric": symmetric,
    "expert_layouts": expert_layouts,
    "stopping": stopping,
    "by_value": by_value,
    "schedules": schedules,
}
