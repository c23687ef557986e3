"""The portable kernels compile for Hopper and Blackwell, without either: within memory, to their instructions."""

from pathlib import Path

import pytest
import torch
from offline import compiled_offline

from lightning_gem.kernels.attention.blocks import _shared_bytes, choose_blocks, padded_dim

pytest.importorskip("triton")


@pytest.mark.parametrize(("arch", "instruction"), [(90, "wgmma"), (100, "tcgen05")])
def test_kernels_compile(arch, instruction):
    results = compiled_offline(Path(__file__).with_name("offline_compile.py"), str(arch))
    assert len(results) > 15
    for result in results:
        assert result["shared"] <= 232_448, result
        assert result["tmem"] <= 512, result  # more compiles to a kernel that only traps
        assert not result["trap"], result
        assert result[instruction] == (result["bytes"] == 2), result
        # Bytes that a thread keeps outside registers. Windows and heads of more than 128 need more than there are.
        if result["bytes"] == 2 and result["dim"] <= 128:
            assert result["stack"] <= (400 if result["masked"] else 32), result


def test_hopper_kernels_compile():
    triton = pytest.importorskip("triton")
    if not triton.__version__.startswith("3.6."):
        pytest.skip("the Hopper kernels are written in the Gluon dialect of Triton 3.6")
    results = compiled_offline(Path(__file__).with_name("offline_gluon.py"))
    assert len(results) == 15
    for result in results:
        assert result["shared"] <= 232_448, result
        assert result["wgmma"], result
        assert result["copies"], result
        assert not result["trap"], result
        assert not result["serialized"], result  # ptxas gives up on asynchronous products where registers run out
        assert result["spills"] <= 512, result


@pytest.mark.parametrize("shared_memory", [101_376, 166_912, 232_448])
@pytest.mark.parametrize("dim", [8, 64, 96, 128, 200, 256])
@pytest.mark.parametrize("kernel", ["forward", "key_value_gradient", "query_gradient"])
def test_blocks_fit_every_gpu(kernel, dim, shared_memory):
    """From sm_86 to sm_90, in both half precision and float32."""
    for dtype in (torch.bfloat16, torch.float32):
        padded = padded_dim(dim)
        blocks = choose_blocks(kernel, dim, dim, dtype, shared_memory)
        assert _shared_bytes(kernel, blocks, padded, padded, dtype.itemsize) <= shared_memory
        short = choose_blocks(kernel, dim, dim, dtype, shared_memory, max_seqlen_q=20, max_seqlen_k=20)
        assert short.block_m <= 32
        assert short.block_n <= 32
