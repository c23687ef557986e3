"""The Triton kernels of block attention and rotation on a GPU, against float64."""

import pytest
import torch
from block_cases import CASES, exactly, make_case, run_case
from kernel_cases import offsets, signal_to_noise_db, tokens

from lightning_gem.kernels import block_attention, rotary
from lightning_gem.kernels.block.registration import why_not_triton
from lightning_gem.kernels.rope.reference import rotary_halves

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BFLOAT16 = torch.bfloat16


def on_gpu(name, dtype, backend="triton"):
    inputs, grad, cu_seqlens, options = make_case(name, dtype)
    if "rotary" in options:
        options["rotary"] = tuple(x.cuda() for x in options["rotary"])
    return run_case(tuple(x.cuda() for x in inputs), grad.cuda(), cu_seqlens.cuda(), options, backend)


def relative_error(actual, expected):
    if not expected.numel() or not expected.norm():
        return float(actual.norm())
    return float((actual.cpu().double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float16])
def test_case_in_half_precision(name, dtype):
    inputs, grad, cu_seqlens, options = make_case(name, dtype)
    exact = run_case(
        tuple(x.double() for x in inputs),
        grad.double(),
        cu_seqlens,
        options | ({"rotary": tuple(x.double() for x in options["rotary"])} if "rotary" in options else {}),
        "reference",
    )
    actual = on_gpu(name, dtype)
    for a, e, limit in zip(actual, exact, [1e-2, 2e-2, 2e-2, 2e-2], strict=True):
        assert a.dtype == dtype
        assert relative_error(a, e) <= limit
        assert (a[len(a) - 3 :] == 0).all()
    assert all(torch.equal(a, b) for a, b in zip(actual, on_gpu(name, dtype), strict=True))


@pytest.mark.parametrize("name", ["blocks of 64", "rotated values", "grouped heads"])
def test_case_in_single_precision(name):
    for a, e in zip(on_gpu(name, torch.float32), exactly(name), strict=True):
        assert relative_error(a, e) < 1e-5


@pytest.mark.parametrize("name", ["blocks of 64", "rotated"])
def test_error_is_that_of_torch(name):
    """At most 1.5 times that of the same formulas in torch, in bfloat16; outputs at 45 dB."""
    actual, torch_like = on_gpu(name, BFLOAT16), on_gpu(name, BFLOAT16, "reference")
    inputs, grad, cu_seqlens, options = make_case(name, BFLOAT16)
    if "rotary" in options:
        options["rotary"] = tuple(x.double() for x in options["rotary"])
    exact = run_case(tuple(x.double() for x in inputs), grad.double(), cu_seqlens, options, "reference")
    rows = slice(0, -3)
    assert signal_to_noise_db(actual[0][rows].cpu(), exact[0][rows]) > 45
    for a, t, e in zip(actual, torch_like, exact, strict=True):
        # The reference on a GPU computes in float32 and rounds once, so allow for the rounding of weights as well.
        assert relative_error(a, e) <= 1.5 * max(relative_error(t, e), 2.0**-8)


def test_more_units_than_65535():
    """[own reading of AMKL's grid]"""
    lengths = [3] * 20_000
    inputs = [tokens(60_000, 8, 16, seed=seed, dtype=BFLOAT16).cuda() for seed in range(3)]
    cu_seqlens = offsets(lengths).cuda()
    out = block_attention(*inputs, cu_seqlens, 3)
    last = block_attention(*(x[-30:].cpu().double() for x in inputs), offsets([3] * 10), 3)
    assert relative_error(out[-30:], last) < 1e-2


def test_offsets_beyond_two_to_the_31():
    rows = 2**31 // (4 * 128) + 1000
    fused = torch.randn(rows, 3, 4, 128, device="cuda", dtype=BFLOAT16)
    leaves = [x.requires_grad_() for x in fused.unbind(1)]
    cu_seqlens = offsets([rows - 100, 100]).cuda()
    out = block_attention(*leaves, cu_seqlens)
    assert out.numel() > 2**31
    tail = [x.detach()[-100:].cpu().double().requires_grad_() for x in leaves]
    expected = block_attention(*tail, offsets([100]))
    assert relative_error(out.detach()[-100:], expected.detach()) < 1e-2
    gradients = torch.autograd.grad(out, leaves, out.detach())
    for a, e in zip(gradients, torch.autograd.grad(expected, tail, out.detach()[-100:].cpu().double()), strict=True):
        assert relative_error(a[-100:], e) < 2e-2


def test_nothing_waits_for_the_device():
    inputs = [tokens(70, 2, 32, dtype=BFLOAT16).cuda().requires_grad_() for _ in range(3)]
    cu_seqlens = offsets([60, 10]).cuda()
    block_attention(*inputs, cu_seqlens, 64).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        block_attention(*inputs, cu_seqlens, 64).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiled_with_changing_lengths():
    compiles = 0

    def backend(module, example_inputs):
        nonlocal compiles
        compiles += 1
        return module.forward

    angle = tokens(500, 16, dtype=torch.float32).cuda()
    run = torch.compile(
        lambda q, k, v, cu, c, s: block_attention(q, k, v, cu, None, rotary=(c, s)),
        fullgraph=True,
        dynamic=True,
        backend=backend,
    )
    for i in range(20):
        lengths = [17 + 3 * i, 0, 5 * i, 64]
        n = sum(lengths)
        inputs = [tokens(n, 2, 32, seed=seed, dtype=BFLOAT16).cuda().requires_grad_() for seed in range(3)]
        cu_seqlens = offsets(lengths).cuda()
        out = run(*inputs, cu_seqlens, angle[:n].cos(), angle[:n].sin())
        eager = block_attention(*inputs, cu_seqlens, rotary=(angle[:n].cos(), angle[:n].sin()))
        assert torch.equal(out, eager)
        out.sum().backward()
    assert compiles <= 2


@pytest.mark.parametrize(("rows", "heads", "dim"), [(1000, 8, 128), (37, 3, 12), (1, 1, 2), (0, 2, 8)])
@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float32])
def test_rotation(rows, heads, dim, dtype):
    x = tokens(rows, 2 * heads, dim, dtype=dtype).cuda()[:, heads:].requires_grad_()
    angle = tokens(rows, dim // 2, seed=1, dtype=torch.float32).cuda()
    out = rotary(x, angle.cos(), angle.sin())
    torch.testing.assert_close(out, rotary_halves(x, angle.cos(), angle.sin()))
    grad = tokens(dim, heads, rows, seed=2, dtype=dtype).cuda().permute(2, 1, 0)
    (actual,) = torch.autograd.grad(out, x, grad)
    torch.testing.assert_close(actual, rotary_halves(grad, angle.cos(), -angle.sin()))


def test_float64_and_huge_blocks_run_the_reference():
    query = tokens(70, 2, 32).cuda()
    assert why_not_triton(query, query, 64) == "float64 has no matrix units"
    assert why_not_triton(query.bfloat16(), query, 200) == "block_size is above 128"
    out = block_attention(query, query, query, offsets([70]).cuda(), block_size=200)
    assert relative_error(out, block_attention(*[query.cpu()] * 3, offsets([70]), block_size=200)) < 1e-12
