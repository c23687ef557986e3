"""The row-scaled FP8 kernels compile without a GPU, without a stack and within shared memory."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from lightning_gem.kernels.triton_activations import CODES  # noqa: E402
from lightning_gem.precision import gluon_scaled, triton_rows  # noqa: E402

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
ROUNDING = {"MAX_EXPONENT": 8, "MANTISSA_BITS": 3}
FORMAT = {"LARGEST": 448.0, "IS_E5M2": False, "ROUND_FIRST": False}


def usage_of(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    warps: int,
    aligned: tuple[str, ...],
    path: Path,
    arch: int = 90,
    source: Any = ASTSource,
) -> tuple[Any, int, int]:
    """The compiled kernel, its registers and its stack."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    compiled = triton.compile(
        source(
            kernel,
            signature,
            {(names.index(name),): value for name, value in constants.items()},
            {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
        ),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": warps},
    )
    assert compiled.metadata.shared <= 232_448
    path.write_bytes(compiled.asm["cubin"])
    out = subprocess.run([TOOLS / "cuobjdump", "-res-usage", path], capture_output=True, text=True, check=True).stdout
    registers = max(int(used) for used in re.findall(r"REG:(\d+)", out))
    return compiled, registers, max(int(used) for used in re.findall(r"STACK:(\d+)", out))


@pytest.mark.parametrize("width", [512, 4096])
def test_norm_rows(width: int, tmp_path: Path) -> None:
    rows, block, warps = triton_rows.norm_tile(width)
    compiled, _, stack = usage_of(
        triton_rows.norm_rows_kernel,
        {"x": "*bf16", "weight": "*fp32", "bias": "*fp32", "codes": "*u8", "scales": "*fp32", "eps": "fp32"},
        {
            **{"NORM": True, "LAYER": True, "ACTIVATION": CODES["silu"], "HAS_WEIGHT": True, "HAS_BIAS": True},
            **ROUNDING,
            **FORMAT,
            "ROWS": rows,
            "BLOCK": block,
        },
        warps,
        ("x", "weight", "bias", "codes", "scales", "dim", "x_stride"),
        tmp_path / "a",
    )
    assert stack == 0
    assert "cvt.rn.satfinite.e4m3x2" in compiled.asm["ptx"]


@pytest.mark.parametrize("arch", [90, 100])
def test_transposing(arch: int, tmp_path: Path) -> None:
    words, block, warps = triton_rows.BOTH_TILE
    _, registers, stack = usage_of(
        triton_rows.rows_both_kernel,
        {"x": "*bf16", "codes": "*u8", "scales": "*fp32", "transposed": "*i32"},
        {**ROUNDING, **FORMAT, "WORDS": words, "BLOCK": block},
        warps,
        ("x", "codes", "scales", "transposed", "dim", "x_stride", "words_per_column"),
        tmp_path / "a",
        arch,
    )
    assert stack == 0
    assert registers <= 168
    words, block, warps = triton_rows.SHIFT_TILE
    _, registers, stack = usage_of(
        triton_rows.shift_transposed_kernel,
        {"codes": "*u8", "ratio": "*fp32", "transposed": "*i32"},
        {**FORMAT, "WORDS": words, "BLOCK": block},
        warps,
        ("codes", "ratio", "transposed", "dim", "words_per_column"),
        tmp_path / "b",
        arch,
    )
    assert stack == 0
    assert registers <= 168


@pytest.mark.parametrize("partial", [False, True])
def test_gemm(partial: bool, tmp_path: Path) -> None:
    cols, stages = gluon_scaled.CONFIG
    a, b, out = gluon_scaled.layouts(cols, gl.float8e4nv)
    compiled, _, stack = usage_of(
        gluon_scaled.scaled_kernel,
        {
            "a_desc": f"tensordesc<fp8e4nv[64, {gluon_scaled.DEPTH}],{a!r}>",
            "b_desc": f"tensordesc<fp8e4nv[{cols}, {gluon_scaled.DEPTH}],{b!r}>",
            "out_desc": f"tensordesc<bf16[64, {cols}],{out!r}>",
            **{"out": "*fp32" if partial else "*bf16", "scale_a": "*fp32", "scale_b": "*fp32"},
        },
        {"PARTS": 4 if partial else 1, "PARTIAL": partial, "STAGES": stages},
        4,
        ("out", "scale_a", "scale_b", "outs", "dim"),
        tmp_path / "a",
        source=GluonASTSource,
    )
    assert stack == 0
    assert "e4m3.e4m3" in compiled.asm["ptx"]
