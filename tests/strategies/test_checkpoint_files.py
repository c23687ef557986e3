"""Directories and files of checkpoints, without processes."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_gem.strategies import checkpoint_files, export
from lightning_gem.strategies.checkpoint_files import finish, partial_path, settle, start
from lightning_gem.strategies.rank_state import random_streams, restore_streams, start_streams
from lightning_gem.strategies.safetensors import create, map_tensors


@pytest.mark.parametrize("exchanges", [True, False])
def test_directory_takes_the_place_of_another(exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not exchanges:
        monkeypatch.setattr(checkpoint_files, "exchange_names", lambda *_: False)
    path = tmp_path / "last.ckpt"
    for content in ("first", "second"):
        (start(path) / "content").write_text(content)
        finish(path, {"world_size": 1})
        assert (path / "content").read_text() == content
        assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_death_between_two_renames(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    start(path)
    finish(path, {"world_size": 1})
    partial = start(path)
    path.rename(partial.with_name("last.ckpt.old"))
    settle(path)
    assert path.exists()
    partial_path(path).with_name("last.ckpt.old").mkdir()
    settle(path)
    assert path.exists()
    assert [file.name for file in partial.parent.iterdir()] == ["last.ckpt"]


def test_streams_come_back() -> None:
    state = random_streams()

    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), float(np.random.rand())

    first = draw()
    restore_streams(state)
    assert draw() == first
    start_streams(state, 0, 2)
    one = draw()
    start_streams(state, 1, 2)
    assert len({first, one, draw()}) == 3
    start_streams(state, 0, 2)
    assert draw() == one


def test_safetensors_round_trip(tmp_path: Path) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float64]
    tensors = {f"t.{i}": torch.arange(6 + i).view(-1).to(dtype) for i, dtype in enumerate(dtypes)}
    tensors["scalar"], tensors["empty"] = torch.tensor(3.0), torch.zeros(0, 4)
    path = tmp_path / "all.safetensors"
    for name, target in create(
        path, {key: (value.dtype, tuple(value.shape)) for key, value in tensors.items()}
    ).items():
        target.copy_(tensors[name])
    loaded = map_tensors(path)
    assert set(loaded) == set(tensors)
    for name, value in tensors.items():
        assert loaded[name].dtype == value.dtype
        assert torch.equal(loaded[name].double(), value.double())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="shorter than its header says"):
        map_tensors(path)
    path.write_bytes(b"something else entirely")
    with pytest.raises(ValueError, match="not a safetensors file"):
        map_tensors(path)
    with pytest.raises(ValueError, match="complex64, which the safetensors format does not have"):
        create(path, {"x": (torch.complex64, (1,))})


def test_export_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file, message in (("out.safetensors", "there is no checkpoint"), ("out.pt", "must end in .safetensors")):
        with pytest.raises(SystemExit):
            export.main([str(tmp_path / "missing"), str(tmp_path / file)])
        assert message in capsys.readouterr().err
