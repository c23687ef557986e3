"""Watches what low precision does to every layer while a model trains, and takes it back where it does too much."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_gem.precision import MXFP8Precision
from lightning_gem.precision.convert import Converted, ConvertedAttention
from lightning_gem.precision.recipes import PrecisionRecipe
from lightning_gem.precision.statistics import operand_statistics, product_statistics

OPERANDS = [f"{tensor}_{what}" for tensor in ("x", "weight", "grad") for what in ("db", "flushed", "saturated")]
PRODUCTS = ["out_db", "grad_x_db", "grad_weight_db"]
COLUMNS = [*OPERANDS, *PRODUCTS]


class SensitivityProbe(Callback):
    """Every so many steps, on a sample of the rows: what MXFP8 does to the operands and products of each layer.

    Healthy: 31.5 dB for an operand, 28.5 dB for a product, less than 0.1 % of the numbers flushed to zero, none
    saturated. A layer beyond a limit in ``patience`` probes in a row goes back to bf16, on all ranks and in resumed
    runs. Between probes the callback costs nothing; a probe synchronises once.

    Logs ``precision/least_out_db``, ``precision/largest_flushed`` and ``precision/demoted``. Writes the layers to keep
    as a configuration (``lightning-gem fit --config ... --config <path>`` leaves them in bf16 from the start), and the
    statistics beside it.

    Args:
        every_n_steps: Steps between probes.
        rows: Largest sample of rows per layer.
        least_db: Signal to noise of the output below which a layer is beyond its limit.
        largest_flushed: Fraction of the gradient's non-zeros flushed to zero above which it is.
        patience: Probes in a row.
        demote: Act on it; False: only watch.
        path: The file; None: ``precision.json`` in the trainer's root folder.
    """

    def __init__(
        self,
        every_n_steps: int = 500,
        rows: int = 4096,
        least_db: float = 25.0,
        largest_flushed: float = 0.01,
        patience: int = 3,
        demote: bool = True,
        path: str | None = None,
    ) -> None:
        if min(every_n_steps, rows, patience) < 1:
            raise ValueError(
                f"every_n_steps, rows and patience must be positive, got {every_n_steps}, {rows}, {patience}"
            )
        self.every_n_steps = every_n_steps
        self.rows = rows
        self.least_db = least_db
        self.largest_flushed = largest_flushed
        self.patience = patience
        self.demote = demote
        self.path = path
        self.statistics: dict[str, dict[str, float]] = {}
        self.beyond: dict[str, int] = {}
        self.demoted: list[str] = []
        self._observed: dict[str, dict[str, list[Tensor]]] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Demotes again what a resumed run had demoted."""
        for name, module in _converted(pl_module).items():
            if name in self.demoted:
                module.precision_enabled = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Sets the probes."""
        if trainer.global_step % self.every_n_steps:
            return
        self._observed = {}
        for name, module in _converted(pl_module).items():
            if module.precision_enabled:
                self._observed[name] = {column: [] for column in ("x", "weight", "grad", *PRODUCTS)}
                module.precision_probe = partial(self._observe, name, module.precision_recipe)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Takes the probes away, gathers what they saw, and acts on it."""
        if not self._observed:
            return
        modules = _converted(pl_module)
        for name in self._observed:
            modules[name].precision_probe = None
        table = torch.stack([self._row(name, pl_module.device) for name in self._observed])
        if trainer.world_size > 1:
            table = trainer.strategy.reduce(table, reduce_op="mean")
        self.statistics.update(
            {
                name: dict(zip(COLUMNS, row, strict=True))
                for name, row in zip(self._observed, table.tolist(), strict=True)
            }
        )
        for name in self._observed:
            row = self.statistics[name]
            is_beyond = row["out_db"] < self.least_db or row["grad_flushed"] > self.largest_flushed
            self.beyond[name] = self.beyond.get(name, 0) + 1 if is_beyond else 0
            if self.demote and self.beyond[name] >= self.patience:
                modules[name].precision_enabled = False
                self.demoted.append(name)
                rank_zero_info(
                    f"{name} goes back to bf16: output {row['out_db']:.1f} dB, {row['grad_flushed']:.2%} of the "
                    "gradient flushed"
                )
        pl_module.log_dict(
            {
                "precision/least_out_db": min(self.statistics[name]["out_db"] for name in self._observed),
                "precision/largest_flushed": max(self.statistics[name]["grad_flushed"] for name in self._observed),
                "precision/demoted": float(len(self.demoted)),
            }
        )
        self._observed = {}
        if trainer.is_global_zero:
            self._write(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Statistics and decisions."""
        return {"statistics": self.statistics, "beyond": self.beyond, "demoted": self.demoted}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores them."""
        self.statistics, self.beyond = dict(state_dict["statistics"]), dict(state_dict["beyond"])
        self.demoted = list(state_dict["demoted"])

    @torch.no_grad()
    def _observe(self, name: str, recipe: PrecisionRecipe, x: Tensor, weight: Tensor, out: Tensor) -> None:
        if name not in self._observed or x.numel() == 0:
            return
        x = x.detach().reshape(*weight.shape[:-2], -1, x.shape[-1])
        step = -(-x.shape[-2] // self.rows)
        sample, fixed, seen = x[..., ::step, :], weight.detach().to(x.dtype), self._observed[name]
        seen["x"].append(operand_statistics(sample, -1, recipe.fmt, recipe.scale, recipe.kind))
        seen["weight"].append(operand_statistics(fixed, -1, recipe.fmt, recipe.scale, recipe.kind))
        seen["out_db"].append(product_statistics(sample, -1, fixed, -1, recipe.fmt, recipe.fmt, recipe.kind))
        if out.requires_grad:
            out.register_hook(partial(self._observe_gradient, name, recipe, sample, fixed, step))

    @torch.no_grad()
    def _observe_gradient(
        self, name: str, recipe: PrecisionRecipe, x: Tensor, weight: Tensor, step: int, grad: Tensor
    ) -> None:
        if name not in self._observed:
            return
        grad = grad.detach().reshape(*weight.shape[:-2], -1, grad.shape[-1])[..., ::step, :]
        seen = self._observed[name]
        seen["grad"].append(operand_statistics(grad, -1, recipe.grad_fmt, recipe.scale, recipe.kind))
        seen["grad_x_db"].append(product_statistics(grad, -1, weight, -2, recipe.grad_fmt, recipe.fmt, recipe.kind))
        seen["grad_weight_db"].append(product_statistics(grad, -2, x, -2, recipe.grad_fmt, recipe.fmt, recipe.kind))

    def _row(self, name: str, device: torch.device) -> Tensor:
        """Means of what was observed, NaN where nothing was."""
        unknown = torch.full((3,), torch.nan, device=device)
        seen = self._observed[name]
        parts = [torch.stack(seen[key]).mean(0) if seen[key] else unknown for key in ("x", "weight", "grad")]
        parts += [torch.stack(seen[key]).mean().view(1) if seen[key] else unknown[:1] for key in PRODUCTS]
        return torch.cat(parts)

    def _write(self, trainer: Trainer) -> None:
        path = Path(self.path or Path(trainer.default_root_dir) / "precision.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        limits = [name for name, count in self.beyond.items() if count >= self.patience]
        keep = [f"^{re.escape(name)}$" for name in dict.fromkeys([*self.demoted, *limits])]
        settings: dict[str, Any] = {}
        precision = trainer.precision_plugin
        if isinstance(precision, MXFP8Precision):
            settings = precision.settings()
        settings["exclude"] = [*(settings.get("exclude") or []), *keep]
        plugin = {"class_path": "lightning_gem.precision.MXFP8Precision", "init_args": settings}
        path.write_text(json.dumps({"trainer": {"plugins": [plugin]}}, indent=1))
        path.with_suffix(".statistics.json").write_text(json.dumps(self.statistics, indent=1))


def _converted(module: LightningModule) -> dict[str, Any]:
    return {
        name: child
        for name, child in module.named_modules()
        if isinstance(child, Converted) and not isinstance(child, ConvertedAttention)
    }
