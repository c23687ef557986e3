"""The references on a GPU give what they give on a CPU."""

import pytest
import torch
from kernel_cases import CROSS_OPS, SELF_OPS, offsets, qkv, signal_to_noise_db, tokens, with_gradients

from lightning_gem.kernels import jagged_flash_attention, jagged_mean_pool, pffn, pma_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DTYPES = pytest.mark.parametrize(("dtype", "decibels"), [(torch.bfloat16, 40.0), (torch.float32, 80.0)])


def assert_same_on_gpu(op, inputs, cu_seqlens, decibels):
    """``op`` takes the inputs and then the offsets."""
    with_offsets = [offset.cuda() for offset in cu_seqlens]
    on_cpu = with_gradients(lambda *x: op(*x, *cu_seqlens), *inputs)
    grad = tokens(*on_cpu[0].shape, dtype=on_cpu[0].dtype, seed=9).cuda()
    on_gpu = with_gradients(lambda *x: op(*x, *with_offsets), *(x.cuda() for x in inputs), grad=grad)
    for actual, expected in zip(on_gpu, on_cpu, strict=True):
        assert actual.dtype == expected.dtype
        assert signal_to_noise_db(actual.cpu(), expected) > decibels


@DTYPES
@pytest.mark.parametrize("name", SELF_OPS)
def test_self_attention(name, dtype, decibels):
    inputs = qkv(205, 205, heads=4, dim=32, value_dim=32, dtype=dtype)  # three rows of slack
    assert_same_on_gpu(SELF_OPS[name], inputs, [offsets([70, 0, 1, 66, 65], torch.int32)], decibels)


@DTYPES
@pytest.mark.parametrize("name", CROSS_OPS)
def test_cross_attention(name, dtype, decibels):
    inputs = qkv(76, 200, dim=32, value_dim=48, dtype=dtype)
    assert_same_on_gpu(CROSS_OPS[name], inputs, [offsets([70, 3, 0, 3]), offsets([130, 0, 65, 5])], decibels)


@DTYPES
def test_bias_seeds_and_dense_keys(dtype, decibels):
    cu_seqlens = [offsets([70, 0, 1])]
    bias = tokens(3, 2, 70, 70).to(dtype)
    inputs = qkv(71, 71, dim=32, value_dim=32, dtype=dtype)
    assert_same_on_gpu(
        lambda q, k, v, b, cu: jagged_flash_attention(q, k, v, cu, attn_bias=b), (*inputs, bias), cu_seqlens, decibels
    )
    assert_same_on_gpu(pma_attention, (inputs[0][:5], *inputs[1:]), cu_seqlens, decibels)
    dense = tokens(3, 64, 2, 32, seed=4).to(dtype), tokens(3, 64, 2, 32, seed=5).to(dtype)
    assert_same_on_gpu(pffn, (inputs[0], *dense), cu_seqlens, decibels)
    assert_same_on_gpu(pffn, (inputs[0], dense[0][0], dense[1][0]), cu_seqlens, decibels)
    assert_same_on_gpu(jagged_mean_pool, inputs[:1], cu_seqlens, decibels)
