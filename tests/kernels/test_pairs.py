"""Pair counts against counting the pairs that the rules show."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import QUICK

from lightning_gem.kernels import pairs
from lightning_gem.kernels.masking import visible_pairs

LENGTHS = st.lists(st.integers(0, 70), max_size=6)


def count(lengths: list[int], causal: bool, window_size: tuple[int, int]) -> int:
    return sum(int(visible_pairs(t, t, causal, window_size).sum()) for t in lengths)


@QUICK
@given(lengths=LENGTHS, window=st.integers(0, 80))
def test_self_attention_pairs_are_those_of_the_masks(lengths, window):
    assert pairs.full_pairs(lengths) == count(lengths, False, (-1, -1))
    assert pairs.causal_pairs(lengths) == count(lengths, True, (-1, -1))
    assert pairs.window_pairs(lengths, window) == count(lengths, False, (window, window))
    assert pairs.causal_window_pairs(lengths, window) == count(lengths, True, (window, -1))


@QUICK
@given(lengths=LENGTHS, block_size=st.integers(1, 80))
def test_block_pairs_are_those_of_the_definition(lengths, block_size):
    blocks = [np.arange(t) // block_size for t in lengths]
    assert pairs.block_pairs(lengths, block_size) == sum(int((b[:, None] == b).sum()) for b in blocks)


@QUICK
@given(lengths=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70)), max_size=6))
def test_cross_pairs_are_products(lengths):
    q, k = [q for q, _ in lengths], [k for _, k in lengths]
    assert pairs.cross_pairs(q, k) == sum(a * b for a, b in lengths)
    assert pairs.cross_pairs(q, 8) == 8 * sum(q)
    assert pairs.cross_pairs(8, k) == 8 * sum(k)


def test_any_container_and_no_overflow():
    expected = 1000 * 50_000**2
    for lengths in ([50_000] * 1000, np.full(1000, 50_000, np.int32), torch.full((1000,), 50_000, dtype=torch.int32)):
        result = pairs.full_pairs(lengths)
        assert result == expected
        assert type(result) is int
