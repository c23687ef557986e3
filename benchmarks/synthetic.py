"""Ablation on synthetic ads: none < one-way < two-way, and how much of the gap to the best possible NE is closed.

    python benchmarks/synthetic.py [--rows 600000] [--seeds 3] [--first_seed 0] [--jobs 2]

Every run trains `configs/tiny.yaml` for one epoch on a CPU thread and is evaluated on the test split. The share of the
gap is `(1 - NE) / (1 - NE of the true probabilities)`, both on the same labels. Prints the range over seeds of every
mode, and writes a dated CSV to `benchmarks/results`, where runs of other seeds of the same day stay.
"""

import argparse
import csv
import datetime
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODES = ("none", "one_way", "two_way")
NETWORK = "--model.network.init_args.config"


def train(mode: str, seed: int, rows: int, extra: list[str]) -> list[dict[str, object]]:
    """Trains and tests in this process; a row per task."""
    import torch

    from lightning_gem.cli import GEMCLI

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            *("--config", str(ROOT / "configs" / "tiny.yaml"), f"--seed_everything={seed}", f"--data.seed={seed}"),
            *(f"{NETWORK}.sequence_mode={mode}", f"--data.num_train={rows}", "--trainer.logger=false"),
            *("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"),
            *("--trainer.limit_val_batches=0", f"--trainer.default_root_dir={folder}", "--checkpoint.monitor=null"),
            *extra,
        ]
        start = time.perf_counter()
        cli = GEMCLI(arguments, run=False)
        cli.trainer.fit(cli.model, cli.datamodule)
        seconds = time.perf_counter() - start
        (metrics,) = cli.trainer.test(cli.model, cli.datamodule, verbose=False)
    result: list[dict[str, object]] = []
    for task, best in cli.datamodule.best_ne("test").items():
        ne = metrics[f"test/{task}/ne"]
        result.append(
            {
                "mode": mode,
                "seed": seed,
                "rows": rows,
                "task": task,
                "ne": round(ne, 4),
                "best_ne": round(best.realised, 4),
                "ne_without_sequences": round(best.without_sequences, 4),
                "gap_closed": round((1 - ne) / (1 - best.realised), 4),
                "auc": round(metrics[f"test/{task}/auc"], 4),
                "seconds": round(seconds, 1),
            }
        )
    return result


def main() -> None:
    """Runs all modes and seeds, `jobs` at a time, and prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=600_000)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--first_seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--one", nargs=2, metavar=("MODE", "SEED"), help=argparse.SUPPRESS)
    options, extra = parser.parse_known_args()
    if options.one:
        writer = csv.DictWriter(sys.stdout, FIELDS)
        writer.writerows(train(options.one[0], int(options.one[1]), options.rows, extra))
        return

    def run(job: tuple[str, int]) -> list[str]:
        command = [sys.executable, __file__, "--one", job[0], str(job[1]), "--rows", str(options.rows), *extra]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        finished = subprocess.run(command, capture_output=True, text=True, env=environment)
        if finished.returncode:
            raise RuntimeError(finished.stderr[-2000:])
        lines = [line for line in finished.stdout.splitlines() if line.startswith(job[0])]
        print(*lines, sep="\n", flush=True)
        return lines

    import torch

    today = datetime.date.today().isoformat()
    path = options.output / f"{today}_synthetic_cpu.csv"
    options.output.mkdir(parents=True, exist_ok=True)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    with ThreadPoolExecutor(options.jobs) as pool:
        lines = [line for one in pool.map(run, [(mode, seed) for mode in MODES for seed in seeds]) for line in one]
    origin = {
        "date": today,
        "device": f"{platform.processor() or platform.machine()} CPU, one thread per run, {options.jobs} at a time",
        "torch": torch.__version__,
        "command": f"python benchmarks/synthetic.py {' '.join(sys.argv[1:])}".strip(),
    }
    results = merge(path, [{**row, **origin} for row in csv.DictReader(lines, FIELDS)])
    with path.open("w") as file:
        writer = csv.DictWriter(file, (*FIELDS, *origin), lineterminator="\n")
        writer.writeheader()
        writer.writerows(results)
    print(summary(results), f"written to {path}", sep="\n")


def merge(path: Path, rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """New results, and those of the file that they do not replace."""
    old = list(csv.DictReader(path.open())) if path.exists() else []
    both = {tuple(row[key] for key in IDENTITY): row for row in [*old, *rows]}
    return sorted(both.values(), key=lambda row: (int(row["rows"]), MODES.index(row["mode"]), int(row["seed"])))


def summary(results: list[dict[str, str]]) -> str:
    """Share of the gap closed by rows, task and mode: least, mean and most of all seeds."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for row in results:
        found.setdefault((row["rows"], row["task"], row["mode"]), []).append(float(row["gap_closed"]))
    return "\n".join(
        f"{rows:>8} rows  {task:<10} {mode:<8} {min(shares):.3f} .. {sum(shares) / len(shares):.3f} .. "
        f"{max(shares):.3f}  ({len(shares)} seeds)"
        for (rows, task, mode), shares in sorted(found.items(), key=lambda item: (item[0][0], item[0][1]))
    )


FIELDS = ("mode", "seed", "rows", "task", "ne", "best_ne", "ne_without_sequences", "gap_closed", "auc", "seconds")
IDENTITY = ("mode", "seed", "rows", "task")

if __name__ == "__main__":
    main()
