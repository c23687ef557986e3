"""The Triton kernels, run by Triton's interpreter on a CPU, against the definitions. Run by test_interpreter.py.

In float32: the interpreter's half precision products are wrong. Blocks are of 16 and 32 rows there.
"""

import itertools

import pytest
import torch
from kernel_cases import assert_close, offsets, qkv, tokens, with_gradients

from lightning_gem.kernels import gdpa, jagged_flash_attention, kernel_info, pffn, pma_attention
from lightning_gem.kernels.attention.packed import build_packing
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


SHORT = [0, 1, 32, 5, 0, 17, 32, 32, 9, 0, 30, 2, 0]  # five tiles of up to 64 rows
SHORT_MASKS = [
    {},
    {"causal": True},
    {"window_size": (3, 2)},
    {"window_size": (-1, 1)},
    {"causal": True, "window_size": (5, -1)},
]


def packed(op, cu, longest=32, **kwargs):
    return lambda q, k, v: op(q, k, v, cu, None, longest, backend="packed", **kwargs)


@pytest.mark.parametrize("mask", SHORT_MASKS, ids=str)
def test_packed_softmax(mask):
    cu, inputs = offsets(SHORT, torch.int32), qkv(sum(SHORT), sum(SHORT), 1, 1, 16, 16, dtype=torch.float32)
    actual = with_gradients(packed(jagged_flash_attention, cu, **mask), *inputs)
    expected = with_gradients(lambda *x: attention_loop(*x, cu, cu, softmax_scale=0.25, **mask)[0], *inputs)
    assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize(("activation", "mask"), zip(ACTIVATIONS, itertools.cycle(SHORT_MASKS)), ids=str)
def test_packed_gdpa(activation, mask):
    cu, inputs = offsets(SHORT), qkv(sum(SHORT), sum(SHORT), 1, 1, 16, 16, dtype=torch.float32)
    kwargs = {"activation": activation, "scale": 0.3, "out_scale": 0.5, **mask}
    actual = with_gradients(packed(gdpa, cu, **kwargs), *inputs)
    assert_close(actual, with_gradients(lambda *x: gdpa_loop(*x, cu, cu, **kwargs), *inputs), 1e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "value_dim", "longest"), [(2, 2, 24, 48, 64), (6, 2, 48, 8, 32)])
def test_packed_head_sizes_groups_and_longer_sequences(heads, kv_heads, dim, value_dim, longest):
    lengths = [3, longest, 0, 30, 7, longest]
    cu = offsets(lengths)
    inputs = qkv(sum(lengths), sum(lengths), heads, kv_heads, dim, value_dim, dtype=torch.float32)
    scale = dim**-0.5
    actual = with_gradients(packed(jagged_flash_attention, cu, longest), *inputs)
    expected = with_gradients(lambda *x: attention_loop(*x, cu, cu, softmax_scale=scale)[0], *inputs)
    assert_close(actual, expected, 1e-5)
    actual = with_gradients(packed(gdpa, cu, longest, activation="silu", scale=scale), *inputs)
    expected = with_gradients(lambda *x: gdpa_loop(*x, cu, cu, activation="silu", scale=scale), *inputs)
    assert_close(actual, expected, 1e-5)


def test_packed_gradient_of_lse():
    cu, inputs = offsets(SHORT), qkv(sum(SHORT), sum(SHORT), 2, 1, 16, 16, dtype=torch.float32)

    def both(backend, *x):
        out, lse = jagged_flash_attention(*x, cu, None, 32, return_lse=True, backend=backend)
        return torch.cat([out.flatten(), lse.flatten()])

    actual = with_gradients(lambda *x: both("packed", *x), *inputs)
    assert_close(actual, with_gradients(lambda *x: both("reference", *x), *inputs), 1e-5)


@pytest.mark.parametrize("op", [jagged_flash_attention, gdpa])
def test_packed_strided_views_and_slack_full_of_nan(op):
    cu, rows = offsets(SHORT), sum(SHORT)
    fused = torch.cat([tokens(rows, 6, 20, dtype=torch.float32), torch.full((140, 6, 20), torch.nan)])
    grad = tokens(20, 2, rows, dtype=torch.float32, seed=9).permute(2, 1, 0)[..., :16]
    grad_slack = torch.cat([grad, torch.full((140, 2, 16), torch.nan)])
    views = fused[..., :16].split(2, 1)
    clean = with_gradients(packed(op, cu), *(x[:rows].contiguous() for x in views), grad=grad)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        actual = with_gradients(packed(op, cu), *views, grad=grad_slack)
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(actual, clean, strict=True):
        assert torch.equal(a[:rows], b)
        assert (a[rows:] == 0).all()


