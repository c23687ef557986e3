"""What the ranks do in test_sharded_tables.py."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from examples.sequential_recommender import NextItem
from examples.sequential_recommender import collate as collate_requests
from lightning_gem.strategies import HybridShardedStrategy, TableConfig
from tests.distributed.foreign import ClickData, LitDLRM, clicks
from tests.distributed.foreign_models import LitDeepFM, LitPlain
from tests.distributed.hybrid_cases import Record, dlrm, trainer

KINDS = {"t_small": "table_wise", "t_large": "row_wise", "t_middle": "column_wise"}
COPIES: dict[str, Any] = {"lr": 0.1, "per_table": KINDS}
LAYOUT: dict[str, Any] = {"table_replicate": 2, "replicate": 2, "wrap_min_parameters": 50}
FEW: dict[str, Any] = {"steps": [[2] * 4] * 5, "val_steps": [[2] * 4]}
RATE, EPS = 0.1, 1e-8


class Memory(Callback):
    """Keeps the memory that tables take between steps, and the bytes that their copies exchange in one."""

    def __init__(self) -> None:
        self.at_rest: list[int] = []
        self.sent = 0.0
        self.expected = 0

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Counts what is handed to collectives of the copies."""
        group = trainer.strategy.tables.copies_group  # type: ignore[attr-defined]
        self.expected = trainer.strategy.layout_report(2).by_axis()["table_replicate"]  # type: ignore[attr-defined]
        self.sent = 0.0
        # Which argument is the larger side, and how often it goes round.
        self.patches = [
            mock.patch.object(dist, name, self._counting(getattr(dist, name), group, argument, rounds))
            for name, argument, rounds in (
                ("all_reduce", 0, 2),
                ("all_gather_into_tensor", 0, 1),
                ("reduce_scatter_tensor", 1, 1),
            )
        ]
        for patch in self.patches:
            patch.start()

    def _counting(self, collective: Any, group: Any, argument: int, rounds: int) -> Any:
        def run(*tensors: Any, **options: Any) -> Any:
            if options.get("group") is group:
                whole = tensors[argument].numel() * tensors[argument].element_size()
                self.sent += rounds * whole * (1 - 1 / dist.get_world_size(group))
            return collective(*tensors, **options)

        return run

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Measures the memory."""
        for patch in self.patches:
            patch.stop()
        tables: Any = trainer.strategy.tables  # type: ignore[attr-defined]
        self.at_rest.append(tables.copies.num_bytes())


def copies(folder: Path) -> dict[str, Any]:
    """Whole and sharded copies on 2 x 2 ranks, with AdaGrad; then each continues what the other saved."""
    results: dict[str, Any] = {}
    for kind in ("whole", "sharded"):
        memory = Memory()
        keep = ModelCheckpoint(folder / kind, filename="{epoch}", save_top_k=-1)
        case = dlrm(
            {**COPIES, "copies": kind},
            **LAYOUT,
            data=FEW,
            module={"dense_lr": 0.01},
            callbacks=(memory, keep),
            enable_checkpointing=True,
            max_epochs=2,
        )
        results[kind] = {**case(folder), "at_rest": memory.at_rest, "sent": memory.sent, "expected": memory.expected}
    for kind, other in (("whole", "sharded"), ("sharded", "whole")):
        path = str(folder / other / "epoch=0.ckpt")
        case = dlrm(
            {**COPIES, "copies": kind},
            **LAYOUT,
            data=FEW,
            module={"dense_lr": 0.01},
            ckpt_path=path,
            max_epochs=2,
        )
        results[f"{kind}_resumed"] = case(folder)
    return results


def squares(folder: Path) -> dict[str, Any]:
    """Row-wise AdaGrad with two copies, its squares scaled or not."""
    layout = {"table_replicate": 2, "replicate": 2}
    tables = {"lr": RATE, "eps": EPS}
    data = {"steps": [[4, 4]] * 10}
    cases = {str(scale): dlrm({**tables, "square_scale": scale}, **layout, data=data) for scale in (1.0, "auto")}
    return {name: case(folder)["weights"] for name, case in cases.items()}


def simulate_squares(num_copies: int, scale: float, steps: int = 10, batch: int = 8) -> dict[str, torch.Tensor]:
    """The rule in one process: each copy adds up its own squares and steps, then both are averaged.

    Returns:
        Weights by name.
    """
    seed_everything(0)
    model = LitDLRM()
    parameters = dict(model.named_parameters())
    tables = {name: value for name, value in parameters.items() if "embedding_bags" in name}
    sums = {name: torch.zeros(len(value)) for name, value in tables.items()}
    size = batch // num_copies
    for step in range(steps):
        factor = 1 / (1 + step / 10)
        gradients: list[dict[str, torch.Tensor]] = []
        for copy in range(num_copies):
            start = step * batch + copy * size
            loss = model._loss(clicks(list(range(start, start + size))))
            gradients.append(dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True)))
        for name, value in parameters.items():
            own = [gradient[name] for gradient in gradients]
            if name not in tables:
                value.data -= model.lr * factor * torch.stack(own).mean(dim=0)
                continue
            total = [sums[name] + scale * gradient.square().mean(dim=1) for gradient in own]
            moves = [g / (s.sqrt() + EPS).unsqueeze(1) for g, s in zip(own, total, strict=True)]
            value.data -= RATE * factor * torch.stack(moves).mean(dim=0)
            sums[name] = torch.stack(total).mean(dim=0)
    return {name: value.detach() for name, value in parameters.items()}


class ManualDLRM(LitDLRM):
    """Optimizes by itself, with a gradient over several batches for every step."""

    batches_per_step = 1

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        """Backward, clipping, step and schedule."""
        loss = self._loss(batch)
        optimizer: Any = self.optimizers()
        self.manual_backward(loss / self.batches_per_step)
        if (batch_idx + 1) % self.batches_per_step == 0:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            scheduler: Any = self.lr_schedulers()
            scheduler.step()
        return {"loss": loss.detach()}


class ManualInParts(ManualDLRM):
    """Two batches for every step."""

    batches_per_step = 2


# The same samples in every step, in one batch or in two.
WHOLE, PARTS = {"steps": [[4, 4]] * 5}, {"steps": [[2, 2]] * 10}
ADAGRAD: dict[str, Any] = {"lr": 0.1, "per_table": KINDS}


def accumulated(folder: Path) -> dict[str, Any]:
    """Weights after five steps whose samples come in one batch or in two, in automatic and in manual optimization."""
    attempts: dict[str, dict[str, Any]] = {
        "whole": {"data": WHOLE, "clip": 0.1},
        "parts": {"data": PARTS, "clip": 0.1, "accumulate_grad_batches": 2},
        "manual": {"data": WHOLE, "model": ManualDLRM},
        "manual_parts": {"data": PARTS, "model": ManualInParts},
    }
    held = {**ADAGRAD, "update": "step"}
    results = {
        name: dlrm(held if name == "manual_parts" else ADAGRAD, wrap_min_parameters=50, **options)(folder)["weights"]
        for name, options in attempts.items()
    }
    for kind in ("whole", "sharded"):
        case = dlrm({**COPIES, "copies": kind}, **LAYOUT, data=PARTS, accumulate_grad_batches=2)
        results[f"{kind}_copies"] = case(folder)["weights"]
    return results


class CountSent(Callback):
    """Counts how often ids had been sent ahead."""

    def __init__(self) -> None:
        self.sent = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Looks at what is under way."""
        pipeline: Any = trainer.strategy._pipeline  # type: ignore[attr-defined]
        self.sent += pipeline is not None and any(pipeline.sent.values())


