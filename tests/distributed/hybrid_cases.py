"""What the ranks do in test_hybrid.py."""

import contextlib
import inspect
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.cli import LightningCLI
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from lightning_gem.models import GEM, ExpertsConfig, GEMConfig, GEMModule
from lightning_gem.models.experts import WukongExperts
from lightning_gem.strategies import HybridShardedStrategy, TableConfig, checkpoint_files
from lightning_gem.strategies.checkpoint import full_state_dict
from lightning_gem.strategies.experts import shard_experts
from lightning_gem.strategies.mesh import build_meshes, resolve_axes
from tests.distributed.foreign import ClickData, LitDLRM
from tests.helpers import ToyData, ToySource, make_schema


class Record(Callback):
    """Keeps losses, gradient norms and whole weights."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.weights: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any) -> None:
        """Keeps the loss of this rank."""
        self.losses.append(float(outputs["loss"]))
        norm = getattr(trainer.strategy, "gradient_norm", None)
        if norm is not None:
            self.norms.append(float(norm))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """In one process, keeps the norm of the gradients before they are clipped."""
        if not isinstance(trainer.strategy, HybridShardedStrategy):
            gradients = [value.grad for value in pl_module.parameters() if value.grad is not None]
            self.norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gathers the weights."""
        self.weights = full_state_dict(pl_module, getattr(trainer.strategy, "tables", None))


def trainer(folder: Path, strategy: Any, **arguments: Any) -> Trainer:
    """A quiet trainer over all processes there are."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": int(os.environ.get("WORLD_SIZE", "1")) if strategy != "auto" else 1,
        "strategy": strategy,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    return Trainer(**{**defaults, **arguments})


def fit_dlrm(
    folder: Path,
    module: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    clip: float | None = None,
    strategy: Any = "auto",
    ckpt_path: str | None = None,
    callbacks: tuple[Callback, ...] = (),
    model: type[LitDLRM] = LitDLRM,
    **arguments: Any,
) -> dict[str, Any]:
    """Trains DLRM and returns what was recorded."""
    seed_everything(0)
    record = Record()
    made = model(**(module or {}))
    run = trainer(folder, strategy, callbacks=[record, *callbacks], gradient_clip_val=clip, **arguments)
    run.fit(made, ClickData(**(data or {})), ckpt_path=ckpt_path)
    metrics = {key: float(value) for key, value in run.callback_metrics.items()}
    return {"losses": record.losses, "norms": record.norms, "weights": record.weights, "metrics": metrics}


class OrderedToyData(ToyData):
    """Rows in an order in which every step of ``world`` ranks is a step of one process."""

    def __init__(self, world: int, steps: int = 20, batch: int = 8) -> None:
        super().__init__(num_rows=steps * batch, batch_size=batch // world)
        # Rank r takes the r-th part of the order.
        blocks = np.arange(steps * batch).reshape(steps, world, batch // world)
        self.order = blocks.transpose(1, 0, 2).ravel()
        self.shuffle_rows = 0

    def setup(self, stage: str) -> None:
        """Reorders the training split."""
        super().setup(stage)
        source = self.sources["train"]
        assert isinstance(source, ToySource)
        source.rows = source.rows.take(self.order)


def fit_gem(
    folder: Path,
    mode: Literal["partition", "ensemble"] = "partition",
    num_experts: int = 4,
    strategy: Any = "auto",
    clip: float | None = None,
    steps: int = 20,
    **arguments: Any,
) -> dict[str, Any]:
    """Trains a small GEM and returns what was recorded."""
    seed_everything(0)
    record = Record()
    data = OrderedToyData(1 if strategy == "auto" else int(os.environ["WORLD_SIZE"]), steps)
    config = GEMConfig(
        width=16, experts=ExpertsConfig(num_experts=num_experts, mode=mode, hidden=16), num_context_tokens=8
    )
    module = GEMModule(
        data.schema,
        network=partial(GEM, config=config),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        table_lr=0.1,
        table_warmup_steps=4,
        # Each rank divides by its own number of conversions, so their mean is not that of the union.
        task_weights={"conversion": 0.0},
    )
    run = trainer(folder, strategy, callbacks=[record], gradient_clip_val=clip, **arguments)
    run.fit(module, data)
    metrics = {key: float(value) for key, value in run.callback_metrics.items()}
    weights = {key: value for key, value in record.weights.items() if key.startswith("network.")}
    return {"losses": record.losses, "norms": record.norms, "weights": weights, "metrics": metrics}


@dataclass
class Case:
    """A training function under the strategy, and the same in one process without it."""

    fit: Callable[..., dict[str, Any]]
    tables: dict[str, Any]
    options: dict[str, Any]

    def __call__(self, folder: Path) -> dict[str, Any]:
        """Trains on the ranks there are."""
        own = {key: value for key, value in self.options.items() if key in STRATEGY}
        strategy = HybridShardedStrategy(**own, tables=TableConfig(**self.tables), timeout_seconds=60)
        return self.fit(folder, strategy=strategy, **self._arguments())

    def reference(self, folder: Path) -> dict[str, Any]:
        """Trains in one process."""
        return self.fit(folder, **self._arguments())

    def _arguments(self) -> dict[str, Any]:
        return {key: value for key, value in self.options.items() if key not in STRATEGY}


STRATEGY = set(inspect.signature(HybridShardedStrategy).parameters) - {"tables"}


def dlrm(tables: dict[str, Any], **options: Any) -> Case:
    """A case with TorchRec's models."""
    return Case(fit_dlrm, tables, options)


