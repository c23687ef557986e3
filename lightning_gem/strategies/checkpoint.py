"""One directory of torch.distributed.checkpoint: saved on N ranks, loaded on M, under any layout.

Weights and optimizer state lie in it by name, so a layout plays no part. A directory appears under its name in one
rename, when every rank has written its part; what an interrupted save left behind has another name.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_gem.optimizers import DenseAndTables
from lightning_gem.strategies.embeddings import ShardedTables, local_shards

_META = "meta.pt"
_MANIFEST = "manifest.json"


def _unwrap(optimizer: Optimizer) -> tuple[Optimizer, Optimizer]:
    """The optimizer with all groups, and the one of the dense parameters."""
    if isinstance(optimizer, LightningOptimizer):
        optimizer = optimizer.optimizer
    return optimizer, optimizer.dense if isinstance(optimizer, DenseAndTables) else optimizer


def optimizer_state(module: nn.Module, optimizer: Optimizer, tables: ShardedTables | None) -> dict[str, Any]:
    """State by parameter name.

    Returns:
        ``tensors`` by ``<parameter>.<state>``, and ``groups`` without parameters.

    Raises:
        ValueError: If an optimizer keeps something else than tensors for a parameter.
    """
    whole, dense = _unwrap(optimizer)
    tensors: dict[str, Any] = {}
    for name, parameter in module.named_parameters():
        for key, value in dense.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                raise ValueError(f"{type(dense).__name__} keeps {key}={value!r} for {name}: only tensors can be saved")
            tensors[f"dense.{name}.{key}"] = value
    if tables is not None and whole is not dense:
        tensors.update({f"tables.{key}": value for key, value in tables.optimizer_state().items()})
    groups = [{key: value for key, value in group.items() if key != "params"} for group in whole.param_groups]
    return {"tensors": tensors, "groups": groups}


def save(checkpoint: dict[str, Any], path: Path) -> None:
    """Writes Lightning's checkpoint dictionary; collective.

    Args:
        checkpoint: ``state_dict`` and ``optimizer_states`` are sharded, the rest is the first rank's.
        path: Directory to write; replaced if it exists.
    """
    rest = dict(checkpoint)
    state = rest.pop("state_dict", {})
    optimizers = rest.pop("optimizer_states", [])
    tensors = {f"model.{key}": value for key, value in state.items() if _is_tensor(value)}
    rest["model_extra"] = {key: value for key, value in state.items() if not _is_tensor(value)}
    rest["optimizer_groups"] = [optimizer["groups"] for optimizer in optimizers]
    for i, optimizer in enumerate(optimizers):
        tensors.update({f"optimizer.{i}.{key}": value for key, value in optimizer["tensors"].items()})
    partial = path.with_name(f".{path.name}.partial")
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    dcp.save(tensors, checkpoint_id=str(partial))
    if first:
        torch.save(rest, partial / _META)
        manifest = {"world_size": dist.get_world_size(), "torch": torch.__version__, "tensors": len(tensors)}
        (partial / _MANIFEST).write_text(json.dumps(manifest))
        for file in partial.iterdir():
            _flush(file)
        _replace(partial, path)
    dist.barrier()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or hasattr(value, "local_shards")


def _flush(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(partial: Path, path: Path) -> None:
    """Puts the new directory in the place of the old file or directory."""
    old = path.with_name(f".{path.name}.old")
    _remove(old)
    if path.exists():
        path.rename(old)
    partial.rename(path)
    _flush(path.parent)
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def load(path: Path, module: nn.Module, optimizers: list[Optimizer], tables: ShardedTables | None) -> dict[str, Any]:
    """Fills the module and its optimizers, under any layout; collective.

    Returns:
        Everything else of Lightning's checkpoint.

    Raises:
        FileNotFoundError: If there is no checkpoint, or a part of it is missing.
        ValueError: If it is not one of this strategy, or of another model; the message names the first difference.
    """
    saved = _read_metadata(path)
    rest = torch.load(path / _META, weights_only=True, map_location="cpu")
    own = {f"model.{key}": value for key, value in module.state_dict().items() if _is_tensor(value)}
    wanted = dict(own)
    problems = [_difference(saved, own, "model.")]
    fresh: list[tuple[Optimizer, nn.Parameter, str, Tensor]] = []
    parameters = dict(module.named_parameters())
    for i, optimizer in enumerate(optimizers):
        whole, dense = _unwrap(optimizer)
        prefix = f"optimizer.{i}."
        if tables is not None and whole is not dense:
            table_state = {f"{prefix}tables.{key}": value for key, value in tables.optimizer_state().items()}
            problems.append(_difference(saved, table_state, f"{prefix}tables."))
            wanted.update(table_state)
        for key, metadata in saved.items():
            if key.startswith(f"{prefix}dense."):
                name, _, state = key[len(f"{prefix}dense.") :].rpartition(".")
                if name not in parameters:
                    problems.append(f"it has optimizer state of {name}, which this model lacks")
                    continue
                parameter = parameters[name]
                dtype = metadata.properties.dtype
                if tuple(metadata.size) == tuple(parameter.shape) and parameter.dim():
                    value = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
                else:
                    value = torch.zeros(tuple(metadata.size), dtype=dtype)
                wanted[key] = value
                fresh.append((dense, parameter, state, value))
    _raise_together(path, problems)
    dcp.load(wanted, checkpoint_id=str(path))
    for dense, parameter, state, value in fresh:
        dense.state[parameter][state] = value
    for optimizer, groups in zip(optimizers, rest.pop("optimizer_groups"), strict=False):
        _load_groups(_unwrap(optimizer)[0], groups)
    _load_copies(module, {key[len("model.") :]: value for key, value in own.items()}, rest.pop("model_extra"))
    return {**rest, "state_dict": {}, "optimizer_states": []}


def _read_metadata(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    if not path.is_dir() or not (path / ".metadata").exists():
        raise ValueError(f"{path} was not written by hybrid_sharded: it loads directories that it saved itself")
    if not (path / _MANIFEST).exists():
        raise FileNotFoundError(f"{path} is incomplete, {_MANIFEST} is missing: take another checkpoint")
    metadata = FileSystemReader(str(path)).read_metadata()
    files = {info.relative_path for info in (metadata.storage_data or {}).values()}
    missing = sorted(file for file in files if not (path / file).exists())
    if missing:
        raise FileNotFoundError(f"{path} is incomplete, {missing[0]} is missing: take another checkpoint")
    return metadata.state_dict_metadata


def _difference(saved: dict[str, Any], own: dict[str, Any], prefix: str) -> str | None:
    """The first difference of names and shapes under a prefix; collective, for a rank may hold only some of them."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, set(own))
    needed: set[str] = set().union(*everyone)
    names = {key for key in saved if key.startswith(prefix)}
    if needed - names:
        return f"it lacks {min(needed - names)}, which this model needs ({len(needed - names)} such entries)"
    if names - needed:
        return f"it has {min(names - needed)}, which this model lacks ({len(names - needed)} such entries)"
    for key, value in own.items():
        before, now = tuple(saved[key].size), tuple(value.shape)
        if before != now:
            if before[1:] == now[1:] and key.startswith("model."):
                hint = ". For a table that is num_embeddings: set the old number, or start from scratch"
            elif key.startswith("model."):
                hint = ": set the old size, or start from scratch"
            else:
                hint = (
                    ": row-wise AdaGrad keeps a state per part of a table that is split by columns, so split it as "
                    "before, or set tables.per_table to row_wise for a table that was never split by columns"
                )
            return f"{key} has shape {before} in it and {now} in this model{hint}"
    return None


