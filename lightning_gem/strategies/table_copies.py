"""Copies of table shards along ``table_replicate``: held whole and averaged, or sharded again where they lie idle.

Fully sharded copies: at rest each of R copies keeps 1/R of every buffer of a lookup, weights and optimizer state. The
weights are gathered for the lookup and freed after it; weights and state are gathered again when the gradient of the
lookup arrives, updated by the fused optimizer, and averaged by a reduce-scatter after the backward. Every lookup sees
the mean of all updates, so losses and weights are those of whole copies that are averaged in every step. (Method:
fully sharded 2D parallelism as Meta describes it for GEM. TorchRec's own variant averages one step later and keeps the
weights whole between backward and forward; see :class:`TorchRecCopies`.)
"""

from collections.abc import Iterable
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_gem.strategies.compat import gather_fully_sharded, is_resharded

CopyKind = Literal["whole", "sharded", "torchrec"]


class Copies(Protocol):
    """How the copies of a table shard are kept."""

    def gather(self) -> None:
        """Makes every buffer whole on this rank; collective."""

    def release(self) -> None:
        """Frees what is not needed at rest, keeping what was written into whole buffers."""

    def begin_update(self) -> None:
        """Called before an update outside of backward; collective."""

    def finish_backward(self) -> None:
        """Called after every backward and update; collective."""

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Averages whole buffers over the copies; collective."""

    def num_bytes(self) -> int:
        """Memory of weights and optimizer state on this rank now."""


class WholeCopies:
    """Every copy keeps everything.

    Args:
        lookups: TorchRec's lookup modules of this rank.
        group: Ranks that hold copies of the same shards.
    """

    def __init__(self, lookups: list[nn.Module], group: dist.ProcessGroup) -> None:
        self.lookups = lookups
        self.group = group

    def gather(self) -> None:
        """Nothing to do."""

    def release(self) -> None:
        """Nothing to do."""

    def begin_update(self) -> None:
        """Makes weights whole that TorchRec has freed."""
        self.gather()

    def finish_backward(self) -> None:
        """Nothing to do: copies are averaged by :meth:`average`, after the step."""

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Averages in place; collective."""
        for tensor in tensors:
            dist.all_reduce(tensor, group=self.group)
            tensor.div_(dist.get_world_size(self.group))

    def num_bytes(self) -> int:
        """Memory of weights and optimizer state on this rank."""
        return sum(tensor.untyped_storage().nbytes() for lookup in self.lookups for tensor in buffers(lookup))


def buffers(lookup: nn.Module) -> list[Tensor]:
    """One flat tensor over each buffer of a lookup: first the weights, then optimizer state; empty ones left out."""
    kernel: Any = lookup.emb_module
    tensors = [*kernel.split_embedding_weights()]
    for state in kernel.get_optimizer_state():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    flat: dict[int, Tensor] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.nbytes():
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
            flat.setdefault(storage.data_ptr(), whole)
    return list(flat.values())


