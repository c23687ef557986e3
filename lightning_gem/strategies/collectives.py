"""Gathers and reductions of FSDP2 that leave the multiprocessors to the model, where the machine has a way.

Three means, in order of preference:

* ``symmetric``: buffers in NCCL's symmetric windows under its zero-CTA policy. All-gathers then run on copy engines
  inside a host (elsewhere NCCL takes a kernel with few CTAs). Reductions always take some multiprocessors. Source of
  method: NCCL user guide, "zero-CTA optimization"; ``SymmMemAllGather`` of torch 2.12.
* ``registered``: buffers from the process group's own allocator, which NCCL does not have to copy.
* ``plain``: what FSDP2 does by default.

NCCL falls back to ordinary kernels without a word where it has no other way, so that only a trace shows what ran. The
means here says what was asked for.
"""

import os
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lightning_gem.strategies.compat import (
    all_gather_single,
    process_group_allocates,
    reduce_scatter_single,
    symmetric_memory,
)

Mode = Literal["off", "auto", "require"]
Means = Literal["symmetric", "registered", "plain"]

_ZERO_CTA = {"NCCL_CTA_POLICY": "2"}


class Memory(Protocol):
    """Where buffers come from."""

    def allocate(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised tensor."""

    def register(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        """Makes the memory of a tensor known to the ranks of a group; collective the first time."""


class NCCLWindows:
    """Symmetric windows of NCCL, reused through a memory pool."""

    def __init__(self) -> None:
        self._memory = symmetric_memory()
        self._memory.set_backend("NCCL")
        self._started: set[str] = set()

    def allocate(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor in the pool."""
        with torch.cuda.use_mem_pool(self._memory.get_mem_pool(device)):
            return torch.empty(*size, dtype=dtype, device=device)

    def register(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        """Opens a window on the allocation, once."""
        if group.group_name not in self._started:
            # A group has no communicator before its first collective, and a window needs one.
            dist.barrier(group, device_ids=[tensor.device.index])
            self._started.add(group.group_name)
        self._memory.rendezvous(tensor, group.group_name)


class SymmetricAllGather:
    """FSDP2's all-gather with its output in symmetric memory; its input is a part of that."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Buffer of the gathered parameters."""
        return self.memory.allocate(size, dtype, device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gathers."""
        self.memory.register(output_tensor, group)
        return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class SymmetricReduceScatter:
    """FSDP2's reduce-scatter with both buffers in symmetric memory."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Buffer of gradients."""
        return self.memory.allocate(size, dtype, device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Reduces."""
        self.memory.register(input_tensor, group)
        self.memory.register(output_tensor, group)
        return reduce_scatter_single(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


@dataclass(frozen=True)
class Offer:
    """What a process can use.

    Attributes:
        means: The best means.
        reason: Why no better one, or which version.
    """

    means: Means
    reason: str


def offered(device: torch.device, backend: str) -> Offer:
    """What torch and NCCL have for this device and backend."""
    if device.type != "cuda" or "nccl" not in backend:
        return Offer("plain", f"{backend} on {device.type} has no others")
    version = torch.cuda.nccl.version()
    name = "NCCL " + ".".join(map(str, version))
    policies = hasattr(dist.ProcessGroupNCCL, "NCCL_CTA_POLICY_ZERO")
    if version >= (2, 28) and policies and symmetric_memory() is not None:
        return Offer("symmetric", f"{name}, zero-CTA policy")
    reason = f"{name} or this torch has no zero-CTA policy"
    return Offer("registered" if process_group_allocates() else "plain", reason)


def choose(mode: Mode, offer: Offer) -> Offer:
    """The means to use.

    Raises:
        ValueError: If ``mode`` is ``"require"`` and there is no symmetric memory.
    """
    if mode == "off":
        return Offer("plain", "sm_free_collectives is off")
    if mode == "require" and offer.means != "symmetric":
        raise ValueError(
            f'sm_free_collectives="require", but there is no symmetric memory here ({offer.reason}): use "auto" or '
            '"off", or a CUDA device with NCCL 2.28 and torch 2.11'
        )
    return offer


def prepare(means: Means, environment: MutableMapping[str, str] = os.environ) -> None:
    """Asks NCCL for its zero-CTA policy; before the first communicator, and unless the environment says otherwise."""
    if means == "symmetric":
        for key, value in _ZERO_CTA.items():
            environment.setdefault(key, value)


def install(units: Iterable[FSDPModule], sizes: Iterable[int], means: Means, memory: Memory | None = None) -> int:
    """Lets units of FSDP2 gather and reduce by ``means``.

    Args:
        units: What ``fully_shard`` returned.
        sizes: Ranks that share the parameters of each; a single one has nothing to gather.
        means: From :func:`choose`.
        memory: Symmetric memory, NCCL's when not given.

    Returns:
        Number of units that were changed.
    """
    changed = 0
    for unit, size in zip(units, sizes, strict=True):
        if size == 1 or means == "plain":
            continue
        if means == "symmetric":
            memory = memory or NCCLWindows()
            unit.set_custom_all_gather(SymmetricAllGather(memory))  # type: ignore[arg-type]
            unit.set_custom_reduce_scatter(SymmetricReduceScatter(memory))  # type: ignore[arg-type]
            unit.set_force_sum_reduction_for_comms(True)  # symmetric reductions are sums only
        else:
            unit.set_allocate_memory_from_process_group_for_comm(True)
        changed += 1
    return changed
