"""Jagged softmax attention against its definition and against torch's dense attention."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import BATCH, PAIRED_BATCH, QUICK, WINDOW, assert_close, offsets, qkv, tokens, with_gradients

from lightning_gem.kernels import jagged_flash_attention
from lightning_gem.kernels.flash.reference import attention_loop


@QUICK
@given(lengths=BATCH, causal=st.booleans(), window_size=WINDOW, kv_heads=st.sampled_from([1, 2, 4]))
def test_self_attention_is_the_definition(lengths, causal, window_size, kv_heads):
    cu_seqlens = offsets(lengths)
    inputs = qkv(sum(lengths), sum(lengths), heads=4, kv_heads=kv_heads, value_dim=3)
    mask = {"causal": causal, "window_size": window_size}

    actual = with_gradients(lambda q, k, v: jagged_flash_attention(q, k, v, cu_seqlens, **mask), *inputs)

    loop = with_gradients(
        lambda q, k, v: attention_loop(q, k, v, cu_seqlens, cu_seqlens, softmax_scale=0.5, **mask)[0], *inputs
    )
    assert_close(actual, loop)


@QUICK
@given(lengths=PAIRED_BATCH, causal=st.booleans(), window_size=WINDOW)
def test_cross_attention_is_the_definition(lengths, causal, window_size):
    cu_q, cu_k = offsets([q for q, _ in lengths]), offsets([k for _, k in lengths])
    inputs = qkv(int(cu_q[-1]), int(cu_k[-1]))
    mask = {"causal": causal, "window_size": window_size}

    actual = with_gradients(lambda q, k, v: jagged_flash_attention(q, k, v, cu_q, cu_k, **mask), *inputs)

    loop = with_gradients(lambda q, k, v: attention_loop(q, k, v, cu_q, cu_k, softmax_scale=0.5, **mask)[0], *inputs)
    assert_close(actual, loop)


@QUICK
@given(lengths=PAIRED_BATCH, causal=st.booleans(), batch_bias=st.booleans(), head_bias=st.booleans())
def test_bias_and_lse_are_the_definition(lengths, causal, batch_bias, head_bias):
    cu_q, cu_k = offsets([q for q, _ in lengths]), offsets([k for _, k in lengths])
    inputs = qkv(int(cu_q[-1]) + 2, int(cu_k[-1]))
    bias = tokens(len(lengths) if batch_bias else 1, 2 if head_bias else 1, 131, 130)

    def op(q, k, v, bias):
        return jagged_flash_attention(q, k, v, cu_q, cu_k, attn_bias=bias, causal=causal, return_lse=True)

    def loop(q, k, v, bias):
        return attention_loop(q, k, v, cu_q, cu_k, attn_bias=bias, causal=causal, softmax_scale=0.5)

    for output in (0, 1):
        actual = with_gradients(lambda *x: op(*x)[output].clamp(min=-1e9), *inputs, bias)  # noqa: B023
        expected = with_gradients(lambda *x: loop(*x)[output].clamp(min=-1e9), *inputs, bias)  # noqa: B023
        assert_close(actual, expected)


@QUICK
@given(lengths=PAIRED_BATCH, causal=st.booleans(), softcap=st.sampled_from([0.5, 3.0]))
def test_softcap_is_the_definition(lengths, causal, softcap):
    cu_q, cu_k = offsets([q for q, _ in lengths]), offsets([k for _, k in lengths])
    inputs = qkv(int(cu_q[-1]), int(cu_k[-1]), value_dim=3)
    kwargs = {"causal": causal, "softcap": softcap}

    actual = with_gradients(lambda q, k, v: jagged_flash_attention(q, k, v, cu_q, cu_k, **kwargs), *inputs)

    loop = with_gradients(lambda q, k, v: attention_loop(q, k, v, cu_q, cu_k, softmax_scale=0.5, **kwargs)[0], *inputs)
    assert_close(actual, loop)


def test_broadcast_query_is_the_repeated_query():
    cu_k = offsets([5, 0, 70, 1])
    seeds, key, value = qkv(3, 76)

    shared = with_gradients(
        lambda s, k, v: jagged_flash_attention(s, k, v, None, cu_k, broadcast_query=True), seeds, key, value
    )
    repeated = with_gradients(
        lambda s, k, v: jagged_flash_attention(s.repeat(4, 1, 1), k, v, offsets([3] * 4), cu_k), seeds, key, value
    )
    assert_close(shared, repeated)


@pytest.mark.parametrize("causal", [False, True])
def test_equal_lengths_are_dense_attention(causal):
    inputs = qkv(4 * 9, 4 * 9)

    def dense(q, k, v):
        q, k, v = (x.unflatten(0, (4, 9)).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(0, 1)

    actual = with_gradients(lambda q, k, v: jagged_flash_attention(q, k, v, offsets([9] * 4), causal=causal), *inputs)
    assert_close(actual, with_gradients(dense, *inputs))


def test_bias_of_minus_infinity_hides_keys_and_never_gives_nan():
    query, key, value = qkv(6, 6)
    bias = torch.zeros(2, 1, 4, 4, dtype=torch.float64)
    bias[0, :, 1] = -torch.inf  # row 1 of sequence 0 sees nothing
    bias[1, :, :, 0] = -torch.inf  # no query of sequence 1 sees its key 0

    out, *grads = with_gradients(
        lambda q, k, v, b: jagged_flash_attention(q, k, v, offsets([4, 2]), attn_bias=b), query, key, value, bias
    )

    assert (out[1] == 0).all()
    assert_close([out[4:]], [value[5].expand(2, -1, -1)])
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[0][1] == 0).all()
    assert (grads[1][4] == 0).all()


def test_lse_is_minus_infinity_without_keys_zero_in_slack_and_float32():
    query, key, value = qkv(5, 3, dtype=torch.bfloat16)
    out, lse = jagged_flash_attention(query, key, value, offsets([2, 2]), offsets([0, 3]), return_lse=True)

    assert lse.shape == (2, 5)
    assert lse.dtype == torch.float32
    assert (lse[:, :2] == -torch.inf).all()
    assert lse[:, 2:4].isfinite().all()
    assert (lse[:, 4] == 0).all()
    assert (out[:2] == 0).all()


@pytest.mark.parametrize("kwargs", [{}, {"causal": True}, {"window_size": (1, 0)}])
def test_gradcheck(kwargs):
    cu_q, cu_k = offsets([2, 0, 3, 1]), offsets([3, 2, 0, 1])
    inputs = [x.requires_grad_() for x in qkv(7, 6, dim=3, value_dim=2, kv_heads=1)]
    bias = tokens(4, 1, 3, 3).requires_grad_()

    def op(q, k, v, bias):
        return jagged_flash_attention(q, k, v, cu_q, cu_k, attn_bias=bias, return_lse=False, **kwargs)

    assert torch.autograd.gradcheck(op, (*inputs, bias))
    assert torch.autograd.gradcheck(lambda q, k, v: jagged_flash_attention(q, k, v, cu_q, cu_k, **kwargs), inputs)
