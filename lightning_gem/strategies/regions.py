"""Loading parts of saved tensors that no sharded tensor of this process describes: rows of a table that has grown."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lightning_gem.strategies.embeddings import local_shards

Regions = dict[str, list[tuple[Tensor, tuple[int, ...]]]]


class RegionPlanner(DefaultLoadPlanner):
    """Loads what a state dictionary says, and fills regions besides.

    Args:
        regions: By name of the saved tensor: tensors to fill, and where they begin in it.
    """

    def __init__(self, regions: Regions) -> None:
        super().__init__()
        self.regions = regions

    def create_local_plan(self) -> LoadPlan:
        """The default plan and what the regions need."""
        plan = super().create_local_plan()
        assert self.metadata is not None
        for name, parts in self.regions.items():
            saved: Any = self.metadata.state_dict_metadata[name]
            chunks = [ChunkStorageMetadata(torch.Size(offset), tensor.size()) for tensor, offset in parts]
            plan.items.extend(create_read_items_for_chunk_list(name, saved, chunks))
        return plan

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where to read to."""
        index = read_item.dest_index
        if index.fqn not in self.regions:
            return super().resolve_tensor(read_item)
        assert index.index is not None
        tensor, _ = self.regions[index.fqn][index.index]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor


def is_grown(key: str, saved: dict[str, Any], own: dict[str, Any], table: str) -> bool:
    """Whether a table, or a state with one entry a row, has only gained rows.

    Args:
        key: Name of the tensor.
        saved: Metadata of the saved tensors by name.
        own: Tensors of this model by name.
        table: Name of the table that it belongs to.
    """
    if any(name not in there for name in (key, table) for there in (saved, own)):
        return False
    before, now = tuple(saved[key].size), tuple(own[key].shape)
    # A state of a table split by columns has as many entries a row as there are parts.
    whole_rows = before[:1] == tuple(saved[table].size)[:1] and now[:1] == tuple(own[table].shape)[:1]
    return bool(now) and whole_rows and before[1:] == now[1:] and before[0] < now[0]


def saved_rows(value: Any, saved: Any) -> list[tuple[Tensor, tuple[int, ...]]]:
    """The part of this rank's shards that the checkpoint has."""
    rows = saved.size[0]
    return [
        (shard[: rows - offset[0]] if offset[0] + len(shard) > rows else shard, offset)
        for shard, offset in local_shards(value)
        if offset[0] < rows
    ]
