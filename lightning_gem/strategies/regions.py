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


class Repartition:
    """A state with one entry a row and part of a table, from other parts than before.

    Row-wise AdaGrad keeps the mean over the columns of squared gradients, for every part of a table that is split by
    columns. What a new part gets is the mean of the old parts' means, weighted by the columns that they share with it:
    exact where old parts are joined, the old mean where they are split.

    Args:
        value: State of this model, sharded.
        saved_rows: Entries of the saved state.
        rows: Rows of the table.
    """

    def __init__(self, value: Any, saved_rows: int, rows: int) -> None:
        old, new = saved_rows // rows, value.shape[0] // rows
        self.regions: list[tuple[Tensor, tuple[int, ...]]] = []
        self._targets: list[tuple[Tensor, list[Tensor], list[float]]] = []
        for shard, (offset, *rest) in local_shards(value):
            part, row = divmod(offset, rows)
            # In units of 1 / (old * new) of the columns.
            shares = [max(0, min((part + 1) * old, (j + 1) * new) - max(part * old, j * new)) for j in range(old)]
            used = [j for j, share in enumerate(shares) if share]
            buffers = [torch.empty_like(shard) for _ in used]
            self.regions += [(buffer, (j * rows + row, *rest)) for buffer, j in zip(buffers, used, strict=True)]
            self._targets.append((shard, buffers, [shares[j] / old for j in used]))

    def finish(self) -> None:
        """Joins what has been loaded."""
        for shard, buffers, weights in self._targets:
            weighted = [weight * buffer for weight, buffer in zip(weights, buffers, strict=True)]
            shard.copy_(torch.stack(weighted).sum(dim=0))


def has_other_parts(key: str, saved: dict[str, Any], own: dict[str, Any], table: str) -> bool:
    """Whether a state has another number of entries a row than before, of a table with as many rows as before."""
    if any(name not in there for name in (key, table) for there in (saved, own)):
        return False
    before, now, rows = tuple(saved[key].size), tuple(own[key].shape), own[table].shape[0]
    return (
        bool(now)
        and before[0] != now[0]
        and before[1:] == now[1:]
        and saved[table].size[0] == rows
        and before[0] % rows == 0 == now[0] % rows
    )
