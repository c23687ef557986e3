"""Personalised feed-forward network against its definition."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import BATCH, QUICK, assert_close, offsets, tokens, with_gradients

from lightning_gem.kernels import pffn
from lightning_gem.kernels.personalized_ffn.op import _cut
from lightning_gem.kernels.personalized_ffn.reference import pffn_loop

SCALES = {"scale": 0.5, "out_scale": 0.25}


@QUICK
@given(lengths=BATCH, width=st.sampled_from([1, 3, 64]), activation=st.sampled_from(["gelu_tanh", "hardswish"]))
def test_pffn_is_the_definition(lengths, width, activation):
    cu_seqlens, batch = offsets(lengths), len(lengths)
    inputs = tokens(sum(lengths), 2, 4), tokens(batch, width, 2, 4, seed=1), tokens(batch, width, 2, 3, seed=2)
    kwargs = {"activation": activation, **SCALES}
    actual = with_gradients(lambda q, k, v: pffn(q, k, v, cu_seqlens, 130, **kwargs), *inputs)
    assert_close(actual, with_gradients(lambda q, k, v: pffn_loop(q, k, v, cu_seqlens, **kwargs), *inputs))


def test_shared_weights_are_the_same_weights_for_every_sample():
    cu_seqlens = offsets([3, 0, 9, 65])
    inputs = tokens(79, 2, 4), tokens(6, 2, 4, seed=1), tokens(6, 2, 3, seed=2)  # two rows of slack

    shared = with_gradients(lambda q, k, v: pffn(q, k, v, cu_seqlens, **SCALES), *inputs)

    def repeated(q, k, v):
        return pffn(q, k.expand(4, -1, -1, -1), v.expand(4, -1, -1, -1), cu_seqlens, **SCALES)

    assert_close(shared, with_gradients(repeated, *inputs))


@pytest.mark.parametrize("piece", [1, 20, 77, 100])
def test_pieces_of_a_batch_with_shared_keys_cover_it(piece):
    """What a GPU does, where one piece would leave it idle."""
    query, key, value = tokens(79, 2, 4), tokens(6, 2, 4, seed=1), tokens(6, 2, 3, seed=2)
    cu_seqlens, longest = _cut(79, offsets([3, 0, 9, 65]), piece)
    assert cu_seqlens.diff().sum() == 77
    assert cu_seqlens.diff().max() <= longest == piece
    copies = (x.expand(len(cu_seqlens) - 1, *x.shape) for x in (key, value))
    assert_close([pffn(query, *copies, cu_seqlens, longest)], [pffn(query, key, value, offsets([3, 0, 9, 65]))])


def test_gradcheck():
    query, key, value = tokens(5, 2, 3), tokens(3, 2, 1, 3, seed=1), tokens(3, 2, 1, 2, seed=2)
    inputs = [x.requires_grad_() for x in (query, key, value)]
    assert torch.autograd.gradcheck(lambda q, k, v: pffn(q, k, v, offsets([4, 0, 1]), activation="silu"), inputs)


def test_keys_that_are_neither_per_sample_nor_shared_are_named():
    query = tokens(5, 2, 4)
    with pytest.raises(ValueError, match="key and value must be .* with B=2"):
        pffn(query, tokens(3, 6, 2, 4), tokens(3, 6, 2, 4), offsets([4, 1]))
