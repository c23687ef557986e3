"""Generalised dot-product attention against its definition."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import LENGTH, PAIRED_BATCH, QUICK, WINDOW, assert_close, offsets, qkv, with_gradients

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


@QUICK
@given(
    lengths=st.lists(st.tuples(LENGTH, st.integers(0, 8)), min_size=1, max_size=4),
    context=st.sampled_from([0, 1, 3, 64]),
    window=st.sampled_from([-1, 0, 5]),
)
def test_context_and_targets_are_the_definition(lengths, context, window):
    cu = offsets([n for n, _ in lengths])
    inputs = qkv(int(cu[-1]), int(cu[-1]))
    kwargs = {
        "activation": "silu",
        "causal": True,
        "window_size": (window, -1),
        "num_targets": torch.tensor([min(n, t) for n, t in lengths]),
        "contextual_seqlen": context,
    }
    actual = with_gradients(lambda q, k, v: gdpa(q, k, v, cu, **kwargs), *inputs)
    assert_close(actual, with_gradients(lambda q, k, v: gdpa_loop(q, k, v, cu, cu, **kwargs), *inputs))


def test_targets_by_hand():
    """Two tokens of context, two of history, two targets; the values are unit vectors, so outputs name what is seen."""
    ones, identity = torch.ones(6, 1, 1), torch.eye(6)[:, None]
    out = gdpa(
        *(ones, ones, identity, offsets([6])),
        activation="identity",
        causal=True,
        num_targets=torch.tensor([2]),
        contextual_seqlen=2,
    )
    seen = ["111100", "111100", "111000", "111100", "111110", "111101"]
    assert out[:, 0].tolist() == [[float(x) for x in row] for row in seen]


def test_bad_targets_are_named():
    query, key, value = qkv(3, 3)
    targets = torch.tensor([1])
    for kwargs in ({}, {"causal": True, "window_size": (1, 1)}, {"causal": True, "cu_seqlens_k": offsets([3])}):
        with pytest.raises(ValueError, match="num_targets and contextual_seqlen are for causal self-attention"):
            gdpa(query, key, value, offsets([3]), num_targets=targets, **kwargs)
    with pytest.raises(ValueError, match=r"num_targets must be int32 or int64 \(1,\) on cpu, got torch.float32"):
        gdpa(query, key, value, offsets([3]), num_targets=targets.float(), causal=True)
    with pytest.raises(ValueError, match="contextual_seqlen must be 0 or more"):
        gdpa(query, key, value, offsets([3]), contextual_seqlen=-1, causal=True)


def test_gelu_poly_is_close_to_gelu():
    x = torch.linspace(-2, 2, 1001, dtype=torch.float64)
    torch.testing.assert_close(ACTIVATIONS["gelu_poly"](x), ACTIVATIONS["gelu"](x), rtol=0, atol=1.2e-3)


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
