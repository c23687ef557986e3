"""Where tables lie: their configuration, and the plan that TorchRec shards them by."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import QuantizedCommCodecs, ShardingPlan, ShardingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from lightning_gem.strategies.compat import move_placement, placement_rank
from lightning_gem.strategies.table_copies import CopyKind

TableOptimizer = Literal["row_wise_adagrad", "adagrad", "sgd"]
TableSharding = Literal["auto", "table_wise", "row_wise", "column_wise"]

Communication = Literal["float32", "float16", "bfloat16", "float8"]

_COMMUNICATION = {
    "float32": CommType.FP32,
    "float16": CommType.FP16,
    "bfloat16": CommType.BF16,
    "float8": CommType.FP8,
}
_KINDS = ("table_wise", "row_wise", "column_wise")


class BagSharder(EmbeddingBagCollectionSharder):
    """Offers what the kernels can do; TorchRec's own list for the CPU is shorter."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [kind.value for kind in ShardingType]


@dataclass
class TableConfig:
    """How tables are placed and updated.

    Args:
        sharding: ``auto``: tables that would take more than their share of a rank are split by rows, the others are
            placed whole so that every rank holds about as much. Or one kind for all tables.
        per_table: Kind of sharding by table name, before ``sharding``.
        planner: ``simple``: the rule above. ``torchrec``: TorchRec's planner, with ``sharding`` and ``per_table`` as
            its constraints; it knows costs, and takes minutes for many tables on many ranks.
        optimizer: Optimizer that runs inside backward, for tables to which the module attached none itself.
        lr: Learning rate of the tables; that of the module's own optimizer for them when not given. Schedulers of that
            optimizer move it.
        eps: Term added to the root of AdaGrad's accumulated squares.
        bounds_check: What a lookup does with an id outside of its table: ``fatal`` stops, ``warning`` takes row 0 and
            says so once in a while, ``ignore`` takes row 0.
        sync_interval: Steps between two averagings of the copies along ``table_replicate``.
        update: When tables are updated. ``backward``: inside every backward. ``step``: with the other parameters, from
            the gradients of all batches since the last step, as if these were one. ``auto``: ``step`` where the trainer
            accumulates gradients.
        copies: How copies are kept. ``whole``: every rank holds its shards, and they are averaged after the step.
            ``sharded``: at rest every rank holds 1/``table_replicate`` of them, gathered for a lookup and for an update
            and averaged by reduce-scatter; the same result. ``torchrec``: TorchRec's own fully sharded lookups, on CUDA
            only, which free the weights between forward and backward.
        square_scale: Factor of the squares that AdaGrad adds up; ``auto`` is 1/``table_replicate``, which makes rows
            that one copy sees in a step learn about as without copies.
        forward_communication: Type in which embeddings travel between ranks. Where an exchange cannot carry it,
            TorchRec warns and takes a wider one: no float8 for tables split by rows, no bfloat16 on the CPU.
        backward_communication: Type in which their gradients travel.
    """

    sharding: TableSharding = "auto"
    per_table: dict[str, TableSharding] | None = None
    planner: Literal["simple", "torchrec"] = "simple"
    optimizer: TableOptimizer = "row_wise_adagrad"
    lr: float | None = None
    eps: float = 1e-8
    bounds_check: Literal["fatal", "warning", "ignore"] = "fatal"
    sync_interval: int = 1
    update: Literal["auto", "backward", "step"] = "auto"
    copies: CopyKind = "whole"
    square_scale: float | Literal["auto"] = 1.0
    forward_communication: Communication = "float32"
    backward_communication: Communication = "float32"

    def check_copies(self, device: torch.device) -> None:
        """Refuses ways to keep copies that cannot work.

        Raises:
            ValueError: Naming the field and the fix.
        """
        if self.copies != "whole" and self.sync_interval != 1:
            raise ValueError(
                f"tables.sync_interval={self.sync_interval}, but with tables.copies: {self.copies} copies are averaged "
                "in every step: set it to 1, or copies to whole"
            )
        if self.copies == "torchrec" and device.type != "cuda":
            raise ValueError(
                f"tables.copies: torchrec works on CUDA only, not on {device.type}: use sharded, which gives the same "
                "result on any device"
            )

    def holds_updates(self, trainer: Any) -> bool:
        """Whether updates wait for the optimizer step."""
        scheduled = any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks)
        return self.update == "step" or (self.update == "auto" and (scheduled or trainer.accumulate_grad_batches != 1))

    def codecs(self, device: torch.device) -> dict[str, QuantizedCommCodecs] | None:
        """TorchRec's codecs of the exchanges of embeddings and gradients; None if these travel as they are.

        Raises:
            ValueError: For float8 on the CPU.
        """
        types = self.forward_communication, self.backward_communication
        if device.type == "cpu" and "float8" in types:
            raise ValueError(
                "tables.forward_communication and backward_communication cannot be float8 on the CPU: use float16"
            )
        config = QCommsConfig(*(_COMMUNICATION[name] for name in types))
        return get_qcomm_codecs_registry(config, device=device)

    def scale_of_squares(self, num_copies: int) -> float:
        """Value of ``square_scale``."""
        return 1.0 / num_copies if self.square_scale == "auto" else float(self.square_scale)

    def kind(self, table: str) -> TableSharding:
        """Kind of sharding asked for a table."""
        return (self.per_table or {}).get(table, self.sharding)


