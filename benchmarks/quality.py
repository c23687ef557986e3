"""Quality of the recipes on real data: test AUC, NE, GAUC, calibration and log loss next to baselines.

    python benchmarks/quality.py --seeds 3 --jobs 2          # all recipes; --only kuairand movielens for some

Every recipe trains on its training and validation rows for the number of epochs in its YAML (found on the validation
rows alone) and is evaluated once per seed on the test rows. Where a recipe has histories, two more figures show what
they are worth: ``masked`` (the trained model, but every user looks new) and ``no history`` (trained again without
sequences and without counters of the user, but with what is known of the user at any time). ``popularity`` and
``linear`` are computed here on the same rows; the published baselines were measured by others on the same splits.

The data sets are looked for in ``../shared/data``, the results go to ``benchmarks/results``.
"""

import argparse
import copy
import csv
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
import yaml
from torch import Tensor
from torch.nn import functional as F
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_gem.cli import GEMCLI
from lightning_gem.data import InteractionLog, RecBatch, RecDataModule
from lightning_gem.data.batch import EventSequence
from lightning_gem.data.stream import BatchStream
from lightning_gem.metrics import AUC, GAUC, Calibration, LogLoss, NormalizedEntropy

ROOT = Path(__file__).parents[1]
VARIANTS = ["full", "no history", "baselines"]
METRICS = ["auc", "ne", "gauc", "calibration", "log_loss"]


@dataclass
class Target:
    """What a task is measured against; pairs are AUC and NE.

    Args:
        must: What the model has to reach.
        stretch: What it would be good to reach.
        baselines: Published figures of the same split: AUC, NE, GAUC, calibration.
        popularity: Numeric feature with the log odds of the item's running rate.
    """

    must: tuple[float, float] | None = None
    stretch: tuple[float, float] | None = None
    baselines: dict[str, tuple[float, float, float | None, float]] = field(default_factory=dict)
    popularity: str | None = None


@dataclass
class Recipe:
    """A configuration and its targets.

    Args:
        targets: By task.
        new_user: Values of the numeric features that tell of the user's past, besides the counters by user (0).
        profile: What the run without history knows of the user instead.
    """

    targets: dict[str, Target]
    new_user: dict[str, float] = field(default_factory=dict)
    profile: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outputs:
    """Logits, labels and users of a task on the test rows; no users where the schema has none.

    Arrays, not tensors: those would be handed over as memory of a process that ends.
    """

    logits: np.ndarray
    labels: np.ndarray
    users: np.ndarray | None


KUAIRAND_PROFILE = {
    "joins": [
        {
            "path": "../shared/data/kuairand27k_explicit/user_features_pure.csv.gz",
            "key": "user_id",
            "columns": ["user_active_degree", *(f"onehot_feat{i}" for i in (0, 1, 2, 6, 7, 9, 10, 11))],
        }
    ],
    "sparse": [
        {"name": name, "num_embeddings": num_embeddings, "encoding": "vocabulary", "embedding_dim": 8}
        for name, num_embeddings in (
            ("user_id", 1000),
            ("user_active_degree", 16),
            *((f"onehot_feat{i}", 128) for i in (0, 1, 2, 6, 7, 9, 10, 11)),
        )
    ],
}
# log1p of the fill value: the user has no earlier event.
KUAIRAND_NEW_USER = {"gap": 13.815511}

