"""Prints the quality of every task as a table when a run ends."""

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only

COLUMNS = {"ne": "NE", "auc": "AUC", "gauc": "GAUC", "calibration": "calibration", "log_loss": "log loss"}


class QualityTable(Callback):
    """Prints normalized entropy, AUC, GAUC, calibration and log loss per task after fit, validate and test."""

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the latest validation metrics."""
        print_table(trainer, "val")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the validation metrics, unless validation is part of training."""
        if trainer.state.fn == "validate":
            print_table(trainer, "val")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the test metrics."""
        print_table(trainer, "test")


def quality_table(metrics: dict[str, float], split: str) -> list[list[str]]:
    """Rows of a table, header first, from metrics named ``<split>/<task>/<metric>``; empty if there are none."""
    tasks = dict.fromkeys(
        name.split("/")[1] for name in metrics if name.startswith(f"{split}/") and name.count("/") == 2
    )
    rows = []
    for task in tasks:
        values = [metrics.get(f"{split}/{task}/{key}") for key in COLUMNS]
        rows.append([task, *("-" if value is None else f"{value:.4f}" for value in values)])
    return [[f"{split} task", *COLUMNS.values()], *rows] if rows else []


@rank_zero_only
def print_table(trainer: Trainer, split: str) -> None:
    """Prints the metrics of a split, if there are any."""
    rows = quality_table({name: float(value) for name, value in trainer.callback_metrics.items()}, split)
    if not rows:
        return
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, "-" * len(lines[0]))
    print("\n" + "\n".join(lines) + "\n")
