"""What a step under HybridShardedStrategy costs more than one written by hand with the same torch and TorchRec calls.

    python benchmarks/strategy_overhead.py

Two processes on the CPU train two copies of one DLRM: one by Lightning's Trainer, the other by a loop of a few lines
(``shard_modules`` and ``fully_shard``, the same placement and units). They take turns step by step, so that other load
on the machine hits both alike. A step is all from one batch to the next: the loader, the hooks, the checks of the loss
and of the batch sizes. The medians are compared, of wall time and of processor time.
"""

import argparse
import csv
import datetime
import platform
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.data import DataLoader, IterableDataset
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.shard import shard_modules
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_gem.strategies import HybridShardedStrategy, TableConfig

KEYS = [f"f{i}" for i in range(8)]
ROWS, DIM, NUM_DENSE = 20_000, 64, 13
UNITS = ["dense_arch", "over_arch"]


class Clicks(LightningModule):
    """DLRM with one optimizer over everything."""

    def __init__(self) -> None:
        super().__init__()
        tables = EmbeddingBagCollection(
            device=torch.device("cpu"),
            tables=[
                EmbeddingBagConfig(name=f"t_{key}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[key])
                for key in KEYS
            ],
        )
        _apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.02, "eps": 1e-8})
        self.model = DLRM(tables, NUM_DENSE, [512, 256, DIM], [1024, 1024, 512, 1])

    def training_step(self, batch: dict[str, Any], batch_idx: int = 0) -> Tensor:
        """Binary cross-entropy."""
        logits = self.model(batch["dense"], batch["sparse"]).squeeze(1)
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, batch["label"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over what TorchRec does not update."""
        tables = {id(parameter) for parameter in self.model.sparse_arch.parameters()}
        dense = [parameter for parameter in self.parameters() if id(parameter) not in tables]
        return torch.optim.AdamW(dense, lr=0.001)


class Batches(IterableDataset[dict[str, Any]]):
    """The same few batches over and over."""

    def __init__(self, batch_size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.batches = []
        for _ in range(4):
            lengths = torch.randint(0, 8, (len(KEYS) * batch_size,), generator=generator)
            ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
            dense = torch.randn(batch_size, NUM_DENSE, generator=generator)
            sparse = KeyedJaggedTensor(KEYS, ids, lengths=lengths)
            self.batches.append({"dense": dense, "sparse": sparse, "label": (dense[:, 0] > 0).float()})

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            yield from self.batches


class ByHand:
    """The loop without the strategy."""

    def __init__(self, batches: DataLoader[Any]) -> None:
        seed_everything(0, verbose=False)
        self.module = Clicks()
        tables = self.module.model.sparse_arch.embedding_bag_collection
        world = dist.get_world_size()
        rules = {f"t_{key}": table_wise(rank=i % world) for i, key in enumerate(KEYS)}
        sharder = EmbeddingBagCollectionSharder()
        plan = construct_module_sharding_plan(tables, rules, sharder, world, world, "cpu")  # type: ignore[arg-type]
        path = "model.sparse_arch.embedding_bag_collection"
        shard_modules(
            self.module,
            ShardingEnv.from_process_group(dist.group.WORLD),  # type: ignore[arg-type]
            torch.device("cpu"),
            ShardingPlan({path: plan}),
            [sharder],  # type: ignore[list-item]
        )
        sharded: Any = self.module.get_submodule(path)
        ignored = set(sharded.parameters())
        for name in UNITS:
            fully_shard(self.module.model.get_submodule(name), ignored_params=ignored)
        fully_shard(self.module.model, ignored_params=ignored, reshard_after_forward=False)
        self.fused = sharded.fused_optimizer
        self.optimizer = self.module.configure_optimizers()
        self.batches = iter(batches)

    def step(self) -> None:
        """One step."""
        loss = self.module.training_step(next(self.batches))
        self.optimizer.zero_grad()
        self.fused.zero_grad()
        loss.backward()
        self.optimizer.step()


class TakeTurns(Callback):
    """After every step of the trainer, one by hand; both are timed."""

    def __init__(self, batches: DataLoader[Any], warm_up: int) -> None:
        self.batches, self.warm_up = batches, warm_up
        self.times: dict[str, list[tuple[float, float]]] = {"strategy": [], "by_hand": []}
        self.start: tuple[float, float] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes the other copy."""
        self.by_hand = ByHand(self.batches)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Ends the trainer's step and takes one by hand."""
        if self.start is not None:
            self._stop("strategy", self.start)
        dist.barrier()
        start = _now()
        self.by_hand.step()
        self._stop("by_hand", start)
        dist.barrier()
        self.start = _now()

    def _stop(self, name: str, start: tuple[float, float]) -> None:
        self.times[name].append(tuple(now - then for now, then in zip(_now(), start, strict=True)))  # type: ignore[arg-type]

    def medians(self, name: str) -> list[float]:
        """Wall and processor milliseconds."""
        return [1000 * statistics.median(values) for values in zip(*self.times[name][self.warm_up :], strict=True)]


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def main() -> None:
    """Prints and writes the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch_size", type=int, default=2048)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    batches = DataLoader(Batches(arguments.batch_size), batch_size=None)
    turns = TakeTurns(batches, warm_up=5)
    strategy = HybridShardedStrategy(tables=TableConfig(sharding="table_wise"), wrap=["DenseArch", "OverArch"])
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=arguments.steps + turns.warm_up + 1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[turns],
    )
    seed_everything(0, verbose=False)
    trainer.fit(Clicks(), batches)
    if not trainer.is_global_zero:
        return
    rows = [["side", "wall_ms", "processor_ms"]]
    medians = {name: turns.medians(name) for name in ("by_hand", "strategy")}
    rows += [[name, *(f"{value:.1f}" for value in values)] for name, values in medians.items()]
    both = zip(medians["strategy"], medians["by_hand"], strict=True)
    rows.append(["overhead", *(f"{100 * (with_strategy / without - 1):.1f}%" for with_strategy, without in both)])
    today = datetime.date.today()
    file = arguments.results / f"{today}_strategy_overhead_cpu.csv"
    with file.open("w", newline="") as out:
        out.write(
            f"# {today}, {platform.machine()} CPU (not idle), torch {torch.__version__}, 2 processes with 1 thread, "
            f"medians of {arguments.steps} steps, batch size {arguments.batch_size} a rank, "
            "python benchmarks/strategy_overhead.py\n"
        )
        csv.writer(out, lineterminator="\n").writerows(rows)
    print(file.read_text())


if __name__ == "__main__":
    main()
