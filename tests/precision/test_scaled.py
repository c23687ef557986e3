"""FP8 with a scale per row, per block and per tensor: numbers, gradients, dispatch."""

import math
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from lightning_gem.precision import dispatch
from lightning_gem.precision.linear import low_precision_linear
from lightning_gem.precision.norm_linear import low_precision_norm_linear
from lightning_gem.precision.recipes import RECIPES, PrecisionRecipe
from lightning_gem.precision.scaled import (
    dequantize,
    matmul,
    quantize_rows,
    quantize_tensor,
    quantize_tiles,
    token_scales,
    transposed,
)
from lightning_gem.precision.scaled_linear import scaled_product


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def decibel(exact: torch.Tensor, approximate: torch.Tensor) -> float:
    return 10 * math.log10(exact.double().square().sum() / (exact.double() - approximate.double()).square().sum())


def test_known_numbers() -> None:
    x = torch.tensor([[448.0, 17.0, -19.0, 2.0**-9], [449.0, 1.0, 0.0, -0.0], [0.0, 0.0, 0.0, 0.0]])
    rows = quantize_rows(x)
    assert rows.scale.flatten().tolist() == [1.0, 2.0, 2.0**-127]
    assert rows.data.view(torch.uint8)[0].tolist() == [0x7E, 0x58, 0xDA, 0x01]
    assert dequantize(rows).tolist() == [[448.0, 16.0, -20.0, 2.0**-9], [448.0, 1.0, 0.0, -0.0], [0.0] * 4]
    tiles = quantize_tiles(torch.full((130, 129), 3.0), 128, 128)
    assert tiles.scale.shape == (2, 2)
    assert tiles.data.shape == (130, 129)
    assert dequantize(tiles).eq(3.0).all()
    assert dequantize(transposed(tiles)).shape == (129, 130)
    assert quantize_tensor(torch.ones(3, 4, 5)).scale.shape == (3, 1, 1)
    poisoned = quantize_rows(torch.tensor([[1.0, math.inf], [1.0, 2.0]]))
    assert dequantize(poisoned)[0].isnan().all()
    assert dequantize(poisoned)[1].tolist() == [1.0, 2.0]


def test_scales_of_tokens_leave_the_sum_exactly() -> None:
    x, grad = leaf(64, 32).detach(), leaf(64, 48, seed=1).detach() * torch.logspace(-2, 0, 64)[:, None]
    a, g = quantize_rows(x), quantize_rows(grad)
    ratio, largest = token_scales(a.scale, g.scale)
    assert ratio.max() == 1
    moved = a.data.float() * ratio
    normal = moved.abs() >= 2**-6
    assert torch.equal(moved.to(torch.float8_e4m3fn).float()[normal], moved[normal])
    exact = dequantize(g).T @ dequantize(a)
    torch.testing.assert_close(largest * (g.data.float().T @ moved), exact)
    zero = token_scales(a.scale, torch.full_like(g.scale, 2.0**-127))
    assert all(t.isfinite().all() for t in zero)


