"""Profiles every layer alone before training begins, and says in the end what became of that efficiency."""

import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from lightning_gem.callbacks.efficiency import EfficiencyMonitor, peak_of
from lightning_gem.efficiency import LayerProfile, local_mfu, profile_layers


class LocalMFUProfiler(Callback):
    """Runs each layer alone on the first batch of a run: time, FLOPs and MFU, which together are the local MFU.

    The forward of the LightningModule must take a batch. Weights, gradients, buffers and random state stay as they are.
    When the run ends, the scaling ratio (E2E MFU, of the last log of :class:`EfficiencyMonitor`, over local MFU) and
    where the rest went are printed, logged, and written with the table to ``local_mfu.json``. Only on one device, since
    layers that a strategy has sharded do not run alone.

    Args:
        peak_tflops: See :class:`EfficiencyMonitor`.
        repetitions: Timed runs of every layer.

    Source: see :mod:`lightning_gem.efficiency.local`.
    """

    def __init__(self, peak_tflops: float | None = None, repetitions: int = 5) -> None:
        self.peak_tflops = peak_tflops
        self.repetitions = repetitions
        self.layers: list[LayerProfile] = []
        self.report: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Profiles once."""
        if self.report:
            return
        self.report = {"layers": []}
        if trainer.world_size > 1:
            warnings.warn("LocalMFUProfiler profiles layers on one device: run it with devices=1", stacklevel=2)
            return
        peak = peak_of(pl_module.device, self.peak_tflops)
        with trainer.precision_plugin.forward_context():
            self.layers = profile_layers(pl_module, lambda: pl_module(batch), peak, self.repetitions)
        self.report["layers"] = [asdict(layer) for layer in self.layers]
        if peak is not None:
            self.report |= {"peak": asdict(peak), "local_mfu": local_mfu(self.layers, peak)}

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reports."""
        if not self.layers:
            return
        monitors = [c for c in trainer.callbacks if isinstance(c, EfficiencyMonitor)]  # type: ignore[attr-defined]
        latest = monitors[0].latest if monitors else {}
        if "mfu" in latest and self.report.get("local_mfu"):
            self.report |= explain(self.report["local_mfu"], latest)
        report(trainer, self.report)


def explain(local: float, measured: dict[str, float]) -> dict[str, float]:
    """Scaling ratio, and the share of the time that each cause took; ratio and shares add up to one.

    ``other`` is what is left: communication, recomputation, optimizers, losses and metrics, and gaps between launches.

    Args:
        local: Local MFU.
        measured: What :class:`EfficiencyMonitor` logged.
    """
    ratio = measured["mfu"] / local
    wait = measured["data_wait"]
    imbalance = (1 - wait) * (1 - 1 / measured["imbalance"])
    return {
        "e2e_mfu": measured["mfu"],
        "scaling_ratio": ratio,
        "lost_to_data_wait": wait,
        "lost_to_imbalance": imbalance,
        "lost_to_other": 1 - ratio - wait - imbalance,
    }


def table(layers: list[dict[str, Any]]) -> list[list[str]]:
    """Rows of the report, most time first, header first."""
    total = sum(layer["seconds"] for layer in layers) or 1.0
    rows = [["layer", "ms", "share", "GFLOP", "MFU", "GB"]]
    for layer in sorted(layers, key=lambda layer: -layer["seconds"]):
        rows.append(
            [
                layer["name"],
                f"{layer['seconds'] * 1e3:.3f}",
                f"{layer['seconds'] / total:.1%}",
                f"{layer['flops'] / 1e9:.3f}",
                "-" if layer["mfu"] is None else f"{layer['mfu']:.1%}",
                f"{layer['gigabytes']:.4f}",
            ]
        )
    return rows


@rank_zero_only
def report(trainer: Trainer, result: dict[str, Any]) -> None:
    """Prints the table, writes the JSON file, and sends both to the loggers."""
    rows = table(result["layers"])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    figures = {name: value for name, value in result.items() if isinstance(value, float)}
    lines += [f"{name.replace('_', ' '):20} {value:7.1%}" for name, value in figures.items()]
    path = Path(trainer.default_root_dir) / "local_mfu.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1))
    print("\n" + "\n".join(lines) + f"\n{path}\n")
    for logger in trainer.loggers:
        logger.log_metrics({f"efficiency/{name}": value for name, value in figures.items()}, step=trainer.global_step)
        if isinstance(logger, WandbLogger):
            logger.log_table("efficiency/layers", columns=rows[0], data=rows[1:])
