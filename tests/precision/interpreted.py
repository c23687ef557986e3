"""The Triton kernel in Triton's interpreter: run by ``test_triton_quantize.py``, in a process of its own."""

import json
from pathlib import Path

import pytest
import torch

from lightning_gem.precision.mx import MXBlocks, mx_quantize, mx_quantize_2d
from lightning_gem.precision.triton_quantize import mx_quantize_triton

VECTORS = json.loads((Path(__file__).parent / "mxfp8_vectors.json").read_text())


def same(a: MXBlocks, b: MXBlocks) -> bool:
    return a.shape == b.shape and torch.equal(a.scale, b.scale) and torch.equal(a.data, b.data)


def check(x: torch.Tensor, fmt: str, scale: str) -> None:
    out = mx_quantize_triton(x, rows=True, columns=True, square=True, fmt=fmt, scale=scale)
    assert same(out["rows"], mx_quantize(x, 1, fmt, scale))
    assert same(out["columns"], mx_quantize(x, 0, fmt, scale))
    assert same(out["square"], mx_quantize_2d(x, fmt, scale))


@pytest.mark.parametrize("mode", ["rceil", "floor", "ceil", "even"])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_vectors(mode: str, fmt: str) -> None:
    chosen = [vector for vector in VECTORS if vector["fmt"] == fmt and mode in vector["expect"]]
    if not chosen:
        pytest.skip("there are no vectors of this format in this mode")
    x = torch.stack([torch.full((32,), float(vector["fill"])) for vector in chosen])
    for row, vector in zip(x, chosen, strict=True):
        words = torch.tensor([int(word, 16) for word in vector["input_fp32_hex"]])
        row[: len(words)] = words.to(torch.int32).view(torch.float32)
    blocks = mx_quantize_triton(x, fmt=fmt, scale=mode)["rows"]
    for vector, scale, codes in zip(chosen, blocks.scale[:, 0].tolist(), blocks.data.tolist(), strict=True):
        expect = vector["expect"][mode]
        tail = int(expect["tail_elem_hex"], 16)
        wanted = [int(code, 16) for code in expect["elem_hex"]]
        assert (scale, codes) == (expect["scale_byte"], wanted + [tail] * (32 - len(wanted))), vector["id"]


@pytest.mark.parametrize("shape", [(64, 64), (1, 1), (33, 70), (100, 31), (130, 96)])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_shapes(shape: tuple[int, int], fmt: str) -> None:
    x = torch.randn(shape) * (3 * torch.randn(shape)).exp()
    check(x, fmt, "rceil")
    check(x.T, fmt, "rceil")


@pytest.mark.parametrize("mode", ["floor", "ceil", "even"])
def test_modes(mode: str) -> None:
    check(torch.randn(64, 96), "e4m3", mode)


def test_edges() -> None:
    x = torch.randn(64, 64)
    x[3, 5], x[40, 50], x[:, 33], x[7, :32] = float("inf"), float("nan"), 0.0, -0.0
    x[9] *= 1e-40
    check(x, "e4m3", "rceil")
    assert mx_quantize_triton(torch.zeros(0, 64), columns=True)["columns"].data.shape == (64, 0)
    assert set(mx_quantize_triton(x, rows=False, square=True)) == {"square"}
    with pytest.raises(ValueError, match=r"must be \(M, K\)"):
        mx_quantize_triton(torch.zeros(2, 2, 32))
