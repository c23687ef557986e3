"""The Triton kernels of block attention and rotation, run by Triton's interpreter. Run by test_block_interpreter.py.

In float32: the interpreter's half precision products are wrong.
"""

import pytest
import torch
from block_cases import CASES, exactly, make_case, run_case
from kernel_cases import assert_close, offsets, qkv, tokens, with_gradients

from lightning_gem.kernels import block_attention
from lightning_gem.kernels.block import triton_kernels
from lightning_gem.kernels.launch import interpreted
from lightning_gem.kernels.rope import triton_kernels as rotary_kernels
from lightning_gem.kernels.rope.reference import rotary_halves


def test_this_is_the_interpreter():
    assert interpreted()


@pytest.mark.parametrize("name", CASES)
def test_case_equals_the_reference(name):
    inputs, grad, cu_seqlens, options = make_case(name, torch.float32)
    actual = run_case(inputs, grad, cu_seqlens, options, "auto")
    expected = exactly(name)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(
            a.double(), e, rtol=1e-4, atol=2e-5 * max(1.0, float(e.abs().max() if e.numel() else 0))
        )
        assert (a[len(a) - 3 :] == 0).all()


def test_every_row_is_written():
    torch.use_deterministic_algorithms(True)  # new memory is NaN
    try:
        actual = run_case(*make_case("blocks of 64", torch.float32), "triton")
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(x.isfinite().all() for x in actual)


@pytest.mark.parametrize("step", [64, 48])
def test_tiles_cover_every_row_once(step):
    lengths = [0, 0, 5, 130, 0, 64, 1, 63, 65, 0]
    for sequences in range(len(lengths) + 1):
        cu_seqlens = offsets(lengths[:sequences], torch.int32)
        total, slack = int(cu_seqlens[-1]), 100
        tiles = triton_kernels.list_tiles(cu_seqlens, total + slack, step)
        rows = torch.cat([torch.arange(first, first + abs(size)) for first, size in tiles.tolist()])
        assert rows.tolist() == list(range(total + slack))
        first, size = tiles[tiles[:, 1] > 0].unbind(1)
        sequence = torch.searchsorted(cu_seqlens.long(), first, right=True) - 1
        assert ((first - cu_seqlens[sequence]) % step == 0).all()
        assert (first + size <= cu_seqlens[sequence + 1]).all()
        assert size.sum() == total


def test_slices_of_one_fused_tensor_and_unusual_gradients():
    fused = tokens(7, 3, 40, dtype=torch.float32)
    views = [part[..., :32] for part in fused.split(1, dim=1)]
    cu_seqlens = offsets([7])
    grad = tokens(32, 1, 7, dtype=torch.float32).permute(2, 1, 0)
    for strange in (grad, grad[:1, :, :1].expand(7, 1, 32)):  # transposed, and the strides of sum()
        actual = with_gradients(lambda q, k, v: block_attention(q, k, v, cu_seqlens), *views, grad=strange)
        dense = [x.contiguous() for x in views]
        expected = with_gradients(
            lambda q, k, v: block_attention(q, k, v, cu_seqlens, backend="reference"), *dense, grad=strange.contiguous()
        )
        assert_close(actual, expected, tolerance=1e-4)


def test_sequences_never_read_each_other():
    cu_seqlens = offsets([9, 3, 4])
    inputs = qkv(16, 16, heads=1, kv_heads=1, dim=32, value_dim=32, dtype=torch.float32)
    changed = [x.clone() for x in inputs]
    for x in changed:
        x[9:12] = torch.nan
    kept = [*range(9), *range(12, 16)]
    before = with_gradients(lambda q, k, v: block_attention(q, k, v, cu_seqlens), *inputs)
    after = with_gradients(lambda q, k, v: block_attention(q, k, v, cu_seqlens), *changed)
    assert all(torch.equal(b[kept], a[kept]) for b, a in zip(before, after, strict=True))


def test_large_scores_stay_finite():
    inputs = [1e3 * x for x in qkv(20, 20, heads=1, kv_heads=1, dim=32, value_dim=32, dtype=torch.float32)]
    for activation in (None, "silu", "gelu_tanh", "gelu"):
        results = with_gradients(
            lambda q, k, v: block_attention(q, k, v, offsets([20]), activation=activation),  # noqa: B023
            *inputs,
        )
        assert all(x.isfinite().all() for x in results)


@pytest.mark.parametrize(("rows", "heads", "dim"), [(37, 2, 12), (1, 1, 2), (0, 2, 8)])
def test_rotation(rows, heads, dim):
    fused = tokens(rows, 2 * heads, dim, dtype=torch.float32)
    angle = tokens(rows, dim // 2, seed=1, dtype=torch.float32)
    for x in (fused[:, heads:], tokens(dim, heads, rows, dtype=torch.float32).permute(2, 1, 0)):
        for inverse in (False, True):
            actual = rotary_kernels.rotate(x, angle.cos(), angle.sin(), inverse)
            sin = -angle.sin() if inverse else angle.sin()
            torch.testing.assert_close(actual, rotary_halves(x, angle.cos(), sin))
            assert actual.is_contiguous()


def test_rotation_leaves_slack_unread():
    x, angle = tokens(9, 2, 8, dtype=torch.float32), tokens(9, 4, seed=1, dtype=torch.float32)
    expected = rotary_halves(x, angle.cos(), angle.sin())
    x[7:], angle[7:] = torch.nan, torch.nan
    actual = rotary_kernels.rotate(x, angle.cos(), angle.sin(), False, offsets([3, 0, 4]))
    torch.testing.assert_close(actual[:7], expected[:7])
    assert (actual[7:] == 0).all()


def test_rotation_of_rows_that_are_not_aligned():
    fused = tokens(7, 3, 36, dtype=torch.float32)
    query, key, value = (part[..., 3:35] for part in fused.split(1, dim=1))
    angle = tokens(7, 17, seed=1, dtype=torch.float32)[:, 1:]
    inputs = (query, key, value)
    options = {"rotary": (angle.cos(), angle.sin()), "rotate_value": True}
    actual = with_gradients(lambda q, k, v: block_attention(q, k, v, offsets([7]), **options), *inputs)
    expected = with_gradients(
        lambda q, k, v: block_attention(q, k, v, offsets([7]), backend="reference", **options), *inputs
    )
    assert_close(actual, expected, tolerance=1e-4)
