"""What of a checkpoint belongs to a rank: random streams, and positions of loaders."""

import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_gem.strategies.checkpoint_files import rank_file


def random_streams() -> dict[str, Any]:
    """States of the generators of torch, of the current GPU, NumPy and Python, as types that load without pickle."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_streams(state: dict[str, Any]) -> None:
    """Sets the generators to what :func:`random_streams` returned; that of the GPU where there is one on both sides."""
    torch.set_rng_state(state["torch"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def start_streams(state: dict[str, Any], rank: int, world_size: int) -> None:
    """Seeds a stream of its own for a rank, made from the state of another one and the numbers of the ranks."""
    origin = zlib.crc32(state["torch"].numpy().tobytes())
    seed = zlib.crc32(f"{origin}/{rank}/{world_size}".encode())
    torch.manual_seed(seed)  # the GPU's too
    np.random.seed(seed)
    random.seed(seed)


def rank_state(checkpoint: dict[str, Any], data_key: str | None) -> dict[str, Any]:
    """What this rank keeps for itself of Lightning's dictionary; ``data_key`` is the data module's entry."""
    return {"random": random_streams(), "loaders": _loaders(checkpoint), "data": checkpoint.get(data_key or "")}


def _loaders(rest: dict[str, Any]) -> Any:
    """Positions of the training loaders in Lightning's dictionary."""
    return rest.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).get("combined_loader")


def _set_loaders(rest: dict[str, Any], value: Any) -> None:
    state = rest.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    state.pop("combined_loader", None)
    if value is not None:
        state["combined_loader"] = value


def restore_rank(path: Path, saved_size: int, rest: dict[str, Any], data_key: str | None) -> dict[str, Any] | None:
    """Restores random streams and the entries of this rank; collective if the number of ranks has changed.

    Returns:
        Random streams to restore once more before the first step, where the epoch had begun: its loaders draw from them
        again when they start.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if saved_size == size:
        own = torch.load(path / rank_file(rank), weights_only=True)
        restore_streams(own["random"])
    else:
        shared: list[Any] = [None]
        if rank == 0:
            everyone = [torch.load(path / rank_file(i), weights_only=True) for i in range(saved_size)]
            shared = [
                {
                    key: everyone[0][key] if all(_same(other[key], everyone[0][key]) for other in everyone) else None
                    for key in ("loaders", "data")
                }
            ]
            shared[0]["random"] = everyone[0]["random"]
            if any(shared[0][key] is None and everyone[0][key] is not None for key in ("loaders", "data")):
                rank_zero_warn(
                    f"{path} was saved on {saved_size} ranks, whose loaders were at different positions, and is loaded "
                    f"on {size}: the loaders start at their first batch"
                )
        dist.broadcast_object_list(shared, 0)
        own = shared[0]
        start_streams(own["random"], rank, size)
    _set_loaders(rest, own["loaders"])
    if data_key is not None:
        rest.pop(data_key, None)
        if own["data"] is not None:
            rest[data_key] = own["data"]
    progress = rest.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress", {})
    in_epoch = progress.get("current", {}).get("ready", 0) > 0 and not progress.get("is_last_batch", True)
    return own["random"] if in_epoch and saved_size == size else None


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return isinstance(second, Tensor) and first.shape == second.shape and bool((first == second).all())
    if isinstance(first, dict):
        return isinstance(second, dict) and set(first) == set(second) and all(_same(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple):
        return (
            isinstance(second, list | tuple)
            and len(first) == len(second)
            and all(_same(a, b) for a, b in zip(first, second, strict=True))
        )
    return type(first) is type(second) and bool(first == second)
