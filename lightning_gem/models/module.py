"""GEMModule: the LightningModule around any network that maps a batch to one logit per task."""

import math
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import Metric, MetricCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_gem.data.batch import RecBatch
from lightning_gem.data.schema import Schema
from lightning_gem.efficiency.work import StepWork
from lightning_gem.metrics import AUC, GAUC, Calibration, LogLoss, NormalizedEntropy, WindowedNormalizedEntropy
from lightning_gem.models.flops import WorkFormula, step_work, work_formulas
from lightning_gem.models.gem import GEM
from lightning_gem.models.losses import task_losses
from lightning_gem.models.schedules import Decay, warmup_then_decay
from lightning_gem.optimizers import DenseAndTables, are_sharded, dense_parameters, table_optimizers

# A ModuleList of metrics, which type checkers take for a list of plain modules.
Metrics = Any


class GEMModule(LightningModule):
    """Multi-task training of a recommendation network.

    Logs for every task: normalized entropy (lifetime and over a window) and calibration while training; normalized
    entropy, AUC, GAUC, calibration and log loss while validating and testing. ``val/ne`` and ``test/ne`` are means over
    the tasks, to be monitored.

    Args:
        schema: Features and tasks; the CLI links it from the data module.
        network: Makes the network from the schema. It is built in ``configure_model``, so on the meta device where the
            strategy wants that.
        optimizer: Optimizer of the dense parameters.
        table_lr: Learning rate of the embedding tables (row-wise AdaGrad, applied inside backward; gradient clipping is
            for the dense parameters only).
        table_eps: Term added to the root of AdaGrad's accumulated squares.
        warmup_steps: Steps over which the dense learning rate rises.
        table_warmup_steps: Steps over which the tables' learning rate rises.
        decay: How both learning rates fall after the warm-up, until the last step of the run.
        task_weights: Weight of a task's loss; 1 where not given.
        entire_space: Train tasks that are given another one on all rows through the product of both probabilities
            (ESMM), instead of on the rows where the other happened.
        window: Examples per rank that the windowed normalized entropy looks back on.
    """

    def __init__(
        self,
        schema: Schema,
        network: Callable[[Schema], nn.Module] = GEM,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        table_lr: float = 0.02,
        table_eps: float = 1e-8,
        warmup_steps: int = 0,
        table_warmup_steps: int = 0,
        decay: Decay = "none",
        task_weights: dict[str, float] | None = None,
        entire_space: bool = False,
        window: int = 100_000,
    ) -> None:
        super().__init__()
        self.schema = schema
        self.tasks = schema.tasks
        self.make_network = network
        self.make_optimizer = optimizer
        self.table_lr = table_lr
        self.table_eps = table_eps
        self.warmup_steps = warmup_steps
        self.table_warmup_steps = table_warmup_steps
        self.decay: Decay = decay
        self.entire_space = entire_space
        names = [task.name for task in schema.tasks]
        unknown = sorted(set(task_weights or {}) - set(names))
        if unknown:
            raise ValueError(f"task_weights names {unknown[0]!r}, the schema has only the tasks {names}")
        self.task_weights = [(task_weights or {}).get(name, 1.0) for name in names]
        self.network: nn.Module | None = None
        self.work_formulas: list[WorkFormula] | None = None
        self.train_metrics = self._per_task(
            lambda: {
                "ne": NormalizedEntropy(),
                "window_ne": WindowedNormalizedEntropy(window),
                "calibration": Calibration(),
            }
        )
        for metrics in self.train_metrics:
            metrics.persistent(True)  # "lifetime" spans resumed runs
        self.val_metrics = self._per_task(_evaluation_metrics)
        self.test_metrics = self._per_task(_evaluation_metrics)
        self.val_gauc = self._gauc()
        self.test_gauc = self._gauc()

    def _per_task(self, make: Callable[[], dict[str, Metric]]) -> Metrics:
        return nn.ModuleList(MetricCollection(make(), compute_groups=False) for _ in self.tasks)

    def _gauc(self) -> Metrics:
        """Metrics per user; none where the schema has no user."""
        return nn.ModuleList(GAUC() for _ in self.tasks if self.schema.user)

    def configure_model(self) -> None:
        """Builds the network, once."""
        if self.network is None:
            self.network = self.make_network(self.schema)
            self.work_formulas = work_formulas(self.network, self.schema)

    def forward(self, batch: RecBatch) -> Tensor:
        """Returns logits ``(B, num_tasks)``; of an ensemble in training those of every copy, see its docstring."""
        assert self.network is not None, "call configure_model first"
        return self.network(batch)

    def training_step(self, batch: RecBatch, batch_idx: int) -> Tensor:
        """Weighted sum of the tasks' losses, in float32."""
        logits = self(batch)
        copies = logits.unbind() if logits.dim() == 3 else [logits]
        # A sum over the copies of an ensemble: each has the gradient that it would have alone.
        losses = torch.stack(
            [task_losses(copy, batch.labels, batch.weights, self.tasks, self.entire_space) for copy in copies]
        ).sum(dim=0)
        loss = (losses * losses.new_tensor(self.task_weights)).sum()
        checked = getattr(self.trainer.strategy, "checks_loss", False)  # on all ranks, so that all of them stop
        if not checked and not torch.isfinite(loss):
            # The backward would write it into the tables before any optimizer could refuse.
            by_task = dict(zip([task.name for task in self.tasks], losses.tolist(), strict=True))
            raise FloatingPointError(
                f"the loss of step {self.global_step} is {loss.item()} (tasks: {by_task}): no weight was changed in "
                "this step; look for extreme inputs, or lower the learning rates or the precision's range"
            )
        self.log("train/loss", loss / len(copies), prog_bar=True, batch_size=len(batch))
        self._update(self.train_metrics, torch.stack(tuple(copies)).mean(dim=0), batch)
        if (self.global_step + 1) % self.trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            for task, metrics in zip(self.tasks, self.train_metrics, strict=True):
                values = {f"train/{task.name}/{key}": value.float() for key, value in metrics.compute().items()}
                self.log_dict(values, batch_size=len(batch))
        return loss

    def validation_step(self, batch: RecBatch, batch_idx: int) -> None:
        """Updates the validation metrics."""
        self._evaluation_step(batch, self.val_metrics, self.val_gauc)

    def test_step(self, batch: RecBatch, batch_idx: int) -> None:
        """Updates the test metrics."""
        self._evaluation_step(batch, self.test_metrics, self.test_gauc)

    def on_validation_epoch_end(self) -> None:
        """Logs the validation metrics."""
        self._log_evaluation("val", self.val_metrics, self.val_gauc)

    def on_test_epoch_end(self) -> None:
        """Logs the test metrics."""
        self._log_evaluation("test", self.test_metrics, self.test_gauc)

    def predict_step(self, batch: RecBatch, batch_idx: int) -> dict[str, Tensor]:
        """Row, user's key, time, and probability and label of every task."""
        probabilities = torch.sigmoid(self(batch).float())
        columns = {"row": batch.row, "user": batch.user, "time": batch.request_timestamps}
        for i, task in enumerate(self.tasks):
            columns[f"{task.name}_prediction"] = probabilities[:, i]
            columns[f"{task.name}_label"] = batch.labels[:, i]
        return columns

    def _update(self, metrics: Metrics, logits: Tensor, batch: RecBatch) -> None:
        for i, metric in enumerate(metrics):
            metric.update(logits[:, i], batch.labels[:, i], weights=batch.weights[:, i])

    def _evaluation_step(self, batch: RecBatch, metrics: Metrics, gauc: Metrics) -> None:
        logits = self(batch)
        self._update(metrics, logits, batch)
        for i, metric in enumerate(gauc):
            metric.update(logits[:, i], batch.labels[:, i], batch.user, batch.weights[:, i])

    def _log_evaluation(self, split: str, metrics: Metrics, gauc: Metrics) -> None:
        entropies = []
        for i, task in enumerate(self.tasks):
            values = metrics[i].compute()
            metrics[i].reset()
            if gauc:
                values["gauc"] = gauc[i].compute()
                gauc[i].reset()
            entropies.append(values["ne"])
            self.log_dict({f"{split}/{task.name}/{key}": value.float() for key, value in values.items()})
        # A task without both labels in the split has no normalized entropy; the others are still worth monitoring.
        self.log(f"{split}/ne", torch.stack(entropies).nanmean().float(), prog_bar=True)

    def step_work(self, batch: RecBatch) -> StepWork | None:
        """FLOPs and tokens of a training step on ``batch``, for :class:`lightning_gem.callbacks.EfficiencyMonitor`."""
        return None if self.work_formulas is None else step_work(self.work_formulas, batch)

    def table_optimizer(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """Optimizer to be fused into the tables' backward, for strategies that shard them."""
        return RowWiseAdagrad, {"lr": self.table_lr, "eps": self.table_eps}

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """One optimizer over dense parameters and tables, with a schedule for each."""
        assert self.network is not None
        if getattr(self.trainer.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                "precision 16-mixed scales the gradients, and the tables are updated before they are unscaled: use "
                "bf16-mixed"
            )
        # Only where a backward pass has the whole gradient of a step.
        in_backward = self.trainer.accumulate_grad_batches == 1 and (
            self.trainer.world_size == 1 or are_sharded(self.network)
        )
        tables = table_optimizers(self.network, self.table_lr, self.table_eps, in_backward)
        dense = self.make_optimizer(dense_parameters(self.network))
        optimizer = DenseAndTables(dense, tables, self.table_lr, in_backward)
        total = self.trainer.estimated_stepping_batches if self.decay != "none" else math.inf
        factors = [warmup_then_decay(self.warmup_steps, self.decay, total)] * len(dense.param_groups)
        factors.append(warmup_then_decay(self.table_warmup_steps, self.decay, total))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, factors), "interval": "step"},
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Stores the schema, so that a checkpoint of other features is recognised."""
        checkpoint["schema"] = self.schema.to_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Compares the schema with the checkpoint's.

        Raises:
            ValueError: Naming the first field that differs.
        """
        difference = _first_difference(checkpoint.get("schema", {}), self.schema.to_dict(), "schema")
        if difference:
            raise ValueError(f"the checkpoint belongs to another schema: {difference}. Use the data it was trained on")


def _evaluation_metrics() -> dict[str, Metric]:
    return {"ne": NormalizedEntropy(), "auc": AUC(), "calibration": Calibration(), "log_loss": LogLoss()}


def _first_difference(saved: Any, own: Any, path: str) -> str | None:
    """Path and values of the first difference of two nested structures."""
    if isinstance(saved, dict) and isinstance(own, dict) and set(saved) == set(own):
        children = [(saved[key], own[key], f"{path}.{key}") for key in own]
    elif isinstance(saved, list) and isinstance(own, list) and len(saved) == len(own):
        children = [(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(saved, own, strict=True))]
    else:
        return None if saved == own else f"{path} was {saved!r} and is now {own!r}"
    return next((found for child in children if (found := _first_difference(*child))), None)
