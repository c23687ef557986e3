"""Block-diagonal attention against its definition."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import BATCH, QUICK, assert_close, offsets, qkv, with_gradients

from lightning_gem.kernels import block_attention, jagged_flash_attention
from lightning_gem.kernels.block.reference import block_attention_loop, block_offsets


@QUICK
@given(
    lengths=BATCH,
    block_size=st.sampled_from([1, 3, 16, 64]),
    activation=st.sampled_from([None, "silu", "gelu_tanh"]),
    causal=st.booleans(),
)
def test_block_attention_is_the_definition(lengths, block_size, activation, causal):
    cu_seqlens = offsets(lengths)
    inputs = qkv(sum(lengths), sum(lengths), value_dim=3)
    kwargs = {"block_size": block_size, "activation": activation, "causal": causal}

    actual = with_gradients(lambda q, k, v: block_attention(q, k, v, cu_seqlens, 130, **kwargs), *inputs)

    loop = with_gradients(lambda q, k, v: block_attention_loop(q, k, v, cu_seqlens, scale=0.5, **kwargs), *inputs)
    assert_close(actual, loop)


def test_one_block_is_full_attention():
    cu_seqlens = offsets([7, 0, 64, 20])
    inputs = qkv(91, 91)
    blocks = with_gradients(lambda q, k, v: block_attention(q, k, v, cu_seqlens, 64), *inputs)
    assert_close(blocks, with_gradients(lambda q, k, v: jagged_flash_attention(q, k, v, cu_seqlens), *inputs))


def test_blocks_start_at_each_sequence_and_the_last_may_be_short():
    assert block_offsets(offsets([5, 0, 4, 1]), 4).tolist() == [0, 4, 5, 9, 10]
    assert block_offsets(offsets([0, 0]), 4).tolist() == [0]


def test_memory_is_linear_in_the_length():
    # Scores of full attention over 2^18 tokens would take 512 GiB.
    cu_seqlens = offsets([2**18])
    query, key, value = qkv(2**18, 2**18, heads=1, kv_heads=1, dtype=torch.float32)
    assert block_attention(query, key, value, cu_seqlens, 2**18, activation="relu").shape == (2**18, 1, 4)


def test_gradcheck():
    inputs = [x.requires_grad_() for x in qkv(6, 6, dim=3, value_dim=2, kv_heads=1)]
    for kwargs in ({}, {"activation": "silu"}, {"causal": True}):
        assert torch.autograd.gradcheck(
            lambda q, k, v: block_attention(q, k, v, offsets([5, 0, 1]), 5, block_size=2, **kwargs),  # noqa: B023
            inputs,
        )


def test_bad_arguments_are_named():
    query, key, value = qkv(4, 4)
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        block_attention(query, key, value, offsets([4]), 4, block_size=0)
    with pytest.raises(ValueError, match="key must have the 4 rows of query, got 3"):
        block_attention(query, key[:3], value[:3], offsets([3]), 4)
