"""TorchRec collections: found by type, placed on the ranks of the table axis, updated inside backward.

``shard_modules`` replaces every collection in place and wraps nothing, so names stay what they were. The copies of a
table shard along ``table_replicate`` update on their own batches and are averaged afterwards: with SGD that equals one
process; with AdaGrad it is another algorithm (the squares of averaged gradients are not the averages of squares), whose
learning rate is to be tuned anew when the number of copies changes.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import BoundsCheckMode, ShardedModule, ShardingEnv2D, ShardingPlan, ShardingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_gem.strategies.compat import (
    apply_optimizer_in_backward,
    in_backward_optimizers,
    move_placement,
    placement_rank,
    shard_modules,
)
from lightning_gem.strategies.mesh import Meshes

TableOptimizer = Literal["row_wise_adagrad", "adagrad", "sgd"]
TableSharding = Literal["auto", "table_wise", "row_wise", "column_wise"]

_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "row_wise_adagrad": RowWiseAdagrad,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
}
_KINDS = ("table_wise", "row_wise", "column_wise")
_INIT_ROWS = 8192


class _BagSharder(EmbeddingBagCollectionSharder):
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
    """

    sharding: TableSharding = "auto"
    per_table: dict[str, TableSharding] | None = None
    planner: Literal["simple", "torchrec"] = "simple"
    optimizer: TableOptimizer = "row_wise_adagrad"
    lr: float | None = None
    eps: float = 1e-8
    bounds_check: Literal["fatal", "warning", "ignore"] = "fatal"
    sync_interval: int = 1

    def kind(self, table: str) -> TableSharding:
        """Kind of sharding asked for a table."""
        return (self.per_table or {}).get(table, self.sharding)


def find_collections(module: nn.Module) -> dict[str, Any]:
    """TorchRec collections inside ``module`` by name; subclasses are left alone, for TorchRec has no sharder for them.

    Raises:
        ValueError: If two collections share a table.
    """
    found = {
        name: child
        for name, child in module.named_modules(remove_duplicate=False)
        if type(child) in (EmbeddingBagCollection, EmbeddingCollection)
    }
    owner: dict[int, str] = {}
    for name, collection in found.items():
        for key, parameter in collection.named_parameters():
            other = owner.setdefault(id(parameter), f"{name}.{key}")
            if other != f"{name}.{key}":
                raise ValueError(
                    f"{name}.{key} and {other} are the same table: a table can be sharded once only, so call one "
                    "collection twice, or give its config both features"
                )
    return found


def _configs(collection: Any) -> list[Any]:
    if isinstance(collection, EmbeddingBagCollection):
        return collection.embedding_bag_configs()
    return collection.embedding_configs()


def attach_optimizers(
    collections: dict[str, Any], optimizer: type[torch.optim.Optimizer], arguments: dict[str, Any]
) -> None:
    """Attaches an optimizer to the tables that have none, to be fused into their backward."""
    fresh = [
        parameter
        for collection in collections.values()
        for parameter in collection.parameters()
        if not in_backward_optimizers(parameter)
    ]
    apply_optimizer_in_backward(optimizer, fresh, arguments)


def attached_learning_rate(collections: dict[str, Any]) -> float | None:
    """Learning rate of the optimizers that the module attached to its tables itself; None if it attached none.

    Raises:
        ValueError: If they differ from table to table.
    """
    rates = {
        group["lr"]
        for collection in collections.values()
        for parameter in collection.parameters()
        for optimizer in in_backward_optimizers(parameter)
        for group in optimizer.param_groups
    }
    if len(rates) > 1:
        raise ValueError(
            f"the optimizers attached to the tables have learning rates {sorted(rates)}: hybrid_sharded has one for "
            "all tables, so attach equal ones"
        )
    return rates.pop() if rates else None


def default_optimizer(config: TableConfig) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Class and arguments for :func:`attach_optimizers`; the learning rate is set before every backward."""
    arguments: dict[str, Any] = {"lr": config.lr if config.lr is not None else 0.0}
    if config.optimizer != "sgd":
        arguments["eps"] = config.eps
    return _OPTIMIZERS[config.optimizer], arguments


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
    names = {config.name for collection in collections.values() for config in _configs(collection)}
    unknown = sorted(set(config.per_table or {}) - names)
    if unknown:
        raise ValueError(f"tables.per_table names {unknown[0]!r}, the module has only the tables {sorted(names)}")
    sharders: dict[type[nn.Module], Any] = {
        EmbeddingBagCollection: _BagSharder(),
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
        for table in _configs(collection)
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
        for table in _configs(collection):
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


def _move_to_group(plan: ShardingPlan, ranks: list[int], device: torch.device) -> None:
    """Rewrites a plan for the ranks of this process's table group, in place."""
    for module_plan in plan.plan.values():
        for sharding in module_plan.values():
            sharding.ranks = [ranks[rank] for rank in sharding.ranks]
            if sharding.sharding_spec is not None:
                for shard in sharding.sharding_spec.shards:
                    rank = ranks[placement_rank(shard.placement)]
                    shard.placement = move_placement(shard.placement, rank, device)