def gem(tables: dict[str, Any], **options: Any) -> Case:
    """A case with GEM."""
    return Case(fit_gem, tables, options)


SGD = {"optimizer": "sgd"}
ATTACHED = {"attach": True}

TWO: dict[str, Case] = {
    "dlrm_table_wise": dlrm({**SGD, "sharding": "table_wise"}, wrap_min_parameters=50),
    "dlrm_row_wise": dlrm({**SGD, "sharding": "row_wise"}, replicate=2),
    "dlrm_column_wise": dlrm({**SGD, "sharding": "column_wise"}),
    "dlrm_copies": dlrm({**SGD, "sharding": "row_wise"}, table_replicate=2, replicate=2),
    "dlrm_adagrad": dlrm({}, module=ATTACHED, wrap_min_parameters=50, clip=0.1),
    "dlrm_planner": dlrm({**SGD, "planner": "torchrec"}),
    "dcn_auto": dlrm({**SGD}, module={"cross": True}, wrap=["CrossNet", "MLP", "LowRankCrossNet"]),
    "gem_dense": gem({"sharding": "table_wise"}, replicate=2),
    "gem_tables": gem({"sharding": "row_wise"}, wrap_min_parameters=10**9, clip=1.0),
    "gem_experts": gem({}, expert=2, clip=1.0),
    "gem_ensemble": gem({}, expert=2, mode="ensemble", clip=1.0),
}
FOUR: dict[str, Case] = {
    "dlrm_all": dlrm({**SGD, "sharding": "row_wise"}, replicate=2, table_replicate=2, wrap_min_parameters=50),
    "gem_all": gem({"sharding": "row_wise"}, replicate=2, expert=2, clip=1.0),
    "gem_all_ensemble": gem({}, expert=2, mode="ensemble", num_experts=2, clip=1.0),
}

# Two epochs with AdamW, row-wise AdaGrad, a schedule and clipping; the checkpoint lies between them.
RESUMED: dict[str, Any] = {"module": {"dense_lr": 0.01}, "clip": 0.1, "max_epochs": 2}
TABLES = {"lr": 0.1, "sharding": "table_wise"}


