"""The Triton kernels, run by Triton's interpreter on a CPU, against the definitions. Run by test_interpreter.py.

In float32: the interpreter's half precision products are wrong. Blocks are of 16 and 32 rows there.
"""

import itertools

import pytest
import torch
from kernel_cases import assert_close, offsets, qkv, tokens, with_gradients

from lightning_gem.kernels import gdpa, jagged_flash_attention, kernel_info, pffn, pma_attention
from lightning_gem.kernels.attention.triton_schedule import fill_schedule
from lightning_gem.kernels.dot_product.activations import ACTIVATIONS
from lightning_gem.kernels.dot_product.reference import gdpa_loop
from lightning_gem.kernels.flash.reference import attention_loop
from lightning_gem.kernels.launch import interpreted
from lightning_gem.kernels.schedule import TileSchedule, build_tile_schedule

assert interpreted()

LENGTHS_Q = [0, 1, 33, 5, 0]
LENGTHS_K = [7, 0, 65, 17, 0]
MASKS = [
    {},
    {"causal": True},
    {"window_size": (3, 2)},
    {"window_size": (-1, 1)},
    {"window_size": (4, -1)},
    {"window_size": (33, 40)},
    {"causal": True, "window_size": (20, -1)},
]


def cross(heads=1, kv_heads=1, dim=16, value_dim=16):
    cu_q, cu_k = offsets(LENGTHS_Q, torch.int32), offsets(LENGTHS_K)
    return cu_q, cu_k, qkv(sum(LENGTHS_Q), sum(LENGTHS_K), heads, kv_heads, dim, value_dim, dtype=torch.float32)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_softmax(mask):
    cu_q, cu_k, inputs = cross()
    actual = with_gradients(lambda q, k, v: jagged_flash_attention(q, k, v, cu_q, cu_k, **mask), *inputs)
    expected = with_gradients(
        lambda q, k, v: attention_loop(q, k, v, cu_q, cu_k, softmax_scale=0.25, **mask)[0], *inputs
    )
    assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize(("activation", "mask"), zip(ACTIVATIONS, itertools.cycle(MASKS[::-1])), ids=str)
def test_gdpa(activation, mask):
    cu_q, cu_k, inputs = cross()
    kwargs = {"activation": activation, "scale": 0.3, "out_scale": 0.5, **mask}
    actual = with_gradients(lambda q, k, v: gdpa(q, k, v, cu_q, cu_k, **kwargs), *inputs)
    expected = with_gradients(lambda q, k, v: gdpa_loop(q, k, v, cu_q, cu_k, **kwargs), *inputs)
    assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "value_dim"), [(2, 2, 24, 48), (4, 2, 48, 8)])
def test_head_sizes_and_groups(heads, kv_heads, dim, value_dim):
    cu_q, cu_k = offsets([0, 20, 3]), offsets([5, 17, 0])
    inputs = qkv(23, 22, heads, kv_heads, dim, value_dim, dtype=torch.float32)
    scale = dim**-0.5
    actual = with_gradients(lambda q, k, v: jagged_flash_attention(q, k, v, cu_q, cu_k), *inputs)
    expected = with_gradients(lambda q, k, v: attention_loop(q, k, v, cu_q, cu_k, softmax_scale=scale)[0], *inputs)
    assert_close(actual, expected, 1e-5)
    kwargs = {"activation": ["gelu", "silu", "relu", "gelu"][:heads], "scale": scale}
    actual = with_gradients(lambda q, k, v: gdpa(q, k, v, cu_q, cu_k, **kwargs), *inputs)
    assert_close(actual, with_gradients(lambda q, k, v: gdpa_loop(q, k, v, cu_q, cu_k, **kwargs), *inputs), 1e-5)


@pytest.mark.parametrize(("context", "window"), [(0, -1), (3, 5)])
def test_context_and_targets(context, window):
    cu = offsets([0, 1, 35, 20])
    inputs = qkv(56, 56, 1, 1, dtype=torch.float32)
    kwargs = {
        "num_targets": torch.tensor([0, 1, 6, 20]),
        "contextual_seqlen": context,
        "causal": True,
        "window_size": (window, -1),
        "activation": "silu",
    }
    actual = with_gradients(lambda q, k, v: gdpa(q, k, v, cu, **kwargs), *inputs)
    assert_close(actual, with_gradients(lambda q, k, v: gdpa_loop(q, k, v, cu, cu, **kwargs), *inputs), 1e-5)


@pytest.mark.parametrize("num_seeds", [1, 37])
def test_broadcast_queries(num_seeds):
    cu_k = offsets(LENGTHS_K)
    seeds, key, value = qkv(num_seeds, sum(LENGTHS_K), 1, 1, 16, 16, dtype=torch.float32)
    num = len(LENGTHS_K)
    repeated = offsets([num_seeds] * num)
    actual = with_gradients(lambda s, k, v: pma_attention(s, k, v, cu_k).flatten(0, 1), seeds, key, value)
    expected = with_gradients(
        lambda s, k, v: attention_loop(s.repeat(num, 1, 1), k, v, repeated, cu_k, softmax_scale=0.25)[0],
        *(seeds, key, value),
    )
    assert_close(actual, expected, 1e-5)
    actual = with_gradients(
        lambda s, k, v: pma_attention(s, k, v, cu_k, activation="gelu").flatten(0, 1), seeds, key, value
    )
    expected = with_gradients(
        lambda s, k, v: gdpa_loop(s.repeat(num, 1, 1), k, v, repeated, cu_k, activation="gelu", scale=0.25),
        *(seeds, key, value),
    )
    assert_close(actual, expected, 1e-5)


