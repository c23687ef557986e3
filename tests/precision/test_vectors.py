"""The exact codes and scales of the test vectors, computed with rational arithmetic by whoever wrote them."""

import json
from pathlib import Path

import pytest
import torch

from lightning_gem.precision.mx import (
    MXBlocks,
    decode,
    mx_dequantize,
    mx_from_blocked,
    mx_quantize,
    mx_quantize_2d,
    mx_to_blocked,
)

VECTORS = json.loads((Path(__file__).parent / "mxfp8_vectors.json").read_text())
CHECKS = [(vector, mode) for vector in VECTORS for mode in vector["expect"]]
# Blocks of one value and 31 zeros: bits, then scale byte and code by mode.
MORE = {
    "V29": ("04600000", {"floor": "007E", "rceil": "007E", "ceil": "0176", "even": "007E"}),
    "V30": ("04600001", {"floor": "007E", "rceil": "007E", "ceil": "0176", "even": "007E"}),
    "V31": ("046001C0", {"floor": "007E", "rceil": "0176", "ceil": "0176", "even": "007E"}),
    "V33": ("3FDFFFFF", {"floor": "777E", "rceil": "777E", "ceil": "7876", "even": "777E"}),
    "V34": ("3FE00001", {"floor": "777E", "rceil": "7876", "ceil": "7876", "even": "777E"}),
    "V35": ("40000000", {"floor": "7878", "rceil": "7878", "ceil": "7878", "even": "7878"}),
    "V36": ("3FFFFFFF", {"floor": "777E", "rceil": "7878", "ceil": "7878", "even": "7878"}),
}
DECODE = [
    ("FE38", "7F000000", "7F00"),
    ("FE7E", "7F800000", "7F80"),
    ("FE01", "7A800000", "7A80"),
    ("0001", "00002000", "0000"),
    ("0008", "00010000", "0001"),
    ("007E", "04600000", "0460"),
    ("7778", "3F800000", "3F80"),
    ("7F80", "80000000", "8000"),
]


def floats(words: list[str]) -> torch.Tensor:
    bits = [int(word, 16) for word in words]
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def vector_block(vector: dict) -> torch.Tensor:
    block = torch.full((32,), float(vector["fill"]))
    block[: len(vector["input_fp32_hex"])] = floats(vector["input_fp32_hex"])
    return block


def expected(vector: dict, mode: str) -> tuple[int, list[int]]:
    expect = vector["expect"][mode]
    codes = [int(code, 16) for code in expect["elem_hex"]]
    return expect["scale_byte"], codes + [int(expect["tail_elem_hex"], 16)] * (32 - len(codes))


def test_count() -> None:
    assert len(CHECKS) == 106


@pytest.mark.parametrize(("vector", "mode"), CHECKS, ids=lambda value: value if isinstance(value, str) else value["id"])
def test_vector(vector: dict, mode: str) -> None:
    blocks = mx_quantize(vector_block(vector), fmt=vector["fmt"], scale=mode)
    byte, codes = expected(vector, mode)
    assert blocks.scale.tolist() == [byte]
    assert blocks.data.tolist() == codes


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("mode", ["floor", "rceil", "ceil", "even"])
def test_vectors_at_once_along_any_axis(axis: int, mode: str) -> None:
    chosen = [vector for vector in VECTORS if vector["fmt"] == "e4m3"]
    stacked = torch.stack([vector_block(vector) for vector in chosen]).unsqueeze(1).movedim(-1, axis)
    blocks = mx_quantize(stacked, axis=axis, scale=mode)
    scales, codes = zip(*(expected(vector, mode) for vector in chosen), strict=True)
    assert blocks.scale.flatten().tolist() == list(scales)
    assert blocks.data.flatten(0, 1).tolist() == list(codes)


@pytest.mark.parametrize("mode", ["floor", "rceil", "ceil", "even"])
def test_vectors_compiled(mode: str) -> None:
    for fmt in ("e4m3", "e5m2") if mode in ("floor", "rceil") else ("e4m3",):
        chosen = [vector for vector in VECTORS if vector["fmt"] == fmt]
        stacked = torch.stack([vector_block(vector) for vector in chosen])
        blocks = torch.compile(mx_quantize, fullgraph=True)(stacked, fmt=fmt, scale=mode)
        scales, codes = zip(*(expected(vector, mode) for vector in chosen), strict=True)
        assert blocks.scale.flatten().tolist() == list(scales)
        assert blocks.data.tolist() == list(codes)
        decoded = torch.compile(mx_dequantize, fullgraph=True)(blocks)
        assert torch.equal(bits(decoded), bits(mx_dequantize(blocks)))


