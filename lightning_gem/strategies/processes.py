"""The process group: how it starts, and small collectives over objects."""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment

from lightning_gem.strategies.compat import distributed_is_initialized, init_process_group


def start_processes(environment: ClusterEnvironment, backend: str, device: torch.device, timeout: timedelta) -> None:
    """Starts the default process group unless there is one; collective."""
    arguments: dict[str, Any] = {} if device.type == "cpu" else {"device_id": device}
    if dist.is_torchelastic_launched() and not distributed_is_initialized():
        # The agent's store outlives a crash: a restarted group would read the addresses of dead ranks in it.
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        arguments["store"] = dist.PrefixStore(f"hybrid_sharded/{attempt}", store)
    init_process_group(environment, backend, timeout=timeout, **arguments)


def barrier(device: torch.device) -> None:
    """Waits for all ranks; nothing without a process group."""
    if distributed_is_initialized():
        dist.barrier(device_ids=None if device.type == "cpu" else [device.index])


def broadcast(obj: Any, src: int = 0) -> Any:
    """Returns the object of rank ``src`` on every rank; the object itself without a process group."""
    if not distributed_is_initialized():
        return obj
    objects = [obj]
    dist.broadcast_object_list(objects, src)
    return objects[0]


def raise_together(error: Exception | None) -> None:
    """Raises on all ranks what any of them found, so that none waits for the others; collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, error)
    found = next((problem for problem in everyone if problem is not None), None)
    if found is not None:
        raise found


def agree_on_path(path: str | None) -> str | None:
    """The first rank's path, if all ranks have one or none has; collective.

    Raises:
        FileNotFoundError: On every rank, if only some have one: they would wait for the others.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, path)
    without = [rank for rank, found in enumerate(everyone) if found is None]
    if without and len(without) < len(everyone):
        raise FileNotFoundError(
            f"rank {', '.join(map(str, without))} found no checkpoint to go on from, others found "
            f"{next(found for found in everyone if found is not None)}: checkpoints must lie on a file system that all "
            "ranks share"
        )
    return everyone[0]
