"""The Triton kernels around attention against float64: on a GPU, or with TRITON_INTERPRET=1 in the interpreter."""

import pytest
import torch
from around_cases import all_cases

from lightning_gem import kernels
from lightning_gem.kernels.launch import interpreted

GPU = torch.cuda.is_available() and not interpreted()
pytestmark = pytest.mark.skipif(not (GPU or interpreted()), reason="needs a CUDA device or TRITON_INTERPRET=1")
CASES = all_cases()


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """Fills new memory with NaN, so that an element that nobody writes is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(name):
    if GPU:
        CASES[name].check("cuda", torch.float32, 1e-5, 2e-5)
        CASES[name].check("cuda", torch.bfloat16, 1e-2, 2e-2)
    else:
        CASES[name].check("cpu", torch.float32, 1e-5, 2e-5)


def test_strided_rows_and_expanded_gradients():
    device = "cuda" if GPU else "cpu"
    fused = torch.randn(20, 3, 2, 16, device=device)
    query = fused[:, 1].requires_grad_()
    out = kernels.jagged_rms_norm(query)
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(query, (16,), eps=1e-5))
    (grad,) = torch.autograd.grad(out.sum(), query)
    (expected,) = torch.autograd.grad(torch.nn.functional.rms_norm(query, (16,), eps=1e-5).sum(), query)
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)
    x = torch.randn(30, 40, device=device)[:, ::2]
    torch.testing.assert_close(kernels.swiglu(x), torch.nn.functional.silu(x[:, 10:]) * x[:, :10])
    cu = torch.tensor([0, 10, 25], device=device)
    torch.testing.assert_close(kernels.jagged_sum_pool(x, cu)[1], x[10:25].sum(0))


def test_max_pool_of_nan_ties_and_infinities():
    device = "cuda" if GPU else "cpu"
    x = torch.tensor([[1.0, -torch.inf], [2.0, -torch.inf], [2.0, torch.nan], [2.0, 5.0]], device=device)
    x = x.requires_grad_()
    out = kernels.jagged_max_pool(x, torch.tensor([0, 2, 2, 4], device=device))
    assert out.isnan().tolist() == [[False, False], [False, False], [False, True]]
    assert out[0].tolist() == [2.0, -torch.inf]
    assert out[1].tolist() == [0.0, 0.0]
    (grad,) = torch.autograd.grad(out[:, 0].sum(), x)
    assert grad[:, 0].tolist() == [0.0, 1.0, 1.0, 0.0]


def test_large_values_stay_finite():
    device = "cuda" if GPU else "cpu"
    x = (torch.randn(20, 32, device=device) * 1e4).requires_grad_()
    for activation in ("silu", "gelu", "gelu_tanh", "hardswish"):
        for out in (kernels.gated(x, x, activation), kernels.jagged_layer_norm(x, activation=activation)):
            assert out.isfinite().all()
            assert torch.autograd.grad(out.sum(), x)[0].isfinite().all()
    total, losses = kernels.fused_linear_bce(
        x, torch.ones(2, 32, device=device, requires_grad=True), None, torch.zeros(20, 2, device=device)
    )
    assert losses.isfinite().all()
    assert torch.autograd.grad(total, x)[0].isfinite().all()


@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
class TestOnGPU:
    def test_slack_is_not_read_and_becomes_zero(self):
        x = torch.full((10, 64), torch.nan, device="cuda", dtype=torch.bfloat16)
        x[:6] = 1
        cu = torch.tensor([0, 2, 6], device="cuda", dtype=torch.int32)
        dense = torch.ones(2, 64, device="cuda", dtype=torch.bfloat16)
        for out in (kernels.jagged_dense_add(x, dense, cu), kernels.jagged_concat([x], [cu])[0]):
            assert out[:6].isfinite().all()
            assert (out[6:] == 0).all()
        weight = torch.ones(2, 64, 32, device="cuda", dtype=torch.bfloat16)
        x.requires_grad_()
        out = kernels.grouped_mm(x, weight, cu)
        assert (out[:6] == 64).all()
        assert (out[6:] == 0).all()
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert (grad[6:] == 0).all()

    def test_grouped_mm_with_empty_groups(self):
        torch.manual_seed(0)
        cu = torch.tensor([0, 0, 70, 70, 200, 333, 333], device="cuda", dtype=torch.int32)
        x = torch.randn(333, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(6, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        out = kernels.grouped_mm(x, weight, cu)
        ends = cu.tolist()
        exact_x, exact_w = (t.detach().double().requires_grad_() for t in (x, weight))
        exact = torch.cat([exact_x[a:b] @ w for a, b, w in zip(ends[:-1], ends[1:], exact_w, strict=True)])
        grad = torch.randn_like(out)
        grads = torch.autograd.grad(out, (x, weight), grad)
        exact_grads = torch.autograd.grad(exact, (exact_x, exact_w), grad.double())
        for a, e in zip((out, *grads), (exact, *exact_grads), strict=True):
            assert (a.double() - e).norm() < 1e-2 * e.norm()
        assert (grads[1][0] == 0).all()

    def test_offsets_beyond_int32(self):
        rows = 2**31 // 1024 + 100
        x = torch.ones(rows, 1024, device="cuda", dtype=torch.bfloat16)
        x[-1] = 3
        assert (kernels.jagged_rms_norm(x)[-1] == 1).all()
        cu = torch.tensor([0, rows - 1, rows], device="cuda")
        assert (kernels.jagged_sum_pool(x, cu)[1] == 3).all()
        assert (kernels.jagged_dense_add(x, torch.ones(2, 1024, device="cuda", dtype=x.dtype), cu)[-1] == 4).all()
        assert (kernels.gated(x, x, "identity")[-1] == 9).all()

    def test_compiles_once_for_changing_lengths(self):
        def step(x, w, dense, cu):
            x = kernels.jagged_dense_add(x, dense, cu)
            out = kernels.norm_linear(kernels.jagged_rms_norm(x), w)
            return kernels.jagged_sum_pool(kernels.swiglu(out), cu).float().square().mean()

        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
        w = torch.randn(128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for seed in range(5):
            lengths = torch.randint(0, 50, (8,), generator=torch.Generator().manual_seed(seed))
            cu = kernels.lengths_to_cu_seqlens(lengths).cuda()
            x = torch.randn(int(lengths.sum()) + seed, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            dense = torch.randn(8, 64, device="cuda", dtype=torch.bfloat16)
            grads = torch.autograd.grad(compiled(x, w, dense, cu), (x, w))
            expected = torch.autograd.grad(step(x, w, dense, cu), (x, w))
            for a, e in zip(grads, expected, strict=True):
                torch.testing.assert_close(a, e)
        assert counter.frame_count <= 2
