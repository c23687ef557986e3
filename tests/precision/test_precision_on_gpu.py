"""A GPU gives the codes of a CPU: eager, compiled and in the Triton kernel; emulated products agree."""

import math

import pytest
import torch

from lightning_gem.precision.linear import low_precision_linear
from lightning_gem.precision.mx import mx_dequantize, mx_quantize, mx_quantize_2d
from tests.precision.test_vectors import VECTORS, vector_block

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def inputs(fmt: str) -> torch.Tensor:
    """All vectors of a format, and numbers of many sizes."""
    vectors = torch.stack([vector_block(vector) for vector in VECTORS if vector["fmt"] == fmt])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 32, generator=generator) * (6 * torch.randn(1000, 32, generator=generator)).exp()
    return torch.cat([vectors, x]).view(-1, 32).repeat(1, 3)


@pytest.mark.parametrize("mode", ["rceil", "floor", "ceil", "even"])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_codes(fmt: str, mode: str) -> None:
    x = inputs(fmt)
    for axis in (0, 1):
        expected = mx_quantize(x, axis, fmt, mode)
        for function in (mx_quantize, torch.compile(mx_quantize, fullgraph=True)):
            actual = function(x.cuda(), axis, fmt, mode)
            assert torch.equal(actual.data.cpu(), expected.data)
            assert torch.equal(actual.scale.cpu(), expected.scale)
        decoded = mx_dequantize(actual).cpu().view(torch.int32)
        reference = mx_dequantize(expected).view(torch.int32)
        assert torch.equal(decoded[~expected_nan(reference)], reference[~expected_nan(reference)])


def expected_nan(bits: torch.Tensor) -> torch.Tensor:
    return (bits & 0x7FFFFFFF) > 0x7F800000


@pytest.mark.parametrize("mode", ["rceil", "floor", "ceil", "even"])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_triton_kernel(fmt: str, mode: str) -> None:
    from lightning_gem.precision.triton_quantize import mx_quantize_triton

    x = inputs(fmt)
    out = mx_quantize_triton(x.cuda(), rows=True, columns=True, square=True, fmt=fmt, scale=mode)
    expected = {
        "rows": mx_quantize(x, 1, fmt, mode),
        "columns": mx_quantize(x, 0, fmt, mode),
        "square": mx_quantize_2d(x, fmt, mode),
    }
    for kind, blocks in expected.items():
        assert torch.equal(out[kind].data.cpu(), blocks.data), kind
        assert torch.equal(out[kind].scale.cpu(), blocks.scale), kind


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_compact"])
def test_linear(recipe: str) -> None:
    x, weight = torch.randn(300, 96, dtype=torch.bfloat16), torch.randn(64, 96, dtype=torch.bfloat16)
    grad = torch.randn(300, 64, dtype=torch.bfloat16)
    results = []
    for device in ("cpu", "cuda"):
        leaves = [t.to(device).requires_grad_() for t in (x, weight)]
        out = low_precision_linear(*leaves, None, recipe)
        results.append([out, *torch.autograd.grad(out, leaves, grad.to(device))])
    for on_cpu, on_gpu in zip(*results, strict=True):
        error = (on_gpu.cpu().double() - on_cpu.double()).square().sum()
        assert error == 0 or 10 * math.log10(on_cpu.double().square().sum() / error) > 40