def shares(world: int) -> dict[str, Any]:
    """Ten steps of 8 samples, as even as they can be."""
    sizes = [8 // world + (rank < 8 % world) for rank in range(world)]
    return {"steps": [sizes] * 10, "val_steps": [sizes] * 2}


def save(folder: Path) -> dict[str, Any]:
    """Trains both epochs and saves after each."""
    world = int(os.environ["WORLD_SIZE"])
    keep = ModelCheckpoint(folder / "checkpoints", filename="{epoch}", save_top_k=-1, save_last=True)
    case = dlrm(
        TABLES,
        replicate=2,
        wrap_min_parameters=50,
        data=shares(world),
        callbacks=(keep,),
        enable_checkpointing=True,
        **RESUMED,
    )
    return case(folder)


def resume(tables: dict[str, Any], **options: Any) -> Callable[[Path], dict[str, Any]]:
    """Trains the second epoch from what :func:`save` saved, under another layout."""

    def case(folder: Path) -> dict[str, Any]:
        world = int(os.environ["WORLD_SIZE"])
        path = str(folder / "checkpoints" / "epoch=0.ckpt")
        result = dlrm({**TABLES, **tables}, data=shares(world), ckpt_path=path, **options, **RESUMED)(folder)
        seed_everything(1)
        strategy = HybridShardedStrategy(tables=TableConfig(**TABLES), timeout_seconds=60)
        run = trainer(folder, strategy)
        last = str(folder / "checkpoints" / "last.ckpt")
        run.validate(LitDLRM(dense_lr=0.01), ClickData(**shares(world)), ckpt_path=last, verbose=False)
        result["validated"] = float(run.callback_metrics["val_loss"])
        return result

    return case


def uneven(folder: Path) -> dict[str, Any]:
    """Ranks with 10, 9, 7 and 0 batches, some of them smaller."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    steps = [[3 - step % 2, 2 * (step < 9), 2 * (step < 7), 0] for step in range(10)]
    val_steps = [[2, 1, 0, 0], [3, 0, 0, 0]]
    data = {"steps": steps, "val_steps": val_steps}
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return fit_dlrm(folder, data={key: [[sum(sizes)] for sizes in value] for key, value in data.items()})
    assert world == 4
    return dlrm({**SGD, "sharding": "table_wise"}, data=data)(folder)


class PoisonedDLRM(LitDLRM):
    """The loss of the last rank is NaN in the third step."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        """As its parent's."""
        loss = super().training_step(batch, batch_idx)
        is_last = self.global_rank == self.trainer.world_size - 1
        return loss * float("nan") if batch_idx == 2 and is_last else loss


def poisoned(folder: Path) -> dict[str, Any]:
    """What happens to a NaN under both settings."""
    results: dict[str, Any] = {}
    for setting in ("raise", "skip"):
        record = Record()
        strategy = HybridShardedStrategy(
            nonfinite_loss=setting,  # type: ignore[arg-type]
            tables=TableConfig(optimizer="sgd"),
            timeout_seconds=60,
        )
        run = trainer(folder, strategy, callbacks=[record])
        try:
            run.fit(PoisonedDLRM(), ClickData())
        except FloatingPointError as error:
            results["message"] = str(error)
        model = run.lightning_module
        results[setting] = full_state_dict(model, strategy.tables)
    return results


def exchange(folder: Path) -> dict[str, Any]:
    """Experts of four ranks with batches of 3, 1, 2 and 4 samples against all experts in one process."""
    sizes = [3, 1, 2, 4][: int(os.environ["WORLD_SIZE"])]
    meshes = build_meshes(resolve_axes(len(sizes), expert=len(sizes)), "cpu")
    rank = dist.get_rank()
    worst = 0.0
    for mode in ("partition", "ensemble"):
        torch.manual_seed(0)
        config = ExpertsConfig(num_experts=8, mode=mode, hidden=16)  # type: ignore[arg-type]
        whole, own = (WukongExperts(16, 8, config, "relu") for _ in range(2))
        own.load_state_dict(whole.state_dict())
        shard_experts(own, meshes)
        own.expert_exchange.samples = sizes
        inputs = torch.randn(sum(sizes), 16, 8)
        mine = inputs.split(sizes)[rank].clone().requires_grad_()
        inputs.requires_grad_()
        expected, out = whole(inputs), own(mine)
        weight = torch.randn_like(expected)
        (expected * weight).sum().backward()
        (out * weight.split(sizes)[rank]).sum().backward()
        assert mine.grad is not None
        assert inputs.grad is not None
        pairs = [(out, expected.split(sizes)[rank]), (mine.grad, inputs.grad.split(sizes)[rank])]
        pairs += [
            (value.grad.full_tensor(), reference.grad)  # type: ignore[union-attr]
            for value, reference in zip(own.parameters(), whole.parameters(), strict=True)
        ]
        worst = max(worst, *(float((a - b).abs().max()) for a, b in pairs))
    return {"worst": worst}


def meta(folder: Path) -> dict[str, Any]:
    """Weights after three steps from the meta device, under two layouts."""
    layouts = [
        ({"sharding": "table_wise"}, {"replicate": 2}),
        ({"sharding": "row_wise"}, {"expert": 2, "wrap": ["GEMLayer", "HierarchicalSeedPooling"]}),
    ]
    return {
        str(i): gem(tables, meta_init=True, steps=3, **options)(folder)["weights"]
        for i, (tables, options) in enumerate(layouts)
    }


def refused(folder: Path) -> dict[str, Any]:
    """Messages of what is refused before the first step."""
    shared = EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=9, feature_names=["f"])]
    )
    twice = LitDLRM()
    twice.other = EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=9, feature_names=["f"])]
    )
    twice.shared = shared
    twice.other.embedding_bags["t"].weight = shared.embedding_bags["t"].weight
    tied = LitDLRM()
    tied.first, tied.second = torch.nn.Linear(9, 9, bias=False), torch.nn.Linear(9, 9, bias=False)
    tied.second.weight = tied.first.weight
    saved, damaged = str(folder / "checkpoints" / "epoch=0.ckpt"), folder / "damaged.ckpt"
    manual = LitDLRM()
    manual.automatic_optimization = False
    borrowed = LitDLRM()
    borrowed.head = torch.nn.Linear(8, 20, bias=False)
    borrowed.head.weight = borrowed.model.sparse_arch.embedding_bag_collection.embedding_bags["t_small"].weight
    network = GEM(make_schema(), GEMConfig(width=16))
    meshes = LitDLRM()
    meshes.network, meshes.other = network, torch.nn.Module()
    meshes.other.weight = next(network.layers[0].experts.parameters())
    manual.factor = torch.nn.Parameter(torch.ones(1))
    attempts: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
        "interval": (LitDLRM(), {"tables": TableConfig(copies="sharded", sync_interval=2)}, {}),
        "cuda": (LitDLRM(), {"tables": TableConfig(copies="torchrec")}, {}),
        "squares": (LitDLRM(attach=True), {"tables": TableConfig(square_scale=0.5)}, {}),
        "no_squares": (LitDLRM(), {"tables": TableConfig(square_scale=0.5, optimizer="sgd")}, {}),
        "precision": (LitDLRM(), {}, {"precision": "bf16-true"}),
        "anomaly": (LitDLRM(), {}, {"detect_anomaly": True}),
        "swa": (LitDLRM(), {}, {"callbacks": [StochasticWeightAveraging(0.1)]}),
        "ema": (LitDLRM(), {}, {"callbacks": [EMAWeightAveraging()]}),
        "link": (
            LitDLRM(),
            {"async_checkpoints": True},
            {"callbacks": [ModelCheckpoint(folder, save_last="link")], "enable_checkpointing": True},
        ),
        "tier": (LitDLRM(), {"host_size": 1, "expert": 2}, {}),
        "symmetric": (LitDLRM(), {"sm_free_collectives": "require"}, {}),
        "borrowed": (borrowed, {}, {}),
        "two_meshes": (meshes, {"expert": 2}, {}),
        "batchnorm": (LitDLRM(), {}, {"sync_batchnorm": True}),
        "manual": (manual, {}, {}),
        "experts": (LitDLRM(), {"expert": 2}, {}),
        "wrap": (LitDLRM(), {"wrap": ["Missing"]}, {}),
        "size": (LitDLRM(), {"shard": 3}, {}),
        "table": (LitDLRM(), {"tables": TableConfig(per_table={"missing": "row_wise"})}, {}),
        "twice": (twice, {}, {}),
        "tied": (tied, {"wrap": lambda name, module: isinstance(module, torch.nn.Linear)}, {}),
        "checkpoint": (LitDLRM(), {}, {"ckpt_path": str(folder / "missing.ckpt")}),
        "other_model": (LitDLRM(cross=True), {}, {"ckpt_path": saved}),
        "other_rows": (LitDLRM(rows=21, dense_lr=0.1), {}, {"ckpt_path": saved}),
        "no_shard": (LitDLRM(), {}, {"ckpt_path": str(damaged)}),
        "unequal": (LitDLRM(), {"tables": TableConfig(sharding="row_wise")}, {"data": ClickData([[3, 2]])}),
    }
    messages = {}
    if os.environ["RANK"] == "0":
        shutil.copytree(saved, damaged)
        next(damaged.glob("*.distcp")).unlink()
    for name, (model, options, arguments) in attempts.items():
        path, data = arguments.pop("ckpt_path", None), arguments.pop("data", ClickData())
        try:
            run = trainer(folder, HybridShardedStrategy(**options, timeout_seconds=60), **arguments)
            run.fit(model, data, ckpt_path=path)
        except (ValueError, FileNotFoundError) as error:
            messages[name] = str(error)
    return messages


