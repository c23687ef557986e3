"""The kernels around attention compile for Hopper and Blackwell without a GPU, within registers and shared memory."""

import os
import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from lightning_gem.kernels.bce import triton_bce  # noqa: E402
from lightning_gem.kernels.gate import triton_gate  # noqa: E402
from lightning_gem.kernels.jagged import triton_jagged  # noqa: E402
from lightning_gem.kernels.lazy_norm import gluon_lazy_norm, triton_lazy_norm  # noqa: E402
from lightning_gem.kernels.norm import triton_norm  # noqa: E402
from lightning_gem.kernels.triton_activations import CODES  # noqa: E402

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED_MEMORY, TENSOR_MEMORY_COLUMNS = 232_448, 512


def _compile(kernel, capability, types, constants, warps, stages=3, aligned=(), source=ASTSource):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    given = {(names.index(name),): value for name, value in constants.items()}
    return triton.compile(
        source(kernel, signature, given, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "num_stages": stages},
    )


def _check(compiled, tmp_path, mma=False, stack=0):
    assert compiled.metadata.shared <= SHARED_MEMORY
    assert compiled.metadata.tmem_size <= TENSOR_MEMORY_COLUMNS
    ptx = compiled.asm["ptx"]
    assert "trap;" not in ptx
    assert bool(re.search(r"wgmma\.mma_async|tcgen05\.mma|mma\.sync", ptx)) == mma
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True, check=True)
    assert max(int(used) for used in re.findall(r"STACK:(\d+)", usage.stdout)) <= stack


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("width", [128, 512])
def test_norm(capability, width, tmp_path):
    rows, block, warps = triton_norm.tile(width)
    strides = [f"{name}_outer" for name in ("x", "residual", "skip")]
    pointers = ("x", "residual", "skip", "weight", "bias", "out", "total")
    flags = {"LAYER": True, "ACTIVATION": CODES["silu"], "HAS_RESIDUAL": True, "HAS_WEIGHT": True, "HAS_BIAS": True}
    forward = _compile(
        triton_norm.forward_kernel,
        capability,
        {**dict.fromkeys(pointers, "*bf16"), "eps": "fp32"},
        {**flags, "HAS_SKIP": True, "WRITE_TOTAL": True, "INNER": False, "ROWS": rows, "BLOCK": block},
        warps,
        aligned=(*pointers, *strides, "dim"),
    )
    _check(forward, tmp_path)
    rows, block, warps, _, stages = triton_norm.pipelined_tile(width)
    pointers = ("grad_out", "grad_total", "x", "residual", "weight", "bias", "grad_x", "normed")
    sums = {"grad_weight": "*fp32", "grad_bias": "*fp32"}
    backward = _compile(
        triton_norm.backward_kernel,
        capability,
        {**dict.fromkeys(pointers, "*bf16"), **sums, "eps": "fp32"},
        {
            **flags,
            "HAS_RESIDUAL": False,
            "HAS_GRAD_TOTAL": True,
            "WRITE_NORMED": False,
            "INNER": False,
            "ROWS": rows,
            "BLOCK": block,
            "STAGES": stages,
        },
        warps,
        aligned=(*pointers, *sums, "out_outer", "total_outer", "x_outer", "dim"),
    )
    _check(backward, tmp_path)


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize(("width", "tasks"), [(256, 8), (512, 4)])
def test_linear_bce(capability, width, tasks, tmp_path):
    choice = triton_bce.config(width, tasks)
    choice.pop("resident")
    warps = choice.pop("num_warps")
    floats = ("weight", "bias", "target", "mask", "task_weight", "pos_weight", "scale")
    floats += ("loss_partial", "weight_partial", "bias_partial")
    compiled = _compile(
        triton_bce.loss_kernel,
        capability,
        {
            **dict.fromkeys(floats, "*fp32"),
            "x_tiles": f"tensordesc<bf16[{choice['ROWS']},{choice['BLOCK']}]>",
            "grad_tiles": f"tensordesc<bf16[{choice['ROWS']},{choice['CHUNK']}]>",
        },
        {
            **dict.fromkeys(("HAS_BIAS", "HAS_MASK", "HAS_TASK_WEIGHT", "GRAD"), True),
            "HAS_POS_WEIGHT": False,
            "PRECISION": "tf32",
            **choice,
        },
        warps,
        aligned=(*floats, "dim", "weight_stride"),
    )
    _check(compiled, tmp_path, mma=True, stack=0 if capability == 90 else 256)


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("layer", [False, True])
def test_norm_linear(capability, layer, tmp_path):
    rows, cols, depth, warps, stages, _ = triton_lazy_norm.CONFIG
    compiled = _compile(
        triton_lazy_norm.norm_linear_kernel,
        capability,
        {
            "x_tiles": f"tensordesc<bf16[{rows},{depth}]>",
            "weight_tiles": f"tensordesc<bf16[{cols},{depth}]>",
            "out_tiles": f"tensordesc<bf16[{rows},{cols}]>",
            "x": "*bf16",
            "weight_sum": "*fp32",
            "eps": "fp32",
        },
        {
            "NORM": True,
            "LAYER": layer,
            "PRECISION": "tf32",
            "ROWS": rows,
            "COLS": cols,
            "DEPTH": depth,
            "SLICE": 16,
            "HEAD": 64,
        },
        warps,
        stages,
        aligned=("x", "weight_sum", "rows", "outs", "dim", "x_stride"),
    )
    _check(compiled, tmp_path, mma=True)


