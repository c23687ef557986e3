"""Generalised dot-product attention against its definition."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import PAIRED_BATCH, QUICK, WINDOW, assert_close, offsets, qkv, with_gradients

from lightning_gem.kernels import gdpa
from lightning_gem.kernels.dot_product.activations import ACTIVATIONS
from lightning_gem.kernels.dot_product.reference import gdpa_loop


@QUICK
@given(
    lengths=PAIRED_BATCH,
    activation=st.sampled_from([*ACTIVATIONS, ["silu", "relu", "identity", "gelu"]]),
    causal=st.booleans(),
    window_size=WINDOW,
    kv_heads=st.sampled_from([1, 2, 4]),
)
def test_gdpa_is_the_definition(lengths, activation, causal, window_size, kv_heads):
    cu_q, cu_k = offsets([q for q, _ in lengths]), offsets([k for _, k in lengths])
    inputs = qkv(int(cu_q[-1]), int(cu_k[-1]), heads=4, kv_heads=kv_heads, value_dim=3)
    kwargs = {"activation": activation, "scale": 0.7, "out_scale": 0.1, "causal": causal, "window_size": window_size}

    actual = with_gradients(lambda q, k, v: gdpa(q, k, v, cu_q, cu_k, **kwargs), *inputs)

    assert_close(actual, with_gradients(lambda q, k, v: gdpa_loop(q, k, v, cu_q, cu_k, **kwargs), *inputs))


def test_broadcast_query_is_the_repeated_query():
    cu_k = offsets([5, 0, 70, 1])
    seeds, key, value = qkv(3, 76)

    shared = with_gradients(lambda s, k, v: gdpa(s, k, v, None, cu_k, broadcast_query=True), seeds, key, value)
    repeated = with_gradients(lambda s, k, v: gdpa(s.repeat(4, 1, 1), k, v, offsets([3] * 4), cu_k), seeds, key, value)
    assert_close(shared, repeated)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_of_zero_is_zero(name):
    assert ACTIVATIONS[name](torch.zeros(1)) == 0


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(activation):
    inputs = [x.requires_grad_() for x in qkv(7, 6, heads=2, kv_heads=1, dim=3, value_dim=2)]
    cu_q, cu_k = offsets([2, 0, 3, 1]), offsets([3, 2, 0, 1])
    for kwargs in ({}, {"causal": True}):
        assert torch.autograd.gradcheck(
            lambda q, k, v: gdpa(q, k, v, cu_q, cu_k, activation=activation, **kwargs),  # noqa: B023
            inputs,
        )


def test_bad_activations_are_named():
    query, key, value = qkv(3, 3)
    with pytest.raises(ValueError, match="activation 'swish' is unknown: use one of identity, relu"):
        gdpa(query, key, value, offsets([3]), activation="swish")
    with pytest.raises(ValueError, match="activation lists 3 names for 2 query heads"):
        gdpa(query, key, value, offsets([3]), activation=["relu"] * 3)


def test_default_scales_change_nothing():
    query, key, value = qkv(4, 4)
    scaled = gdpa(query * 0.25, key, value * 2, offsets([4]))
    assert_close([scaled], [gdpa(query, key, value, offsets([4]), scale=0.25, out_scale=2.0)])
