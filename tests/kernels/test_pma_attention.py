"""Pooling by attention against its definition."""

import torch
from hypothesis import given
from kernel_cases import BATCH, QUICK, assert_close, offsets, qkv, with_gradients

from lightning_gem.kernels import gdpa, pma_attention
from lightning_gem.kernels.pma.reference import pma_loop


@QUICK
@given(lengths=BATCH)
def test_pma_attention_is_the_definition(lengths):
    cu_seqlens = offsets(lengths)
    inputs = qkv(5, sum(lengths), value_dim=3)
    actual = with_gradients(lambda s, k, v: pma_attention(s, k, v, cu_seqlens, 130), *inputs)
    assert_close(actual, with_gradients(lambda s, k, v: pma_loop(s, k, v, cu_seqlens, softmax_scale=0.5), *inputs))


def test_an_activation_makes_it_gdpa():
    cu_seqlens = offsets([3, 0, 9])
    seeds, key, value = qkv(5, 12)
    pooled = pma_attention(seeds, key, value, cu_seqlens, 9, activation=["relu", "silu"])
    expected = gdpa(seeds, key, value, None, cu_seqlens, activation=["relu", "silu"], scale=0.5, broadcast_query=True)
    assert pooled.shape == (3, 5, 2, 4)
    assert_close([pooled.flatten(0, 1)], [expected])


def test_gradcheck():
    inputs = [x.requires_grad_() for x in qkv(2, 5, dim=3, value_dim=2, kv_heads=1)]
    assert torch.autograd.gradcheck(lambda s, k, v: pma_attention(s, k, v, offsets([4, 0, 1]), 4), inputs)
