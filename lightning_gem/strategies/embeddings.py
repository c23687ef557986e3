"""TorchRec collections: found by type, placed on the ranks of the table axis, updated inside backward.

``shard_modules`` replaces every collection in place and wraps nothing, so names stay what they were. The copies of a
table shard along ``table_replicate`` update on their own batches and are averaged afterwards: with SGD that equals one
process; with AdaGrad it is another algorithm (the squares of averaged gradients are not the averages of squares), whose
learning rate is to be tuned anew when the number of copies changes. ``square_scale`` brings it closer: a row that only
one of R copies sees in a step has there a gradient R times that of the global mean, so its square is R**2 times as
large, and R times after the averaging; scaling squares by 1/R undoes that (source of the idea: momentum-scaled row-wise
AdaGrad, Two-dimensional Sparse Parallelism, arXiv 2508.03854; the factor is derived here, not taken from there).
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.types import BoundsCheckMode, ShardedModule, ShardingEnv2D, ShardingStrategy, ShardingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_gem.strategies.compat import (
    apply_optimizer_in_backward,
    in_backward_optimizers,
    shard_modules,
    table_lookups,
)
from lightning_gem.strategies.mesh import Meshes
from lightning_gem.strategies.table_copies import Copies, WholeCopies, make_copies
from lightning_gem.strategies.table_plan import BagSharder, TableConfig, move_to_group, plan_tables, table_configs
from lightning_gem.strategies.table_updates import HeldUpdates

_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "row_wise_adagrad": RowWiseAdagrad,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
}
_STRATEGIES = {False: ShardingStrategy.DEFAULT, True: ShardingStrategy.FULLY_SHARDED}
_INIT_ROWS = 8192


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


def attach_optimizers(
    collections: dict[str, Any],
    optimizer: type[torch.optim.Optimizer],
    arguments: dict[str, Any],
    square_scale: float = 1.0,
) -> None:
    """Attaches an optimizer to the tables that have none, to be fused into their backward.

    Args:
        collections: What :func:`find_collections` returned.
        optimizer: Its class.
        arguments: Its arguments.
        square_scale: Factor of the squares that AdaGrad adds up. The kernel adds them up unscaled; with ``eps`` and the
            learning rate divided by the root of the factor (the latter by :class:`ShardedTables`) that is the same.

    Raises:
        ValueError: If squares are to be scaled that are not there, or belong to an optimizer of the module's own.
    """
    if square_scale != 1.0:
        if attached_learning_rate(collections) is not None:
            raise ValueError(
                f"tables.square_scale={square_scale:g}, but the module attached optimizers to its tables itself: "
                "return class and arguments from table_optimizer() instead, or use tables.optimizer"
            )
        if optimizer not in (RowWiseAdagrad, torch.optim.Adagrad):
            raise ValueError(
                f"tables.square_scale={square_scale:g}, but {optimizer.__name__} adds up no squares: use "
                "row_wise_adagrad or adagrad"
            )
        arguments = {**arguments, "eps": arguments.get("eps", 1e-8) / square_scale**0.5}
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


@dataclass(frozen=True)
class TableInfo:
    """A table before it was sharded.

    Attributes:
        rows: Its rows.
        columns: Its columns.
        num_features: Features that look into it.
        is_pooled: Whether the rows of a sample are summed.
        kind: How it is sharded.
    """

    rows: int
    columns: int
    num_features: int
    is_pooled: bool
    kind: str


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
        square_scale: The factor that :func:`attach_optimizers` was given.
        hold_updates: Hold updates back until :meth:`step`.

    Raises:
        ValueError: If copies are to be kept in a way that does not fit the device or the interval of averaging.
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
        square_scale: float = 1.0,
        hold_updates: bool = False,
    ) -> None:
        self.config = config
        self.device = device
        config.check_copies(device)
        self.square_scale = square_scale
        self.group = meshes.tables.get_group("table")
        self.copies_group = meshes.tables.get_group("table_replicate")
        self.num_copies = meshes.axes.table_replicate
        self.copies: Copies = WholeCopies([], self.copies_group)
        before = {path: dict(collection.named_parameters()) for path, collection in collections.items()}
        init = {
            f"{path}.{key}": table.init_fn
            for path, collection in collections.items()
            for key, table in zip(before[path], table_configs(collection), strict=True)
        }
        # Nothing can be placed on the meta device; a dry run plans for the CPU.
        place = torch.device("cpu") if device.type == "meta" else device
        plan = plan_tables(module, collections, config, meshes.axes.table, host_size, place.type)
        move_to_group(plan, dist.get_process_group_ranks(self.group), place)
        self.kinds = {
            f"{path}.{name}": sharding.sharding_type
            for path, module_plan in plan.plan.items()
            for name, sharding in module_plan.items()
        }
        self.infos = [
            TableInfo(
                rows=table.num_embeddings,
                columns=table.embedding_dim,
                num_features=len(table.feature_names),
                is_pooled=isinstance(collection, EmbeddingBagCollection),
                kind=self.kinds[f"{path}.{table.name}"],
            )
            for path, collection in collections.items()
            for table in table_configs(collection)
        ]
        environment = ShardingEnv2D(
            sharding_pg=self.group,
            replica_pg=self.copies_group,
            global_pg=dist.group.WORLD,
            device_mesh=meshes.tables,
            node_group_size=min(host_size, meshes.axes.table),
            use_inter_host_allreduce=not meshes.axes.copies_in_host,
            sharding_strategy=_STRATEGIES[config.copies == "torchrec"],
        )
        fused = {"bounds_check_mode": BoundsCheckMode[config.bounds_check.upper()]}
        codecs = config.codecs(place)
        sharders: list[Any] = [
            BagSharder(fused_params=fused, qcomm_codecs_registry=codecs),
            EmbeddingCollectionSharder(fused_params=fused, qcomm_codecs_registry=codecs),
        ]
        shard_modules(module, env=environment, device=device, plan=plan, sharders=sharders)
        self.modules: dict[str, Any] = {path: module.get_submodule(path) for path in collections}
        for name, shard, (row, column) in self.shards():
            source = next(before[path][name[len(path) + 1 :]] for path in before if name.startswith(f"{path}."))
            if device.type == "meta":
                continue
            if source.device.type != "meta":
                shard.copy_(source.detach()[row : row + shard.shape[0], column : column + shard.shape[1]])
            else:
                _initialise(shard, row, column, source.shape, init[name], f"{seed}/{name}")
        self.lookups = [lookup for child in self.modules.values() for lookup in table_lookups(child)]
        for lookup in self.lookups:
            _scale_learning_rate(lookup.emb_module, square_scale**-0.5)
        kind = "whole" if device.type == "meta" else config.copies
        self.held = HeldUpdates([lookup.emb_module for lookup in self.lookups]) if hold_updates else None
        self.copies = make_copies(kind, self.lookups, self.copies_group, update_in_backward=not hold_updates)
        if kind != "whole":
            for child in self.modules.values():
                child.register_state_dict_pre_hook(self._gather_for_state)

    def _gather_for_state(self, *_: Any) -> None:
        self.gather()

    def gather(self) -> None:
        """Makes all shards of this rank whole, to be read and written until the next training step; collective."""
        self.copies.gather()

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
        return {path: child.fused_optimizer for path, child in self.modules.items()}

    def parameters(self) -> set[nn.Parameter]:
        """What ``fully_shard`` has to leave alone."""
        return {parameter for child in self.modules.values() for parameter in child.parameters()}

    def state(self) -> dict[str, Any]:
        """Sharded weights by name; collective where copies are sharded."""
        self.gather()
        return {
            f"{path}.{key}": value
            for path, child in self.modules.items()
            for key, value in child.state_dict().items()
            if hasattr(value, "to_local")
        }

    def optimizer_state(self) -> dict[str, Any]:
        """Sharded optimizer state by ``<table parameter>.<state>``, flat: DCP takes an empty dict for a leaf.

        Collective where copies are sharded.
        """
        self.gather()
        return self.optimizer_tensors()

    def optimizer_tensors(self) -> dict[str, Any]:
        """As :meth:`optimizer_state`, for their shapes: where copies are sharded, values may not be there."""
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

    def step(self) -> None:
        """Updates the tables if updates were held back; collective where copies are sharded."""
        if self.held is not None:
            self.copies.begin_update()
            self.held.apply()
            self.copies.finish_backward()

    def synchronize(self) -> None:
        """Averages weights and optimizer state over the copies where that is left to do; collective."""
        if self.num_copies == 1 or self.config.copies == "sharded":
            return
        tensors = [shard for _, shard, _ in self.shards()]
        tensors += [
            shard
            for value in self.optimizer_state().values()
            for shard, _ in local_shards(value)
            if shard.is_floating_point()
        ]
        self.copies.average(tensors)

    def rescale_squares(self, saved_scale: float) -> None:
        """Turns accumulated squares that were saved under another ``square_scale`` into this one's."""
        if saved_scale != self.square_scale:
            for value in self.optimizer_state().values():
                for shard, _ in local_shards(value):
                    shard.mul_(saved_scale / self.square_scale)


def _scale_learning_rate(kernel: Any, factor: float) -> None:
    """Multiplies every learning rate that a kernel is given."""
    if factor != 1.0:
        set_rate = kernel.set_learning_rate
        kernel.set_learning_rate = lambda rate: set_rate(rate * factor)


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
