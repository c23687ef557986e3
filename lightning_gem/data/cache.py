"""Caches of prepared data: folders that exist completely or not at all, filled with memory-mappable arrays."""

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

STALE_SECONDS = 24 * 3600


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/lightning_gem``, or ``~/.cache/lightning_gem``."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "lightning_gem"


def fingerprint(files: Iterable[str | Path], arguments: Any) -> str:
    """Key of a cache folder: changes with the path, size or modification time of a file and with the arguments.

    Args:
        files: Input files.
        arguments: Anything made of dataclasses, mappings, sequences and plain values.
    """
    stats = [(str(Path(file).resolve()), os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in files]
    text = json.dumps([stats, arguments], sort_keys=True, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


@contextmanager
def atomic_directory(path: str | Path) -> Iterator[Path]:
    """Yields an empty folder that becomes ``path`` when the block ends without an error, and vanishes otherwise.

    ``path`` is complete whenever it exists. Processes that build it at the same time do not disturb each other: the
    first one wins, the others discard their copy.

    Args:
        path: Folder to create. If it exists when the block ends, it is kept as it is.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        try:
            temporary.rename(path)
        except OSError:
            # A rename onto a filled folder fails: another process was faster.
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def save_arrays(folder: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Writes each array to ``<name>.npy``."""
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array, allow_pickle=False)


def load_arrays(folder: Path) -> dict[str, npt.NDArray[Any]]:
    """Maps all arrays of a folder into memory, read-only.

    They are plain views of the maps: their slices are then ordinary arrays without the overhead of ``np.memmap``.
    """
    return {file.stem: _load(file) for file in sorted(folder.glob("*.npy"))}


def _load(file: Path) -> npt.NDArray[Any]:
    mapped = np.load(file, mmap_mode="r", allow_pickle=False) if _has_values(file) else np.load(file)
    return mapped.view(np.ndarray)


def _has_values(file: Path) -> bool:
    """An array of size zero cannot be mapped."""
    with file.open("rb") as stream:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        return 0 not in read(stream)[0]


def _remove_stale(path: Path) -> None:
    """Removes what killed runs left behind, once it is so old that no run can still be writing to it."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        try:
            if time.time() - leftover.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(leftover, ignore_errors=True)
        except FileNotFoundError:
            continue


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return str(value)
