"""What a layout costs: memory of each rank, and the bytes of every collective by axis. Works on the meta device."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_gem.strategies.embeddings import ShardedTables, local_shards
from lightning_gem.strategies.mesh import Axes

_LENGTH_BYTES, _ID_BYTES = 4, 8
_COMMUNICATION_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8": 1}


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends in a step.

    Attributes:
        axis: Whose ranks take part.
        collective: Its name.
        content: What travels.
        num_bytes: Sent by this rank.
    """

    axis: str
    collective: str
    content: str
    num_bytes: int


@dataclass(frozen=True)
class LayoutReport:
    """Memory of this rank, and its traffic in a step.

    Attributes:
        table_weights: Bytes of table shards, while they are whole.
        table_state: Bytes of their optimizer state, while it is whole.
        tables_at_rest: Bytes of both between steps.
        dense_parameters: Bytes of the parameters that this rank keeps; gradients take as much again.
        largest_unit: Bytes of the largest unit of FSDP2 while it is gathered.
        traffic: All collectives. That of the expert axis depends on activations and is not in it.
    """

    table_weights: int
    table_state: int
    tables_at_rest: int
    dense_parameters: int
    largest_unit: int
    traffic: list[Traffic]

    def by_axis(self) -> dict[str, int]:
        """Bytes that this rank sends in a step, by axis."""
        sums: dict[str, int] = {}
        for entry in self.traffic:
            sums[entry.axis] = sums.get(entry.axis, 0) + entry.num_bytes
        return sums

    def as_dict(self) -> dict[str, Any]:
        """Plain types."""
        return {**asdict(self), "by_axis": self.by_axis()}


def layout_report(
    module: nn.Module,
    tables: ShardedTables | None,
    axes: Axes,
    samples: int,
    ids_per_feature: float = 1.0,
    parameter_bytes: int = 4,
    reduce_bytes: int = 4,
) -> LayoutReport:
    """Reports on a sharded module.

    Collectives over n ranks are counted as rings send them: (n - 1) / n of the whole for a gather or a
    reduce-scatter, twice that for an all-reduce.

    Args:
        module: A module that the strategy has sharded.
        tables: Its tables.
        axes: Sizes of the axes.
        samples: Batch size of a rank.
        ids_per_feature: Mean number of ids of a feature in a sample.
        parameter_bytes: Bytes of an element of a gathered dense parameter.
        reduce_bytes: Bytes of an element of a reduced gradient.
    """
    weights = state = at_rest = 0
    traffic: list[Traffic] = []
    if tables is not None:
        weights = sum(_weight_bytes(lookup.emb_module) for lookup in tables.lookups)
        values = tables.optimizer_tensors().values()
        state = sum(_num_bytes(shard) for value in values for shard, _ in local_shards(value))
        at_rest = weights + state
        if tables.config.copies == "sharded":
            at_rest = -(-at_rest // axes.table_replicate)
        traffic += _lookup_traffic(tables, axes.table, samples, ids_per_feature)
        traffic += _copy_traffic(tables, axes.table_replicate, weights, state)
    dense, largest, dense_traffic = _dense(module, axes, parameter_bytes, reduce_bytes)
    return LayoutReport(weights, state, at_rest, dense, largest, [*traffic, *dense_traffic])


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _weight_bytes(kernel: Any) -> int:
    elements = sum(rows * columns for rows, columns, *_ in kernel.embedding_specs)
    return elements * kernel.weights_precision.bit_rate() // 8


def _ring(num_bytes: float, size: int) -> int:
    """Bytes that each of ``size`` ranks sends to gather, or to reduce and scatter, ``num_bytes`` in all."""
    return round(num_bytes * (size - 1) / size)


def _lookup_traffic(tables: ShardedTables, size: int, samples: int, ids_per_feature: float) -> list[Traffic]:
    """Ids on their way to the rows, embeddings on their way back, and their gradients."""
    lookups = ids = forward = 0.0
    for table in tables.infos:
        ids_of_table = samples * table.num_features * ids_per_feature
        lookups += samples * table.num_features
        ids += ids_of_table
        elements = (samples * table.num_features if table.is_pooled else ids_of_table) * table.columns
        # Of a table split by rows, every rank has a part of every pooled sum of the group.
        forward += elements * (size if table.is_pooled and table.kind == "row_wise" else 1)
    config = tables.config
    sent = {
        "ids": lookups * _LENGTH_BYTES + ids * _ID_BYTES,
        "embeddings": forward * _COMMUNICATION_BYTES[config.forward_communication],
        "gradients": forward * _COMMUNICATION_BYTES[config.backward_communication],
    }
    return [
        Traffic("table", "all_to_all or reduce_scatter", content, _ring(num_bytes, size))
        for content, num_bytes in sent.items()
    ]


def _copy_traffic(tables: ShardedTables, size: int, weights: int, state: int) -> list[Traffic]:
    axis, interval = "table_replicate", tables.config.sync_interval
    if size == 1:
        return []
    if tables.config.copies == "sharded":
        return [
            Traffic(axis, "all_gather", "weights for the lookup", _ring(weights, size)),
            Traffic(axis, "all_gather", "weights and state for the update", _ring(weights + state, size)),
            Traffic(axis, "reduce_scatter", "updated weights and state", _ring(weights + state, size)),
        ]
    average = Traffic(axis, "all_reduce", "updated weights and state", 2 * _ring(weights + state, size) // interval)
    if tables.config.copies == "whole":
        return [average]
    return [
        Traffic(axis, "reduce_scatter", "weights after the lookup", _ring(weights, size)),
        Traffic(axis, "all_gather", "weights for the update", _ring(weights, size)),
        average,
    ]


def _dense(module: nn.Module, axes: Axes, parameter_bytes: int, reduce_bytes: int) -> tuple[int, int, list[Traffic]]:
    """Bytes of the parameters kept here, those of the largest unit, and the traffic of FSDP2."""
    units = {name: child for name, child in module.named_modules() if isinstance(child, FSDPModule)}
    gathered = {"shard": 0.0, "expert_shard": 0.0}
    per_unit: dict[str, float] = dict.fromkeys(units, 0.0)
    again = {"shard": 0.0, "expert_shard": 0.0}
    kept = 0
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        kept += _num_bytes(parameter.to_local())
        owner = max((unit for unit in units if not unit or name.startswith(f"{unit}.")), key=len)
        names = parameter.device_mesh.mesh_dim_names or ()
        axis = "expert_shard" if "expert" in names else "shard"
        whole = parameter.numel() / (axes.expert if axis == "expert_shard" else 1)
        gathered[axis] += whole
        per_unit[owner] += whole
        # The root stays gathered between forward and backward.
        again[axis] += whole if owner else 0
    traffic = []
    for axis, size in (("shard", axes.shard), ("expert_shard", axes.expert_shard)):
        if size > 1 and gathered[axis]:
            whole = (gathered[axis] + again[axis]) * parameter_bytes
            traffic.append(Traffic(axis, "all_gather", "parameters", _ring(whole, size)))
            traffic.append(Traffic(axis, "reduce_scatter", "gradients", _ring(gathered[axis] * reduce_bytes, size)))
    if axes.replicate > 1:
        shards = gathered["shard"] / axes.shard + gathered["expert_shard"] / axes.expert_shard
        traffic.append(
            Traffic("replicate", "all_reduce", "gradient shards", 2 * _ring(shards * reduce_bytes, axes.replicate))
        )
    return kept, round(max(per_unit.values(), default=0.0) * parameter_bytes), traffic