RECIPES = {
    "kuairand": Recipe(
        {
            "click": Target(
                (0.785, 0.810),
                (0.800, 0.790),
                {
                    "constant": (0.5, 1.0001, 0.5, 0.992),
                    "click rate of the video": (0.6581, 0.9309, 0.6179, 1.007),
                    "click rate of the user": (0.7280, 0.8849, 0.5, 1.008),
                    "LR user + context": (0.7476, 0.8623, 0.6065, 1.020),
                    "LR user + context + history": (0.7744, 0.8263, 0.5969, 1.017),
                },
            ),
            "long_view": Target(
                (0.765, 0.838),
                (0.780, 0.820),
                {
                    "constant": (0.5, 1.0, 0.5, 1.002),
                    "long view rate of the video": (0.6656, 0.9249, 0.6199, 1.017),
                    "long view rate of the user": (0.7042, 0.9093, 0.5, 1.026),
                    "LR user + context": (0.7374, 0.8705, 0.6222, 1.013),
                    "LR user + context + history": (0.7546, 0.8493, 0.6171, 1.001),
                },
            ),
        },
        KUAIRAND_NEW_USER,
        KUAIRAND_PROFILE,
    ),
    "kuairand_counters": Recipe(
        {
            "click": Target(
                (0.828, 0.743),
                (0.838, 0.730),
                {
                    "LR user + context + item counters": (0.8138, 0.7647, 0.7078, 1.017),
                    "LR user + context + history + item counters": (0.8235, 0.7500, 0.7071, 1.011),
                },
                "video_id_is_click_rate",
            ),
            "long_view": Target(
                (0.810, 0.772),
                (0.820, 0.757),
                {
                    "LR user + context + item counters": (0.7995, 0.7866, 0.7105, 1.005),
                    "LR user + context + history + item counters": (0.8055, 0.7775, 0.7047, 0.994),
                },
                "video_id_long_view_rate",
            ),
        },
        KUAIRAND_NEW_USER,
        KUAIRAND_PROFILE,
    ),
    "movielens": Recipe(
        {
            "liked": Target(
                (0.805, 0.775),
                (0.815, 0.760),
                {
                    "constant": (0.5, 1.0012, 0.5, 1.043),
                    "like rate of the movie": (0.6711, 0.9354, 0.6593, 1.040),
                    "LR user + movie + genres": (0.7734, 0.8205, 0.6703, 1.017),
                    "LR + history": (0.8002, 0.7818, 0.6657, 0.961),
                    "gradient boosting + history": (0.8008, 0.7798, 0.6627, 0.978),
                },
                "movieId_liked_rate",
            )
        },
        # log1p of the fill value: the user has no earlier rating.
        {"gap": 19.519293},
        {"sparse": [{"name": "userId", "num_embeddings": 1000, "encoding": "vocabulary", "embedding_dim": 8}]},
    ),
    "criteo": Recipe(
        {
            "click": Target(
                (0.730, 0.884),
                (0.740, 0.875),
                {
                    "constant": (0.5, 1.0006, None, 1.045),
                    "LR on hashed tokens": (0.7273, 0.8870, None, 1.042),
                    "gradient boosting on target means": (0.7296, 0.8835, None, 1.030),
                },
            )
        }
    ),
    "open_bandit": Recipe(
        {
            "click": Target(
                baselines={
                    "constant": (0.5, 1.0019, None, 0.854),
                    "click rate of the item": (0.5163, 1.0056, None, 0.882),
                    "LR on hashed tokens": (0.5297, 1.0011, None, 0.854),
                },
                popularity="item_click_rate",
            )
        }
    ),
}


def user_columns(data: RecDataModule, new_user: dict[str, float]) -> dict[int, float]:
    """Positions of the numeric features that tell of the user's past, and their values for a new user."""
    names = [feature.name for feature in data.schema.dense]
    columns = {names.index(name): value for name, value in new_user.items()}
    if isinstance(data, InteractionLog):
        counters = [counter for counter in data.config.counters if data.schema.user in counter.by]
        columns |= {names.index(name): 0.0 for counter in counters for name in counter.names}
    return columns


def forget(batch: RecBatch, columns: dict[int, float]) -> RecBatch:
    """The same requests, but of users without a past: empty sequences, numbers of a new user."""
    dense = batch.dense.clone()
    for column, value in columns.items():
        dense[:, column] = value
    sequences = {}
    for name, sequence in batch.sequences.items():
        keys = sequence.ids.keys()
        sequences[name] = EventSequence(
            ids=KeyedJaggedTensor(
                keys=keys,
                values=sequence.ids.values()[:0],
                lengths=torch.zeros(len(keys) * len(batch), dtype=torch.int32),
            ),
            floats=sequence.floats[:0],
            timestamps=sequence.timestamps[:0],
            cu_seqlens=torch.zeros_like(sequence.cu_seqlens),
            lengths_cpu=torch.zeros_like(sequence.lengths_cpu),
        )
    return RecBatch(
        dense=dense,
        sparse=batch.sparse,
        sequences=sequences,
        request_timestamps=batch.request_timestamps,
        domain=batch.domain,
        labels=batch.labels,
        weights=batch.weights,
        user=batch.user,
        row=batch.row,
    )


