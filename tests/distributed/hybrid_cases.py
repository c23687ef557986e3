"""What the ranks do in test_hybrid.py."""

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from lightning_gem.models import GEM, ExpertsConfig, GEMConfig, GEMModule
from lightning_gem.strategies import HybridShardedStrategy, TableConfig
from lightning_gem.strategies.checkpoint import full_state_dict
from tests.distributed.foreign import ClickData, LitDLRM
from tests.helpers import ToyData, ToySource

class Record(Callback):
    """Keeps losses, gradient norms and whole weights."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.weights: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any) -> None:
        """Keeps the loss of this rank."""
        self.losses.append(float(outputs["loss"]))
        norm = getattr(trainer.strategy, "gradient_norm", None)
        if norm is not None:
            self.norms.append(float(norm))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """In one process, keeps the norm of the gradients before they are clipped."""
        if not isinstance(trainer.strategy, HybridShardedStrategy):
            gradients = [value.grad for value in pl_module.parameters() if value.grad is not None]
            self.norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gathers the weights."""
        self.weights = full_state_dict(pl_module, getattr(trainer.strategy, "tables", None))


def trainer(folder: Path, strategy: Any, **arguments: Any) -> Trainer:
    """A quiet trainer over all processes there are."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": int(os.environ.get("WORLD_SIZE", "1")) if strategy != "auto" else 1,
        "strategy": strategy,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    return Trainer(**{**defaults, **arguments})


def fit_dlrm(
    folder: Path,
    module: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    clip: float | None = None,
    strategy: Any = "auto",
    **arguments: Any,
) -> dict[str, Any]:
    """Trains DLRM and returns what was recorded."""
    seed_everything(0)
    record = Record()
    model = LitDLRM(**(module or {}))
    run = trainer(folder, strategy, callbacks=[record], gradient_clip_val=clip, **arguments)
    run.fit(model, ClickData(**(data or {})))
    metrics = {key: float(value) for key, value in run.callback_metrics.items()}
    return {"losses": record.losses, "norms": record.norms, "weights": record.weights, "metrics": metrics}


class OrderedToyData(ToyData):
    """Rows in an order in which every step of ``world`` ranks is a step of one process."""

    def __init__(self, world: int, steps: int = 20, batch: int = 8) -> None:
        super().__init__(num_rows=steps * batch, batch_size=batch // world)
        # Rank r takes the r-th part of the order.
        blocks = np.arange(steps * batch).reshape(steps, world, batch // world)
        self.order = blocks.transpose(1, 0, 2).ravel()
        self.shuffle_rows = 0

    def setup(self, stage: str) -> None:
        """Reorders the training split."""
        super().setup(stage)
        source = self.sources["train"]
        assert isinstance(source, ToySource)
        source.rows = source.rows.take(self.order)


def fit_gem(
    folder: Path,
    mode: Literal["partition", "ensemble"] = "partition",
    strategy: Any = "auto",
    clip: float | None = None,
    steps: int = 20,
    **arguments: Any,
) -> dict[str, Any]:
    """Trains a small GEM and returns what was recorded."""
    seed_everything(0)
    record = Record()
    data = OrderedToyData(1 if strategy == "auto" else int(os.environ["WORLD_SIZE"]), steps)
    config = GEMConfig(width=16, experts=ExpertsConfig(num_experts=4, mode=mode, hidden=16), num_context_tokens=8)
    module = GEMModule(
        data.schema,
        network=partial(GEM, config=config),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        table_lr=0.1,
        table_warmup_steps=4,
        # Each rank divides by its own number of conversions, so their mean is not that of the union.
        task_weights={"conversion": 0.0},
    )
    run = trainer(folder, strategy, callbacks=[record], gradient_clip_val=clip, **arguments)
    run.fit(module, data)
    metrics = {key: float(value) for key, value in run.callback_metrics.items()}
    weights = {key: value for key, value in record.weights.items() if key.startswith("network.")}
    return {"losses": record.losses, "norms": record.norms, "weights": weights, "metrics": metrics}


@dataclass
class Case:
    """A training function under the strategy, and the same in one process without it."""

    fit: Callable[..., dict[str, Any]]
    tables: dict[str, Any]
    options: dict[str, Any]

    def __call__(self, folder: Path) -> dict[str, Any]:
        """Trains on the ranks there are."""
        own = {key: value for key, value in self.options.items() if key in STRATEGY}
        strategy = HybridShardedStrategy(**own, tables=TableConfig(**self.tables), timeout_seconds=60)
        return self.fit(folder, strategy=strategy, **self._arguments())

    def reference(self, folder: Path) -> dict[str, Any]:
        """Trains in one process."""
        return self.fit(folder, **self._arguments())

    def _arguments(self) -> dict[str, Any]:
        return {key: value for key, value in self.options.items() if key not in STRATEGY}


STRATEGY = set(inspect.signature(HybridShardedStrategy).parameters) - {"tables"}


def dlrm(tables: dict[str, Any], **options: Any) -> Case:
    """A case with TorchRec's models."""
    return Case(fit_dlrm, tables, options)


def gem(tables: dict[str, Any], **options: Any) -> Case:
    """A case with GEM."""
    return Case(fit_gem, tables, options)


SGD = {"optimizer": "sgd"}
ATTACHED = {"attach": True}

TWO: dict[str, Case] = {
    "dlrm_table_wise": dlrm({**SGD, "sharding": "table_wise"}, wrap_min_parameters=50),
    "dlrm_row_wise": dlrm({**SGD, "sharding": "row_wise"}, replicate=2),
    "dlrm_column_wise": dlrm({**SGD, "sharding": "column_wise"}),
    "dlrm_copies": dlrm({**SGD, "sharding": "row_wise"}, table_replicate=2, replicate=2),
    "dlrm_adagrad": dlrm({}, module=ATTACHED, wrap_min_parameters=50, clip=0.1),
    "dlrm_planner": dlrm({**SGD, "planner": "torchrec"}),
    "dcn_auto": dlrm({**SGD}, module={"cross": True}, wrap_min_parameters=50),
    "gem_dense": gem({"sharding": "table_wise"}, replicate=2),
    "gem_tables": gem({"sharding": "row_wise"}, wrap_min_parameters=10**9, clip=1.0),
    "gem_experts": gem({}, expert=2, clip=1.0),
    "gem_ensemble": gem({}, expert=2, mode="ensemble", clip=1.0),
}
FOUR: dict[str, Case] = {
    "dlrm_all": dlrm({**SGD, "sharding": "row_wise"}, replicate=2, table_replicate=2, wrap_min_parameters=50),
    "dlrm_all_table_wise": dlrm({**SGD, "sharding": "table_wise"}, replicate=4, table_replicate=2),
    "gem_all": gem({"sharding": "row_wise"}, replicate=2, expert=2, clip=1.0),
    "gem_experts_sharded": gem({}, expert=2, clip=1.0),
    "gem_all_ensemble": gem({}, expert=4, mode="ensemble", clip=1.0),
}
CASES: dict[str, Callable[[Path], dict[str, Any]]] = {**TWO, **FOUR}
