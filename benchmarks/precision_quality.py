"""What low precision costs in quality: recipes trained with the same seeds, batches and examples as bf16.

    python -m benchmarks.precision_quality --sets synthetic kuairand --seeds 3 --train 2000000 --test 500000

Two questions, two tables. ``trained``: every recipe trains a model; its predictions are compared with those of the bf16
model of the same seed, example by example. Their interval over examples is tight, but two trainings differ by their
rounding alone, so the mean over the seeds has an interval of its own (Student's t), and ``fp32`` shows what rounding
does by itself. ``same weights``: the bf16 model predicts under every recipe; nothing but the recipe differs.

Every job leaves its predictions in ``--work``; a run that is interrupted goes on where it was, and ``--jobs`` limits
how many are done now. KuaiRand is looked for in ``../shared/data``.
"""

import argparse
import csv
import math
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_gem.callbacks import SensitivityProbe
from lightning_gem.cli import GEMCLI
from lightning_gem.data.stream import BatchStream
from lightning_gem.metrics import NormalizedEntropy
from lightning_gem.precision import MXFP8Precision, convert, unconvert
from lightning_gem.precision.convert import ScopeRule
from lightning_gem.precision.gap import gap, paired_sums

ROOT = Path(__file__).parents[1]
EVERYTHING = ("",)
DEFAULT, BLANKET = ScopeRule(pad=True), ScopeRule(include=EVERYTHING, pad=True)
# Name: recipe, scope, whether a probe takes layers back.
RECIPES: dict[str, tuple[str, ScopeRule, bool]] = {
    "fp32": ("", DEFAULT, False),
    "bf16": ("", DEFAULT, False),
    "mxfp8 everywhere": ("mxfp8", BLANKET, False),
    "mxfp8": ("mxfp8", DEFAULT, False),
    "mxfp8 + probe": ("mxfp8", DEFAULT, True),
    "mxfp8 floor": ("mxfp8_floor", DEFAULT, False),
    "fp8_rowwise": ("fp8_rowwise", DEFAULT, False),
    "fp8_tensorwise": ("fp8_tensorwise", DEFAULT, False),
}
SETS = {"synthetic": "tiny", "kuairand": "kuairand"}
# Two-sided 95 % quantiles of Student's t.
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


