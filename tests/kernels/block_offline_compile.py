"""Compiles what the launchers of block attention and rotation would launch on GPUs that are not there.

Run as a program with architectures as arguments (90, 100); prints one JSON line per kernel. The launchers run on CPU
tensors with a driver that only claims to be the GPU, so exactly the shipped configurations are compiled.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from lightning_gem.kernels.block import triton_kernels
from lightning_gem.kernels.rope import triton_kernels as rotary_kernels

# name, block size, heads, key heads, D, Dv, dtype, dtype of the angles, rotated values, activation
CASES: list[tuple[Any, ...]] = [
    ("softmax", 64, 4, 4, 128, 128, torch.bfloat16, None, False, None),
    ("rotary fp16", 64, 4, 4, 128, 128, torch.bfloat16, torch.float16, False, None),
    ("rotary fp32", 64, 4, 4, 128, 128, torch.bfloat16, torch.float32, True, None),
    ("odd rotary", 64, 2, 2, 40, 40, torch.bfloat16, torch.float32, True, None),
    ("gelu", 16, 4, 4, 64, 64, torch.float16, None, False, "gelu"),
    ("grouped", 64, 4, 2, 64, 96, torch.bfloat16, torch.float32, False, None),
    ("blocks of 128", 128, 4, 4, 128, 128, torch.bfloat16, None, False, None),
    ("widest", 64, 4, 4, 256, 256, torch.bfloat16, torch.float16, True, "silu"),
    ("float32", 64, 2, 2, 64, 64, torch.float32, None, False, None),
]


class ClaimedDriver:
    """What Triton asks of a driver before a launch."""

    def __init__(self, arch: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


def describe(kernel: Any, arch: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(kernel.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True).stdout
    ptx = re.sub(r"//.*", "", kernel.asm["ptx"])
    return {
        "arch": arch,
        "shared": kernel.metadata.shared,
        "tmem": getattr(kernel.metadata, "tmem_size", None) or 0,
        "trap": "trap" in ptx,
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),  # type: ignore[index]
        "stack": int(re.search(r"STACK:(\d+)", usage)[1]),  # type: ignore[index]
        "matrix_unit": ("tcgen05.mma" if arch >= 100 else "wgmma") in ptx,
    }


def main(architectures: list[int]) -> None:
    run, compiled = JITFunction.run, []
    JITFunction.run = lambda self, *args, warmup=False, **kwargs: compiled.append(  # type: ignore[method-assign]
        (self.__name__, run(self, *args, warmup=True, **kwargs))
    )
    for arch in architectures:
        triton.runtime.driver.set_active(ClaimedDriver(arch))
        for name, block_size, heads, key_heads, dim, dim_v, dtype, angle_dtype, rotate_value, activation in CASES:
            query, grad = torch.randn(66, heads, dim, dtype=dtype), torch.randn(66, heads, dim_v, dtype=dtype)
            key, value = torch.randn(66, key_heads, dim, dtype=dtype), torch.randn(66, key_heads, dim_v, dtype=dtype)
            angle = None if angle_dtype is None else torch.randn(66, dim // 2, dtype=angle_dtype)
            options = (torch.tensor([0, 66]), angle, angle, block_size, 0.1, activation, False, rotate_value)
            triton_kernels.forward(query, key, value, *options)
            triton_kernels.backward(grad, query, key, value, *options)
            if name == "rotary fp32":
                rotary_kernels.rotate(query, angle, angle, False)
            for function, kernel in compiled:
                line = {"case": name, "kernel": function, "itemsize": dtype.itemsize, **describe(kernel, arch)}
                print(json.dumps(line), flush=True)
            compiled.clear()


if __name__ == "__main__":
    main([int(arch) for arch in sys.argv[1:]])