class _Buffer:
    """A flat tensor that is whole, or of which this rank keeps one of R parts.

    The storage stays the same object, so all views into it, those of checkpoints included, stay valid whenever it is
    whole. Without memory they must not be read.
    """

    def __init__(self, flat: Tensor, group: dist.ProcessGroup) -> None:
        self.storage = flat.untyped_storage()
        self.like = flat.new_empty(0)
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.part_numel = -(-flat.numel() // self.size)
        self.nbytes = self.part_numel * self.size * flat.element_size()
        self.part = flat.new_zeros(self.part_numel)
        self.is_whole = True
        self.is_updated = False
        # From here on the storage has room for equal parts.
        self.storage.resize_(self.nbytes)
        self._whole()[flat.numel() :].zero_()
        self.keep()

    def _whole(self) -> Tensor:
        return self.like.new_empty(0).set_(self.storage, 0, (self.part_numel * self.size,))  # type: ignore[call-overload]

    def gather(self) -> None:
        """Makes it whole; collective."""
        if not self.is_whole:
            self.storage.resize_(self.nbytes)
            dist.all_gather_into_tensor(self._whole(), self.part, group=self.group)
            self.is_whole = True

    def average(self) -> None:
        """Keeps this rank's part of the mean of all copies and frees the rest; collective."""
        dist.reduce_scatter_tensor(self.part, self._whole(), group=self.group)
        self.part.div_(self.size)
        self._free()

    def keep(self) -> None:
        """Keeps this rank's part as it is and frees the rest."""
        if self.is_whole:
            self.part.copy_(self._whole()[self.rank * self.part_numel :][: self.part_numel])
            self._free()

    def _free(self) -> None:
        self.storage.resize_(0)
        self.is_whole = self.is_updated = False

    def num_bytes(self) -> int:
        """Memory that it takes now."""
        return self.storage.nbytes() + self.part.untyped_storage().nbytes()


class ShardedCopies:
    """Fully sharded copies through plain collectives, on any device.

    A collection may be called several times before the backward; each call gathers.

    Args:
        lookups: TorchRec's lookup modules of this rank; hooks are attached to them.
        group: Ranks that hold copies of the same shards.
        update_in_backward: Whether backward updates; else :meth:`begin_update` says when.

    Raises:
        ValueError: For tables of integers.
    """

    def __init__(self, lookups: list[nn.Module], group: dist.ProcessGroup, update_in_backward: bool = True) -> None:
        self.buffers: list[tuple[_Buffer, list[_Buffer]]] = []
        for lookup in lookups:
            kernel: Any = lookup.emb_module
            if not all(table.is_floating_point() for table in kernel.split_embedding_weights()):
                raise ValueError("tables.copies: sharded cannot average tables of integers: use whole")
            weights, *state = [_Buffer(flat, group) for flat in buffers(lookup)]
            self.buffers.append((weights, state))
            self._attach(lookup, weights, state, update_in_backward)

    @staticmethod
    def _attach(lookup: nn.Module, weights: _Buffer, state: list[_Buffer], update_in_backward: bool) -> None:
        def before_lookup(module: nn.Module, inputs: Any) -> None:
            weights.gather()

        def before_update(gradient: Tensor) -> None:
            for buffer in (weights, *state):
                buffer.gather()
                buffer.is_updated = True

        def after_lookup(module: nn.Module, inputs: Any, output: Tensor) -> None:
            # Updates of an earlier backward that is not finished are still to be averaged.
            if not weights.is_updated:
                weights.keep()
            if update_in_backward and output.requires_grad:
                output.register_hook(before_update)

        lookup.register_forward_pre_hook(before_lookup)
        lookup.register_forward_hook(after_lookup)

    def _all(self) -> list[_Buffer]:
        return [buffer for weights, state in self.buffers for buffer in (weights, *state)]

    def gather(self) -> None:
        """Makes every buffer whole on this rank; collective."""
        for buffer in self._all():
            buffer.gather()

    def release(self) -> None:
        """Keeps this rank's part of every buffer."""
        for buffer in self._all():
            buffer.keep()

    def begin_update(self) -> None:
        """Makes every buffer whole, to be averaged by :meth:`finish_backward`; collective."""
        for buffer in self._all():
            buffer.gather()
            buffer.is_updated = True

    def finish_backward(self) -> None:
        """Averages what the backward updated, each rank its part; collective."""
        for buffer in self._all():
            if buffer.is_updated:
                buffer.average()
            else:
                buffer.keep()

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Nothing to do: the copies are averaged after every backward."""

    def num_bytes(self) -> int:
        """Memory of weights and optimizer state on this rank now."""
        return sum(buffer.num_bytes() for buffer in self._all())


class TorchRecCopies(WholeCopies):
    """TorchRec's ``ShardingStrategy.FULLY_SHARDED``, which its lookups carry out themselves on CUDA streams.

    They free the weights between forward and backward, when the dense part of the model needs memory most, and overlap
    the reduce-scatter with it. Between steps weights are whole, and averaged by an all-reduce as whole copies are:
    TorchRec alone would let each copy look up its own update first.

    Args:
        lookups: TorchRec's lookup modules of this rank, built for the strategy.
        group: Ranks that hold copies of the same shards.
    """

    def __init__(self, lookups: list[nn.Module], group: dist.ProcessGroup) -> None:
        super().__init__(lookups, group)
        for lookup in lookups:
            lookup.register_forward_pre_hook(self._check_forward)

    @staticmethod
    def _check_forward(lookup: nn.Module, inputs: Any) -> None:
        if lookup.training and is_resharded(lookup):
            raise RuntimeError(
                "tables.copies: torchrec, and a collection was called twice before one backward: TorchRec has freed "
                "its weights. Call it once in a step, or set tables.copies to sharded"
            )

    def gather(self) -> None:
        """Makes the weights whole where a forward was not followed by a backward; collective."""
        for lookup in self.lookups:
            gather_fully_sharded(lookup)


def make_copies(
    kind: CopyKind, lookups: list[nn.Module], group: dist.ProcessGroup, update_in_backward: bool = True
) -> Copies:
    """The copies of a rank's lookups, kept as asked; one copy is always whole."""
    if kind == "torchrec":
        return TorchRecCopies(lookups, group)
    if kind == "sharded" and dist.get_world_size(group) > 1:
        return ShardedCopies(lookups, group, update_in_backward)
    return WholeCopies(lookups, group)