def without_history(config: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    """The configuration without sequences and counters of the user, but with the user's id and profile."""
    config = copy.deepcopy(config)
    network = config["model"]["network"]["init_args"]
    network.get("network", {"init_args": network})["init_args"]["config"]["sequence_mode"] = "none"
    data = config["data"]["init_args"]
    schema = data["schema"]
    data["counters"] = [counter for counter in data["counters"] if schema["user"] not in counter["by"]]
    data["joins"] = [*data.get("joins", []), *recipe.profile.get("joins", [])]
    schema["dense"] = [feature for feature in schema["dense"] if feature["name"] not in recipe.new_user]
    schema["sparse"] = [*schema["sparse"], *recipe.profile.get("sparse", [])]
    return config


def scores(logits: Tensor, labels: Tensor, users: Tensor | None) -> dict[str, float]:
    """All metrics of one task from logits."""
    metrics = {"auc": AUC(), "ne": NormalizedEntropy(), "calibration": Calibration(), "log_loss": LogLoss()}
    for metric in metrics.values():
        metric.update(logits, labels)
    values = {name: float(metric.compute()) for name, metric in metrics.items()}
    if users is not None:
        gauc = GAUC()
        gauc.update(logits, labels, users, torch.ones_like(labels))
        values["gauc"] = float(gauc.compute())
    return values


def train(path: Path, seed: int, folder: str, extra: list[str]) -> GEMCLI:
    """Trains a configuration on its training and validation rows."""
    cli = GEMCLI(
        [
            *("--config", str(path), f"--seed_everything={seed}", f"--data.init_args.seed={seed}"),
            *("--data.init_args.split.val=0", "--checkpoint.monitor=null", f"--checkpoint.dirpath={folder}"),
            *("--trainer.logger=false", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"),
            *("--trainer.accelerator=cpu", f"--trainer.default_root_dir={folder}"),
            *extra,
        ],
        run=False,
    )
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    return cli


def evaluate(cli: GEMCLI) -> dict[str, dict[str, float]]:
    """Test metrics by task, from the product's own test loop."""
    (logged,) = cli.trainer.test(cli.model, datamodule=cli.datamodule, verbose=False)
    return {
        task.name: {
            name: logged[f"test/{task.name}/{name}"] for name in METRICS if f"test/{task.name}/{name}" in logged
        }
        for task in cli.datamodule.schema.tasks
    }


def run(name: str, variant: str, seed: int, extra: list[str]) -> list[dict[str, Any]]:
    """Trains and evaluates one recipe with one seed. Runs in a process of its own."""
    os.chdir(ROOT)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    recipe, start = RECIPES[name], time.monotonic()
    config = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
    rows = []

    def add(label: str, metrics: dict[str, dict[str, float]]) -> None:
        for task, values in metrics.items():
            rows.append({"recipe": name, "task": task, "model": label, "seed": seed, **values})

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(yaml.safe_dump(without_history(config, recipe) if variant == "no history" else config))
        if variant == "baselines":
            for label, metrics in simple_baselines(path, recipe):
                add(label, metrics)
            return rows
        cli = train(path, seed, folder, extra)
        assert cli.model.network is not None
        logits: list[Tensor] = []
        hook = cli.model.network.register_forward_hook(lambda *call: logits.append(call[-1]))
        add("GEM, no history" if variant == "no history" else "GEM", evaluate(cli))
        hook.remove()
        test = read_split(cli.datamodule, "test")
        for i, row in enumerate(rows):
            row["seconds"] = time.monotonic() - start
            row["outputs"] = Outputs(
                torch.cat(logits)[:, i].numpy(),
                torch.cat([batch.labels[:, i] for batch in test]).numpy(),
                torch.cat([batch.user for batch in test]).numpy() if cli.datamodule.schema.user else None,
            )
        if cli.datamodule.schema.sequences and variant == "full":
            columns = user_columns(cli.datamodule, recipe.new_user)
            cli.model.network.register_forward_pre_hook(lambda _, inputs: (forget(inputs[0], columns),))
            add("GEM, history masked", evaluate(cli))
    return rows


def read_split(data: RecDataModule, split: str) -> list[RecBatch]:
    """All batches of a split."""
    return list(BatchStream(data.sources[split], 4096))


def simple_baselines(path: Path, recipe: Recipe) -> list[tuple[str, dict[str, dict[str, float]]]]:
    """Popularity, and a logistic regression on the request's own numbers and categories, counters included."""
    cli = GEMCLI(["--config", str(path), "--data.init_args.split.val=0", "--trainer.logger=false"], run=False)
    data = cli.datamodule
    data.prepare_data()
    data.setup("test")
    rows, test = read_split(data, "train"), read_split(data, "test")
    names = [feature.name for feature in data.schema.dense]
    popularity, linear = {}, {}
    users = torch.cat([batch.user for batch in test]) if data.schema.user else None
    for i, task in enumerate(data.schema.tasks):
        labels = torch.cat([batch.labels[:, i] for batch in rows])
        truth = torch.cat([batch.labels[:, i] for batch in test])
        item = recipe.targets[task.name].popularity
        if item is not None:
            odds = torch.cat([batch.dense[:, names.index(item)] for batch in test])
            popularity[task.name] = scores(odds + torch.logit(labels.mean()), truth, users)
        weights = fit_linear(rows, labels, data)
        linear[task.name] = scores(apply_linear(weights, test, data), truth, users)
    return [("popularity (computed)", popularity), ("linear (computed)", linear)]


def apply_linear(weights: list[Tensor], batches: list[RecBatch], data: RecDataModule) -> Tensor:
    """Logits of a linear model with one weight per category and per standardised number."""
    bias, dense, mean, deviation, *tables = weights
    logits = []
    for batch in batches:
        out = bias + ((batch.dense - mean) / deviation).clamp(-5, 5) @ dense
        for feature, table in zip(data.schema.sparse, tables, strict=True):
            assert batch.sparse is not None
            ids = batch.sparse[feature.name]
            out = out + F.embedding_bag(ids.values(), table[:, None], ids.offsets()[:-1], mode="sum")[:, 0]
        logits.append(out)
    return torch.cat(logits)


def fit_linear(batches: list[RecBatch], labels: Tensor, data: RecDataModule, decay: float = 3e-4) -> list[Tensor]:
    """Fits that model with an L2 penalty by L-BFGS."""
    dense = torch.cat([batch.dense for batch in batches])
    fixed = [dense.mean(0), dense.std(0).clamp(min=1e-6)]
    shapes = [1, dense.shape[1], *(feature.num_embeddings for feature in data.schema.sparse)]
    free = [torch.zeros(shape, requires_grad=True) for shape in shapes]
    optimizer = torch.optim.LBFGS(free, max_iter=60, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        logits = apply_linear([free[0], free[1], *fixed, *free[2:]], batches, data)
        penalty = torch.stack([weight.square().sum() for weight in free[1:]]).sum()
        loss = F.binary_cross_entropy_with_logits(logits, labels) + decay * penalty
        loss.backward()
        return loss

    optimizer.step(closure)
    return [weight.detach() for weight in (free[0], free[1], *fixed, *free[2:])]


def average_seeds(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Figures of the mean logits of all seeds, which is another model: what the seeds' spread costs a single one.

    Takes the outputs out of the rows.
    """
    groups: dict[tuple[str, str, str], list[Outputs]] = {}
    for row in rows:
        if "outputs" in row:
            groups.setdefault((row["recipe"], row["task"], row["model"]), []).append(row.pop("outputs"))
    averages = []
    for (recipe, task, model), members in groups.items():
        if len(members) > 1:
            logits = np.mean([outputs.logits for outputs in members], axis=0)
            labels, users = members[0].labels, members[0].users
            figures = scores(
                torch.from_numpy(logits),
                torch.from_numpy(labels),
                torch.from_numpy(users) if users is not None else None,
            )
            label = f"{model}, logits of {len(members)} seeds averaged"
            averages.append({"recipe": recipe, "task": task, "model": label, "seed": "all", **figures})
    return averages


def summarise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and sample standard deviation over the seeds."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["recipe"], row["task"], row["model"]), []).append(row)
    means = []
    for (recipe, task, model), members in groups.items():
        mean: dict[str, Any] = {"recipe": recipe, "task": task, "model": model, "seed": f"mean of {len(members)}"}
        for name in METRICS:
            values = [row[name] for row in members if row.get(name) is not None]
            if values:
                mean[name] = statistics.fmean(values)
                mean[f"{name}_sd"] = statistics.stdev(values) if len(values) > 1 else 0.0
        means.append(mean)
    return means


def print_tables(means: list[dict[str, Any]]) -> None:
    """One table per recipe and task: ours, the baselines, the bars."""
    for recipe, task in dict.fromkeys((mean["recipe"], mean["task"]) for mean in means):
        target = RECIPES[recipe].targets[task]
        print(f"\n{recipe}, {task}\n{'':52s}{'AUC':>16s}{'NE':>16s}{'GAUC':>16s}{'calibration':>16s}{'log loss':>16s}")
        for mean in means:
            if (mean["recipe"], mean["task"]) == (recipe, task):
                cells = [
                    f"{mean[name]:.4f}" + (f" ± {mean[f'{name}_sd']:.4f}" if mean[f"{name}_sd"] else "")
                    if name in mean
                    else "-"
                    for name in METRICS
                ]
                print(f"{mean['model']:52s}" + "".join(f"{cell:>16s}" for cell in cells))
        for label, figures in target.baselines.items():
            cells = [f"{value:.4f}" if value is not None else "-" for value in figures]
            print(f"{'published: ' + label:52s}" + "".join(f"{cell:>16s}" for cell in cells))
        for label, bar in (("must", target.must), ("stretch", target.stretch)):
            if bar is not None:
                print(f"{label:52s}{bar[0]:16.4f}{bar[1]:16.4f}")


def write(rows: list[dict[str, Any]], path: Path, device: str) -> None:
    """Writes all rows with what is needed to repeat them."""
    common = {
        "date": date.today().isoformat(),
        "device": device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "command": "python benchmarks/quality.py " + " ".join(sys.argv[1:]),
    }
    names = ["recipe", "task", "model", "seed", *METRICS, *(f"{name}_sd" for name in METRICS), "seconds", *common]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        for row in rows:
            rounded = {key: round(value, 5) if isinstance(value, float) else value for key, value in row.items()}
            writer.writerow({**rounded, **common})


def main(arguments: list[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="trainings side by side, each on one thread")
    parser.add_argument("--device", default=platform.processor() or platform.machine(), help="name for the results")
    parser.add_argument("--output", type=Path, help="CSV file; benchmarks/results/<date>_quality_cpu.csv by default")
    # Further arguments go to the command line of every training, such as --trainer.max_epochs=1.
    options, extra = parser.parse_known_args(arguments)
    if not (ROOT.parent / "shared" / "data").is_dir():
        parser.error(f"the data sets are not in {ROOT.parent / 'shared' / 'data'}")
    todo = []
    for name in options.only:
        # Only recipes with histories can be trained without.
        variants = [variant for variant in options.variants if variant != "no history" or RECIPES[name].profile]
        for variant in variants:
            seeds = [0] if variant == "baselines" else range(1, options.seeds + 1)
            todo += [(name, variant, seed) for seed in seeds]
    # Every training has a process of its own: a clean state, and as many side by side as asked for.
    with ProcessPoolExecutor(options.jobs, get_context("spawn"), max_tasks_per_child=1) as pool:
        jobs = [pool.submit(run, *item, extra) for item in todo]
        for job in as_completed(jobs):
            for row in job.result():
                print(f"{row['recipe']}, {row['task']}, {row['model']}: {row['auc']:.4f} / {row['ne']:.4f}", flush=True)
        rows = [row for job in jobs for row in job.result()]
    rows += average_seeds(rows)
    means = summarise(rows)
    print_tables(means)
    path = options.output or ROOT / "benchmarks" / "results" / f"{date.today().isoformat()}_quality_cpu.csv"
    write([*rows, *means], path, f"{options.device}, 1 thread per training, {options.jobs} side by side")
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
