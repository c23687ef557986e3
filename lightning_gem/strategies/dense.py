"""Dense parameters: which modules become units of FSDP2, and how they come to hold values."""

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from lightning_gem.strategies.embeddings import is_table_module
from lightning_gem.strategies.mesh import Meshes

WrapRule = Callable[[str, nn.Module], bool]

# Modules that read the parameters of their children without calling them.
_INDIVISIBLE = (nn.MultiheadAttention, nn.RNNBase)
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def wrap_by_class(names: list[str]) -> WrapRule:
    """Rule: modules of these classes, named plainly (``GEMLayer``) or with their package."""
    wanted = set(names)

    def rule(name: str, module: nn.Module) -> bool:
        classes = type(module).__mro__
        return any(kind.__name__ in wanted or f"{kind.__module__}.{kind.__name__}" in wanted for kind in classes)

    return rule


def choose_units(root: nn.Module, rule: WrapRule | None, min_parameters: int) -> list[str]:
    """Names of the modules that become units of their own, inner ones first.

    Without a rule: modules that declare ``fully_shard_unit = True``, and modules that hold at least ``min_parameters``
    parameters outside of inner units. A module with TorchRec collections inside is never a unit by this default.

    Raises:
        ValueError: If the rule matches no module.
    """
    units: list[str] = []

    def visit(name: str, module: nn.Module) -> int:
        """Returns the number of parameters that are in no unit yet."""
        if is_table_module(module):
            return 0
        left = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        if isinstance(module, _INDIVISIBLE):
            left = sum(parameter.numel() for parameter in module.parameters())
        else:
            for key, child in module.named_children():
                left += visit(f"{name}.{key}" if name else key, child)
        if not name or isinstance(module, _CONTAINERS) or not left:
            return left
        if rule is not None:
            chosen = rule(name, module)
        else:
            has_tables = any(is_table_module(child) for child in module.modules())
            chosen = not has_tables and (getattr(module, "fully_shard_unit", False) or left >= min_parameters)
        if chosen:
            units.append(name)
            return 0
        return left

    visit("", root)
    if rule is not None and not units:
        raise ValueError(
            "wrap names no module of this model: give class names of its layers, as in `wrap: [GEMLayer]`, or "
            "`wrap: auto`"
        )
    return units


def called_units(root: nn.Module, units: list[str]) -> list[str]:
    """Adds units so that all parameters are in one that the root calls, for manual optimization.

    There the backward runs inside of ``training_step``, which therefore cannot be the forward of a unit around it.

    Raises:
        ValueError: If a parameter is in no module that can be called.
    """
    found = list(units)

    def visit(name: str, module: nn.Module) -> None:
        if name in units or is_table_module(module):
            return
        if name and not isinstance(module, _CONTAINERS):
            if any(True for _ in module.parameters()):
                found.append(name)
            return
        for key, child in module.named_children():
            visit(f"{name}.{key}" if name else key, child)

    visit("", root)
    inside = [*found, *(name for name, module in root.named_modules() if is_table_module(module))]
    for key, _ in root.named_parameters():
        if not any(key.startswith(f"{name}.") for name in inside):
            raise ValueError(
                f"{key} is in no module that is called, so with automatic_optimization=False nothing could gather it: "
                "put it into a module with a forward"
            )
    return found


def large_embeddings(root: nn.Module, min_parameters: int = 1_000_000) -> list[tuple[str, int]]:
    """Names and sizes of plain embeddings that would be better off as TorchRec tables."""
    return [
        (name, module.weight.numel())
        for name, module in _own_modules(root, set())
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.weight.numel() >= min_parameters
    ]


