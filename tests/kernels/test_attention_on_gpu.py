"""The Triton kernels on a GPU, against the reference in float64, and in the cases that only a device has.

The numbers in brackets are issues where users reported the case: FA is Dao-AILab/flash-attention, fla is
fla-org/flash-linear-attention, GR is meta-recsys/generative-recommenders.
"""

import threading

import pytest
import torch
from kernel_cases import offsets, signal_to_noise_db
from torch import Tensor

from lightning_gem.kernels import gdpa, jagged_flash_attention, pffn, pma_attention
from lightning_gem.kernels.dot_product.activations import ACTIVATIONS
from lightning_gem.kernels.schedule import _build, build_tile_schedule

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENGTHS_Q = [0, 1, 63, 64, 65, 130, 0, 300, 17]
LENGTHS_K = [7, 1, 64, 0, 130, 65, 0, 200, 333]
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (20, 9)},
    "left": {"window_size": (40, -1)},
    "causal window": {"causal": True, "window_size": (33, -1)},
    "narrow": {"window_size": (0, 0)},
}
LIMITS = {torch.bfloat16: (1e-2, 2e-2, 45.0), torch.float16: (2e-3, 4e-3, 55.0), torch.float32: (5e-6, 1e-5, 100.0)}


def randn(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.float32).to(dtype)


def cuda_qkv(rows_q, rows_k, heads=4, kv_heads=4, dim=64, dim_v=64, dtype=torch.bfloat16):
    return (
        randn(rows_q, heads, dim, dtype=dtype, seed=1),
        randn(rows_k, kv_heads, dim, dtype=dtype, seed=2),
        randn(rows_k, kv_heads, dim_v, dtype=dtype, seed=3),
    )