def pipelined(folder: Path) -> dict[str, Any]:
    """Two epochs with validation inside, with and without the pipeline; ranks run out at different times."""
    uneven = [[3, 3]] * 5 + [[3, 0]] * 2
    results: dict[str, Any] = {}
    for pipeline in (False, True):
        count = CountSent()
        tables = {"lr": 0.1, "sharding": "table_wise"}
        options: dict[str, Any] = {"data": {"steps": uneven, "val_steps": [[2, 2]] * 2}, "max_epochs": 2}
        case = dlrm(tables, pipeline=pipeline, val_check_interval=3, callbacks=(count,), **options)
        results[str(pipeline)] = {**case(folder), "sent": count.sent}
    return results


QUANTISED: dict[str, dict[str, Any]] = {
    "float32": {},
    "float16": {"forward_communication": "float16", "backward_communication": "float16"},
}


def quantised(folder: Path) -> dict[str, Any]:
    """Losses with embeddings and gradients that travel in fewer bits, under all kinds of sharding."""
    tables = {"optimizer": "sgd", "per_table": KINDS}
    data = {"steps": [[4, 4]] * 6}
    return {name: dlrm({**tables, **types}, data=data)(folder)["losses"] for name, types in QUANTISED.items()}


REQUESTS = {"make": collate_requests}
RECOMMENDER = partial(NextItem, lr=1.0)
FOREIGN: dict[str, tuple[Callable[[], LightningModule], dict[str, Any], dict[str, Any]]] = {
    "deepfm": (LitDeepFM, {}, {"wrap_min_parameters": 50}),
    "plain": (LitPlain, {}, {"wrap_min_parameters": 50}),
    "sequences": (RECOMMENDER, REQUESTS, {"wrap": ["Block"], "pipeline": True}),
    "sequences_by_rows": (RECOMMENDER, REQUESTS, {"sharding": "row_wise"}),
    "sequences_in_parts": (
        partial(NextItem, lr=1.0),
        {"make": collate_requests},
        {"sharding": "row_wise", "accumulate": 2},
    ),
}


def foreign(folder: Path) -> dict[str, Any]:
    """Weights of foreign models after five steps, under the strategy if there are ranks."""
    results: dict[str, Any] = {}
    on_ranks = "TORCHELASTIC_RUN_ID" in os.environ
    for name, (model, data, options) in FOREIGN.items():
        seed_everything(0)
        record, options = Record(), dict(options)
        accumulate = options.pop("accumulate", 1) if on_ranks else 1
        strategy: Any = "auto"
        if on_ranks:
            tables = TableConfig(optimizer="sgd", sharding=options.pop("sharding", "auto"))
            strategy = HybridShardedStrategy(tables=tables, timeout_seconds=60, **options)
        sizes = [[8 // accumulate // 2] * 2] * (5 * accumulate) if on_ranks else [[8]] * 5
        run = trainer(folder, strategy, callbacks=[record], accumulate_grad_batches=accumulate, limit_val_batches=0)
        run.fit(model(), ClickData(sizes, **data))
        results[name] = {"losses": record.losses, "weights": record.weights}
    return results


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "copies": copies,
    "squares": squares,
    "accumulated": accumulated,
    "pipelined": pipelined,
    "quantised": quantised,
    "foreign": foreign,
}
