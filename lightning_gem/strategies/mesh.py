"""The five axes over one set of ranks: sizes, rank order and process groups as pure functions, then device meshes.

Three factorings of the same ranks, last axis fastest:

* dense parameters: ``(replicate, shard)``
* experts: ``(replicate, expert_shard, expert)`` with ``expert_shard * expert = shard``
* tables: ``(table, table_replicate)`` where the copies of a table shard lie inside the host, or
  ``(table_replicate, table)`` where every zone holds whole copies

A *host* is the set of ranks with the fastest links, a *zone* the set inside which ranks may exchange activations. Ranks
are numbered host by host, zone by zone, as every launcher does.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_gem.strategies.compat import unflatten_mesh

Size = int | Literal["auto"]


@dataclass(frozen=True)
class Axes:
    """Sizes of the axes.

    Attributes:
        replicate: Copies of the dense parameters.
        shard: Ranks that share one copy of the dense parameters.
        expert: Ranks that share the experts of a layer, each holding whole ones.
        table: Ranks that share one copy of the embedding tables.
        table_replicate: Copies of the embedding tables.
        copies_in_host: Whether the copies of a table shard are neighbours (else every table group is contiguous).
    """

    replicate: int
    shard: int
    expert: int
    table: int
    table_replicate: int
    copies_in_host: bool

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.replicate * self.shard

    @property
    def expert_shard(self) -> int:
        """Ranks that share the parameters of the same experts."""
        return self.shard // self.expert


def resolve_axes(
    world_size: int,
    host_size: Size = "auto",
    zone_size: Size = "auto",
    replicate: Size = "auto",
    shard: Size = "auto",
    expert: Size = "auto",
    table: Size = "auto",
    table_replicate: Size = "auto",
) -> Axes:
    """Fills in what is ``"auto"`` and checks that everything divides and fits its tier.

    ``host_size`` and ``zone_size`` default to the world, ``shard`` to the zone, ``expert`` to 1, ``table_replicate`` to
    one copy per zone; ``replicate`` and ``table`` are what is left of the world.

    Raises:
        ValueError: Naming the field, its value and the fix.
    """
    given = {
        "host_size": host_size,
        "zone_size": zone_size,
        "replicate": replicate,
        "shard": shard,
        "expert": expert,
        "table": table,
        "table_replicate": table_replicate,
    }
    for name, size in given.items():
        if size != "auto" and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ValueError(f'{name} must be a positive integer or "auto", not {size!r}')
    host = min(_or(host_size, world_size), world_size)
    zone = min(_or(zone_size, world_size), world_size)
    _check_divides("host_size", host, "zone_size", zone)
    _check_divides("zone_size", zone, "the world size", world_size)
    replicate, shard = _factor(world_size, "replicate", replicate, "shard", shard, zone)
    table_replicate, table = _factor(world_size, "table_replicate", table_replicate, "table", table, zone)
    expert = _or(expert, 1)
    _check_tier("shard", shard, "zone", zone)
    _check_tier("expert", expert, "host", host)
    if shard % expert:
        raise ValueError(
            f"expert={expert} does not divide shard={shard}: the experts of a layer are shared by ranks of one shard "
            f"group, so use one of {_divisors(shard)}, or a larger shard"
        )
    copies_in_host = world_size <= zone
    if copies_in_host:
        _check_tier("table_replicate", table_replicate, "host", host)
    else:
        _check_tier("table", table, "zone", zone)
    return Axes(replicate, shard, expert, table, table_replicate, copies_in_host)


def _or(size: Size, default: int) -> int:
    return default if size == "auto" else size


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _check_divides(name: str, size: int, whole_name: str, whole: int) -> None:
    if whole % size:
        raise ValueError(f"{name}={size} does not divide {whole_name}={whole}: use one of {_divisors(whole)}")


def _check_tier(name: str, size: int, tier: str, tier_size: int) -> None:
    if size > tier_size or tier_size % size:
        relation = "is larger than" if size > tier_size else "does not divide"
        raise ValueError(
            f"{name}={size} {relation} the {tier} of {tier_size} ranks that its traffic has to stay inside: use one of "
            f"{_divisors(tier_size)}, or set {tier}_size if the {tier} is larger"
        )


def _factor(
    world: int, copies_name: str, copies: Size, parts_name: str, parts: Size, default_parts: int
) -> tuple[int, int]:
    """Completes ``copies * parts = world``."""
    if parts == "auto":
        if copies == "auto":
            parts = default_parts
        else:
            _check_divides(copies_name, copies, "the world size", world)
            parts = world // copies
    _check_divides(parts_name, parts, "the world size", world)
    copies = _or(copies, world // parts)
    if copies * parts != world:
        raise ValueError(
            f"{copies_name}={copies} times {parts_name}={parts} is {copies * parts}, but the world has {world} ranks: "
            f'set one of them to "auto" or {copies_name} to {world // parts}'
        )
    return copies, parts


def rank_grids(axes: Axes) -> dict[str, tuple[tuple[str, ...], np.ndarray]]:
    """Names of the axes and ranks of the three factorings: ``dense``, ``experts`` and ``tables``."""
    ranks = np.arange(axes.world_size)
    if axes.copies_in_host:
        tables = ranks.reshape(axes.table, axes.table_replicate).T
    else:
        tables = ranks.reshape(axes.table_replicate, axes.table)
    return {
        "dense": (("replicate", "shard"), ranks.reshape(axes.replicate, axes.shard)),
        "experts": (
            ("replicate", "expert_shard", "expert"),
            ranks.reshape(axes.replicate, axes.expert_shard, axes.expert),
        ),
        "tables": (("table_replicate", "table"), tables),
    }


def process_groups(axes: Axes) -> dict[str, list[list[int]]]:
    """Ranks of every process group, by the name of its axis; each rank is in one group of every axis."""
    groups: dict[str, list[list[int]]] = {}
    for names, grid in rank_grids(axes).values():
        for dim, name in enumerate(names):
            groups.setdefault(name, np.moveaxis(grid, dim, -1).reshape(-1, grid.shape[dim]).tolist())
    return groups


@dataclass
class Meshes:
    """Device meshes of the three factorings.

    Attributes:
        axes: Sizes of the axes.
        dense: ``("replicate", "shard")``.
        experts: ``("replicate", "expert_shard", "expert")``.
        tables: ``("table_replicate", "table")``.
    """

    axes: Axes
    dense: DeviceMesh
    experts: DeviceMesh
    tables: DeviceMesh

    @property
    def dense_fsdp(self) -> DeviceMesh:
        """What ``fully_shard`` wants for dense parameters: one dimension, or two with copies."""
        return self.dense if self.axes.replicate > 1 else self.dense["shard"]

    @property
    def expert_fsdp(self) -> DeviceMesh:
        """What ``fully_shard`` wants for the parameters of experts."""
        return self.experts["replicate", "expert_shard"] if self.axes.replicate > 1 else self.experts["expert_shard"]


def build_meshes(axes: Axes, device_type: str) -> Meshes:
    """Makes the meshes and their process groups; every rank of the default group must call it.

    Dense and expert meshes are views of one root, which FSDP2 needs in order to combine them.
    """
    grids = rank_grids(axes)
    world = init_device_mesh(device_type, (axes.world_size,), mesh_dim_names=("world",))
    views = [unflatten_mesh(world, grids[name][1].shape, grids[name][0]) for name in ("dense", "experts")]
    names, ranks = grids["tables"]
    tables = DeviceMesh(device_type, torch.from_numpy(np.ascontiguousarray(ranks)), mesh_dim_names=names)
    return Meshes(axes, views[0], views[1], tables)
