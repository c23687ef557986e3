"""Linear layers in MXFP8: exact emulation, gradients, bias, empty and poisoned rows, the native branch on fakes."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_gem.precision import matmul
from lightning_gem.precision.linear import (
    _Linear,
    low_precision_batched_linear,
    low_precision_grouped_linear,
    low_precision_linear,
)
from lightning_gem.precision.matmul import choose_backend, mx_matmul
from lightning_gem.precision.mx import mx_dequantize, mx_quantize, mx_quantize_2d, mx_requantize
from lightning_gem.precision.recipes import RECIPES, PrecisionRecipe, get_recipe

HYBRID = PrecisionRecipe("hybrid", grad_fmt="e5m2")
PRECISE = PrecisionRecipe("precise", high_precision_weight_gradient=True)
COMPACT_PRECISE = PrecisionRecipe("compact_precise", compact=True, high_precision_weight_gradient=True)
MX = [
    *(recipe for recipe in RECIPES.values() if recipe.kind == "mx" and recipe.scale == "rceil"),
    HYBRID,
    PRECISE,
    COMPACT_PRECISE,
]
QUANTISED = [
    *(recipe for recipe in RECIPES.values() if recipe.kind != "auto" and recipe.scale == "rceil"),
    HYBRID,
    PRECISE,
    COMPACT_PRECISE,
]
ALL = [*RECIPES.values(), HYBRID, PRECISE, COMPACT_PRECISE]
SOME = [RECIPES[name] for name in ("mxfp8", "fp8_rowwise")]
ROW_BY_ROW = [recipe for recipe in QUANTISED if recipe.kind != "tensor"]


def name(value: Any) -> str:
    return getattr(value, "name", str(value))


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return x.requires_grad_()


def decibel(exact: torch.Tensor, approximate: torch.Tensor) -> float:
    return 10 * math.log10(exact.double().square().sum() / (exact.double() - approximate.double()).square().sum())


def round_trip(x: torch.Tensor, axis: int, fmt: Any = "e4m3") -> torch.Tensor:
    return mx_dequantize(mx_quantize(x.detach(), axis, fmt))


GEMM_VECTORS = [
    ([1.0] * 32, [0.5] * 32, (0x77, 0x78), (0x76, 0x78), 16.0),
    ([1.1] * 32, [0.3] * 32, (0x77, 0x79), (0x75, 0x7A), 11.25),
    ([1.1] * 31 + [448.0], [0.3] * 32, (0x7F, 0x39), (0x75, 0x7A), 150.8984375),
]


@pytest.mark.parametrize(("a", "b", "code_a", "code_b", "result"), GEMM_VECTORS)
def test_gemm_vectors(a: list, b: list, code_a: tuple, code_b: tuple, result: float) -> None:
    left, right = mx_quantize(torch.tensor([a])), mx_quantize(torch.tensor([b]))
    assert (left.scale.item(), left.data[0, 0].item()) == code_a
    assert (right.scale.item(), right.data[0, 0].item()) == code_b
    assert mx_matmul(left, right, torch.float32).item() == result
    assert low_precision_linear(torch.tensor([a]), torch.tensor([b])).item() == result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", MX, ids=name)
def test_equals_explicit_formulas_to_the_bit(recipe: PrecisionRecipe, dtype: torch.dtype) -> None:
    x, weight, grad = leaf(70, 96, dtype=dtype), leaf(64, 96, seed=1, dtype=dtype), leaf(70, 64, seed=2, dtype=dtype)
    out = low_precision_linear(x, weight, None, recipe)
    out.backward(grad)
    x_rows, w_rows, w_columns = round_trip(x, 1), round_trip(weight, 1), round_trip(weight, 0)
    x_columns = round_trip(x, 0)
    if recipe.compact:
        w_rows = w_columns = mx_dequantize(mx_quantize_2d(weight.detach()))
        x_columns = mx_dequantize(mx_requantize(mx_quantize(x.detach()), 0))
    assert out.dtype == dtype
    assert torch.equal(out, (x_rows @ w_rows.T).to(dtype))
    assert torch.equal(x.grad, (round_trip(grad, 1, recipe.grad_fmt) @ w_columns).to(dtype))
    if recipe.high_precision_weight_gradient:
        used = x_rows.to(dtype) if recipe.compact else x.detach()
        assert torch.equal(weight.grad, grad.detach().T @ used)
    else:
        assert torch.equal(weight.grad, (round_trip(grad, 0, recipe.grad_fmt).T @ x_columns).to(dtype))


@pytest.mark.parametrize("recipe", QUANTISED, ids=name)
def test_error_budget(recipe: PrecisionRecipe) -> None:
    x, weight, grad = leaf(512, 256), leaf(128, 256, seed=1), leaf(512, 128, seed=2)
    low_precision_linear(x, weight, None, recipe).backward(grad)
    with torch.no_grad():
        out = low_precision_linear(x, weight, None, recipe)
        assert decibel(x @ weight.T, out) == pytest.approx(28.5, abs=0.3)
        assert decibel(grad @ weight, x.grad) > (28.2 if recipe.grad_fmt == "e4m3" else 24.0)
        least = {PRECISE: 100.0, RECIPES["fp8_forward"]: 100.0, COMPACT_PRECISE: 31.0, HYBRID: 24.0}.get(recipe, 28.2)
        assert decibel(grad.T @ x, weight.grad) > least


@pytest.mark.parametrize("recipe", ALL, ids=name)
def test_bias_is_kept_and_learns(recipe: PrecisionRecipe) -> None:
    x, weight, bias = leaf(2, 5, 32), leaf(64, 32, seed=1), leaf(64, seed=2)
    out = low_precision_linear(x, weight, bias, recipe)
    assert torch.equal(out, low_precision_linear(x, weight, None, recipe) + bias)
    grad = torch.randn_like(out)
    out.backward(grad)
    torch.testing.assert_close(bias.grad, grad.sum((0, 1)))


@pytest.mark.parametrize("recipe", ALL, ids=name)
@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64), (1, 64), (64,)])
def test_few_and_no_rows(recipe: PrecisionRecipe, shape: tuple[int, ...]) -> None:
    x, weight, bias = leaf(*shape), leaf(32, 64, seed=1), leaf(32, seed=2)
    out = low_precision_linear(x, weight, bias, recipe)
    assert out.shape == (*shape[:-1], 32)
    out.sum().backward()
    assert x.grad.shape == x.shape
    if 0 in shape:
        assert not weight.grad.any()
        assert not bias.grad.any()


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=name)
@pytest.mark.parametrize(("k", "n"), [(33, 32), (5, 7), (96, 20)])
def test_widths_that_are_no_multiple_of_a_block(recipe: PrecisionRecipe, k: int, n: int) -> None:
    x, weight = leaf(40, k), leaf(n, k, seed=1)
    out = low_precision_linear(x, weight, None, recipe)
    out.backward(torch.ones_like(out))
    assert decibel(x @ weight.T, out) > 25
    assert decibel(torch.ones(n, 40) @ x, weight.grad) > 22


@pytest.mark.parametrize("recipe", ROW_BY_ROW, ids=name)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_poison_stays_in_its_row(recipe: PrecisionRecipe, poison: float) -> None:
    x, weight = leaf(40, 64).detach(), leaf(32, 64, seed=1)
    clean = low_precision_linear(x, weight, None, recipe)
    x[7, 3] = poison
    out = low_precision_linear(x, weight, None, recipe)
    assert out[7].isnan().all()
    rest = torch.arange(40) != 7
    assert torch.equal(out[rest], clean[rest])


@pytest.mark.parametrize("recipe", ROW_BY_ROW, ids=name)
def test_rows_do_not_see_each_other(recipe: PrecisionRecipe) -> None:
    """Neither forward nor in the gradient of the activations, whatever the batch."""
    x, weight = leaf(64, 64).detach(), leaf(64, 64, seed=1)
    results = []
    for factor, rows in ((1.0, 64), (1e4, 64), (1.0, 40)):
        inputs = x.clone()
        inputs[39] *= factor
        inputs = inputs[:rows].requires_grad_()
        out = low_precision_linear(inputs, weight, None, recipe)
        out.backward(x[:rows])
        results.append((out[:39].detach(), inputs.grad[:39]))
    for out, grad in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(grad, results[0][1])


def test_compact_saves_half() -> None:
    def saved_bytes(recipe: str) -> int:
        sizes = []
        x, weight = leaf(4096, 64, dtype=torch.bfloat16), leaf(32, 64, seed=1, dtype=torch.bfloat16)
        pack = lambda t: sizes.append(t.nbytes if t.data_ptr() != weight.data_ptr() else 0) or t  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            low_precision_linear(x, weight, None, recipe)
        return sum(sizes)

    assert saved_bytes("mxfp8") == 4096 * 64 * 2
    assert saved_bytes("mxfp8_compact") == 4096 * 64 * 33 // 32 + 32 * 64 + 2


@pytest.mark.parametrize("recipe", ALL, ids=name)
def test_batched_equals_one_expert_at_a_time(recipe: PrecisionRecipe) -> None:
    x, weight = leaf(3, 40, 64), leaf(3, 32, 64, seed=1)
    out = low_precision_batched_linear(x, weight, recipe)
    out.backward(torch.ones_like(out))
    for i in range(3):
        one_x, one_weight = x[i].detach().requires_grad_(), weight[i].detach().requires_grad_()
        one = low_precision_linear(one_x, one_weight, None, recipe)
        one.backward(torch.ones_like(one))
        assert torch.equal(out[i], one)
        assert torch.equal(x.grad[i], one_x.grad)
        assert torch.equal(weight.grad[i], one_weight.grad)
    assert low_precision_batched_linear(leaf(3, 0, 64), weight, recipe).shape == (3, 0, 32)


@pytest.mark.parametrize("recipe", ALL, ids=name)
def test_grouped_with_an_idle_expert(recipe: PrecisionRecipe) -> None:
    x, weight, sizes = leaf(77, 64), leaf(4, 32, 64, seed=1), [33, 0, 40, 4]
    out = low_precision_grouped_linear(x, weight, sizes, recipe)
    out.backward(torch.ones_like(out))
    start = 0
    for i, size in enumerate(sizes):
        assert torch.equal(
            out[start : start + size], low_precision_linear(x[start : start + size], weight[i], None, recipe)
        )
        start += size
    assert not weight.grad[1].any()
    assert weight.grad[[0, 2, 3]].abs().sum((1, 2)).all()
    with pytest.raises(ValueError, match="4 numbers of rows with the sum 77"):
        low_precision_grouped_linear(x, weight, [77], recipe)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=name)
def test_autocast(recipe: PrecisionRecipe) -> None:
    x, weight, bias = leaf(40, 64), leaf(32, 64, seed=1), leaf(32, seed=2)
    with torch.autocast("cpu", torch.bfloat16):
        out = low_precision_linear(x, weight, bias, recipe)
    assert out.dtype == torch.bfloat16
    exact = low_precision_linear(x.bfloat16(), weight.bfloat16(), bias, recipe)
    assert torch.equal(out, exact)
    out.sum().backward()
    assert x.grad.dtype == weight.grad.dtype == bias.grad.dtype == torch.float32


@pytest.mark.parametrize("recipe", SOME, ids=name)
def test_compiled(recipe: PrecisionRecipe) -> None:
    x, weight, bias = leaf(40, 64), leaf(32, 64, seed=1), leaf(32, seed=2)
    grad = torch.randn(40, 32)
    results = []
    for function in (low_precision_linear, torch.compile(low_precision_linear, fullgraph=True)):
        out = function(x, weight, bias, recipe)
        results.append([out, *torch.autograd.grad(out, (x, weight, bias), grad)])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)


def test_compiled_once_for_any_number_of_rows() -> None:
    compiled = torch.compile(low_precision_linear, fullgraph=True)
    weight = leaf(32, 64, seed=1)
    for rows in (40, 77, 33):
        x = leaf(rows, 64)
        torch._dynamo.mark_dynamic(x, 0)
        with torch.compiler.set_stance("fail_on_recompile" if rows != 40 else "default"):
            out = compiled(x, weight, None, RECIPES["mxfp8"])
            actual = torch.autograd.grad(out.sum(), (x, weight))
        expected = torch.autograd.grad(low_precision_linear(x, weight).sum(), (x, weight))
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", SOME, ids=name)
def test_activation_checkpointing(recipe: PrecisionRecipe) -> None:
    x, weight = leaf(40, 64), leaf(64, 64, seed=1)
    block = lambda t: low_precision_linear(F.silu(low_precision_linear(t, weight, None, recipe)), weight, None, recipe)  # noqa: E731
    plain = torch.autograd.grad(block(x).sum(), (x, weight))
    again = torch.autograd.grad(checkpoint(block, x, use_reentrant=False).sum(), (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.parametrize("recipe", SOME, ids=name)
def test_flops(recipe: PrecisionRecipe) -> None:
    x, weight = leaf(40, 64), leaf(32, 64, seed=1)
    with FlopCounterMode(display=False) as counter:
        low_precision_linear(x, weight, None, recipe).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 40 * 64 * 32


@pytest.fixture
def blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))


class Context:
    """What autograd hands to a function; its engine aborts on fake CUDA tensors where torch has no CUDA."""

    needs_input_grad = (True, True, False, False, False)

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.saved_tensors = tensors


@pytest.mark.parametrize("recipe", MX, ids=name)
@pytest.mark.parametrize(("rows", "k", "n"), [(70, 96, 64), (64, 128, 40), (0, 64, 32), (300, 2080, 160)])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_native_shapes(blackwell: None, recipe: PrecisionRecipe, rows: int, k: int, n: int, batch: tuple) -> None:
    """The native branch accepts what the emulated one accepts, as far as torch's own checks of a GPU's operands see."""
    half = torch.bfloat16
    backend = choose_backend(torch.device("cuda"))
    with torch.no_grad(), FakeTensorMode(), FlopCounterMode(display=False) as counter:
        x = torch.empty(*batch, rows, k, device="cuda", dtype=half)
        weight = torch.empty(*batch, n, k, device="cuda", dtype=half)
        for out_dtype in (half, torch.float32):
            context = Context()
            out = _Linear.forward(context, x, weight, recipe, backend, out_dtype)
            assert (out.shape, out.dtype, out.device.type) == ((*batch, rows, n), out_dtype, "cuda")
            grad_x, grad_weight = _Linear.backward(context, out)[:2]
            assert (grad_x.shape, grad_x.dtype) == (x.shape, half)
            assert (grad_weight.shape, grad_weight.dtype) == (weight.shape, half)
    counts = counter.get_flop_counts().get("Global", {})
    assert (counts.get(torch.ops.aten._scaled_mm, 0) > 0) == (rows > 0)
    other = set(counts) - {torch.ops.aten._scaled_mm}
    assert not other or recipe.high_precision_weight_gradient


def test_native_public_functions(blackwell: None) -> None:
    with torch.no_grad(), FakeTensorMode():
        x = torch.empty(2, 40, 64, device="cuda", dtype=torch.bfloat16)
        weight, bias = torch.empty(4, 32, 64, device="cuda", dtype=x.dtype), torch.empty(32, device="cuda")
        out = low_precision_linear(x, weight.select(0, 0), bias)
        assert (out.shape, out.dtype) == ((2, 40, 32), torch.bfloat16)
        rows = torch.empty(77, 64, device="cuda")
        assert low_precision_grouped_linear(rows, weight, [33, 0, 40, 4]).shape == (77, 32)
        assert low_precision_batched_linear(x.repeat(2, 1, 1), weight, backend="native").shape == (4, 40, 32)


def test_backend_follows_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    for capability, backend in {(8, 0): "emulated", (9, 0): "emulated", (10, 0): "native", (10, 3): "native"}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, value=capability: value)
        assert choose_backend(device) == backend
        assert choose_backend(device, "emulated") == "emulated"
    assert choose_backend(torch.device("cpu")) == "emulated"
    assert not matmul.native_mx(torch.device("cpu"))


def rowwise_on_cpu(backend: Any) -> torch.Tensor:
    return low_precision_linear(torch.zeros(2, 32), torch.zeros(4, 32), None, "fp8_rowwise", backend)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: low_precision_linear(torch.zeros(2, 32), torch.zeros(4, 64)), ValueError, "do not fit"),
        (lambda: low_precision_linear(torch.zeros(2, 32).double(), torch.zeros(4, 32).double()), ValueError, "cast it"),
        (
            lambda: low_precision_linear(torch.zeros(2, 32), torch.zeros(4, 32), backend="native"),
            ValueError,
            "Blackwell",
        ),
        (
            lambda: low_precision_linear(torch.zeros(2, 32), torch.zeros(4, 32), backend="fast"),
            ValueError,
            "'fast' is unknown",
        ),
        (lambda: low_precision_batched_linear(torch.zeros(2, 3, 32), torch.zeros(3, 4, 32)), ValueError, "do not fit"),
        (lambda: get_recipe("mxfp4"), ValueError, "use one of mxfp8"),
        (lambda: rowwise_on_cpu("native"), ValueError, "needs a GPU of compute capability 9.0"),
        (lambda: choose_backend(torch.device("cpu"), "native", "block"), ValueError, "emulated on every device"),
    ],
)
def test_errors(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_learns() -> None:
    """A small regression in MXFP8 ends where float32 ends, up to the noise of the format."""
    losses = {}
    for recipe in (None, *SOME):
        torch.manual_seed(0)
        x = torch.randn(512, 32)
        target = torch.tanh(x @ torch.randn(32, 8) / 6)
        layers = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 8))
        optimizer = torch.optim.Adam(layers.parameters(), lr=1e-2)
        for _ in range(100):
            if recipe is None:
                out = layers(x)
            else:
                hidden = F.silu(low_precision_linear(x, layers[0].weight, layers[0].bias, recipe))
                out = low_precision_linear(hidden, layers[2].weight, layers[2].bias, recipe)
            loss = (out - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[recipe and recipe.name] = loss.item()
    assert all(loss < 0.02 for loss in losses.values()), losses