@pytest.mark.parametrize("op", [jagged_flash_attention, gdpa])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("poisoned", range(4))
def test_packed_isolation_and_equal_reruns(op, poison, poisoned):
    cu, rows = offsets([20, 5, 24, 9]), 58
    inputs = [*qkv(rows, rows, 1, 1, dtype=torch.float32), tokens(rows, 1, 4, dtype=torch.float32, seed=9)]
    changed = [x.clone() for x in inputs]
    changed[poisoned][22, 0, 1] = poison
    kept = [*range(20), *range(25, rows)]
    first, again, other = (with_gradients(packed(op, cu), *x[:3], grad=x[3]) for x in (inputs, inputs, changed))
    for a, b, c in zip(first, again, other, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a[kept], c[kept])
    assert not all(x[20:25].isfinite().all() for x in other)


@pytest.mark.parametrize("op", [jagged_flash_attention, gdpa])
def test_packed_nothing_at_all(op):
    for lengths, rows in (([], 0), ([], 3), ([0, 0], 0), ([0], 3)):
        inputs = qkv(rows, rows, dtype=torch.float32)
        for result in with_gradients(packed(op, offsets(lengths)), *inputs):
            assert (result == 0).all()


@pytest.mark.parametrize(("longest", "block", "batch"), [(32, 64, 300), (1, 64, 200), (64, 128, 150)])
def test_packed_tiles_cover_every_row_once_and_are_full(longest, block, batch):
    lengths = torch.randint(0, longest + 1, (batch,), generator=torch.Generator().manual_seed(0))
    cu = offsets(lengths.tolist())
    rows = int(cu[-1])
    packing = build_packing(cu, rows + 100, longest, block)
    used = rows // packing.min_rows + packing.num_chunks
    first, last = packing.storage[: 2 * packing.capacity].view(2, -1)[:, :used]
    sizes = last - first
    covered = torch.cat([torch.arange(a, b) for a, b in zip(first.tolist(), last.tolist(), strict=True)])
    assert torch.equal(covered, torch.arange(rows))
    assert int(sizes.max()) <= block
    assert int(((sizes > 0) & (sizes < packing.min_rows)).sum()) <= packing.num_chunks
    assert packing.capacity - used >= 100 // block
    starts = torch.repeat_interleave(cu[:-1], lengths)
    assert torch.equal(packing.storage[2 * packing.capacity :][:rows], starts.int())


def test_packed_tiles_of_sequences_longer_than_promised_stay_inside():
    cu = offsets([3, 200, 5, 90, 1])
    packing = build_packing(cu, 299, 32, 64)
    used = 299 // packing.min_rows + packing.num_chunks
    first, last = packing.storage[: 2 * packing.capacity].view(2, -1)[:, :used]
    assert first.min() >= 0
    assert last.max() <= 299
    assert int((last - first).max()) <= 64


def test_when_tiles_are_packed():
    query, key, value = qkv(50, 50, dtype=torch.float32)

    def fits(op="jagged_flash_attention", inputs=(query, key, value), longest=32, **kwargs):
        packs = kernel_info(op, *inputs, max_seqlen_q=longest, **kwargs)["backend"] == "packed"
        try:
            assert kernel_info(op, *inputs, max_seqlen_q=longest, backend="packed", **kwargs)["backend"] == "packed"
        except ValueError:
            assert not packs
        else:
            assert packs
        return packs

    assert fits()
    assert fits("gdpa")
    assert fits(causal=True)
    assert fits(longest=64)
    assert fits(longest=None, max_seqlen_k=8)
    assert fits(longest=100, max_seqlen_k=8)
    refused = [{"longest": None}, {"longest": 65}, {"softcap": 1.0}, {"broadcast_query": True}]
    refused += [{"self_attention": False}, {"inputs": qkv(50, 40, dtype=torch.float32)}]
    refused += [{"inputs": qkv(50, 50, dim=130, dtype=torch.float32)}, {"inputs": qkv(50, 50)}]
    refused += [{"op": "gdpa", "activation": ["gelu", "silu"]}]
    refused += [{"longest": 40, "inputs": qkv(50, 50, dim=65, dtype=torch.float32)}]
    refused += [{"longest": 40, "inputs": qkv(50, 50, kv_heads=1, dtype=torch.float32)}]
    assert not any(fits(**arguments) for arguments in refused)
    cu, other = offsets([20, 30]), offsets([30, 20])
    for function in (jagged_flash_attention, gdpa):
        with pytest.raises(ValueError, match="short sequences"):
            function(query, key, value, cu, None, backend="packed")
        with pytest.raises(ValueError, match="short sequences"):
            function(query, key, value, cu, other, 32, 32, backend="packed")
        for cu_k in (None, cu):
            function(query, key, value, cu, cu_k, 32, backend="packed")
