"""The directory of a checkpoint: written under another name, checked before anything is read from it.

``.saving/name`` becomes ``name`` in one rename when every rank has written its part. What an interrupted save left
behind stays there, where no one takes it for a checkpoint (Lightning looks for parts of names).
"""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader, Metadata

from lightning_gem.strategies.compat import exchange_names

META = "meta.pt"
MANIFEST = "manifest.json"


def partial_path(path: Path) -> Path:
    """Where a checkpoint is written."""
    return path.parent / ".saving" / path.name


def _old_path(path: Path) -> Path:
    return path.parent / ".saving" / f"{path.name}.old"


def rank_file(rank: int) -> str:
    """Name of the file with what only this rank knows."""
    return f"rank_{rank:05d}.pt"


def start(path: Path) -> Path:
    """Makes the empty directory to write into; by one rank."""
    settle(path)
    partial = partial_path(path)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def finish(path: Path, manifest: dict[str, Any]) -> None:
    """Puts what was written in the place of ``path``, be that a file or a directory; by one rank."""
    partial = partial_path(path)
    (partial / MANIFEST).write_text(json.dumps(manifest))
    for file in partial.iterdir():
        flush(file)
    flush(partial)
    old = _old_path(path)
    if path.is_symlink():
        path.unlink()
    if not path.exists():
        partial.rename(path)
    elif exchange_names(partial, path):
        partial.rename(old)
    else:
        path.rename(old)
        partial.rename(path)
    flush(path.parent)
    _remove(old)
    with suppress(OSError):  # there may be another's
        partial.parent.rmdir()


def settle(path: Path) -> None:
    """Finishes what a death between two renames left undone."""
    old = _old_path(path)
    if not old.exists():
        return
    if path.exists():
        _remove(old)
    else:
        old.rename(path)


def check(path: Path) -> tuple[Metadata, dict[str, Any]]:
    """Metadata and manifest of a whole checkpoint.

    Raises:
        FileNotFoundError: If there is none, or a part of it is missing.
        ValueError: If it is something else.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    if not path.is_dir() or not (path / ".metadata").exists():
        raise ValueError(
            f"{path} was not written by hybrid_sharded: it loads directories that it saved itself, and weights from "
            "files that end in .safetensors"
        )
    if not (path / MANIFEST).exists():
        raise FileNotFoundError(f"{path} is incomplete, {MANIFEST} is missing: take another checkpoint")
    manifest = json.loads((path / MANIFEST).read_text())
    metadata = FileSystemReader(str(path)).read_metadata()
    needed = {META: 1} | {rank_file(rank): 1 for rank in range(manifest["world_size"])}
    for info in (metadata.storage_data or {}).values():
        needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
    sizes = {entry.name: entry.stat().st_size for entry in os.scandir(path)}
    for name, size in sorted(needed.items()):
        if name not in sizes:
            raise FileNotFoundError(f"{path} is incomplete, {name} is missing: take another checkpoint")
        if sizes[name] < size:
            raise ValueError(
                f"{path} is incomplete, {name} has {sizes[name]} bytes instead of {size}: take another checkpoint"
            )
    return metadata, manifest


def flush(file: Path) -> None:
    """Waits until a file or directory is on the disk."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
