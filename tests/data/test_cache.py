import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest

from lightning_gem.data.cache import atomic_directory, default_cache_dir, fingerprint, load_arrays, save_arrays
from lightning_gem.data.log_config import Split

FORK = multiprocessing.get_context("fork")


def test_folder_appears_complete(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "cache"
    with atomic_directory(target) as folder:
        (folder / "a.txt").write_text("a")
        assert not target.exists()
        assert folder.parent == target.parent
    assert [file.name for file in target.iterdir()] == ["a.txt"]
    assert list(target.parent.iterdir()) == [target]


def test_failure_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "cache"

    def build() -> None:
        with atomic_directory(target) as folder:
            (folder / "a.txt").write_text("a")
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        build()
    assert list(tmp_path.iterdir()) == []


def test_existing_folder_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "cache"
    for text in ("first", "second"):
        with atomic_directory(target) as folder:
            (folder / "a.txt").write_text(text)
    assert (target / "a.txt").read_text() == "first"
    assert list(tmp_path.iterdir()) == [target]


def _build(target: Path, barrier: object, name: str) -> None:
    with atomic_directory(target) as folder:
        for i in range(20):
            (folder / f"{i}.txt").write_text(name)
        barrier.wait()


def test_two_processes_both_end_well(tmp_path: Path) -> None:
    target, barrier = tmp_path / "cache", FORK.Barrier(2)
    processes = [FORK.Process(target=_build, args=(target, barrier, name)) for name in ("x", "y")]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0]
    assert len({file.read_text() for file in target.iterdir()}) == 1
    assert len(list(target.iterdir())) == 20
    assert list(tmp_path.iterdir()) == [target]


def _die(target: Path) -> None:
    with atomic_directory(target) as folder:
        (folder / "a.txt").write_text("half")
        os._exit(9)


def test_killed_run_looks_incomplete_and_is_cleaned_up_later(tmp_path: Path) -> None:
    target = tmp_path / "cache"
    process = FORK.Process(target=_die, args=(target,))
    process.start()
    process.join(30)
    assert process.exitcode == 9
    assert not target.exists()
    (leftover,) = tmp_path.iterdir()
    with atomic_directory(target):
        assert leftover.exists(), "a recent folder may belong to a run that is still writing"
    old = time.time() - 2 * 24 * 3600
    os.utime(leftover, (old, old))
    with atomic_directory(target):
        pass
    assert list(tmp_path.iterdir()) == [target]


def test_arrays_are_mapped_and_equal(tmp_path: Path) -> None:
    arrays = {"a": np.arange(6).reshape(2, 3), "empty": np.empty((4, 0), np.float32), "none": np.empty(0, np.int64)}
    save_arrays(tmp_path, arrays)
    loaded = load_arrays(tmp_path)
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array)
        assert loaded[name].dtype == array.dtype
    assert not loaded["a"].flags.writeable
    assert isinstance(loaded["a"].base, np.memmap)
    assert type(loaded["a"]) is np.ndarray


def test_fingerprint_follows_files_and_arguments(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("1")
    os.utime(file, ns=(0, 10**18))
    key = fingerprint([file], {"split": Split()})
    assert fingerprint([str(file)], {"split": Split()}) == key
    assert fingerprint([file], {"split": Split(val=0.2)}) != key
    file.write_text("2")
    os.utime(file, ns=(0, 10**18 + 1))
    changed = fingerprint([file], {"split": Split()})
    assert changed != key
    file.write_text("22")
    os.utime(file, ns=(0, 10**18 + 1))
    assert fingerprint([file], {"split": Split()}) not in (key, changed)


def test_cache_dir_honours_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "lightning_gem"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "lightning_gem"