class OnlyTables(LitDLRM):
    """No dense parameter at all."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = self.model.sparse_arch.embedding_bag_collection
        del self.model

    def _loss(self, batch: dict[str, Any]) -> torch.Tensor:
        scores = self.tables(batch["sparse"]).values().sum(dim=1)
        return torch.nn.functional.binary_cross_entropy_with_logits(scores, batch["label"])


class OnlyDense(LitDLRM):
    """No TorchRec module at all."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def _loss(self, batch: dict[str, Any]) -> torch.Tensor:
        logits = self.model(batch["dense"]).squeeze(1)
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, batch["label"])


MODELS = {"only_tables": OnlyTables, "only_dense": OnlyDense}


def models(folder: Path) -> dict[str, Any]:
    """Other modules, under the strategy if there are ranks."""
    results = {}
    for name, kind in MODELS.items():
        seed_everything(0)
        record = Record()
        strategy: Any = "auto"
        if "TORCHELASTIC_RUN_ID" in os.environ:
            strategy = HybridShardedStrategy(tables=TableConfig(optimizer="sgd"), timeout_seconds=60)
        clip = 0.5 if name == "only_dense" else None
        trainer(folder, strategy, callbacks=[record], gradient_clip_val=clip).fit(kind(), ClickData())
        results[name] = {"weights": record.weights}
    return results