@pytest.mark.parametrize("layer", [False, True])
def test_norm_linear_for_hopper(layer, tmp_path):
    cols, depth, stages, per_unit = gluon_lazy_norm.CONFIG
    x, weight, out = gluon_lazy_norm.layouts(cols, depth, gl.bfloat16)
    compiled = _compile(
        gluon_lazy_norm.norm_linear_kernel,
        90,
        {
            "x_desc": f"tensordesc<bf16[64, {depth}],{x!r}>",
            "w_desc": f"tensordesc<bf16[{cols}, {depth}],{weight!r}>",
            "out_desc": f"tensordesc<bf16[64, {cols}],{out!r}>",
            "x": "*bf16",
            "weight_sum": "*fp32",
            "eps": "fp32",
        },
        {"NORM": True, "LAYER": layer, "RAGGED": True, "PER_UNIT": per_unit, "STAGES": stages},
        4,
        aligned=("x", "weight_sum", "rows", "outs", "dim", "x_stride"),
        source=GluonASTSource,
    )
    _check(compiled, tmp_path, mma=True)
    assert "wgmma.mma_async" in compiled.asm["ptx"]


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("mode", ["mean", "max"])
def test_pool(capability, mode, tmp_path):
    rows, block = triton_jagged.tile(512, 4096 if mode == "max" else 8192)
    pointers = ("x", "other", "dense", "out", "copy")
    compiled = _compile(
        triton_jagged.pool_kernel,
        capability,
        {**dict.fromkeys(pointers, "*bf16"), "cu_seqlens": "*i32", "index": "*i32"},
        {"MODE": mode, "HAS_OTHER": mode == "mean", "COPY": mode == "mean", "ROWS": rows, "BLOCK": block, "STAGES": 3},
        8,
        aligned=(*pointers, "cu_seqlens", "index", "dim", "x_stride", "other_stride"),
    )
    _check(compiled, tmp_path)


@pytest.mark.parametrize("capability", [90, 100])
def test_gate(capability, tmp_path):
    rows, block = triton_gate.tile(1024, 2048)
    pointers = ("grad_out", "value", "scores", "grad_value", "grad_scores")
    strides = ("out_stride", "value_stride", "scores_stride", "grad_value_stride", "grad_scores_stride")
    compiled = _compile(
        triton_gate.backward_kernel,
        capability,
        dict.fromkeys(pointers, "*bf16"),
        {"ACTIVATION": CODES["gelu_tanh"], "ROWS": rows, "BLOCK": block},
        4,
        aligned=(*pointers, *strides, "dim"),
    )
    _check(compiled, tmp_path)
