"""Row-scaled FP8 kernels in Triton's interpreter: run by ``test_triton_quantize.py``, in a process of its own."""

import pytest
import torch
from torch.nn import functional as F

from lightning_gem.precision import triton_rows
from lightning_gem.precision.scaled import quantize_rows, token_scales


def numbers(rows: int, dim: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, dim, generator=generator) * torch.randn(rows, 1, generator=generator).mul(3).exp()
    if rows > 5:
        x[1] = 0.0
        x[2, 0], x[3, 1 % dim], x[4] = float("nan"), float("inf"), x[4] * 1e-38
    return x


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", [(37, 70), (16, 32), (1, 33), (130, 64)])
def test_rows(shape: tuple[int, int], fmt: str) -> None:
    x = numbers(*shape)
    expected = quantize_rows(x, fmt)
    codes, scales = triton_rows.quantize(x, None, None, None, 0.0, "identity", fmt)
    assert same(codes, expected.data)
    assert torch.equal(scales.nan_to_num(-1), expected.scale.nan_to_num(-1))
    codes, scales, transposed = triton_rows.quantize_both(x, fmt)
    assert same(codes, expected.data)
    assert torch.equal(scales.nan_to_num(-1), expected.scale.nan_to_num(-1))
    assert transposed.shape == (shape[1], -(-shape[0] // 16) * 16)
    assert same(transposed[:, : shape[0]], expected.data.mT.contiguous())
    assert not transposed[:, shape[0] :].view(torch.uint8).any()


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_shift(fmt: str) -> None:
    x, grad = numbers(37, 70).nan_to_num(1.0, 1.0, 1.0), numbers(37, 20, 1).nan_to_num(1.0, 1.0, 1.0)
    a, g = quantize_rows(x, fmt), quantize_rows(grad)
    ratio, _ = token_scales(a.scale, g.scale)
    expected = (a.data.float() * ratio).to(a.data.dtype)
    out = triton_rows.shift_transposed(a.data, ratio, fmt)
    assert torch.equal(out[:, :37].float(), expected.mT.float())
    assert not out[:, 37:].view(torch.uint8).any()
    ratio[5] = torch.nan
    assert triton_rows.shift_transposed(a.data, ratio, fmt)[:, 5].isnan().all()


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("affine", [False, True])
def test_norm(norm: str, affine: bool) -> None:
    x = torch.randn(19, 70, generator=torch.Generator().manual_seed(0)) + 2
    weight, bias = (torch.randn(70), torch.randn(70)) if affine else (None, None)
    normed = F.layer_norm(x, (70,), weight, bias, 1e-5) if norm == "layer" else F.rms_norm(x, (70,), weight, 1e-5)
    if norm == "rms" and bias is not None:
        normed = normed + bias
    for activation, function in (("identity", lambda t: t), ("silu", F.silu)):
        expected = quantize_rows(function(normed))
        codes, scales = triton_rows.quantize(x, weight, bias, norm, 1e-5, activation)
        assert torch.equal(scales, expected.scale)
        # The norm's own rounding may tip a code to its neighbour.
        difference = (codes.view(torch.uint8).int() - expected.data.view(torch.uint8).int()).abs()
        assert (difference > 0).float().mean() < 0.01
        assert difference.max() <= 1
