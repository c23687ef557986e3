"""A GPU gives the codes of a CPU: eager, compiled and in the Triton kernels; products agree with the emulation."""

import math
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch.nn import functional as F

from lightning_gem.precision import dispatch
from lightning_gem.precision.linear import low_precision_linear
from lightning_gem.precision.matmul import native_rows
from lightning_gem.precision.mx import mx_dequantize, mx_quantize, mx_quantize_2d
from lightning_gem.precision.norm_linear import low_precision_norm_linear
from lightning_gem.precision.scaled import quantize_rows, token_scales
from tests.precision.test_vectors import VECTORS, vector_block

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
hopper_only = pytest.mark.skipif(
    not torch.cuda.is_available() or not native_rows(torch.device("cuda")), reason="needs compute capability 9.0"
)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def inputs(fmt: str) -> torch.Tensor:
    """All vectors of a format, and numbers of many sizes."""
    vectors = torch.stack([vector_block(vector) for vector in VECTORS if vector["fmt"] == fmt])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 32, generator=generator) * (6 * torch.randn(1000, 32, generator=generator)).exp()
    return torch.cat([vectors, x]).view(-1, 32).repeat(1, 3)


def is_nan(bits: torch.Tensor) -> torch.Tensor:
    return (bits & 0x7FFFFFFF) > 0x7F800000


def decibel(exact: torch.Tensor, approximate: torch.Tensor) -> float:
    exact, approximate = exact.detach().double().cpu(), approximate.detach().double().cpu()
    error = (exact - approximate).square().sum()
    return math.inf if error == 0 else 10 * math.log10(exact.square().sum() / error)


@pytest.mark.parametrize("mode", ["rceil", "floor", "ceil", "even"])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_codes(fmt: Any, mode: Any) -> None:
    x = inputs(fmt)
    functions = [mx_quantize]
    if (fmt, mode) in (("e4m3", "rceil"), ("e4m3", "floor"), ("e5m2", "rceil")):
        torch._dynamo.reset()
        functions.append(torch.compile(mx_quantize, fullgraph=True, dynamic=False))
    for axis in (0, 1):
        expected = mx_quantize(x, axis, fmt, mode)
        for function in functions[: 2 if axis == 1 else 1]:
            actual = function(x.cuda(), axis, fmt, mode)
            assert torch.equal(actual.data.cpu(), expected.data)
            assert torch.equal(actual.scale.cpu(), expected.scale)
        decoded = mx_dequantize(actual).cpu().view(torch.int32)
        reference = mx_dequantize(expected).view(torch.int32)
        assert torch.equal(decoded[~is_nan(reference)], reference[~is_nan(reference)])


@pytest.mark.parametrize("mode", ["rceil", "floor", "ceil", "even"])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_triton_kernel(fmt: Any, mode: Any) -> None:
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


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_compact", "fp8_rowwise", "fp8_forward", "fp8_blockwise"])
def test_linear(recipe: str) -> None:
    x, weight = torch.randn(300, 96, dtype=torch.bfloat16), torch.randn(64, 96, dtype=torch.bfloat16)
    grad, bias = torch.randn(300, 64, dtype=torch.bfloat16), torch.randn(64)
    results = []
    for device in ("cpu", "cuda"):
        leaves = [t.to(device).requires_grad_() for t in (x, weight, bias)]
        out = low_precision_linear(*leaves, recipe)
        results.append([out, *torch.autograd.grad(out, leaves, grad.to(device))])
    for on_cpu, on_gpu in zip(*results, strict=True):
        assert decibel(on_cpu, on_gpu) > 40


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", [(1000, 96), (37, 70), (513, 1536), (4096, 512)])
def test_row_kernels(fmt: Any, shape: tuple[int, int]) -> None:
    from lightning_gem.precision import triton_rows

    x = torch.randn(shape) * (3 * torch.randn(shape[0], 1)).exp()
    x[3, 5], x[7, 9], x[9] = math.nan, math.inf, 0.0
    expected = quantize_rows(x, fmt)
    codes, scales = triton_rows.quantize(x.cuda(), None, None, None, 0.0, "identity", fmt)
    both, both_scales, transposed = triton_rows.quantize_both(x.cuda(), fmt)
    wanted = expected.data.view(torch.uint8)
    for out, scale in ((codes, scales), (both, both_scales)):
        assert torch.equal(out.view(torch.uint8).cpu(), wanted)
        assert torch.equal(scale.cpu().nan_to_num(-1), expected.scale.nan_to_num(-1))
    padded = F.pad(wanted.mT, (0, -shape[0] % 16))
    assert torch.equal(transposed.view(torch.uint8).cpu(), padded)
    a, g = quantize_rows(x.nan_to_num(1.0, 1.0, 1.0), fmt), quantize_rows(torch.randn(shape))
    ratio, _ = token_scales(a.scale, g.scale)
    shifted = triton_rows.shift_transposed(a.data.cuda(), ratio.cuda(), fmt)
    assert torch.equal(shifted[:, : shape[0]].float().cpu(), (a.data.float() * ratio).to(a.data.dtype).mT.float())