class ShardedTables:
    """The sharded collections of a module.

    Args:
        module: Its collections are replaced by sharded ones.
        collections: What :func:`find_collections` returned; every table has an optimizer attached.
        config: Placement.
        meshes: Device meshes.
        host_size: Ranks of a host.
        device: Where the tables live.
        seed: Seeds the initial rows of tables on the meta device, which do not depend on the layout.
    """

    def __init__(
        self,
        module: nn.Module,
        collections: dict[str, Any],
        config: TableConfig,
        meshes: Meshes,
        host_size: int,
        device: torch.device,
        seed: int,
    ) -> None:
        self.config = config
        self.device = device
        self.group = meshes.tables.get_group("table")
        self.copies = meshes.tables.get_group("table_replicate")
        self.num_copies = meshes.axes.table_replicate
        before = {path: dict(collection.named_parameters()) for path, collection in collections.items()}
        init = {
            f"{path}.{key}": table.init_fn
            for path, collection in collections.items()
            for key, table in zip(before[path], _configs(collection), strict=True)
        }
        # Nothing can be placed on the meta device; a dry run plans for the CPU.
        place = torch.device("cpu") if device.type == "meta" else device
        plan = plan_tables(module, collections, config, meshes.axes.table, host_size, place.type)
        _move_to_group(plan, dist.get_process_group_ranks(self.group), place)
        self.kinds = {
            f"{path}.{name}": sharding.sharding_type
            for path, module_plan in plan.plan.items()
            for name, sharding in module_plan.items()
        }
        environment = ShardingEnv2D(
            sharding_pg=self.group,
            replica_pg=self.copies,
            global_pg=dist.group.WORLD,
            device_mesh=meshes.tables,
            node_group_size=min(host_size, meshes.axes.table),
            use_inter_host_allreduce=not meshes.axes.copies_in_host,
        )
        fused = {"bounds_check_mode": BoundsCheckMode[config.bounds_check.upper()]}
        sharders: list[Any] = [_BagSharder(fused_params=fused), EmbeddingCollectionSharder(fused_params=fused)]
        shard_modules(module, env=environment, device=device, plan=plan, sharders=sharders)
        self.modules = {path: module.get_submodule(path) for path in collections}
        for name, shard, (row, column) in self.shards():
            source = next(before[path][name[len(path) + 1 :]] for path in before if name.startswith(f"{path}."))
            if device.type == "meta":
                continue
            if source.device.type != "meta":
                shard.copy_(source.detach()[row : row + shard.shape[0], column : column + shard.shape[1]])
            else:
                _initialise(shard, row, column, source.shape, init[name], f"{seed}/{name}")

    @property
    def needs_equal_batches(self) -> bool:
        """Whether the lookup's collectives want the same number of samples on every rank."""
        return any(
            self.kinds[f"{path}.{name}"] == ShardingType.ROW_WISE.value and hasattr(child, "embedding_bags")
            for path, child in self.modules.items()
            for name in [key[len(path) + 1 :] for key in self.kinds if key.startswith(f"{path}.")]
        )

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Fused optimizers by the path of their collection."""
        return {path: child.fused_optimizer for path, child in self.modules.items()}  # type: ignore[misc]

    def parameters(self) -> set[nn.Parameter]:
        """What ``fully_shard`` has to leave alone."""
        return {parameter for child in self.modules.values() for parameter in child.parameters()}

    def state(self) -> dict[str, Any]:
        """Sharded weights by name."""
        return {
            f"{path}.{key}": value
            for path, child in self.modules.items()
            for key, value in child.state_dict().items()
            if hasattr(value, "to_local")
        }

    def optimizer_state(self) -> dict[str, Any]:
        """Sharded optimizer state by ``<table parameter>.<state>``, flat: DCP takes an empty dict for a leaf."""
        return {
            f"{path}.{key.split('.weight')[0]}.weight.{name.split('.')[-1]}": value
            for path, optimizer in self.optimizers.items()
            for key, states in optimizer.state_dict()["state"].items()
            for name, value in states.items()
        }

    def shards(self) -> Iterator[tuple[str, Tensor, tuple[int, int]]]:
        """Name, local rows and offsets of the shards of this rank; writing to them writes to the tables."""
        for name, value in self.state().items():
            yield from ((name, shard, (row, column)) for shard, (row, column) in local_shards(value))

    def synchronize(self) -> None:
        """Averages weights and optimizer state over the copies; collective."""
        if self.num_copies == 1:
            return
        tensors = [shard for _, shard, _ in self.shards()]
        tensors += [
            shard
            for value in self.optimizer_state().values()
            for shard, _ in local_shards(value)
            if shard.is_floating_point()
        ]
        for tensor in tensors:
            dist.all_reduce(tensor, group=self.copies)
            tensor.div_(self.num_copies)


def local_shards(value: Any) -> list[tuple[Tensor, tuple[int, ...]]]:
    """Shards of this rank, with offsets, of a ShardedTensor or of TorchRec's DTensor."""
    if hasattr(value, "to_local"):
        local = value.to_local()
        # A rank without a shard has an offset nevertheless.
        tensors = [tensor.detach() for tensor in local.local_shards()]
        return list(zip(tensors, [tuple(offset) for offset in local.local_offsets()], strict=False))
    if hasattr(value, "local_shards"):
        return [(shard.tensor.detach(), tuple(shard.metadata.shard_offsets)) for shard in value.local_shards()]
    return [(value, (0,) * value.dim())]


@torch.no_grad()
def _initialise(shard: Tensor, row: int, column: int, shape: torch.Size, init: Any, key: str) -> None:
    """Draws the rows of a shard in blocks with a seed of their own, so that every layout starts with the same table."""
    for block in range(row // _INIT_ROWS, -(-(row + len(shard)) // _INIT_ROWS)):
        start = block * _INIT_ROWS
        rows = torch.empty(min(_INIT_ROWS, shape[0] - start), shape[1])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(f"{key}/{block}".encode()))
            init(rows)
        begin, end = max(row, start), min(row + len(shard), start + len(rows))
        part = rows[begin - start : end - start, column : column + shard.shape[1]]
        shard[begin - row : end - row].copy_(part)


def is_table_module(module: nn.Module) -> bool:
    """Whether a module belongs to TorchRec's sharding, sharded or not."""
    return isinstance(module, ShardedModule | EmbeddingBagCollection | EmbeddingCollection)