def arguments_of(name: str, seed: int, folder: str, options: argparse.Namespace) -> list[str]:
    """Command line of one training."""
    arguments = [
        *("--config", str(ROOT / "configs" / f"{SETS[name]}.yaml"), f"--seed_everything={seed}"),
        *(f"--data.init_args.seed={seed}", f"--checkpoint.dirpath={folder}", f"--trainer.default_root_dir={folder}"),
        *("--trainer.logger=false", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"),
        *("--trainer.limit_val_batches=0", "--checkpoint.monitor=null", f"--trainer.accelerator={options.accelerator}"),
    ]
    if name == "synthetic":
        return [
            *arguments,
            *(f"--data.init_args.num_train={options.train}", f"--data.init_args.num_test={options.test}"),
            # Rows of more than one block of 32, so that recipes differ.
            *("--data.init_args.num_workers=0", "--model.network.init_args.config.width=64"),
        ]
    log = options.data / "kuairand27k_explicit" / "interactions.tsv.gz"
    # One network: the average of three would hide what a recipe does to one.
    return [
        *arguments,
        *("--data.init_args.split.val=0", "--model.network.init_args.size=1", f"--data.init_args.log={log}"),
        f"--trainer.max_epochs={options.epochs}",
    ]


def train(name: str, recipe: str, seed: int, options: argparse.Namespace, folder: str) -> Any:
    """Trains one model."""
    low, scope, probe = RECIPES[recipe]
    cli_arguments = arguments_of(name, seed, folder, options)
    cli_arguments.append(f"--trainer.precision={'bf16-mixed' if recipe == 'bf16' else '32-true'}")
    cli = GEMCLI(cli_arguments, run=False)
    if low:
        plugin = MXFP8Precision(low)
        plugin.scope = scope
        cli.trainer.strategy.precision_plugin = plugin
    if probe:
        # A small model has few rows: the probe looks at all of them, often.
        cli.trainer.callbacks.append(SensitivityProbe(every_n_steps=100, rows=1024))
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    return cli


@torch.no_grad()
def predict(cli: Any, recipe: str, as_trained: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels and weights of all test rows.

    Args:
        cli: After training.
        recipe: What computes.
        as_trained: With the layers that training left converted; otherwise the recipe's scope is converted anew.
    """
    cli.datamodule.setup("test")
    network = cli.model.network.eval()
    low, scope, _ = RECIPES[recipe]
    if not as_trained:
        unconvert(network)
        if low:
            convert(network, low, scope)
    rows: list[tuple[Tensor, ...]] = []
    device = next(network.parameters()).device
    with torch.autocast(device.type, torch.bfloat16, enabled=recipe != "fp32"):
        for batch in BatchStream(cli.datamodule.sources["test"], 1024):
            rows.append((network(batch.to(device)).float().cpu(), batch.labels, batch.weights))
    logits, labels, weights = (torch.cat(column) for column in zip(*rows, strict=True))
    return logits, labels, weights


def job(name: str, recipe: str, seed: int, options: argparse.Namespace) -> None:
    """Trains, predicts and saves; bf16 also predicts under every recipe."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        cli = train(name, recipe, seed, options, folder)
        seconds = time.monotonic() - start
        logits, labels, weights = predict(cli, recipe, True)
        arrays = {"logits": logits, "labels": labels, "weights": weights}
        if recipe == "bf16":
            for other in (name for name, (_, _, probe) in RECIPES.items() if not probe):
                arrays[f"same {other}"] = predict(cli, other, False)[0]
        probes = [callback for callback in cli.trainer.callbacks if isinstance(callback, SensitivityProbe)]
        demoted = len(probes[0].demoted) if probes else 0
        tasks = [task.name for task in cli.datamodule.schema.tasks]
    np.savez(
        path_of(name, recipe, seed, options),
        **{key: value.numpy() for key, value in arrays.items()},
        tasks=np.array(tasks),
        seconds=seconds,
        demoted=demoted,
    )


def path_of(name: str, recipe: str, seed: int, options: argparse.Namespace) -> Path:
    """Where a job's predictions are."""
    size = f"{options.train}_{options.test}" if name == "synthetic" else f"{options.epochs}"
    return Path(options.work / f"{name}_{size}_{recipe.replace(' ', '_')}_{seed}.npz")


def compare(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of both tables for the jobs that are done."""
    rows = []
    for recipe in RECIPES:
        for kind in ("trained", "same weights"):
            found: dict[str, list[dict[str, Any]]] = {}
            for seed in range(1, options.seeds + 1):
                reference = path_of(name, "bf16", seed, options)
                own = path_of(name, recipe, seed, options) if kind == "trained" else reference
                if not reference.exists() or not own.exists():
                    continue
                base, data = np.load(reference), np.load(own)
                key = "logits" if kind == "trained" else f"same {recipe}"
                base_key = "logits" if kind == "trained" else "same bf16"
                if key not in data:
                    continue
                for i, task in enumerate(base["tasks"]):
                    tensors = [torch.from_numpy(array[:, i]) for array in (data[key], base[base_key])]
                    labels, weights = (torch.from_numpy(base[part][:, i]) for part in ("labels", "weights"))
                    sums = paired_sums(*tensors, labels, weights)
                    metric = NormalizedEntropy()
                    metric.update(tensors[0], labels, weights=weights)
                    details = {"sums": sums, "ne": float(metric.compute()), "seed": seed}
                    details |= {"seconds": float(data["seconds"]), "demoted": int(data["demoted"])}
                    found.setdefault(str(task), []).append(details)
            rows += [summarise(name, kind, recipe, task, members) for task, members in found.items()]
    return rows


def summarise(name: str, kind: str, recipe: str, task: str, members: list[dict[str, Any]]) -> dict[str, Any]:
    """One line: the seeds together."""
    gaps = [gap(member["sums"]) for member in members]
    pooled = gap(torch.stack([member["sums"] for member in members]).sum(0))
    row: dict[str, Any] = {
        "set": name,
        "kind": kind,
        "recipe": recipe,
        "task": task,
        "seeds": len(members),
        "examples": pooled.examples,
        "ne": statistics.fmean(member["ne"] for member in members),
        "gap %": 100 * pooled.ne,
        "low %": 100 * pooled.low,
        "high %": 100 * pooled.high,
        "calibration": pooled.calibration,
        "status": pooled.status,
        "needed": pooled.needed if math.isfinite(pooled.needed) else "",
        "demoted": max(member["demoted"] for member in members) if kind == "trained" else "",
        "seconds": statistics.fmean(member["seconds"] for member in members) if kind == "trained" else "",
    }
    if len(gaps) > 1:
        mean = statistics.fmean(item.ne for item in gaps)
        half = STUDENT[len(gaps)] * statistics.stdev(item.ne for item in gaps) / math.sqrt(len(gaps))
        row |= {"seeds low %": 100 * (mean - half), "seeds high %": 100 * (mean + half)}
    return row


COLUMNS = (
    "set", "kind", "recipe", "task", "seeds", "examples", "ne", "gap %", "low %", "high %", "seeds low %",
    "seeds high %", "calibration", "status", "needed", "demoted", "seconds",
)  # fmt: skip


def write(rows: list[dict[str, Any]], path: Path, options: argparse.Namespace) -> None:
    """The table as CSV, and as text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        file.write(f"# {date.today().isoformat()}, {options.device}, torch {torch.__version__}, ")
        file.write(f"python -m benchmarks.precision_quality {' '.join(sys.argv[1:])}\n")
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for row in rows:
            rounded = {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()}
            writer.writerow(rounded)
            print("  ".join(str(rounded.get(column, "")) for column in COLUMNS))


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Gaps with their intervals as an SVG, one line per set, kind, task and recipe; a band shows the tolerance."""
    rows = [row for row in rows if row["recipe"] != "bf16"]
    ends = [abs(row[key]) for row in rows for key in ("low %", "high %") if math.isfinite(row[key])]
    if not ends:
        return
    # Asinh: gaps of 0.001 % and 1 % on one axis.
    limit = math.asinh(max(ends) / 0.02)
    left, width, height = 430, 520, 18

    def x_of(value: float) -> float:
        return left + width * (1 + math.asinh(value / 0.02) / limit) / 2

    total = 40 + height * len(rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 20}" height="{total}" '
        'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>',
        f'<rect x="{x_of(-0.02):.1f}" y="20" width="{x_of(0.02) - x_of(-0.02):.1f}" height="{total - 30}" '
        'fill="#dfd"/>',
    ]
    for tick in (-1, -0.1, -0.02, 0, 0.02, 0.1, 1):
        if abs(math.asinh(tick / 0.02)) <= limit:
            lines.append(f'<text x="{x_of(tick):.1f}" y="14" text-anchor="middle">{tick:g} %</text>')
            lines.append(f'<line x1="{x_of(tick):.1f}" x2="{x_of(tick):.1f}" y1="20" y2="{total - 10}" stroke="#bbb"/>')
    for i, row in enumerate(rows):
        y = 32 + height * i
        label = f"{row['set']}, {row['kind']}, {row['task']}: {row['recipe']}"
        lines.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{label}</text>')
        lines.append(
            f'<line x1="{x_of(row["low %"]):.1f}" x2="{x_of(row["high %"]):.1f}" y1="{y}" y2="{y}" stroke="#246" '
            f'stroke-width="2"/><circle cx="{x_of(row["gap %"]):.1f}" cy="{y}" r="3" fill="#246"/>'
        )
    path.write_text("\n".join([*lines, "</svg>"]) + "\n")


def main(arguments: list[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="*", choices=list(SETS), default=list(SETS))
    parser.add_argument("--recipes", nargs="*", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--train", type=int, default=2_000_000, help="synthetic examples")
    parser.add_argument("--test", type=int, default=500_000, help="synthetic examples")
    parser.add_argument("--epochs", type=int, default=6, help="of KuaiRand")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "precision_quality")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--jobs", type=int, default=10**9, help="trainings to do now")
    parser.add_argument("--device", default=platform.processor() or platform.machine(), help="name for the results")
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    # By seed, bf16 first: whatever is done is comparable.
    todo = [
        (name, recipe, seed)
        for seed in range(1, options.seeds + 1)
        for name in options.sets
        for recipe in sorted(options.recipes, key=lambda recipe: recipe != "bf16")
        if not path_of(name, recipe, seed, options).exists()
    ]
    for name, recipe, seed in todo[: options.jobs]:
        job(name, recipe, seed, options)
        print(f"{name}, {recipe}, seed {seed} done, {time.strftime('%H:%M:%S')}", flush=True)
    rows = [row for name in options.sets for row in compare(name, options)]
    stem = options.output / f"{date.today().isoformat()}_precision_quality_{options.accelerator}"
    write(rows, stem.with_suffix(".csv"), options)
    plot(rows, stem.with_suffix(".svg"))


if __name__ == "__main__":
    main()
