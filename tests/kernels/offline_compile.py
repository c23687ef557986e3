"""Compiles the portable attention kernels for GPUs that are not there, and prints what each needs, as JSON lines.

Run as a program: Triton's compiler runs in its own process, without the interpreter.
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
from triton.compiler import ASTSource

from lightning_gem.kernels.attention import packed
from lightning_gem.kernels.attention.blocks import choose_blocks, padded_dim
from lightning_gem.kernels.attention.spec import AttentionSpec
from lightning_gem.kernels.attention.triton_backward import (
    delta_kernel,
    key_value_gradient_kernel,
    query_gradient_kernel,
)
from lightning_gem.kernels.attention.triton_forward import attention_forward_kernel
from lightning_gem.kernels.attention.triton_packed import packed_backward_kernel, packed_forward_kernel, packing_kernel
from lightning_gem.kernels.attention.triton_schedule import schedule_kernel
from lightning_gem.kernels.triton_activations import CODES

SHARED_MEMORY = 232_448
KERNELS = {
    "forward": attention_forward_kernel,
    "key_value_gradient": key_value_gradient_kernel,
    "query_gradient": query_gradient_kernel,
}
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def argument_type(name: str, dtype: str) -> str:
    if name in ("lse_ptr", "delta_ptr", "grad_lse_ptr"):
        return "*fp32"
    if name in ("offsets", "offsets_q", "offsets_k", "tiled", "other"):
        return "*i64"
    if name in ("schedule_ptr", "packing_ptr", "codes_ptr", "targets_ptr", "sequence_out", "tile_out", "num_tiles_out"):
        return "*i32"
    if name.endswith("_ptr"):
        return f"*{dtype}"
    return "fp32" if name in ("scale", "out_scale", "softcap") else "i32"


def compile_kernel(
    kernel: Any, dtype: str, constants: dict[str, Any], options: dict[str, int], arch: int
) -> dict[str, Any]:
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else argument_type(n, dtype) for n in names}
    aligned = [n for n in names if signature[n].startswith("*") or n.startswith("stride_") and n != "stride_lse"]
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()}, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True).stdout
    ptx = compiled.asm["ptx"]
    return {
        "shared": compiled.metadata.shared,
        "tmem": getattr(compiled.metadata, "tmem_size", None) or 0,
        "trap": "trap" in re.sub(r"//.*", "", ptx),
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "stack": int(re.search(r"STACK:(\d+)", usage)[1]),
        "wgmma": "wgmma" in ptx,
        "tcgen05": "tcgen05.mma" in ptx,
    }


def attention_constants(kind: str, dim: int, dim_v: int, dtype: torch.dtype, activation: str | None, **changes: Any):
    blocks = choose_blocks(kind, dim, dim_v, dtype, SHARED_MEMORY)
    constants = {
        "GROUP": 1,
        "DIM": dim,
        "DIM_V": dim_v,
        "BLOCK_M": blocks.block_m,
        "BLOCK_N": blocks.block_n,
        "BLOCK_D": padded_dim(dim),
        "BLOCK_DV": padded_dim(dim_v),
        "SOFTMAX": activation is None,
        "CODES": 0 if activation is None else 1 << CODES[activation],
        "PER_HEAD": False,
        "HAS_LEFT": False,
        "HAS_RIGHT": False,
        "HAS_ROLES": False,
        "HAS_TARGETS": False,
        "BROADCAST": False,
        "HAS_BIAS": False,
        "HAS_CAP": False,
        "PRECISION": "tf32" if dtype.itemsize == 2 else "ieee",
        "FAST": dtype.itemsize == 2,
        "HEADS_KV" if kind == "key_value_gradient" else "HEADS": 4,
        **changes,
    }
    return constants, {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages}


def cases() -> list[tuple[str, int, int, torch.dtype, str | None, dict[str, Any]]]:
    window = {"HAS_LEFT": True, "HAS_RIGHT": True}
    table: list[tuple[int, int, torch.dtype, str | None, dict[str, Any]]] = [
        (128, 128, torch.bfloat16, None, {}),
        (128, 128, torch.bfloat16, "gelu_tanh", window),
        (64, 64, torch.bfloat16, "silu", {}),
        (48, 64, torch.float16, None, {"HAS_RIGHT": True, "BROADCAST": True}),
        (256, 256, torch.bfloat16, None, {}),
        (64, 64, torch.float32, "gelu", {}),
    ]
    return [(kind, *row) for row in table for kind in KERNELS]


def packed_cases() -> list[tuple[int, int, int, torch.dtype, str | None, dict[str, Any]]]:
    """Longest sequence, sizes of heads, dtype, activation and other constants."""
    return [
        (32, 64, 64, torch.bfloat16, None, {}),
        (32, 64, 64, torch.bfloat16, "gelu_tanh", {}),
        (32, 64, 64, torch.bfloat16, "silu", {"HAS_LEFT": True, "HAS_RIGHT": True}),
        (32, 128, 128, torch.bfloat16, None, {}),
        (32, 96, 80, torch.float16, "gelu", {"GROUP": 2}),
        (64, 64, 64, torch.bfloat16, None, {}),
        (32, 64, 64, torch.float32, None, {}),
    ]


def packed_constants(longest: int, dim: int, dim_v: int, dtype: torch.dtype, activation: str | None, **changes: Any):
    """Constants and options of the packed kernels, forward and backward."""
    spec = AttentionSpec(activation=activation, scale=1.0)
    heads_kv = 4 // changes.get("GROUP", 1)
    query, key, value = (torch.empty(1, h, d, dtype=dtype) for h, d in ((4, dim), (heads_kv, dim), (heads_kv, dim_v)))
    for backward in (False, True):
        blocks = packed.choose_blocks(spec, query, key, value, longest, backward)
        constants = packed.constants(spec, query, key, value, longest, blocks)
        constants |= {"FAST": dtype.itemsize == 2, **changes}
        constants |= {"HEADS_KV": heads_kv, "HAS_GRAD_LSE": False} if backward else {"HEADS": 4}
        options = {name: constants.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in constants}
        yield ("packed_backward" if backward else "packed_forward"), constants, options


def main(architectures: list[int]) -> None:
    for arch in architectures:
        for kind, dim, dim_v, dtype, activation, changes in cases():
            constants, options = attention_constants(kind, dim, dim_v, dtype, activation, **changes)
            result = compile_kernel(KERNELS[kind], TYPES[dtype], constants, options, arch)
            name = f"{kind} {dim}/{dim_v} {TYPES[dtype]} {activation or 'softmax'} {' '.join(changes)}".strip()
            facts = {"dim": dim, "masked": bool(changes), "bytes": dtype.itemsize}
            print(json.dumps({"name": name, "arch": arch, **facts, **result}), flush=True)
        for longest, dim, dim_v, dtype, activation, changes in packed_cases():
            for kind, constants, options in packed_constants(longest, dim, dim_v, dtype, activation, **changes):
                kernel = packed_backward_kernel if kind == "packed_backward" else packed_forward_kernel
                result = compile_kernel(kernel, TYPES[dtype], constants, options, arch)
                name = f"{kind} {longest} {dim}/{dim_v} {TYPES[dtype]} {activation or 'softmax'} {' '.join(changes)}"
                facts = {"dim": dim, "masked": True, "bytes": dtype.itemsize}
                print(json.dumps({"name": name.strip(), "arch": arch, **facts, **result}), flush=True)
        packs = {"BLOCK": 64, "STARTS": 33, "LONGEST": 32, "SEQUENCES": 64}
        result = compile_kernel(packing_kernel, "i32", packs, {"num_warps": 1}, arch)
        print(json.dumps({"name": "packing", "arch": arch, "bytes": 0, **result}), flush=True)
        delta = {"HEADS": 4, "DIM_V": 128, "BLOCK_M": 32, "BLOCK_DV": 128, "BROADCAST": False, "HAS_GRAD_LSE": True}
        result = compile_kernel(delta_kernel, "bf16", delta, {"num_warps": 4}, arch)
        print(json.dumps({"name": "delta", "arch": arch, "bytes": 0, **result}), flush=True)
        tiles = {"BLOCK_SIZE": 128, "CONSTANT": False, "LONGEST_FIRST": True, "SEQUENCES": 16, "CHUNK": 256}
        result = compile_kernel(schedule_kernel, "i32", tiles, {"num_warps": 4}, arch)
        print(json.dumps({"name": "schedule", "arch": arch, "bytes": 0, **result}), flush=True)


if __name__ == "__main__":
    main([int(arch) for arch in sys.argv[1:]])
