"""One directory of torch.distributed.checkpoint: saved on N ranks, loaded on M, under any layout.

Weights and optimizer state lie in it by name, so a layout plays no part. What belongs to a rank (random streams,
positions of loaders) lies in a file of its own; on another number of ranks the random streams start anew, and positions
are kept only if they were the same everywhere.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, StorageReader
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_gem.optimizers import DenseAndTables
from lightning_gem.strategies import checkpoint_files as files
from lightning_gem.strategies.background import BackgroundSaver, StagedPlanner, explain
from lightning_gem.strategies.embeddings import ShardedTables, local_shards
from lightning_gem.strategies.processes import raise_together
from lightning_gem.strategies.rank_state import rank_state, restore_rank
from lightning_gem.strategies.regions import RegionPlanner, Repartition, has_other_parts, is_grown, saved_rows
from lightning_gem.strategies.safetensors import SafetensorsReader

RANDOM = "random_streams"


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


def save(
    checkpoint: dict[str, Any], path: Path, data_key: str | None = None, background: BackgroundSaver | None = None
) -> None:
    """Writes Lightning's checkpoint dictionary; collective.

    Args:
        checkpoint: ``state_dict`` and ``optimizer_states`` are sharded, the rest is the first rank's, except for the
            positions of the loaders, which are every rank's own.
        path: Directory to write; replaced if it exists.
        data_key: Entry of the data module.
        background: Where to write; here and now when not given.

    Raises:
        RuntimeError: On every rank, if any could not write.
    """
    rest = dict(checkpoint)
    state = rest.pop("state_dict", {})
    optimizers = rest.pop("optimizer_states", [])
    tensors = {f"model.{key}": value for key, value in state.items() if _is_tensor(value)}
    rest["model_extra"] = {key: value for key, value in state.items() if not _is_tensor(value)}
    rest["optimizer_groups"] = [optimizer["groups"] for optimizer in optimizers]
    for i, optimizer in enumerate(optimizers):
        tensors.update({f"optimizer.{i}.{key}": value for key, value in optimizer["tensors"].items()})
    rank, first = dist.get_rank(), dist.get_rank() == 0
    own = rank_state(rest, data_key)
    manifest = {"world_size": dist.get_world_size(), "torch": torch.__version__, "tensors": len(tensors)}
    partial = files.partial_path(path)
    error: Exception | None = None
    if first:
        try:
            _write(rest, files.start(path) / files.META)
        except OSError as problem:
            error = RuntimeError(f"checkpoint {path} could not be written: {problem}")
    raise_together(error)
    # Everything but the tensors is small, and may change once the training goes on.
    _write(own, partial / files.rank_file(rank))
    if background is None:
        try:
            dcp.save(tensors, checkpoint_id=str(partial))
            if first:
                files.finish(path, manifest)
        except dcp.CheckpointException as problem:
            error = RuntimeError(f"checkpoint {path} could not be written: {explain(problem)}")
        except OSError as problem:
            error = RuntimeError(f"checkpoint {path} could not be written: {problem}")
        raise_together(error)
        return
    planner, group = StagedPlanner(tensors, first), background.group

    def write() -> None:
        dcp.save({}, checkpoint_id=str(partial), planner=planner, process_group=group)
        if first:
            files.finish(path, manifest)

    background.start(path, write)


def _write(content: dict[str, Any], path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    path.write_bytes(buffer.getvalue())


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or hasattr(value, "local_shards")


def load(
    path: Path,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    tables: ShardedTables | None,
    grow_tables: bool = False,
    data_key: str | None = None,
    resume: bool = True,
) -> dict[str, Any]:
    """Fills the module and its optimizers, under any layout; collective.

    Args:
        path: Directory that :func:`save` wrote, or a ``.safetensors`` file with weights.
        module: LightningModule.
        optimizers: Its optimizers; none to load weights only.
        tables: Its sharded tables.
        grow_tables: Take tables that have fewer rows in the checkpoint: new rows keep what they have.
        data_key: Entry of the data module.
        resume: Whether to restore what belongs to this rank.

    Returns:
        Everything else of Lightning's checkpoint, and under ``RANDOM`` what to restore before the first step, if any.

    Raises:
        FileNotFoundError: If there is no checkpoint, or a part of it is missing; on every rank.
        ValueError: If it is not one of this strategy, or of another model; the message names the first difference.
    """
    reader, saved, rest, manifest = _open(path)
    own = {f"model.{key}": value for key, value in module.state_dict().items() if _is_tensor(value)}
    wanted = dict(own)
    grown: set[str] = set()
    parts: dict[str, Repartition] = {}
    if grow_tables and tables is not None:
        grown = {key for key in (f"model.{name}" for name in tables.state()) if is_grown(key, saved, own, key)}
    problems = [_difference(saved, own, "model.", grown)]
    fresh: list[tuple[Optimizer, nn.Parameter, str, Tensor]] = []
    parameters = dict(module.named_parameters())
    for i, optimizer in enumerate(optimizers):
        whole, dense = _unwrap(optimizer)
        prefix = f"optimizer.{i}."
        if tables is not None and whole is not dense:
            state = {f"{prefix}tables.{key}": value for key, value in tables.optimizer_state().items()}
            for key, value in state.items():
                table = "model." + key[len(f"{prefix}tables.") :].rpartition(".")[0]
                if grow_tables and is_grown(key, saved, {**own, **state}, table):
                    grown.add(key)
                elif has_other_parts(key, saved, {**own, **state}, table):
                    parts[key] = Repartition(value, saved[key].size[0], own[table].shape[0])
            problems.append(_difference(saved, state, f"{prefix}tables.", {*grown, *parts}))
            wanted.update(state)
        for key, metadata in saved.items():
            if key.startswith(f"{prefix}dense."):
                name, _, kind = key[len(f"{prefix}dense.") :].rpartition(".")
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
                fresh.append((dense, parameter, kind, value))
    problem = next((problem for problem in problems if problem), None)
    raise_together(ValueError(f"{path} is a checkpoint of another model or optimizer: {problem}") if problem else None)
    regions = {key: saved_rows(wanted.pop(key), saved[key]) for key in grown}
    for key, part in parts.items():
        del wanted[key]
        regions[key] = part.regions
    names = sorted({key[len("model.") :] for key in own if key in grown})
    if names:
        rank_zero_info(
            f"hybrid_sharded: {', '.join(names)} have more rows than in {path}: the new rows keep their fresh values"
        )
    error: Exception | None = None
    try:
        dcp.load(wanted, storage_reader=reader, planner=RegionPlanner(regions))
    except dcp.CheckpointException as failure:
        error = ValueError(f"{path} is damaged: {explain(failure)}")
    raise_together(error)
    for part in parts.values():
        part.finish()
    for dense, parameter, kind, value in fresh:
        dense.state[parameter][kind] = value
    for optimizer, groups in zip(optimizers, rest.pop("optimizer_groups", []), strict=False):
        _load_groups(_unwrap(optimizer)[0], groups)
    _load_copies(module, {key[len("model.") :]: value for key, value in own.items()}, rest.pop("model_extra", {}))
    again = restore_rank(path, manifest["world_size"], rest, data_key) if resume and manifest is not None else None
    return {**rest, "state_dict": {}, "optimizer_states": [], RANDOM: again}


def _open(path: Path) -> tuple[StorageReader, dict[str, Any], dict[str, Any], dict[str, Any] | None]:
    """Reader, saved tensors, Lightning's entries and manifest, after all ranks have seen them; collective."""
    error: Exception | None = None
    try:
        if path.suffix == ".safetensors":
            if not path.exists():
                raise FileNotFoundError(f"there is no file {path}")
            weights = SafetensorsReader(path, prefix="model.")
            saved = weights.read_metadata().state_dict_metadata
            found: Any = (weights, saved, {}, None)
        else:
            metadata, manifest = files.check(path)
            rest = torch.load(path / files.META, weights_only=True, map_location="cpu")
            found = (FileSystemReader(str(path)), metadata.state_dict_metadata, rest, manifest)
    except (OSError, ValueError) as problem:
        error = problem
    except Exception as problem:
        error = ValueError(f"{path} is damaged: {problem}")
    raise_together(error)
    return found


def _difference(saved: dict[str, Any], own: dict[str, Any], prefix: str, converted: set[str]) -> str | None:
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
        if before != now and key not in converted:
            if key.startswith("model.") and len(now) == 2 and before[1:] == now[1:]:
                hint = (
                    ". For a table that is num_embeddings: set the old number, start from scratch, or (for more rows)"
                )
                hint += " set grow_tables: true"
            elif key.startswith("model."):
                hint = ": set the old size, or start from scratch"
            else:
                hint = ": use the table optimizer that it was saved with"
            return f"{key} has shape {before} in it and {now} in this model{hint}"
    return None


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