def _raise_together(path: Path, problems: list[str | None]) -> None:
    """Raises on all ranks what any of them found, so that none waits for the others; collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, next((problem for problem in problems if problem), None))
    found = next((problem for problem in everyone if problem), None)
    if found:
        raise ValueError(f"{path} is a checkpoint of another model or optimizer: {found}")


def _load_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(
            f"the checkpoint has {len(groups)} parameter groups and this optimizer {len(optimizer.param_groups)}: "
            "use the optimizer that it was saved with"
        )
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update(saved)


def _load_copies(module: nn.Module, tensors: dict[str, Any], extra: dict[str, Any]) -> None:
    """Metrics hand out copies of their state, and extra state is no tensor: both have to be given back."""
    for name, child in module.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(child, Metric):
            state = {key[len(prefix) :]: value for key, value in tensors.items() if key.startswith(prefix)}
            child.load_state_dict(state, strict=False)
        if f"{prefix}_extra_state" in extra:
            child.set_extra_state(extra[f"{prefix}_extra_state"])


@torch.no_grad()
def full_state_dict(module: nn.Module, tables: ShardedTables | None) -> dict[str, Tensor]:
    """Whole weights on every rank, on the CPU; collective, and for models that fit."""
    own = tables.state() if tables is not None else {}
    full: dict[str, Tensor] = {}
    for name, value in module.state_dict().items():
        if name in own:
            assert tables is not None
            table = torch.zeros(tuple(value.shape), dtype=value.dtype, device=tables.device)
            for shard, (row, column) in local_shards(value):
                table[row : row + shard.shape[0], column : column + shard.shape[1]] = shard
            dist.all_reduce(table, group=tables.group)
            full[name] = table.cpu()
        elif isinstance(value, DTensor):
            full[name] = value.full_tensor().cpu()
        elif isinstance(value, Tensor):
            full[name] = value.detach().cpu().clone()
    return full
