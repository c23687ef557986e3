"""What holds for every tensor: symmetry, shift invariance, idempotence, error bounds, independence of blocks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gem.precision.mx import (
    FORMATS,
    MXBlocks,
    hadamard_matrix,
    mx_dequantize,
    mx_quantize,
    mx_quantize_2d,
    mx_requantize,
    random_hadamard,
    scale_bytes,
)

MODES = ["rceil", "floor", "ceil", "even"]
seeds = st.integers(0, 2**31)
spreads = st.sampled_from([0.0, 1.0, 6.0])


def sample(seed: int, rows: int, columns: int, spread: float = 0.0) -> torch.Tensor:
    """Gaussian numbers, each times ``e ** (spread * N(0, 1))``."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    return x * (spread * torch.randn(rows, columns, generator=generator)).exp()


def same(a: MXBlocks, b: MXBlocks) -> bool:
    return torch.equal(a.data, b.data) and torch.equal(a.scale, b.scale)


def decibel(exact: torch.Tensor, approximate: torch.Tensor) -> float:
    return 10 * math.log10(exact.double().square().sum() / (exact.double() - approximate.double()).square().sum())


@settings(max_examples=20, deadline=None)
@given(seed=seeds, spread=spreads, mode=st.sampled_from(MODES), fmt=st.sampled_from(["e4m3", "e5m2"]))
def test_negation(seed: int, spread: float, mode: str, fmt: str) -> None:
    x = sample(seed, 4, 96, spread)
    positive, negative = mx_quantize(x, fmt=fmt, scale=mode), mx_quantize(-x, fmt=fmt, scale=mode)
    assert torch.equal(positive.scale, negative.scale)
    assert torch.equal(positive.data ^ 0x80, negative.data)


@settings(max_examples=20, deadline=None)
@given(seed=seeds, shift=st.integers(-80, 80), mode=st.sampled_from(MODES))
def test_powers_of_two_move_only_the_scale(seed: int, shift: int, mode: str) -> None:
    x = sample(seed, 4, 64)
    blocks, shifted = mx_quantize(x, scale=mode), mx_quantize(x * 2.0**shift, scale=mode)
    assert torch.equal(blocks.data, shifted.data)
    assert torch.equal(blocks.scale.int() + shift, shifted.scale.int())


@settings(max_examples=20, deadline=None)
@given(seed=seeds, spread=spreads)
def test_permutation_inside_a_block(seed: int, spread: float) -> None:
    x = sample(seed, 3, 32, spread)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(seed))
    blocks, permuted = mx_quantize(x), mx_quantize(x[:, order])
    assert torch.equal(blocks.scale, permuted.scale)
    assert torch.equal(blocks.data[:, order], permuted.data)


@settings(max_examples=20, deadline=None)
@given(seed=seeds, spread=spreads, fmt=st.sampled_from(["e4m3", "e5m2"]))
def test_idempotence(seed: int, spread: float, fmt: str) -> None:
    """Of the numbers: a maximum just above 1.75 times a power of two may become it, and fit the next smaller scale."""
    values = mx_dequantize(mx_quantize(sample(seed, 4, 96, spread), fmt=fmt))
    again = mx_quantize(values, fmt=fmt)
    assert torch.equal(mx_dequantize(again), values)
    assert same(mx_quantize(mx_dequantize(again), fmt=fmt), again)
    assert same(mx_quantize(mx_dequantize(again, torch.bfloat16), fmt=fmt), again)


@settings(max_examples=20, deadline=None)
@given(seed=seeds, spread=spreads, mode=st.sampled_from(["rceil", "ceil"]))
def test_error_bound(seed: int, spread: float, mode: str) -> None:
    """Never saturates; 1/17 of an element that is no subnormal code."""
    x = sample(seed, 4, 96, spread)
    error = (mx_dequantize(mx_quantize(x, scale=mode)) - x).abs()
    largest = x.abs().unflatten(1, (3, 32)).amax(2).repeat_interleave(32, 1)
    normal = x.abs() > largest * 2.0**-13
    assert (error[normal] <= x.abs()[normal] / 17 * (1 + 1e-6)).all()
    assert (error <= largest * 2.0**-4).all()


