"""Block sizes of the portable kernels, by head size, dtype and shared memory: fixed rules, no tuning at run time."""

from dataclasses import dataclass
from typing import Literal

import torch

Kernel = Literal["forward", "key_value_gradient", "query_gradient"]

_INTERPRETER_BLOCKS = {"forward": (16, 32), "key_value_gradient": (32, 16), "query_gradient": (32, 16)}


@dataclass(frozen=True)
class Blocks:
    """Rows of queries and keys per tile, and how a program runs."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# From large to small: the first that fits is taken. Sizes that do not spill on sm_90 and sm_100; see test_compile.py.
_FORWARD = {
    64: [Blocks(128, 64, 4, 3), Blocks(64, 64, 4, 3), Blocks(64, 64, 4, 2)],
    128: [Blocks(128, 64, 8, 3), Blocks(128, 64, 8, 2), Blocks(64, 64, 4, 2), Blocks(64, 32, 4, 2)],
    256: [Blocks(128, 64, 8, 2), Blocks(64, 32, 4, 2), Blocks(64, 32, 4, 1), Blocks(32, 32, 4, 1)],
}
_KEY_VALUE_GRADIENT = {
    64: [Blocks(64, 128, 8, 2), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 1)],
    128: [Blocks(64, 128, 8, 2), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 1), Blocks(32, 64, 4, 1)],
    256: [Blocks(64, 64, 8, 1), Blocks(32, 32, 4, 1), Blocks(16, 32, 4, 1)],
}
_QUERY_GRADIENT = {
    64: [Blocks(128, 64, 8, 2), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 1)],
    128: [Blocks(128, 64, 8, 2), Blocks(64, 64, 8, 2), Blocks(64, 64, 8, 1), Blocks(64, 32, 4, 1)],
    256: [Blocks(64, 64, 8, 1), Blocks(32, 32, 4, 1), Blocks(32, 16, 4, 1)],
}
_TABLES = {"forward": _FORWARD, "key_value_gradient": _KEY_VALUE_GRADIENT, "query_gradient": _QUERY_GRADIENT}
_FLOAT32 = {
    64: [Blocks(32, 32, 4, 1)],
    128: [Blocks(32, 32, 4, 1), Blocks(16, 32, 4, 1)],
    256: [Blocks(32, 32, 8, 1), Blocks(16, 16, 4, 1)],
}


def padded_dim(dim: int) -> int:
    """Features of a head in a tile: a power of two of at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


def choose_blocks(
    kernel: Kernel,
    dim: int,
    dim_v: int,
    dtype: torch.dtype,
    shared_memory: int,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    interpreting: bool = False,
) -> Blocks:
    """Block sizes of a kernel.

    Args:
        kernel: Which of the three.
        dim: Features of queries and keys.
        dim_v: Features of values.
        dtype: Of the inputs.
        shared_memory: Bytes of shared memory that one program may have.
        max_seqlen_q: Upper bound of the query lengths, if known: no tile is more than twice as long.
        max_seqlen_k: The same for keys.
        interpreting: Small blocks for Triton's interpreter, so that small inputs have several of them.
    """
    if interpreting:
        return Blocks(*_INTERPRETER_BLOCKS[kernel], num_warps=4, num_stages=1)
    padded, padded_v = padded_dim(dim), padded_dim(dim_v)
    row = max(64, padded, padded_v)
    table = _FLOAT32 if dtype.itemsize > 2 else _TABLES[kernel]
    fitting = [x for x in table[row] if _shared_bytes(kernel, x, padded, padded_v, dtype.itemsize) <= shared_memory]
    blocks = fitting[0] if fitting else table[row][-1]
    block_m, block_n, num_warps = blocks.block_m, blocks.block_n, blocks.num_warps
    if max_seqlen_q is not None:
        block_m = min(block_m, max(32, padded_dim(max_seqlen_q)))
    if max_seqlen_k is not None:
        block_n = min(block_n, max(32, padded_dim(max_seqlen_k)))
    if block_m * block_n < blocks.block_m * blocks.block_n and max(block_m, block_n) <= 64 and row < 256:
        num_warps = 4
    return Blocks(block_m, block_n, num_warps, blocks.num_stages)


def _shared_bytes(kernel: Kernel, blocks: Blocks, dim: int, dim_v: int, itemsize: int) -> int:
    """An upper bound: the tiles that stay, those that stream by in stages, and the scores on their way."""
    stays, streams = blocks.block_m, blocks.block_n
    if kernel == "key_value_gradient":
        stays, streams = streams, stays
    resident = stays * (dim if kernel == "forward" else dim + dim_v)
    scores = blocks.block_m * blocks.block_n * (1 if kernel == "forward" else 2)
    return (resident + blocks.num_stages * streams * (dim + dim_v) + scores) * itemsize