@pytest.mark.parametrize(("vector", "mode"), CHECKS, ids=lambda value: value if isinstance(value, str) else value["id"])
def test_vector_fills_a_square(vector: dict, mode: str) -> None:
    square = vector_block(vector).expand(32, 32)
    blocks = mx_quantize_2d(square, fmt=vector["fmt"], scale=mode)
    byte, codes = expected(vector, mode)
    assert blocks.scale.tolist() == [[byte]]
    assert blocks.data.tolist() == [codes] * 32


@pytest.mark.parametrize("name", MORE)
@pytest.mark.parametrize("mode", ["floor", "rceil", "ceil", "even"])
def test_single_values(name: str, mode: str) -> None:
    word, expect = MORE[name]
    block = torch.zeros(32)
    block[0] = floats([word])[0]
    blocks = mx_quantize(block, scale=mode)
    assert f"{blocks.scale[0]:02X}{blocks.data[0]:02X}" == expect[mode]
    assert not blocks.data[1:].any()


@pytest.mark.parametrize("mode", ["floor", "rceil", "ceil", "even"])
def test_negative_zeros(mode: str) -> None:
    blocks = mx_quantize(torch.full((32,), -0.0), scale=mode)
    assert blocks.scale.tolist() == [0]
    assert blocks.data.tolist() == [0x80] * 32


@pytest.mark.parametrize(("code", "single", "half"), DECODE)
def test_decode(code: str, single: str, half: str) -> None:
    scale, data = torch.tensor([int(code[:2], 16)]), torch.full((32,), int(code[2:], 16))
    blocks = MXBlocks(data.to(torch.uint8), scale.to(torch.uint8), "e4m3", (32,), 0)
    assert f"{bits(mx_dequantize(blocks))[0]:08X}" == single
    assert f"{mx_dequantize(blocks, torch.bfloat16).view(torch.int16)[0].item() & 0xFFFF:04X}" == half


def test_decode_of_not_a_number() -> None:
    every = torch.arange(256).to(torch.uint8)
    assert decode(every, torch.full((8,), 255, dtype=torch.uint8)).isnan().all()
    for scale in (0, 127, 254):
        values = decode(every, torch.full((8,), scale, dtype=torch.uint8))
        assert values.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]


def test_decode_is_exact_in_bfloat16() -> None:
    """All 256 codes with the scale bytes that quantisation reaches and bfloat16 holds; exact in float32 from 0 on."""
    codes = torch.arange(256).to(torch.uint8)
    for byte in range(247):
        scale = torch.full((8,), byte, dtype=torch.uint8)
        blocks = MXBlocks(codes, scale, "e4m3", (256,), 0)
        single = mx_dequantize(blocks)
        exact = codes.view(torch.float8_e4m3fn).to(torch.float64) * 2.0 ** (byte - 127)
        assert torch.equal(single.double().nan_to_num(1e300), exact.nan_to_num(1e300))
        if byte >= 3:
            assert torch.equal(mx_dequantize(blocks, torch.bfloat16).float().nan_to_num(1e30), single.nan_to_num(1e30))


OFFSETS = {(1, 0): 16, (32, 0): 4, (33, 1): 21, (127, 3): 511, (0, 4): 512, (128, 0): 1024, (255, 7): 2047}


@pytest.mark.parametrize(("place", "offset"), OFFSETS.items())
def test_swizzle(place: tuple[int, int], offset: int) -> None:
    scale = torch.zeros(256, 8, dtype=torch.uint8)
    scale[place] = 1
    assert mx_to_blocked(scale).nonzero().tolist() == [[offset]]


@pytest.mark.parametrize(("rows", "columns", "size"), [(100, 3, 512), (128, 4, 512), (129, 5, 2048), (1, 1, 512)])
def test_swizzle_round_trip(rows: int, columns: int, size: int) -> None:
    scale = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
    blocked = mx_to_blocked(scale)
    assert blocked.shape == (size,)
    assert torch.equal(mx_from_blocked(blocked, rows, columns), scale)
    assert blocked.sum() == scale.sum()


def test_swizzle_of_nothing() -> None:
    assert mx_to_blocked(torch.zeros(0, 4, dtype=torch.uint8)).shape == (0,)