@hopper_only
@pytest.mark.parametrize("shape", [(1000, 512, 1536), (37, 80, 48), (4096, 1024, 256), (300, 96, 20)])
def test_native_rows_agree_with_the_emulation(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    x, weight, grad = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((m, k), (n, k), (m, n)))
    x.requires_grad_()
    weight.requires_grad_()
    results = []
    for backend in ("emulated", "native"):
        out = low_precision_linear(x, weight, None, "fp8_rowwise", backend)  # type: ignore[arg-type]
        results.append([out, *torch.autograd.grad(out, (x, weight), grad)])
    for emulated, native in zip(*results, strict=True):
        assert emulated.dtype == native.dtype
        assert decibel(emulated, native) > 40


@hopper_only
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("recipe", ["fp8_rowwise", "fp8_forward"])
def test_norm_linear(recipe: str, norm: Any) -> None:
    leaves = [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((2000, 512), (256, 512), (512,), (512,))]
    x, weight, scale, shift = (t.requires_grad_() for t in leaves)
    affine = [scale, shift if norm == "layer" else None]
    grad = torch.randn(2000, 256, device="cuda", dtype=torch.bfloat16)
    inputs = [x, weight, *(t for t in affine if t is not None)]
    out = low_precision_norm_linear(
        x, weight, None, recipe, norm=norm, norm_weight=affine[0], norm_bias=affine[1], activation="silu"
    )
    actual = [out, *torch.autograd.grad(out, inputs, grad)]
    shape = (512,)
    normed = F.rms_norm(x, shape, scale, 1e-5) if norm == "rms" else F.layer_norm(x, shape, scale, shift, 1e-5)
    exact = F.linear(F.silu(normed), weight)
    for a, e in zip(actual, [exact, *torch.autograd.grad(exact, inputs, grad)], strict=True):
        assert decibel(e, a) > 24


@hopper_only
def test_compiled() -> None:
    x, weight = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((512, 128), (256, 128)))
    x.requires_grad_()
    torch._dynamo.reset()
    results = []
    for function in (low_precision_linear, torch.compile(low_precision_linear, fullgraph=True, dynamic=False)):
        out = function(x, weight, None, "fp8_rowwise")
        results.append([out, *torch.autograd.grad(out.sum(), x)])
    for a, b in zip(*results, strict=True):
        assert decibel(a, b) > 50


@hopper_only
@pytest.mark.parametrize("shape", [(1000, 512, 1536), (128, 96, 256), (130, 4096, 520), (77, 128, 64)])
def test_gluon_gemm(shape: tuple[int, int, int]) -> None:
    from lightning_gem.precision import gluon_scaled

    m, k, n = shape
    a, b = (torch.randn(s, device="cuda").to(torch.float8_e4m3fn) for s in ((m, k), (n, k)))
    scales = [torch.rand(s, device="cuda") + 0.5 for s in (m, n)]
    exact = a.float() @ b.float().t()
    out = gluon_scaled.matmul_rows(a, b, *scales)
    assert decibel(exact * scales[0][:, None] * scales[1], out) > 40
    assert decibel(exact, gluon_scaled.matmul_parts(a, b, 512)) > 40


@hopper_only
def test_auto_measures() -> None:
    table = dispatch.measure([(64, 64)], torch.device("cuda"), rows=(16_384,))
    assert list(table) == ["16384x64->64"]
    assert set(table.values()) <= {"bf16", *dispatch.CANDIDATES}
