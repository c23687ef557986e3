"""The Hopper kernels against the reference in float64. Each case compiles a few kernels of some seconds each."""

import pytest
import torch
from kernel_cases import offsets
from test_attention_on_gpu import LENGTHS_K, LENGTHS_Q, assert_accurate, cuda_qkv, evaluate, randn

from lightning_gem.kernels import gdpa, jagged_flash_attention, kernel_info, pma_attention


def _on_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _on_hopper(), reason="needs a Hopper GPU")]

HOPPER = {"backend": "hopper"}


def hopper_if_half(x):
    """The reference in float64 goes through the same function."""
    return HOPPER if x.dtype == torch.bfloat16 else {}


MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (20, 9)},
    "left": {"window_size": (40, -1)},
    "narrow": {"window_size": (0, 0)},
}


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("op", [jagged_flash_attention, gdpa])
def test_masks_and_groups(op, mask, dim):
    cu_q, cu_k = offsets(LENGTHS_Q, torch.int32).cuda(), offsets(LENGTHS_K).cuda().int()
    inputs = cuda_qkv(int(cu_q[-1]), int(cu_k[-1]), 4, 2, dim, dim)
    scale = {"scale": 0.1} if op is gdpa else {}
    assert_accurate(lambda q, k, v: op(q, k, v, cu_q, cu_k, **MASKS[mask], **scale, **hopper_if_half(q)), *inputs)


@pytest.mark.parametrize(
    "activation", ["identity", "relu", "relu_squared", "leaky_relu", "gelu", "gelu_tanh", "silu", "hardswish"]
)
def test_activations(activation):
    cu = offsets(LENGTHS_Q).cuda()
    inputs = cuda_qkv(int(cu[-1]), int(cu[-1]), 4, 4, 64, 64)
    assert_accurate(
        lambda q, k, v: gdpa(q, k, v, cu, activation=activation, scale=0.125, out_scale=0.01, **hopper_if_half(q)),
        *inputs,
    )


@pytest.mark.parametrize("keys", [128, 256])
@pytest.mark.parametrize("op", [jagged_flash_attention, gdpa])
def test_few_keys(op, keys):
    """Enough sequences for every program: the kernels that keep the keys of a sequence."""
    lengths_q = [0, 1, 200, 64, 1100, 3] * 10
    lengths_k = [keys, 0, 1, keys - 1, keys, 65] * 10
    cu_q, cu_k = offsets(lengths_q, torch.int32).cuda(), offsets(lengths_k, torch.int32).cuda()
    inputs = cuda_qkv(sum(lengths_q), sum(lengths_k), 4, 4, 128, 128)
    scale = {"scale": 0.1} if op is gdpa else {}
    assert_accurate(lambda q, k, v: op(q, k, v, cu_q, cu_k, 1100, keys, **scale, **hopper_if_half(q)), *inputs)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_few_queries(activation, dim):
    """Seeds for all sequences, and private queries."""
    lengths = [0, 1, 200, 64, 333, 3] * 10
    cu_k = offsets(lengths, torch.int32).cuda()
    seeds = randn(64, 4, dim, seed=5)
    _, key, value = cuda_qkv(1, sum(lengths), 4, 4, dim, dim)
    assert_accurate(
        lambda s, k, v: pma_attention(s, k, v, cu_k, activation=activation, **hopper_if_half(s)), seeds, key, value
    )
    lengths_q = [64, 1, 0, 17, 5, 63] * 10
    cu_q = offsets(lengths_q, torch.int32).cuda()
    query = randn(sum(lengths_q), 4, dim, seed=6)
    op = jagged_flash_attention if activation is None else gdpa
    assert_accurate(lambda q, k, v: op(q, k, v, cu_q, cu_k, 64, 333, **hopper_if_half(q)), query, key, value)


def test_slack_isolation_and_equal_runs():
    rows = sum(LENGTHS_Q)
    cu = offsets(LENGTHS_Q).cuda()
    slack = torch.full((200, 4, 64), torch.nan, device="cuda").bfloat16()
    inputs = [torch.cat([x, slack]) for x in cuda_qkv(rows, rows)]
    grad = torch.cat([randn(rows, 4, 64, seed=9), slack])
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        for op in (jagged_flash_attention, gdpa):
            first, again = (evaluate(lambda *x: op(*x, cu, **HOPPER), *inputs, grad=grad) for _ in range(2))  # noqa: B023
            clean = evaluate(lambda *x: op(*x, cu, **HOPPER), *(x[:rows] for x in inputs), grad=grad[:rows])  # noqa: B023
            for a, b, c in zip(first, again, clean, strict=True):
                assert torch.equal(a, b)
                assert torch.equal(a[:rows], c)
                assert (a[rows:] == 0).all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_lse_and_its_gradient():
    cu = offsets(LENGTHS_Q).cuda()
    rows = int(cu[-1])
    query, key, value = cuda_qkv(rows, rows)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    out, lse = jagged_flash_attention(*leaves, cu, return_lse=True, **HOPPER)
    expected_out, expected_lse = jagged_flash_attention(*exact, cu, return_lse=True)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-4)
    weight = randn(*lse.shape, dtype=torch.float32, seed=3)
    actual = torch.autograd.grad((out.float().sum() + (lse * weight).sum()), leaves[:2])
    expected = torch.autograd.grad((expected_out.sum() + (expected_lse * weight).sum()), exact[:2])
    for a, e in zip(actual, expected, strict=True):
        assert (a.double() - e).norm() / e.norm() < 2e-2


def test_information_names_the_kernels():
    query = randn(600, 4, 128)
    info = kernel_info("gdpa", query, query, query, max_seqlen_q=100, max_seqlen_k=100, **HOPPER)
    assert info["backend"] == "hopper"
    assert info["arch"] == "sm_90"
    assert info["config"]["forward"]["BLOCK_M"] == 128