@pytest.mark.parametrize("kind", ["row", "block", "tensor"])
@pytest.mark.parametrize("shape", [(70, 96, 64), (300, 160, 200), (1, 128, 128)])
def test_equals_explicit_formulas(kind: Any, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    x, weight, grad = leaf(m, k), leaf(n, k, seed=1), leaf(m, n, seed=2).detach()
    out = low_precision_linear(x, weight, None, PrecisionRecipe("test", kind=kind))
    out.backward(grad)
    with torch.no_grad():
        if kind == "row":
            low_x, low_w, low_g = (dequantize(quantize_rows(t)) for t in (x, weight, grad))
            columns = dequantize(quantize_rows(weight.T)).T
            ratio, largest = token_scales(quantize_rows(x).scale, quantize_rows(grad).scale)
            shifted = (quantize_rows(x).data.float() * ratio).to(torch.float8_e4m3fn).float()
            grad_weight = quantize_rows(grad).data.float().T @ (shifted * largest)
        elif kind == "block":
            low_x, low_g = (dequantize(quantize_tiles(t, 1, 128)) for t in (x, grad))
            low_w = columns = dequantize(quantize_tiles(weight, 128, 128))
            over = [dequantize(quantize_tiles(t, 1, 128)) for t in (grad.T, low_x.T)]
            grad_weight = over[0] @ over[1].T
        else:
            low_x, low_w, low_g = (dequantize(quantize_tensor(t)) for t in (x, weight, grad))
            columns, grad_weight = low_w, low_g.T @ low_x
        assert torch.equal(out, low_x @ low_w.T)
        assert torch.equal(x.grad, low_g @ columns)
        torch.testing.assert_close(weight.grad, grad_weight, rtol=1e-6, atol=1e-6)


def test_gradients_in_high_precision() -> None:
    x, weight, grad = leaf(40, 64), leaf(32, 64, seed=1), leaf(40, 32, seed=2).detach()
    low_precision_linear(x, weight, None, "fp8_forward").backward(grad)
    assert torch.equal(x.grad, grad @ weight)
    assert torch.equal(weight.grad, grad.T @ x)


def test_tokens_of_very_different_gradients() -> None:
    """What the shared scale of the weight's gradient flushes adds nothing to it."""
    x, weight = leaf(512, 64), leaf(32, 64, seed=1)
    grad = leaf(512, 32, seed=2).detach() * torch.logspace(-5, 0, 512)[:, None]
    low_precision_linear(x, weight, None, "fp8_rowwise").backward(grad)
    assert decibel(grad.T @ x, weight.grad) > 26


def test_activations_are_saved_as_fp8() -> None:
    sizes = []
    x, weight = leaf(4096, 64).detach().bfloat16().requires_grad_(), leaf(32, 64, seed=1).detach().bfloat16()
    pack = lambda t: sizes.append(t.nbytes if t.data_ptr() != weight.data_ptr() else 0) or t  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        low_precision_linear(x, weight, None, "fp8_rowwise")
    assert sum(sizes) == 4096 * 64 + 4096 * 4


def test_native_matmul_of_what_torch_runs_on_a_cpu() -> None:
    """torch's own row-scaled GEMM gives what the emulation gives."""
    x, weight = quantize_rows(leaf(48, 64).detach()), quantize_rows(leaf(32, 64, seed=1).detach())
    native = torch._scaled_mm(x.data, weight.data.t(), x.scale, weight.scale.t(), out_dtype=torch.float32)
    torch.testing.assert_close(native, matmul(x, weight, torch.float32, "emulated"), rtol=1e-4, atol=1e-4)


def test_auto_follows_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.empty(2048, 1024, dtype=torch.bfloat16)
    device = torch.device("cuda")
    assert dispatch.choose(65_536, weight, torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    try:
        assert dispatch.choose(65_536, weight, device) is None  # nothing measured
        dispatch.use({"16384x1024->2048": "bf16", "65536x1024->2048": "fp8_forward"})
        assert dispatch.choose(1_000_000, weight, device) == RECIPES["fp8_forward"]
        assert dispatch.choose(65_535, weight, device) is None
        assert dispatch.choose(100, weight, device) is None
        assert dispatch.choose(65_536, weight[:1024], device) is None
        assert dispatch.choose(65_536, weight.float(), device) is None
    finally:
        dispatch.use({})
    assert dispatch.measure([(32, 32)], torch.device("cpu")) == {}


def test_auto_is_bf16_where_nothing_is_faster() -> None:
    x, weight, bias = leaf(2, 5, 64), leaf(32, 64, seed=1), leaf(32, seed=2)
    out = low_precision_linear(x, weight, bias, "auto")
    assert torch.equal(out, torch.nn.functional.linear(x, weight, bias))


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("recipe", ["fp8_rowwise", "fp8_forward", "auto"])
def test_norm_linear(recipe: str, norm: Any, affine: bool) -> None:
    """The fused op is norm, then linear, in values and gradients."""
    activation = "silu" if affine else None
    x, weight, bias, grad = leaf(2, 40, 64), leaf(32, 64, seed=1), leaf(32, seed=2), leaf(2, 40, 32, seed=3).detach()
    affines = [leaf(64, seed=4) if affine else None, leaf(64, seed=5) if affine and norm == "layer" else None]
    inputs = [x, weight, bias, *(t for t in affines if t is not None)]
    out = low_precision_norm_linear(
        x, weight, bias, recipe, norm=norm, norm_weight=affines[0], norm_bias=affines[1], activation=activation
    )
    actual = [out, *torch.autograd.grad(out, inputs, grad)]
    shape = (64,)
    normed = (
        F.layer_norm(x, shape, *affines, eps=1e-5) if norm == "layer" else F.rms_norm(x, shape, affines[0], eps=1e-5)
    )
    normed = F.silu(normed) if activation else normed
    apart = low_precision_linear(normed, weight, bias, recipe)
    expected = [apart, *torch.autograd.grad(apart, inputs, grad)]
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape
        assert decibel(e, a) > 50, (a, e)


def test_norm_linear_errors() -> None:
    x, weight = torch.zeros(2, 32), torch.zeros(4, 32)
    for arguments, message in (
        ({"recipe": "mxfp8"}, "has no scale per row"),
        ({"norm": "batch"}, "must be 'rms' or 'layer'"),
        ({"activation": "cube"}, "activation 'cube'"),
        ({"norm_bias": torch.zeros(32)}, "has no norm_bias"),
        ({"backend": "native"}, "compute capability 9.0"),
    ):
        with pytest.raises(ValueError, match=message):
            low_precision_norm_linear(x, weight, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="do not fit"):
        low_precision_norm_linear(x, weight.T)


def test_hopper_ops_on_a_cpu() -> None:
    """What the GPU's kernels are registered with: same numbers, transposed and padded; fakes of the same shapes."""
    grad, x = leaf(37, 20).detach(), quantize_rows(leaf(37, 70, seed=1).detach())
    codes, scale, over = torch.ops.lightning_gem.fp8_rows_both(grad, "e4m3")
    expected = quantize_rows(grad)
    assert torch.equal(codes.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(over[:, :37].view(torch.uint8), codes.mT.contiguous().view(torch.uint8))
    assert over.shape == (20, 48)
    ratio, _ = token_scales(x.scale, scale)
    for op, arguments in (
        (torch.ops.lightning_gem.fp8_rows_both, (grad, "e4m3")),
        (torch.ops.lightning_gem.fp8_rows, (grad, None, None, "rms", 1e-5, "silu", "e4m3")),
        (torch.ops.lightning_gem.fp8_shift_transposed, (x.data, ratio, "e4m3")),
    ):
        real = op(*arguments)
        with FakeTensorMode() as mode:
            fake = op(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments))
        for r, f in zip(*((t if isinstance(t, tuple) else (t,)) for t in (real, fake)), strict=True):
            assert (r.shape, r.dtype) == (f.shape, f.dtype)


@pytest.mark.parametrize("shape", [(48, 64, 32), (37, 70, 20), (0, 64, 32)])
def test_hopper_products_on_a_cpu(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The native branch with torch's GEMM for CPUs."""
    m, k, n = shape
    x, weight, grad = leaf(m, k), leaf(n, k, seed=1), leaf(m, n, seed=2).detach()
    recipe = RECIPES["fp8_rowwise"]
    original = torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *a, out_dtype, **kw: original(*a, out_dtype=out_dtype))
    results = []
    for backend in ("emulated", "native"):
        out = scaled_product(x, weight, recipe, backend, torch.float32)
        results.append([out, *torch.autograd.grad(out, (x, weight), grad)])
    for emulated, native in zip(*results, strict=True):
        assert emulated.shape == native.shape
        if m:
            assert decibel(emulated, native) > 45
