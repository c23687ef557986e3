"""Rotary embedding against complex multiplication."""

import pytest
import torch
from kernel_cases import assert_close, tokens, with_gradients

from lightning_gem.kernels import rotary
from lightning_gem.kernels.rope.reference import rotary_complex


def test_rotary_is_complex_multiplication():
    x, angle = tokens(7, 2, 6), tokens(7, 3, seed=1)
    actual = with_gradients(lambda x: rotary(x, angle.cos(), angle.sin()), x)
    assert_close(actual, with_gradients(lambda x: rotary_complex(x, angle), x))


def test_products_depend_on_the_difference_of_positions():
    query, key, frequency = tokens(1, 1, 8), tokens(1, 1, 8, seed=1), tokens(4, seed=2)

    def product(position_q: float, position_k: float) -> torch.Tensor:
        q, k = (
            rotary(x, (position * frequency)[None].cos(), (position * frequency)[None].sin())
            for x, position in ((query, position_q), (key, position_k))
        )
        return (q * k).sum()

    assert_close([product(5.0, 2.0)], [product(13.0, 10.0)])


def test_low_precision_tokens_are_rotated_in_float32():
    x, angle = tokens(64, 2, 16, dtype=torch.bfloat16), tokens(64, 8, dtype=torch.float32)
    out = rotary(x, angle.cos(), angle.sin())
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, rotary(x.float(), angle.cos(), angle.sin()).bfloat16())


def test_gradcheck_and_no_tokens():
    cos, sin = tokens(3, 2).requires_grad_(), tokens(3, 2, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(rotary, (tokens(3, 2, 4, seed=2).requires_grad_(), cos, sin))
    assert rotary(tokens(0, 2, 4), tokens(0, 2), tokens(0, 2)).shape == (0, 2, 4)


def test_bad_shapes_are_named():
    with pytest.raises(ValueError, match="x must be .* even head_dim"):
        rotary(tokens(3, 2, 5), tokens(3, 2), tokens(3, 2))
    with pytest.raises(ValueError, match=r"sin must be .* \(3, 2\), got \(3, 4\)"):
        rotary(tokens(3, 2, 4), tokens(3, 2), tokens(3, 4))
