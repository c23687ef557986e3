"""Compiles the Hopper attention kernels for sm_90 without a GPU, and prints what each needs, as JSON lines."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from lightning_gem.kernels.attention.gluon_backward import attention_backward_key_value, attention_backward_query
from lightning_gem.kernels.attention.gluon_forward import attention_forward
from lightning_gem.kernels.attention.gluon_short_key import attention_forward_short_key
from lightning_gem.kernels.attention.gluon_short_key_backward import attention_backward_short_key
from lightning_gem.kernels.attention.gluon_short_query_backward import attention_backward_short_query

REGISTERS = {"PRODUCER_REGISTERS": 24, "CONSUMER_REGISTERS": 240}
FULL = {"HAS_LEFT": False, "HAS_RIGHT": False}
WINDOW = {"HAS_LEFT": True, "HAS_RIGHT": True}
SELF = {"HEADS": 4, "GROUP": 1, "BROADCAST": False}
KEYS = {"HEADS_K": 2, "GROUP": 2, "BROADCAST": False}


def segment(rows: int, columns: int) -> str:
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], gl.bfloat16)
    return f"tensordesc<bf16{[1, 1, rows, columns]},{layout!r}>"


def stats(run: int) -> str:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return f"tensordesc<fp32{[1, run]},{layout!r}>"


def cases() -> list[tuple[str, Any, dict[str, int], dict[str, Any]]]:
    """Name, kernel, rows of the tiles that differ from 64, constants."""
    table = []
    for activation in ("", "gelu_tanh"):
        name = activation or "softmax"
        chosen = {"ACTIVATION": activation, "D": 128}
        wide = {"k_desc": 128, "v_desc": 128}
        forward = {**SELF, **chosen, "BLOCK_M": 128}
        table += [
            (f"forward {name}", attention_forward, wide, {**forward, **FULL, "BLOCK_N": 128, "STAGES": 2}),
            (f"forward window {name}", attention_forward, {}, {**forward, **WINDOW, "BLOCK_N": 64, "STAGES": 4}),
            (
                f"few keys {name}",
                attention_forward_short_key,
                wide,
                {**forward, "BLOCK_N": 128, "PARTS": 2, "SETS": 1, "STAGES": 2, "RUN": 8},
            ),
            (f"dQ {name}", attention_backward_query, {}, {**forward, **FULL, "BLOCK_N": 64, "STAGES": 3}),
            (
                f"dK dV window {name}",
                attention_backward_key_value,
                {},
                {**KEYS, **chosen, **WINDOW, "BLOCK_M": 64, "BLOCK_N": 128, "STAGES": 3},
            ),
            (
                f"few keys, all gradients {name}",
                attention_backward_short_key,
                {},
                {**KEYS, **chosen, "BLOCK_M": 64, "STAGES": 2},
            ),
            (
                f"few queries, all gradients {name}",
                attention_backward_short_query,
                {},
                {"HEADS": 4, "BROADCAST": True, **chosen, "STAGES": 3},
            ),
        ]
    small = {**SELF, **FULL, "ACTIVATION": "silu", "D": 64, "BLOCK_M": 128, "BLOCK_N": 64, "STAGES": 3}
    return [*table, ("dQ silu, heads of 64", attention_backward_query, {}, small)]


def argument_type(name: str, tiles: dict[str, int], dim: int, half_columns: bool) -> str:
    if name == "stats_desc":
        return stats(64)
    if name.endswith("_desc"):
        return segment(tiles.get(name, 64), dim // 2 if half_columns and name == "dq_desc" else dim)
    if name in ("lse", "row_stats"):
        return "*fp32"
    if name.startswith("cu_") or name.endswith("_list") or name in ("num_tiles", "num_runs"):
        return "*i32"
    return "fp32" if name.endswith("scale") else "i32"


def main() -> None:
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    for name, kernel, tiles, constants in cases():
        constants = constants | REGISTERS
        halves = kernel is attention_backward_short_key
        signature = {
            argument: "constexpr" if argument in constants else argument_type(argument, tiles, constants["D"], halves)
            for argument in kernel.arg_names
        }
        source = GluonASTSource(kernel, signature, {(kernel.arg_names.index(k),): v for k, v in constants.items()}, {})
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
        ptx = compiled.asm["ptx"]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernel.ptx"
            path.write_text(ptx)
            report = subprocess.run(
                [tools / "ptxas", "-v", "--gpu-name=sm_90a", path, "-o", path.with_suffix(".cubin")],
                capture_output=True,
                text=True,
                check=True,
            ).stderr
        result = {
            "name": name,
            "shared": compiled.metadata.shared,
            "trap": "trap" in re.sub(r"//.*", "", ptx),
            "spills": int(re.search(r"(\d+) bytes spill stores", report)[1]),
            "serialized": "serialized" in report,
            "wgmma": "wgmma.mma_async" in ptx,
            "copies": "cp.async.bulk.tensor.4d.shared" in ptx,
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    sys.exit(main())