def test_dense_keys():
    cu = offsets([5, 0, 40])
    query = tokens(45, 1, 16, dtype=torch.float32)
    key, value = (tokens(3, 20, 1, 16, dtype=torch.float32, seed=seed) for seed in (1, 2))
    dense = offsets([20] * 3)
    actual = with_gradients(lambda q, k, v: pffn(q, k, v, cu, scale=0.25), query, key, value)
    expected = with_gradients(
        lambda q, k, v: gdpa_loop(q, k.flatten(0, 1), v.flatten(0, 1), cu, dense, activation="gelu_tanh", scale=0.25),
        *(query, key, value),
    )
    assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize(("shape", "softcap"), [((5, 2), 1.5), ((1, 1), 0.0)])
def test_bias_cap_and_lse(shape, softcap):
    cu_q, cu_k = offsets([0, 20, 3]), offsets([5, 17, 0])
    inputs = qkv(23, 22, dtype=torch.float32)
    bias = tokens(3 if shape[0] > 1 else 1, shape[1], 21, 17, dtype=torch.float32)
    bias[..., 2, :] = -torch.inf  # the third query of every sequence is blind

    def both(backend, *x):
        kwargs = {"attn_bias": bias, "softcap": softcap, "return_lse": True, "backend": backend}
        out, lse = jagged_flash_attention(*x, cu_q, cu_k, **kwargs)
        return torch.cat([out.flatten(), lse.clamp(min=-1e9).flatten()])

    actual = with_gradients(lambda *x: both("triton", *x), *inputs)
    assert_close(actual, with_gradients(lambda *x: both("reference", *x), *inputs), 1e-5)


@pytest.mark.parametrize("op", [jagged_flash_attention, gdpa])
def test_strided_views_and_slack_full_of_nan(op):
    cu = offsets([0, 20, 33, 0])
    fused = tokens(53, 6, 20, dtype=torch.float32)
    with_slack = torch.cat([fused, torch.full((70, 6, 20), torch.nan)])
    grad = tokens(20, 2, 53, dtype=torch.float32, seed=9).permute(2, 1, 0)[..., :16]
    grad_slack = torch.cat([grad, torch.full((70, 2, 16), torch.nan)])
    clean = with_gradients(lambda *x: op(*x, cu), *(x.contiguous() for x in fused[..., :16].split(2, 1)), grad=grad)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        views = with_slack[..., :16].split(2, 1)
        actual = with_gradients(lambda *x: op(*x, cu), *views, grad=grad_slack)
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(actual, clean, strict=True):
        assert torch.equal(a[:53], b)
        assert (a[53:] == 0).all()


@pytest.mark.parametrize("op", [jagged_flash_attention, gdpa])
def test_nothing_at_all(op):
    for lengths, rows in (([], 0), ([], 3), ([0, 0], 0), ([0], 3)):
        inputs = qkv(rows, rows, dtype=torch.float32)
        for result in with_gradients(lambda *x: op(*x, offsets(lengths)), *inputs):  # noqa: B023
            assert (result == 0).all()


@pytest.mark.parametrize("op", [jagged_flash_attention, gdpa])
def test_isolation_and_equal_reruns(op):
    cu, inputs = offsets([20, 5, 33]), qkv(58, 58, 1, 1, dtype=torch.float32)
    changed = [x.clone() for x in inputs]
    for x in changed:
        x[20:25] = torch.nan
    kept = [*range(20), *range(25, 58)]
    first = with_gradients(lambda *x: op(*x, cu), *inputs)
    for a, b in zip(first, with_gradients(lambda *x: op(*x, cu), *inputs), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(first, with_gradients(lambda *x: op(*x, cu), *changed), strict=True):
        assert torch.equal(a[kept], b[kept])


def test_half_precision_and_what_runs():
    query, key, value = qkv(20, 20, dtype=torch.bfloat16)
    out = jagged_flash_attention(query, key, value, offsets([20]))
    exact = attention_loop(*(x.double() for x in (query, key, value)), *[offsets([20])] * 2, softmax_scale=0.5)[0]
    assert out.dtype == torch.bfloat16
    assert_close([out.double()], [exact], 1e-2)
    info = kernel_info("jagged_flash_attention", query, key, value)
    assert info["backend"] == "triton"
    assert info["arch"] == "interpreter"


@pytest.mark.parametrize("longest_first", [True, False])
def test_schedule_kernel_is_the_definition(longest_first):
    cu_q, cu_k = offsets([0, 70, 16, 1, 0, 300, 33] * 3), offsets([5, 0, 7, 7, 9, 1, 2] * 3, torch.int32)
    for tiled, rows in ((cu_q, int(cu_q[-1])), (None, 40)):
        order = "lpt" if longest_first else "none"
        expected = build_tile_schedule(tiled, cu_k, block_m=16, num_rows=rows, order=order)
        actual = TileSchedule.from_storage(torch.zeros_like(expected.storage), 16)
        fill_schedule(tiled, cu_k, actual, rows, longest_first)
        size = int(expected.num_tiles)
        assert torch.equal(actual.num_tiles, expected.num_tiles)
        assert torch.equal(actual.sequence[:size], expected.sequence[:size])
        assert torch.equal(actual.tile[:size], expected.tile[:size])