def precisions(folder: Path) -> dict[str, Any]:
    """Losses in lower precision."""
    layouts: dict[str, dict[str, Any]] = {
        "autocast": {"precision": "bf16-mixed"},
        "gathered": {"param_dtype": "bfloat16", "reduce_dtype": "float32", "wrap_min_parameters": 50},
    }
    return {name: dlrm(SGD, **options)(folder)["losses"] for name, options in layouts.items()}


def out_of_range(folder: Path) -> dict[str, Any]:
    """An id that its table does not have."""

    class Wrong(LitDLRM):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
            batch["sparse"].values()[0] = 1_000_000
            return super().training_step(batch, batch_idx)

    try:
        trainer(folder, HybridShardedStrategy()).fit(Wrong(), ClickData())
    except RuntimeError as error:
        return {"message": str(error)}
    return {"message": "nothing was raised"}


def interrupted(folder: Path) -> dict[str, Any]:
    """A save that dies half-way over a good checkpoint."""
    strategy = HybridShardedStrategy()
    run = trainer(folder, strategy, max_steps=2)
    run.fit(LitDLRM(), ClickData())
    path = folder / "again.ckpt"
    run.save_checkpoint(path)
    before = full_state_dict(run.lightning_module, strategy.tables)
    run = trainer(folder, HybridShardedStrategy(), max_steps=4)
    run.fit(LitDLRM(), ClickData(), ckpt_path=str(path))
    with mock.patch.object(checkpoint_files, "flush", side_effect=OSError("killed")), contextlib.suppress(RuntimeError):
        run.save_checkpoint(path)
    strategy = HybridShardedStrategy()
    run = trainer(folder, strategy)
    run.validate(LitDLRM(), ClickData(), ckpt_path=str(path), verbose=False)
    first = {"before": before, "weights": full_state_dict(run.lightning_module, strategy.tables)}
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("again*"))
    return {**first, "names": names}