@settings(max_examples=20, deadline=None)
@given(seed=seeds, rows=st.integers(0, 70), columns=st.integers(1, 70), axis=st.integers(0, 1))
def test_any_size(seed: int, rows: int, columns: int, axis: int) -> None:
    x = sample(seed, rows, columns)
    blocks = mx_quantize(x, axis)
    other, length = x.shape[1 - axis], x.shape[axis]
    assert blocks.data.shape == (other, -(-length // 32) * 32)
    assert blocks.scale.shape == (other, -(-length // 32))
    assert not blocks.data[:, length:].any()
    back = mx_dequantize(blocks)
    assert back.shape == x.shape
    assert ((back - x).abs() <= x.abs() / 17 + 1e-3).all()
    square = mx_quantize_2d(x)
    assert square.scale.shape == (-(-rows // 32), -(-columns // 32))
    assert mx_dequantize(square).shape == x.shape


@settings(max_examples=20, deadline=None)
@given(seed=seeds, poison=st.sampled_from([math.inf, -math.inf, math.nan]), place=st.integers(0, 127))
def test_poison_stays_in_its_block(seed: int, poison: float, place: int) -> None:
    x = sample(seed, 1, 128)
    clean = mx_dequantize(mx_quantize(x))
    x[0, place] = poison
    values = mx_dequantize(mx_quantize(x))
    block = place // 32
    inside = torch.arange(128) // 32 == block
    assert values[0, inside].isnan().all()
    assert torch.equal(values[0, ~inside], clean[0, ~inside])


@settings(max_examples=10, deadline=None)
@given(seed=seeds, spread=spreads)
def test_square_blocks_transpose(seed: int, spread: float) -> None:
    x = sample(seed, 70, 100, spread)
    blocks = mx_quantize_2d(x)
    assert same(mx_quantize_2d(x.T.contiguous()), blocks.transposed())
    assert torch.equal(mx_dequantize(blocks.as_rows()), mx_dequantize(blocks))
    assert torch.equal(mx_dequantize(blocks.transposed()), mx_dequantize(blocks).T)


def test_rows_are_independent() -> None:
    x = sample(0, 8, 64)
    before = mx_quantize(x)
    x[7] *= 100
    after = mx_quantize(x)
    assert torch.equal(before.data[:7], after.data[:7])
    assert torch.equal(before.scale[:7], after.scale[:7])


def test_every_mantissa_rounds_up_as_a_division_does() -> None:
    """rceil equals the next power of two of the float32 quotient, for every mantissa, and at the smallest scales."""
    mantissa = torch.arange(2**23, dtype=torch.int32)
    for fmt, element in FORMATS.items():
        for exponent in (1, element.max_exponent, element.max_exponent + 1, 130, 254):
            largest = mantissa | (exponent << 23)
            quotient = (largest.view(torch.float32) / element.largest).view(torch.int32)
            above = torch.where(quotient < 0x800000, quotient > 0x400000, (quotient & 0x7FFFFF) != 0)
            byte = (quotient >> 23) + above.to(torch.int32)
            assert torch.equal(scale_bytes(largest, fmt, "rceil"), byte), (fmt, exponent)


def test_rounding_down_scales_is_biased() -> None:
    """Why scales round up: the format's own rule makes block maxima smaller, and with them every prediction."""
    x = torch.rand(4096, 256, generator=torch.Generator().manual_seed(0))
    bias = {mode: float((mx_dequantize(mx_quantize(x, scale=mode)) - x).mean() / x.mean()) for mode in MODES}
    assert bias["floor"] < -0.01
    assert abs(bias["rceil"]) < 1e-4


@pytest.mark.parametrize("kind", ["gaussian", "rows", "outliers", "decades"])
def test_blocking_again_along_the_other_axis_is_almost_lossless(kind: str) -> None:
    x = sample(0, 1024, 256)
    if kind == "rows":
        x *= (1.5 * sample(1, 1024, 1)).exp()
    elif kind == "outliers":
        x = torch.where(torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 1e-3, x * 100, x)
    elif kind == "decades":
        x *= 10 ** (6 * torch.rand(x.shape, generator=torch.Generator().manual_seed(1)))
    rows = mx_quantize(x)
    columns = mx_requantize(rows, 0)
    assert decibel(mx_dequantize(rows), mx_dequantize(columns)) >= 100
    direct = decibel(x, mx_dequantize(mx_quantize(x, 0)))
    assert decibel(x, mx_dequantize(columns)) == pytest.approx(direct, abs=0.05)
    assert direct == pytest.approx(31.5, abs=0.8)


def test_saturating_infinity() -> None:
    x = torch.ones(32)
    x[0] = -math.inf
    blocks = mx_quantize(x, inf="saturate")
    assert blocks.scale.tolist() == [254]
    assert blocks.data.tolist() == [0xFE] + [0] * 31
    x[1] = math.nan
    assert mx_quantize(x, inf="saturate").scale.tolist() == [255]


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_stochastic_rounding(fmt: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = sample(0, 1, 32, 2.0)
    many = mx_quantize(x.expand(20_000, 32), fmt=fmt, rounding="stochastic", generator=generator)
    values = mx_dequantize(many)
    spread = values.std(0) / 20_000**0.5
    assert ((values.mean(0) - x[0]).abs() <= 5 * spread + 1e-7).all()
    assert all(len(column.unique()) <= 2 for column in values.T)
    exact = mx_dequantize(mx_quantize(x, fmt=fmt)).expand(20_000, 32)
    again = mx_quantize(exact, fmt=fmt, rounding="stochastic", generator=generator)
    assert torch.equal(mx_dequantize(again), exact)  # what is representable stays
    poisoned = mx_quantize(torch.full((32,), math.nan), fmt=fmt, rounding="stochastic")
    assert poisoned.data.tolist() == [0x7F] * 32


@pytest.mark.parametrize("axis", [0, 1])
def test_random_hadamard(axis: int) -> None:
    matrix = hadamard_matrix(seed=3)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(32))
    x, y = sample(0, 64, 64), sample(1, 64, 64)
    rotated = random_hadamard(x, matrix, axis)
    torch.testing.assert_close(random_hadamard(rotated, matrix, axis, inverse=True), x)
    other = random_hadamard(y, matrix, axis)
    product = rotated.T @ other if axis == 0 else rotated @ other.T
    torch.testing.assert_close(product, x.T @ y if axis == 0 else x @ y.T, atol=1e-4, rtol=1e-4)
    outlier = torch.zeros(1, 32)
    outlier[0, 5] = 1000.0
    assert random_hadamard(outlier, matrix).abs().max() < 200
    assert not torch.equal(hadamard_matrix(4), matrix)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mx_quantize(torch.zeros(32, dtype=torch.float64)), "cast it"),
        (lambda: mx_quantize(torch.zeros(())), "at least 1 dimension"),
        (lambda: mx_quantize_2d(torch.zeros(32)), "at least 2 dimension"),
        (lambda: mx_quantize(torch.zeros(2, 32), axis=2), "axis 2 is out of range"),
        (lambda: mx_quantize(torch.zeros(32), fmt="e3m4"), "'e3m4' is unknown"),
        (lambda: mx_quantize(torch.zeros(32), scale="nearest"), "'nearest' is unknown"),
        (lambda: mx_quantize(torch.zeros(32), inf="ignore"), "'poison' or 'saturate'"),
        (lambda: mx_quantize(torch.zeros(32)).transposed(), "mx_requantize"),
        (lambda: random_hadamard(torch.zeros(33), hadamard_matrix()), "multiple of 32"),
    ],
)
def test_errors(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
