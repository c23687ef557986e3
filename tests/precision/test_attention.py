"""Queries and keys in MXFP8: what the ops see, gradients, and that nothing on by default looks at other tokens."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_gem.kernels import block_attention, gdpa, jagged_flash_attention, rotary
from lightning_gem.models.attention import SelfAttention
from lightning_gem.precision import convert, convert_attention
from lightning_gem.precision.attention import mx_fake_quantize, with_low_precision_scores
from lightning_gem.precision.linear import low_precision_linear
from lightning_gem.precision.mx import mx_dequantize, mx_quantize
from lightning_gem.precision.norm_linear import low_precision_norm_linear
from lightning_gem.precision.recipes import RECIPES

LENGTHS = [5, 0, 9, 20]
CU = torch.tensor([0, 5, 5, 14, 34], dtype=torch.int32)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def low(x: torch.Tensor) -> torch.Tensor:
    return mx_dequantize(mx_quantize(x.detach(), -1), x.dtype)


OPS: dict[str, Callable[..., Any]] = {
    "jfa": partial(jagged_flash_attention, causal=True),
    "gdpa": partial(gdpa, causal=True),
    "block": partial(block_attention, block_size=4, causal=True),
}


def call(op: Callable[..., Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor) -> Any:
    return op(q, k, v, cu)


def test_fake_quantisation() -> None:
    x = randn(7, 2, 40).requires_grad_()
    out = mx_fake_quantize(x)
    assert torch.equal(out, low(x))
    grad = randn(7, 2, 40, seed=1)
    out.backward(grad)
    assert torch.equal(x.grad, grad)
    assert torch.equal(mx_fake_quantize(x.bfloat16()).float(), mx_dequantize(mx_quantize(x.bfloat16())))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dim", [32, 24])
def test_scores_alone_are_low_precision(name: str, dim: int) -> None:
    q, k, v = (randn(34, 2, dim, seed=i).requires_grad_() for i in range(3))
    out = call(with_low_precision_scores(OPS[name]), q, k, v, CU)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    lq, lk = (low(t).requires_grad_() for t in (q, k))
    expected = call(OPS[name], lq, lk, v, CU)
    assert torch.equal(out, expected)
    for a, e in zip(grads, torch.autograd.grad(expected.square().sum(), (lq, lk, v)), strict=True):
        assert torch.equal(a, e)
    exact = call(OPS[name], q, k, v, CU)
    assert 0 < (out - exact).norm() / exact.norm() < 0.1


def test_rotation_comes_first() -> None:
    q, k, v = (randn(34, 2, 32, seed=i) for i in range(3))
    angles = (randn(34, 16, seed=4).cos(), randn(34, 16, seed=4).sin())
    out = with_low_precision_scores(block_attention)(q, k, v, CU, block_size=4, rotary=angles, rotate_value=True)
    rotated = [rotary(t, *angles) for t in (q, k, v)]
    assert torch.equal(out, block_attention(low(rotated[0]), low(rotated[1]), rotated[2], CU, block_size=4))


@pytest.mark.parametrize("name", OPS)
def test_attention_sees_neither_the_future_nor_other_requests(name: str) -> None:
    op = with_low_precision_scores(OPS[name])
    q, k, v = (randn(34, 2, 32, seed=i) for i in range(3))
    clean = call(op, q, k, v, CU)
    for tensor in (q, k, v):
        changed = tensor.clone()
        changed[20] *= 1e4  # the seventh token of the last request
        out = call(op, *(changed if t is tensor else t for t in (q, k, v)), CU)
        assert torch.equal(out[:20], clean[:20])
    alone = call(op, q[5:14], k[5:14], v[5:14], torch.tensor([0, 9], dtype=torch.int32))
    torch.testing.assert_close(alone, clean[5:14], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "fp8_tensorwise"])
def test_layers_see_no_other_row(recipe: str) -> None:
    """Every recipe but the one that is for comparisons, forward."""
    weight, x = randn(64, 64, seed=1), randn(40, 64)
    changed = x.clone()
    changed[39] *= 1e4
    functions = [lambda t: low_precision_linear(t, weight, None, recipe)]
    if RECIPES[recipe].kind in ("row", "auto"):
        functions.append(lambda t: low_precision_norm_linear(t, weight, None, recipe))
    for function in functions:
        assert torch.equal(function(changed)[:39], function(x)[:39])
        torch.testing.assert_close(function(x[:7]), function(x)[:7], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("attention", ["block", "window", "full"])
def test_self_attention(attention: Any) -> None:
    torch.manual_seed(0)
    layer = nn.ModuleDict({"a": SelfAttention(64, 2, attention, 4, True)})
    x, angles = randn(34, 64), rotary_angles_of(34)
    exact = layer["a"](x, CU, 20, angles)
    convert(layer)
    linear_only = layer["a"](x, CU, 20, angles)
    assert convert_attention(layer) == ["a"]
    both = layer["a"](x, CU, 20, angles)
    for first, second in ((exact, linear_only), (linear_only, both)):
        assert 0 < (first - second).norm() / first.norm() < 0.1
    changed = x.clone()
    changed[20] *= 1e3
    assert torch.equal(layer["a"](changed, CU, 20, angles)[:14], both[:14])
    with pytest.raises(ValueError, match="no attention in scope"):
        convert_attention(nn.Linear(32, 32))


def rotary_angles_of(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = randn(tokens, 16, seed=9)
    return angle.cos(), angle.sin()