def table_configs(collection: Any) -> list[Any]:
    """Configurations of the tables of a collection that is not sharded yet."""
    if isinstance(collection, EmbeddingBagCollection):
        return collection.embedding_bag_configs()
    return collection.embedding_configs()


def place_tables(
    tables: dict[str, tuple[int, int]], kinds: dict[str, TableSharding], num_ranks: int
) -> dict[str, tuple[str, list[int]]]:
    """Chooses kind and ranks of every table: large ones by rows, the rest whole on the emptiest rank.

    Args:
        tables: Rows and columns by name.
        kinds: Kind asked for, by name.
        num_ranks: Ranks of the table axis.

    Returns:
        Kind (``table_wise``, ``row_wise`` or ``column_wise``) and ranks by name.

    Raises:
        ValueError: If a table cannot be split as asked.
    """
    sizes = {name: rows * columns for name, (rows, columns) in tables.items()}
    share = sum(sizes.values()) / num_ranks
    load = [0.0] * num_ranks
    placed: dict[str, tuple[str, list[int]]] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rows, columns = tables[name]
        kind: str = kinds[name]
        if kind == "auto":
            kind = "row_wise" if sizes[name] > share and num_ranks > 1 and rows >= num_ranks else "table_wise"
        if kind == "row_wise":
            if rows < num_ranks:
                raise ValueError(
                    f"table {name!r} has {rows} rows, fewer than the {num_ranks} ranks of the table axis: give it "
                    "sharding: table_wise"
                )
            ranks = list(range(num_ranks))
        else:
            parts = 1
            if kind == "column_wise":
                # FBGEMM wants widths that are multiples of 4.
                parts = max((n for n in range(1, num_ranks + 1) if columns % (4 * n) == 0), default=0)
                if not parts:
                    raise ValueError(
                        f"table {name!r} has {columns} columns, which cannot be split into multiples of 4: give it "
                        "sharding: row_wise"
                    )
            ranks = sorted(range(num_ranks), key=lambda rank: (load[rank], rank))[:parts]
        for rank in ranks:
            load[rank] += sizes[name] / len(ranks)
        placed[name] = kind, ranks
    return placed


def plan_tables(
    module: nn.Module,
    collections: dict[str, Any],
    config: TableConfig,
    num_ranks: int,
    host_size: int,
    device_type: str,
) -> ShardingPlan:
    """Sharding plan over the ranks ``0 .. num_ranks - 1`` of one table group; collective with TorchRec's planner.

    Raises:
        ValueError: If ``per_table`` names an unknown table, or a table cannot be split as asked.
    """
    names = {config.name for collection in collections.values() for config in table_configs(collection)}
    unknown = sorted(set(config.per_table or {}) - names)
    if unknown:
        raise ValueError(f"tables.per_table names {unknown[0]!r}, the module has only the tables {sorted(names)}")
    sharders: dict[type[nn.Module], Any] = {
        EmbeddingBagCollection: BagSharder(),
        EmbeddingCollection: EmbeddingCollectionSharder(),
    }
    if config.planner == "torchrec":
        # Data-parallel tables would be ordinary parameters, which the fused optimizers do not update.
        constraints = {
            name: ParameterConstraints(
                sharding_types=list(_KINDS) if config.kind(name) == "auto" else [config.kind(name)]
            )
            for name in names
        }
        topology = Topology(
            world_size=num_ranks, local_world_size=min(host_size, num_ranks), compute_device=device_type
        )
        planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
        return planner.collective_plan(module, list(sharders.values()), dist.group.WORLD)
    shapes = {
        (path, table.name): (table.num_embeddings, table.embedding_dim)
        for path, collection in collections.items()
        for table in table_configs(collection)
    }
    # Table names are unique inside a collection only.
    placed = place_tables(
        {f"{path}.{name}": shape for (path, name), shape in shapes.items()},
        {f"{path}.{name}": config.kind(name) for path, name in shapes},
        num_ranks,
    )
    plans = {}
    for path, collection in collections.items():
        rules = {}
        for table in table_configs(collection):
            kind, ranks = placed[f"{path}.{table.name}"]
            if kind == "row_wise":
                rules[table.name] = row_wise()
            else:
                rules[table.name] = table_wise(rank=ranks[0]) if kind == "table_wise" else column_wise(ranks=ranks)
        plans[path] = construct_module_sharding_plan(
            collection,
            rules,
            sharder=sharders[type(collection)],
            local_size=min(host_size, num_ranks),
            world_size=num_ranks,
            device_type=device_type,
        )
    return ShardingPlan(plans)


def move_to_group(plan: ShardingPlan, ranks: list[int], device: torch.device) -> None:
    """Rewrites a plan for the ranks of this process's table group, in place."""
    for module_plan in plan.plan.values():
        for sharding in module_plan.values():
            sharding.ranks = [ranks[rank] for rank in sharding.ranks]
            if sharding.sharding_spec is not None:
                for shard in sharding.sharding_spec.shards:
                    rank = ranks[placement_rank(shard.placement)]
                    shard.placement = move_placement(shard.placement, rank, device)
