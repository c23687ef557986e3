"""Private names of torch, torchrec and lightning: the only file that imports them.

Each is covered by a test, so that a new version that moves one fails with its name.
"""

import ctypes
import os
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _distributed_is_initialized as distributed_is_initialized
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device as default_process_group_backend,
)
from lightning.fabric.utilities.distributed import _init_dist_connection as init_process_group
from lightning.fabric.utilities.distributed import _sync_ddp_if_available as reduce_over_ranks
from lightning.fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher as SubprocessScriptLauncher,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.fsdp import FSDPModule
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torch.distributed.remote_device import _remote_device as remote_device
from torch.nn.utils.stateless import _reparametrize_module
from torch.optim import Optimizer
from torchrec.distributed.shard import _shard_modules as shard_modules  # the public one refuses absent tables

# Names that newer versions have given to the same functions.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

# Lightning passes a barrier of this name in every run, after loading a checkpoint or instead of it.
RESUME_END = "_CheckpointConnector.resume_end"

__all__ = [
    "RESUME_END",
    "SubprocessScriptLauncher",
    "all_gather_single",
    "apply_optimizer_in_backward",
    "default_process_group_backend",
    "default_store",
    "detects_anomaly",
    "distributed_is_initialized",
    "exchange_names",
    "gather_fully_sharded",
    "in_backward_optimizers",
    "init_process_group",
    "is_resharded",
    "move_placement",
    "optimizers_to_device",
    "placement_rank",
    "process_group_allocates",
    "reduce_over_ranks",
    "reduce_scatter_single",
    "remote_device",
    "reparametrize",
    "reset_seed",
    "shard_modules",
    "symmetric_memory",
    "table_lookups",
    "unflatten_mesh",
    "version_of",
]


def default_store() -> Any:
    """The store of the default process group."""
    return _get_default_store()


def in_backward_optimizers(parameter: nn.Parameter) -> list[Optimizer]:
    """Optimizers that run in the backward of a parameter."""
    return getattr(parameter, "_in_backward_optimizers", [])


def detects_anomaly(trainer: Any) -> bool:
    """Whether the trainer runs under autograd's anomaly detection."""
    return trainer._detect_anomaly


def unflatten_mesh(mesh: DeviceMesh, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """View of a one-dimensional mesh with several dimensions."""
    return mesh._unflatten(0, shape, names)


def move_placement(placement: Any, rank: int, device: torch.device) -> Any:
    """Placement of a shard on another rank; on the CPU a device without index, which ShardedTensor insists on."""
    index = "" if device.type == "cpu" else f":{placement.device().index}"
    return remote_device(f"rank:{rank}/{device.type}{index}")


def placement_rank(placement: Any) -> int:
    """Rank of a shard's placement."""
    return placement.rank()


def reparametrize(module: nn.Module, tensors: dict[str, Tensor]) -> AbstractContextManager[None]:
    """Lets a module compute with other tensors in the place of its parameters, without calling its hooks."""
    return _reparametrize_module(module, tensors)


def exchange_names(first: os.PathLike[str], second: os.PathLike[str]) -> bool:
    """Lets two files or directories change names at once; False where the system or its file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return renameat2(here, os.fsencode(first), here, os.fsencode(second), exchange) == 0


def symmetric_memory() -> Any:
    """The module of symmetric memory; None if it lacks what is needed."""
    try:
        import torch.distributed._symmetric_memory as module
    except ImportError:
        return None
    complete = all(hasattr(module, name) for name in ("set_backend", "get_mem_pool", "rendezvous"))
    return module if complete else None


def process_group_allocates() -> bool:
    """Whether FSDP2 can take its buffers from the process group's allocator."""
    return hasattr(FSDPModule, "set_allocate_memory_from_process_group_for_comm")


def table_lookups(module: Any) -> list[Any]:
    """Lookup modules of a sharded collection, one per kernel: none where this rank holds nothing of it."""
    return [lookup for group in module._lookups for lookup in getattr(group, "module", group)._emb_modules]


def is_resharded(lookup: Any) -> bool:
    """Whether TorchRec has freed the weights of a fully sharded lookup."""
    return getattr(lookup, "weights_sharded", False)


def gather_fully_sharded(lookup: Any) -> None:
    """Gathers the weights of a fully sharded lookup again, as TorchRec does at the start of its backward."""
    if is_resharded(lookup):
        lookup._all_gather_table_weights()


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place."""
    return tensor._version
