"""Ablation on synthetic ads: none < one-way < two-way, and how much of the gap to the best possible NE is closed.

    python benchmarks/synthetic.py [--rows 1000000] [--seeds 3] [--jobs 2]

Every run trains `configs/tiny.yaml` for one epoch on a CPU thread and is evaluated on the test split. The share of the
gap is `(1 - NE) / (1 - NE of the true probabilities)`, both on the same labels. Writes a dated CSV to
`benchmarks/results`.
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
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--one", nargs=2, metavar=("MODE", "SEED"), help=argparse.SUPPRESS)
    options, extra = parser.parse_known_args()
    if options.one:
        writer = csv.DictWriter(sys.stdout, _FIELDS)
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

    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(run, [(mode, seed) for mode in MODES for seed in range(options.seeds)]))
    today = datetime.date.today().isoformat()
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{today}_synthetic_cpu.csv"
    with path.open("w") as file:
        file.write(f"# {today}, {platform.processor() or platform.machine()} CPU, torch {torch.__version__}, ")
        file.write(f"python benchmarks/synthetic.py {' '.join(sys.argv[1:])}\n")
        file.write(",".join(_FIELDS) + "\n" + "\n".join(line for lines in results for line in lines) + "\n")
    print(f"written to {path}")


_FIELDS = ("mode", "seed", "rows", "task", "ne", "best_ne", "ne_without_sequences", "gap_closed", "auc", "seconds")

if __name__ == "__main__":
    main()