def evaluate(op, *inputs, grad=None):
    """Output and gradients."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = op(*leaves)
    grad = randn(*out.shape, dtype=out.dtype, seed=9) if grad is None else grad
    return (out.detach(), *torch.autograd.grad(out, leaves, grad))


def relative_error(actual, expected):
    return float((actual.double() - expected).norm() / expected.norm())


def assert_accurate(op, *inputs: Tensor) -> None:
    """Values and gradients of the kernels, in memory that was full of NaN, against the same in float64."""
    dtype = inputs[0].dtype
    out_limit, gradient_limit, decibels = LIMITS[dtype]
    torch.use_deterministic_algorithms(True)
    try:
        actual = evaluate(op, *inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    grad = randn(*actual[0].shape, dtype=dtype, seed=9)
    expected = evaluate(op, *(x.double() for x in inputs), grad=grad.double())
    assert signal_to_noise_db(actual[0], expected[0]) >= decibels
    for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert a.dtype == dtype
        if e.abs().max() < 1e-9:  # the weight of a lone key is 1, whatever the scores
            assert a.abs().max() < 1e-3
        else:
            assert relative_error(a, e) <= (gradient_limit if index else out_limit), (index, relative_error(a, e))


def both_offsets(extra=0, dtype=torch.int32):
    cu_q, cu_k = offsets(LENGTHS_Q, dtype).cuda(), offsets(LENGTHS_K, dtype).cuda()
    return cu_q, cu_k, int(cu_q[-1]) + extra, int(cu_k[-1]) + extra


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("dim", "dim_v", "dtype"), [(64, 64, torch.bfloat16), (128, 128, torch.bfloat16)])
def test_masks(mask, dim, dim_v, dtype):
    cu_q, cu_k, rows_q, rows_k = both_offsets()
    inputs = cuda_qkv(rows_q, rows_k, 2, 2, dim, dim_v, dtype)
    assert_accurate(lambda q, k, v: jagged_flash_attention(q, k, v, cu_q, cu_k, **MASKS[mask]), *inputs)
    assert_accurate(lambda q, k, v: gdpa(q, k, v, cu_q, cu_k, scale=0.1, **MASKS[mask]), *inputs)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, ["silu", "relu", "identity", "gelu"]])
def test_activations(activation):
    cu_q, cu_k, rows_q, rows_k = both_offsets()
    inputs = cuda_qkv(rows_q, rows_k, 4, 2)
    assert_accurate(
        lambda q, k, v: gdpa(q, k, v, cu_q, cu_k, activation=activation, scale=0.125, out_scale=0.01), *inputs
    )


@pytest.mark.parametrize(
    ("dim", "dim_v", "dtype", "kv_heads"),
    [
        (24, 24, torch.bfloat16, 1),
        (48, 80, torch.float16, 2),
        (80, 48, torch.bfloat16, 4),
        (96, 96, torch.float16, 1),
        (8, 256, torch.bfloat16, 4),
        (128, 16, torch.bfloat16, 1),
        (64, 32, torch.bfloat16, 4),
        (256, 256, torch.bfloat16, 4),
        (64, 64, torch.float32, 2),
        (256, 40, torch.float32, 4),
    ],
)
def test_head_sizes_types_and_groups(dim, dim_v, dtype, kv_heads):
    cu_q, cu_k, rows_q, rows_k = both_offsets(dtype=torch.int64)
    inputs = cuda_qkv(rows_q, rows_k, 4, kv_heads, dim, dim_v, dtype)
    assert_accurate(lambda q, k, v: jagged_flash_attention(q, k, v, cu_q, cu_k, causal=True), *inputs)
    assert_accurate(lambda q, k, v: gdpa(q, k, v, cu_q, cu_k, activation="silu", scale=dim**-0.5), *inputs)


def test_broadcast_seeds_dense_keys_cap_and_lse():
    _, cu_k, _, rows_k = both_offsets()
    _, key, value = cuda_qkv(1, rows_k)
    for num_seeds in (1, 32, 200):
        seeds = randn(num_seeds, 4, 64, seed=5)
        assert_accurate(lambda s, k, v: pma_attention(s, k, v, cu_k), seeds, key, value)
        assert_accurate(lambda s, k, v: pma_attention(s, k, v, cu_k, activation="gelu"), seeds, key, value)
    dense = (randn(len(LENGTHS_K), 40, 4, 64, seed=6) / 8, randn(len(LENGTHS_K), 40, 4, 64, seed=7))
    assert_accurate(lambda q, k, v: pffn(q, k, v, cu_k), key, *dense)
    assert_accurate(lambda q, k, v: pffn(q, k, v, cu_k), key, dense[0][0], dense[1][0])
    query = randn(rows_k, 4, 64, seed=8)
    assert_accurate(lambda q, k, v: jagged_flash_attention(q, k, v, cu_k, softcap=3.0), query, key, value)
    bias = randn(1, 4, 333, 333, seed=4)
    assert_accurate(lambda q, k, v: jagged_flash_attention(q, k, v, cu_k, attn_bias=bias), query, key, value)
    lse = jagged_flash_attention(query, key, value, cu_k, return_lse=True)[1]
    exact = jagged_flash_attention(query.double(), key.double(), value.double(), cu_k, return_lse=True)[1]
    torch.testing.assert_close(lse.double(), exact, rtol=1e-5, atol=1e-5)


def test_targets_and_context():
    cu, _, rows, _ = both_offsets()
    inputs = cuda_qkv(rows, rows)
    targets = torch.tensor([0, 1, 5, 64, 0, 20, 0, 3, 17], device="cuda")
    for context, window in ((0, -1), (3, -1), (70, 25)):
        assert_accurate(
            lambda q, k, v: gdpa(
                *(q, k, v, cu),
                causal=True,
                activation="silu",
                scale=0.1,
                num_targets=targets,
                contextual_seqlen=context,  # noqa: B023
                window_size=(window, -1),  # noqa: B023
            ),
            *inputs,
        )


@pytest.mark.parametrize("lengths", [[0, 9, 3], [9, 0, 0, 3], [9, 3, 0], [0, 0], [], [1, 0, 1]])
def test_empty_sequences_and_slack(lengths):
    """[FA 2562, FA 2568, FA 1537, FA 1228, fla 892]"""
    rows = sum(lengths)
    slack = torch.full((200, 4, 64), torch.nan, device="cuda").bfloat16()
    inputs = [torch.cat([x, slack]) for x in cuda_qkv(rows, rows)]
    cu = offsets(lengths).cuda()
    grad = torch.cat([randn(rows, 4, 64, seed=9), slack])
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        for op in (jagged_flash_attention, gdpa):
            with_slack = evaluate(lambda *x: op(*x, cu), *inputs, grad=grad)  # noqa: B023
            clean = evaluate(lambda *x: op(*x, cu), *(x[:rows] for x in inputs), grad=grad[:rows])  # noqa: B023
            for a, b in zip(with_slack, clean, strict=True):
                assert torch.equal(a[:rows], b)
                assert b.isfinite().all()
                assert (a[rows:] == 0).all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_bit_equal_runs_isolation_and_strides():
    """[FA 414, FA 746, FA 988, GR 583]"""
    cu, _, rows, _ = both_offsets()
    inputs = cuda_qkv(rows, rows)
    changed = [x.clone() for x in inputs]
    start, end = int(cu[5]), int(cu[6])
    for x in changed:
        x[start:end] = 1e3 * x[start:end] + 1
    kept = torch.cat([torch.arange(start), torch.arange(end, rows)]).cuda()
    fused = torch.cat([*inputs, inputs[0][..., :3].transpose(1, 2)[:, :, :1].expand(-1, -1, 64)], 1)
    views = fused.split([4, 4, 4, fused.shape[1] - 12], 1)[:3]
    for op in (jagged_flash_attention, gdpa):
        first, again, other, strided = (
            evaluate(lambda *x: op(*x, cu), *x)  # noqa: B023
            for x in (inputs, inputs, changed, views)
        )
        for a, b, c, d in zip(first, again, other, strided, strict=True):
            assert torch.equal(a, b)
            assert torch.equal(a[kept], c[kept])
            assert torch.equal(a, d)
        ones = evaluate(lambda *x: op(*x, cu), *inputs, grad=torch.ones_like(first[0]))  # noqa: B023
        expanded = first[0].new_ones(1, 1, 1).expand(*first[0].shape)
        stride_0 = evaluate(lambda *x: op(*x, cu), *inputs, grad=expanded)  # noqa: B023
        assert all(torch.equal(a, b) for a, b in zip(ones, stride_0, strict=True))


@pytest.mark.parametrize("magnitude", [1e3, 1e4])
def test_large_inputs_stay_finite(magnitude):
    cu, _, rows, _ = both_offsets()
    inputs = [magnitude * x for x in cuda_qkv(rows, rows)]
    for op in (jagged_flash_attention, gdpa):
        assert all(x.isfinite().all() for x in evaluate(lambda *x: op(*x, cu), *inputs))  # noqa: B023


def test_more_units_than_a_grid_axis_holds():
    """20,000 sequences of 8 heads: an axis of a grid that is not the first ends at 65,535."""
    cu = offsets([3] * 20_000, torch.int32).cuda()
    assert_accurate(lambda q, k, v: jagged_flash_attention(q, k, v, cu), *cuda_qkv(60_000, 60_000, 8, 8, 16, 16))
    assert_accurate(lambda q, k, v: gdpa(q, k, v, cu, scale=0.25), *cuda_qkv(60_000, 60_000, 8, 8, 16, 16))


def test_offsets_beyond_int32():
    """[fla 1080]: the last sequence lies behind 2^31 elements, in rows and, transposed, in heads."""
    lengths = [128] * 16_400 + [130]
    cu = offsets(lengths).cuda()
    rows = int(cu[-1])
    assert rows * 8 * 128 > 2**31
    for transposed in (False, True):
        inputs = [torch.zeros(8, rows, 128, device="cuda", dtype=torch.bfloat16).transpose(0, 1) for _ in range(3)]
        if not transposed:
            inputs = [x.contiguous() for x in inputs]
        last = [randn(130, 8, 128, seed=seed) for seed in (1, 2, 3)]
        for x, y in zip(inputs, last, strict=True):
            x[-130:] = y
        grad = torch.zeros_like(inputs[0])
        grad[-130:] = randn(130, 8, 128, seed=9)
        backend = "triton" if transposed else "auto"  # the copy engine does not take tokens behind heads
        for op in (jagged_flash_attention, gdpa):
            results = evaluate(lambda *x: op(*x, cu, backend=backend), *inputs, grad=grad)  # noqa: B023
            one = offsets([130]).cuda()
            alone = evaluate(lambda *x: op(*x, one, backend=backend), *last, grad=grad[-130:])  # noqa: B023
            for a, b in zip(results, alone, strict=True):
                assert torch.equal(a[-130:], b)
            del results
        del inputs, grad


def test_nothing_waits_for_the_gpu():
    cu_q, cu_k, rows_q, rows_k = both_offsets()
    inputs = [x.requires_grad_() for x in cuda_qkv(rows_q, rows_k)]
    seeds = randn(5, 4, 64, seed=5).requires_grad_()
    grad = torch.ones(rows_q, 4, 64, device="cuda", dtype=torch.bfloat16)

    def step():
        cu = cu_q.clone()  # a new tensor, so that the schedule is built again
        jagged_flash_attention(*inputs, cu, cu_k, window_size=(9, 9)).backward(grad)
        gdpa(*inputs, cu, cu_k).backward(grad)
        pma_attention(seeds, *inputs[1:], cu_k).sum().backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_first_call_in_a_new_thread_and_on_another_device():
    """[triton 10002]"""
    cu, _, rows, _ = both_offsets()
    inputs = cuda_qkv(rows, rows)
    expected = evaluate(lambda *x: gdpa(*x, cu, activation="hardswish"), *inputs)
    results = []
    thread = threading.Thread(
        target=lambda: results.append(evaluate(lambda *x: gdpa(*x, cu, activation="hardswish"), *inputs))
    )
    thread.start()
    thread.join()
    assert all(torch.equal(a, b) for a, b in zip(results[0], expected, strict=True))
    if torch.cuda.device_count() > 1:
        elsewhere = [x.to("cuda:1") for x in inputs]
        grad = randn(*expected[0].shape, seed=9).to("cuda:1")
        moved = evaluate(lambda *x: gdpa(*x, cu.to("cuda:1"), activation="hardswish"), *elsewhere, grad=grad)
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(moved, expected, strict=True))


def test_captured_graphs_follow_the_offsets():
    cu, _, rows, _ = both_offsets()
    inputs = cuda_qkv(rows, rows)
    jagged_flash_attention(*inputs, cu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = jagged_flash_attention(*inputs, cu)
    other = offsets(LENGTHS_Q[::-1], torch.int32).cuda()
    cu.copy_(other)
    graph.replay()
    assert torch.equal(out, jagged_flash_attention(*inputs, other))


def test_compiled_is_eager():
    cu, _, rows, _ = both_offsets()
    inputs = cuda_qkv(rows, rows)
    for op in (jagged_flash_attention, gdpa):
        compiled = torch.compile(op, fullgraph=True, dynamic=True)
        eager = evaluate(lambda *x: op(*x, cu, None, 300, 300), *inputs)  # noqa: B023
        actual = evaluate(lambda *x: compiled(*x, cu, None, 300, 300), *inputs)  # noqa: B023
        assert all(torch.equal(a, b) for a, b in zip(actual, eager, strict=True))


@pytest.mark.parametrize("order", ["lpt", "none"])
def test_schedule_kernel_is_the_definition(order):
    for lengths in (LENGTHS_Q, [], [0], [700] * 40, list(range(1000))):
        cu, other = offsets(lengths).cuda(), offsets(lengths[::-1], torch.int32).cuda()
        for tiled, rows in ((cu, int(cu[-1]) + 300), (None, 77)):
            actual = build_tile_schedule(tiled, other, block_m=64, num_rows=rows, order=order)
            expected = _build(tiled, other, 64, rows, order, actual.capacity)
            assert torch.equal(actual.num_tiles, expected.num_tiles)
            size = int(actual.num_tiles)
            assert torch.equal(actual.sequence[:size], expected.sequence[:size])
            assert torch.equal(actual.tile[:size], expected.tile[:size])
