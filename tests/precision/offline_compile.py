"""Compiles the quantisation kernel for a GPU that is not there, and prints what it needs, as JSON lines."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lightning_gem.precision.mx import FORMATS
from lightning_gem.precision.triton_quantize import BLOCK_K, BLOCK_M, NUM_WARPS, quantize_kernel

KINDS = {
    "rows": (True, False, False),
    "columns": (False, True, False),
    "rows and columns": (True, True, False),
    "square": (False, False, True),
}


def compile_kernel(kind: str, fmt: str, arch: int) -> dict[str, Any]:
    element = FORMATS[fmt]
    constants: dict[str, Any] = dict(zip(("ROWS", "COLUMNS", "SQUARE"), KINDS[kind], strict=True))
    constants |= {"MODE": 0, "MAX_EXPONENT": element.max_exponent, "MANTISSA_BITS": element.mantissa_bits}
    constants |= {
        "LARGEST": element.largest,
        "IS_E5M2": fmt == "e5m2",
        "ROUND_FIRST": False,
        "BLOCK_M": BLOCK_M,
        "BLOCK_K": BLOCK_K,
    }
    constants |= {"stride_k": 1}
    names = quantize_kernel.arg_names
    types = {name: "*u8" if name.endswith("_ptr") else "i32" for name in names} | {"x_ptr": "*bf16"}
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = [n for n in names if signature[n].startswith("*")] + ["stride_m", "num_columns"]
    source = ASTSource(
        quantize_kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": NUM_WARPS})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True).stdout
    return {
        "kind": kind,
        "fmt": fmt,
        "arch": arch,
        "shared": compiled.metadata.shared,
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "stack": int(re.search(r"STACK:(\d+)", usage)[1]),
        "cast": f"cvt.rn.satfinite.{fmt}x2" in compiled.asm["ptx"],
    }


if __name__ == "__main__":
    for kind in KINDS:
        print(json.dumps(compile_kernel(kind, "e4m3", int(sys.argv[1]))), flush=True)
    print(json.dumps(compile_kernel("rows", "e5m2", int(sys.argv[1]))), flush=True)