class Kill(Callback):
    """Kills the last rank in the middle of a step."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Kills it in the first attempt."""
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if trainer.global_step == 5 and trainer.global_rank == trainer.world_size - 1 and attempt == "0":
            os.kill(os.getpid(), signal.SIGKILL)


def killed(folder: Path) -> dict[str, Any]:
    """A rank dies, and a checkpoint is asked for on exceptions."""
    keep = ModelCheckpoint(folder / "killed", every_n_train_steps=2, save_last=True, save_on_exception=True)
    strategy = HybridShardedStrategy(tables=TableConfig(sharding="table_wise"), timeout_seconds=60)
    run = trainer(folder, strategy, callbacks=[keep, Kill()], enable_checkpointing=True)
    try:
        run.fit(LitDLRM(), ClickData())
    except RuntimeError as error:
        return {"message": str(error)}
    return {"message": "nothing was raised"}


def after_kill(folder: Path) -> dict[str, Any]:
    """Loads what is left."""
    run = trainer(folder, HybridShardedStrategy(), max_steps=6)
    run.fit(LitDLRM(), ClickData(), ckpt_path=str(folder / "killed" / "last.ckpt"))
    return {"step": run.global_step}


def command_line(folder: Path) -> dict[str, Any]:
    """A foreign module and LightningCLI's own command line."""
    config = {
        "seed_everything": 0,
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(folder / "cli"),
            "strategy": {
                "class_path": "lightning_gem.strategies.HybridShardedStrategy",
                "init_args": {"table": "auto", "shard": 1, "tables": {"optimizer": "sgd", "sharding": "row_wise"}},
            },
        },
        "model": {"lr": 0.5},
    }
    (folder / "cli.yaml").write_text(yaml.safe_dump(config))
    arguments = ["fit", "--config", str(folder / "cli.yaml")]
    cli = LightningCLI(LitDLRM, ClickData, args=arguments, save_config_callback=None)
    return {"losses": cli.model.losses, "strategy": type(cli.trainer.strategy).__name__}


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    **TWO,
    **FOUR,
    "save": save,
    "resume_rows": resume({"sharding": "row_wise"}),
    "resume_copies": resume({}, shard=2),
    "resume_whole": resume({}, wrap_min_parameters=50),
    "resume_auto": resume({"sharding": "auto"}, wrap_min_parameters=50),
    "uneven": uneven,
    "poisoned": poisoned,
    "exchange": exchange,
    "meta": meta,
    "refused": refused,
    "models": models,
    "precisions": precisions,
    "out_of_range": out_of_range,
    "interrupted": interrupted,
    "killed": killed,
    "after_kill": after_kill,
    "command_line": command_line,
}