def check_parameters(root: nn.Module, units: list[str]) -> None:
    """Refuses what FSDP2 would fail on far from the cause.

    Raises:
        TypeError: For modules that are wrapped or sharded already.
        ValueError: For parameters that belong to two units, and for embeddings with sparse gradients.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    for name, module in root.named_modules():
        if isinstance(module, FullyShardedDataParallel | nn.parallel.DistributedDataParallel):
            raise TypeError(f"{name} is wrapped in {type(module).__name__}: remove the wrapper, the strategy shards it")
        if isinstance(module, FSDPModule):
            raise TypeError(f"{name} is sharded already by fully_shard: remove that call, the strategy shards it")
    for name, module in _own_modules(root, set()):
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(f"{name} has sparse gradients, which FSDP2 cannot reduce: set sparse=False")
    collections = {f"{name}.": module for name, module in root.named_modules() if is_table_module(module)}
    tables = {
        id(parameter): f"{name}{key}"
        for name, module in collections.items()
        for key, parameter in module.named_parameters()
    }
    owners: dict[int, tuple[str, str]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        if f"{name}.".startswith(tuple(collections)):
            continue
        unit = max((u for u in units if name == u or name.startswith(f"{u}.")), key=len, default="")
        for key, parameter in module.named_parameters(recurse=False):
            path = f"{name}.{key}" if name else key
            if id(parameter) in tables:
                raise ValueError(
                    f"{path} and {tables[id(parameter)]} are the same parameter, but a table is sharded by TorchRec "
                    "and updated inside backward: give the dense layer a parameter of its own"
                )
            other, other_unit = owners.setdefault(id(parameter), (path, unit))
            if other_unit != unit:
                raise ValueError(
                    f"{path} and {other} are the same parameter in two FSDP units ({unit or 'root'!r} and "
                    f"{other_unit or 'root'!r}): choose `wrap` so that one unit holds both"
                )


def _own_modules(unit: nn.Module, done: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Modules of a unit that are neither in inner units nor TorchRec's."""

    def visit(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if module in done or is_table_module(module):
            return
        yield name, module
        for key, child in module.named_children():
            yield from visit(f"{name}.{key}" if name else key, child)

    yield from visit("", unit)


@torch.no_grad()
def materialize(name: str, unit: nn.Module, done: set[nn.Module], device: torch.device, seed: int) -> None:
    """Gives the parameters of one unit values that all ranks agree on; collective.

    What is on the meta device is drawn by ``reset_parameters`` of its module, with a seed made from the module's name,
    so that every layout starts with the same weights. Everything else is taken from the first rank.

    Raises:
        ValueError: If a parameter on the meta device has no ``reset_parameters``.
    """
    modules = list(_own_modules(unit, done))
    pending: list[tuple[str, nn.Module]] = []
    for key, module in modules:
        path = ".".join(part for part in (name, key) if part)
        tensors = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
        if any(tensor.device.type == "meta" for tensor in tensors.values()):
            pending.append((path, module))
            module.to_empty(device=device, recurse=False)
        else:
            for tensor in tensors.values():
                tensor.data = tensor.data.to(device)
                dist.broadcast(tensor.data, src=0)
    fresh = [path for path, _ in pending]
    covered: set[str] = set()
    for key, module in modules:
        path = ".".join(part for part in (name, key) if part)
        own = [at for at in fresh if at == path]
        own += [
            at
            for at, child in pending
            if isinstance(child, nn.ParameterList | nn.ParameterDict) and at.rpartition(".")[0] == path
        ]
        reset: Any = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if own and reset is not None:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                torch.manual_seed(zlib.crc32(f"{seed}/{path}".encode()))
                reset()
            covered.update(own)
    missing = [(path, module) for path, module in pending if path not in covered]
    if missing:
        path, module = missing[0]
        raise ValueError(
            f"{path} ({type(module).__name__}) is on the meta device and has no reset_parameters to draw its values: "
            "give it one, or set meta_init: false and build it on a real device"
        )


def choose_dimension(parameter: nn.Parameter, size: int) -> Shard | None:
    """The dimension to split over ``size`` ranks: the first one, unless it has fewer rows and another one divides.

    A rank of the expert axis may have a single expert, whose matrices many ranks are to share.
    """
    shape = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).shape
    if not shape or shape[0] >= size:
        return None
    return next((Shard(dim) for dim in range(1, len(shape)) if shape[dim] % size == 0), None)


def shard_dense(
    root: nn.Module,
    units: list[str],
    meshes: Meshes,
    experts: dict[str, nn.Module],
    ignored: set[nn.Parameter],
    prepare: Callable[[str, nn.Module, set[nn.Module]], None],
    policy: MixedPrecisionPolicy,
    reshard_after_forward: bool,
) -> dict[str, FSDPModule]:
    """Applies ``fully_shard`` to the units, inner ones first.

    Gradients come out as the mean over all ranks on every mesh: FSDP2 divides those of dense units by their mesh; those
    of experts have seen the samples of a whole expert group, and are divided by the world.

    Args:
        root: The LightningModule.
        units: Names from :func:`choose_units`, and the empty name of the root.
        meshes: Device meshes.
        experts: Expert modules among the units, already units of their own.
        ignored: Parameters of tables.
        prepare: Called with name, module and the modules sharded before, to materialise a unit and split its experts.
        policy: Precision of gathers and reductions.
        reshard_after_forward: Free gathered parameters between forward and backward.

    Returns:
        The units by name, in order of their sharding.
    """

    def placement(size: int) -> Callable[[nn.Parameter], Shard | None]:
        return lambda parameter: choose_dimension(parameter, size)

    done: set[nn.Module] = set()
    sharded: dict[str, FSDPModule] = {}
    for name in units:
        module = root.get_submodule(name)
        prepare(name, module, done)
        done.add(module)
        is_expert = name in experts and meshes.axes.expert > 1
        unit = fully_shard(
            module,
            mesh=meshes.expert_fsdp if is_expert else meshes.dense_fsdp,
            reshard_after_forward=reshard_after_forward if name else False,
            shard_placement_fn=placement(meshes.axes.expert_shard if is_expert else meshes.axes.shard),
            mp_policy=policy,
            ignored_params=ignored,
        )
        if is_expert:
            unit.set_gradient_divide_factor(float(meshes.axes.world_size))
            # Gloo cannot scale inside a reduction; with one rank the copy would be divided twice.
            unit.set_force_sum_reduction_for_comms(meshes.axes.expert_shard > 1)
        sharded[name] = unit
    if meshes.axes.expert > 1:
        _gather_experts_early(root, sharded, set(experts))
    return sharded


def _gather_experts_early(root: nn.Module, units: dict[str, FSDPModule], experts: set[str]) -> None:
    """Lets the gathers of the two meshes run beside the computation, whatever the host waits for in between.

    A unit starts to gather the experts inside of it when it runs itself, and the experts start to gather the unit that
    is defined after them. The backward needs no help: FSDP2 remembers the order of the forward.
    """
    order = [name for name, _ in root.named_modules() if name in units and name]
    for position, name in enumerate(order):
        if name not in experts:
            continue
        around = max((unit for unit in order if name.startswith(f"{unit}.")), key=len, default=None)
        if around is not None:
            units[around].set_modules_to_forward_prefetch([units[name]])
        following = next((unit for unit in order[position + 1 :] if not unit.startswith(f"{name}.")), None)
        if following is not None:
            units[name].set_modules_to_forward_prefetch([units[following]])
