"""Shared by the kernel tests: random packed inputs, lengths worth testing, and gradients in one call."""

from collections.abc import Callable, Sequence

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_gem.kernels import block_attention, gdpa, jagged_flash_attention, lengths_to_cu_seqlens

QUICK = settings(max_examples=20, deadline=None, derandomize=True)
LENGTH = st.sampled_from([0, 1, 2, 7, 63, 64, 65, 130])
BATCH = st.lists(LENGTH, min_size=1, max_size=5)
PAIRED_BATCH = st.lists(st.tuples(LENGTH, LENGTH), min_size=1, max_size=4)
WINDOW = st.sampled_from([(-1, -1), (0, 0), (2, 3), (-1, 1), (4, -1), (100, 100)])

# Ops over one packed batch: op(query, key, value, cu_seqlens).
SELF_OPS = {
    "softmax": jagged_flash_attention,
    "softmax causal": lambda q, k, v, cu: jagged_flash_attention(q, k, v, cu, causal=True),
    "softmax window": lambda q, k, v, cu: jagged_flash_attention(q, k, v, cu, window_size=(2, 1)),
    "gdpa": gdpa,
    "gdpa causal": lambda q, k, v, cu: gdpa(q, k, v, cu, causal=True),
    "gdpa window": lambda q, k, v, cu: gdpa(q, k, v, cu, window_size=(2, 1), activation="silu"),
    "block": lambda q, k, v, cu: block_attention(q, k, v, cu, None, block_size=4),
    "block gdpa": lambda q, k, v, cu: block_attention(q, k, v, cu, None, block_size=4, activation="hardswish"),
}
# Ops between two packed batches: op(query, key, value, cu_seqlens_q, cu_seqlens_k).
CROSS_OPS = {
    "softmax": jagged_flash_attention,
    "softmax causal": lambda q, k, v, cu_q, cu_k: jagged_flash_attention(q, k, v, cu_q, cu_k, causal=True),
    "softmax window": lambda q, k, v, cu_q, cu_k: jagged_flash_attention(q, k, v, cu_q, cu_k, window_size=(1, 0)),
    "gdpa": gdpa,
    "gdpa causal": lambda q, k, v, cu_q, cu_k: gdpa(q, k, v, cu_q, cu_k, causal=True),
}


def offsets(lengths: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return lengths_to_cu_seqlens(torch.tensor(lengths, dtype=dtype))


def tokens(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def qkv(
    rows_q: int, rows_k: int, heads: int = 2, kv_heads: int = 2, dim: int = 4, value_dim: int = 4, **kwargs: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        tokens(rows_q, heads, dim, seed=1, **kwargs),
        tokens(rows_k, kv_heads, dim, seed=2, **kwargs),
        tokens(rows_k, kv_heads, value_dim, seed=3, **kwargs),
    )


def with_gradients(op: Callable[..., Tensor], *inputs: Tensor, grad: Tensor | None = None) -> tuple[Tensor, ...]:
    """The output of ``op``, and the gradients of all inputs for a random (or the given) gradient of the output."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = op(*leaves)
    if not out.requires_grad:  # a loop over nothing but empty sequences
        return (out, *(torch.zeros_like(x) for x in inputs))
    grad = tokens(*out.shape, dtype=out.dtype, seed=9) if grad is None else grad
    return (out.detach(), *torch.autograd.grad(out, leaves, grad, materialize_grads=True))


def assert_close(actual: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = 1e-9) -> None:
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def signal_to_noise_db(actual: Tensor, expected: Tensor) -> float:
    noise = (actual.double() - expected.double()).square().sum()
    return float(10 * torch.log10(expected.double().square().sum() / noise))
