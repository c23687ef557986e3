"""From a LightningModule to its sharded self: tables, experts and dense units, in that order."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, register_fsdp_forward_method

from lightning_gem.strategies.collectives import Means, install
from lightning_gem.strategies.dense import (
    WrapRule,
    called_units,
    check_parameters,
    choose_units,
    large_embeddings,
    materialize,
    shard_dense,
    wrap_by_class,
)
from lightning_gem.strategies.embeddings import (
    ShardedTables,
    attach_optimizers,
    attached_learning_rate,
    default_optimizer,
    find_collections,
)
from lightning_gem.strategies.experts import check_experts, find_experts, shard_experts
from lightning_gem.strategies.mesh import Meshes
from lightning_gem.strategies.table_plan import TableConfig

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


@dataclass
class DenseConfig:
    """How dense parameters are wrapped and gathered; the strategy's arguments of the same names.

    Attributes:
        wrap: Class names, a rule, or ``"auto"``.
        wrap_min_parameters: Size of a unit under ``"auto"``.
        reshard_after_forward: Free gathered parameters between forward and backward.
        param_dtype: Type in which parameters are gathered and used.
        reduce_dtype: Type in which gradients are reduced.
        means: How parameters are gathered and gradients reduced.
    """

    wrap: list[str] | Literal["auto"] | WrapRule
    wrap_min_parameters: int
    reshard_after_forward: bool
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    means: Means = "plain"

    @property
    def rule(self) -> WrapRule | None:
        """Rule of the units; None for the default."""
        if callable(self.wrap):
            return self.wrap
        return None if self.wrap == "auto" else wrap_by_class(self.wrap)

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """FSDP2's terms for the types."""
        return MixedPrecisionPolicy(
            param_dtype=None if self.param_dtype == torch.float32 else self.param_dtype,
            reduce_dtype=self.reduce_dtype if self.reduce_dtype != self.param_dtype else None,
        )


@dataclass
class Sharded:
    """Parts of a sharded module.

    Attributes:
        module: The LightningModule.
        tables: Its tables, None if it has none.
        attached_lr: Learning rate of the optimizers that the module attached to its tables itself.
        experts: Modules that follow the protocol of experts, by name.
    """

    module: nn.Module
    tables: ShardedTables | None
    attached_lr: float | None
    experts: dict[str, Any]


def shard_module(
    module: Any,
    meshes: Meshes,
    dense: DenseConfig,
    tables: TableConfig,
    host_size: int,
    device: torch.device,
    seed: int,
    hold_updates: bool = False,
) -> Sharded:
    """Shards a LightningModule in place; collective.

    Args:
        module: LightningModule; parameters may be on the meta device.
        meshes: Device meshes.
        dense: Units and types.
        tables: Placement and optimizer of the tables.
        host_size: Ranks of a host.
        device: Where parameters come to live.
        seed: Seeds what is drawn, the same on all ranks.
        hold_updates: Let updates of the tables wait for the optimizer step.

    Raises:
        ValueError: Naming the module, the field and the fix.
        TypeError: For modules that are wrapped or sharded already.
    """
    collections = find_collections(module)
    experts = find_experts(module)
    for name, child in experts.items():
        check_experts(name, child, meshes.axes.expert)
    units = choose_units(module, dense.rule, dense.wrap_min_parameters)
    if meshes.axes.expert > 1:
        units = _with_experts(units, list(experts))
        if not experts:
            raise ValueError(
                f"expert={meshes.axes.expert}, but the module declares no experts: set expert to 1, or see the "
                "protocol in lightning_gem.strategies.experts"
            )
    is_manual = not getattr(module, "automatic_optimization", True)
    if is_manual:
        units = called_units(module, units)
    check_parameters(module, units)
    for name, size in large_embeddings(module):
        rank_zero_info(
            f"hybrid_sharded: {name} is a plain nn.Embedding with {size:,} parameters, gathered whole in every "
            "step: as a TorchRec EmbeddingCollection it would be sharded as a table"
        )
    attached_lr = attached_learning_rate(collections) if collections else None
    sharded_tables = None
    if collections:
        sharded_tables = shard_tables(module, collections, meshes, tables, host_size, device, seed, hold_updates)

    def prepare(name: str, unit: nn.Module, done: set[nn.Module]) -> None:
        materialize(name, unit, done, device, seed)
        if name in experts and meshes.axes.expert > 1:
            shard_experts(unit, meshes)

    ignored = sharded_tables.parameters() if sharded_tables is not None else set()
    roots = units if is_manual else [*units, ""]
    own_units = shard_dense(module, roots, meshes, experts, ignored, prepare, dense.policy, dense.reshard_after_forward)
    axes = meshes.axes
    sizes = [axes.expert_shard if name in experts else axes.shard for name in own_units]
    install(own_units.values(), sizes, dense.means)
    for step in _STEPS:
        # Lightning calls these without going through the module's forward.
        if is_overridden(step, module):
            register_fsdp_forward_method(module, step)
    return Sharded(module, sharded_tables, attached_lr, experts)


def shard_tables(
    module: Any,
    collections: dict[str, Any],
    meshes: Meshes,
    config: TableConfig,
    host_size: int,
    device: torch.device,
    seed: int,
    hold_updates: bool,
) -> ShardedTables:
    """Attaches optimizers to the tables that have none, and shards the collections in place; collective."""
    optimizer, arguments = default_optimizer(config)
    if hasattr(module, "table_optimizer"):
        optimizer, arguments = module.table_optimizer()
    scale = config.scale_of_squares(meshes.axes.table_replicate)
    attach_optimizers(collections, optimizer, arguments, scale)
    tables = ShardedTables(module, collections, config, meshes, host_size, device, seed, scale, hold_updates)
    when = "at the optimizer step" if hold_updates else "inside backward"
    rank_zero_info(f"hybrid_sharded: {len(tables.kinds)} tables, updated {when}")
    return tables


def _with_experts(units: list[str], experts: list[str]) -> list[str]:
    """Adds expert modules as units of their own, before the units around them; nothing inside of them is one."""
    units = [unit for unit in units if not any(unit == name or unit.startswith(f"{name}.") for name in experts)]
    return sorted([*units, *experts], key=lambda name: -name.count("."))
