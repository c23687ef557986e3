"""Checks in every validation what low precision costs the very weights that are being trained."""

import math
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_gem.callbacks.sensitivity import SensitivityProbe
from lightning_gem.precision.convert import Converted, high_precision
from lightning_gem.precision.gap import COLUMNS, Gap, gap, paired_sums

Action = Literal["log", "demote", "stop"]


class QualityGuard(Callback):
    """Predicts validation batches twice, with the recipe and with the same weights in bf16, and compares.

    Both predict the same examples, so a gap of 0.01 % of the normalized entropy shows with far fewer of them than two
    trainings would need. Logs ``precision/ne_gap/<task>`` (relative, positive is worse) with ``_low`` and ``_high``,
    the ends of its 95 % interval, and ``precision/calibration/<task>``; says ``pass``, ``fail`` or ``inconclusive``
    with the number of examples that would settle it. It measures what the recipe costs predictions, not what it did to
    training.

    Attributes:
        gaps: The latest comparison by task.

    Args:
        tolerance: Relative change of the normalized entropy that is accepted.
        limit_batches: Batches per validation and rank; None: all.
        action: On ``fail``: ``log`` a warning, ``demote`` the layers that :class:`SensitivityProbe` found worst (to
            bf16, for good), or ``stop`` the training.
        demote_layers: Layers demoted at a time.
    """

    def __init__(
        self,
        tolerance: float = 2e-4,
        limit_batches: int | None = None,
        action: Action = "log",
        demote_layers: int = 1,
    ) -> None:
        if tolerance <= 0 or demote_layers < 1 or action not in ("log", "demote", "stop"):
            raise ValueError(
                f"tolerance {tolerance} and demote_layers {demote_layers} must be positive, and action {action!r} "
                "'log', 'demote' or 'stop'"
            )
        self.tolerance = tolerance
        self.limit_batches = limit_batches
        self.action = action
        self.demote_layers = demote_layers
        self.gaps: dict[str, Gap] = {}
        self._sums: Tensor | None = None

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts over."""
        self._sums = None

    @torch.no_grad()
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Predicts the batch both ways."""
        if trainer.sanity_checking or (self.limit_batches is not None and batch_idx >= self.limit_batches):
            return
        with trainer.precision_plugin.forward_context():
            low = pl_module(batch)
            with high_precision(pl_module):
                reference = pl_module(batch)
        sums = torch.stack(
            [
                paired_sums(low[:, i], reference[:, i], batch.labels[:, i], batch.weights[:, i])
                for i in range(low.shape[1])
            ]
        )
        self._sums = sums if self._sums is None else self._sums + sums

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compares, over all ranks, and acts."""
        if trainer.sanity_checking:
            return
        tasks: list[Any] = list(pl_module.tasks)  # type: ignore[arg-type]
        if self._sums is None:
            self._sums = torch.zeros(len(tasks), len(COLUMNS), dtype=torch.float64, device=pl_module.device)
        if trainer.world_size > 1:
            self._sums = trainer.strategy.reduce(self._sums, reduce_op="sum")
        self.gaps = {task.name: gap(row, self.tolerance) for task, row in zip(tasks, self._sums, strict=True)}
        for task, found in self.gaps.items():
            pl_module.log_dict(
                {
                    f"precision/ne_gap/{task}": found.ne,
                    f"precision/ne_gap/{task}_low": found.low,
                    f"precision/ne_gap/{task}_high": found.high,
                    f"precision/calibration/{task}": found.calibration,
                }
            )
            rank_zero_info(self._text(task, found))
        failed = [task for task, found in self.gaps.items() if found.status == "fail"]
        if failed:
            self._act(trainer, pl_module, failed)

    def _text(self, task: str, found: Gap) -> str:
        text = (
            f"{task}: low precision changes the normalized entropy by {found.ne:+.4%} ({found.low:+.4%} to "
            f"{found.high:+.4%}) on {found.examples:,} examples: {found.status}"
        )
        if found.status == "inconclusive":
            needed = f"{math.ceil(found.needed):,}" if math.isfinite(found.needed) else "more"
            text += f", it needs {needed} examples"
        return text

    def _act(self, trainer: Trainer, pl_module: LightningModule, failed: list[str]) -> None:
        names = ", ".join(failed)
        if self.action == "stop":
            trainer.should_stop = True
            rank_zero_warn(f"low precision costs {names} more than {self.tolerance:.3%}: training stops")
        elif self.action == "demote":
            worst = self._worst(trainer, pl_module)
            for name, probe in worst:
                pl_module.get_submodule(name).precision_enabled = False  # type: ignore[assignment]
                probe.demoted.append(name)
            done = f"{', '.join(name for name, _ in worst)} go back to bf16" if worst else "no probe has seen a layer"
            rank_zero_warn(f"low precision costs {names} more than {self.tolerance:.3%}: {done}")
        else:
            rank_zero_warn(f"low precision costs {names} more than {self.tolerance:.3%}")

    def _worst(self, trainer: Trainer, pl_module: LightningModule) -> list[tuple[str, SensitivityProbe]]:
        """Layers with the least signal to noise in their output, worst first."""
        modules = dict(pl_module.named_modules())
        candidates = [
            (row["out_db"], name, probe)
            for probe in trainer.callbacks  # type: ignore[attr-defined]
            if isinstance(probe, SensitivityProbe)
            for name, row in probe.statistics.items()
            if isinstance(modules.get(name), Converted) and modules[name].precision_enabled
        ]
        return [(name, probe) for _, name, probe in sorted(candidates, key=lambda c: c[:2])[: self.demote_layers]]
