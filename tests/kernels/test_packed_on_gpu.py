"""Self-attention over short sequences on a GPU, several in one tile, against the reference in float64."""

import pytest
import torch
from kernel_cases import offsets
from test_attention_on_gpu import assert_accurate, cuda_qkv, evaluate, randn

from lightning_gem.kernels import gdpa, jagged_flash_attention, kernel_info
from lightning_gem.kernels.attention.packed import build_packing
from lightning_gem.kernels.dot_product.activations import ACTIVATIONS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MASKS = [{}, {"causal": True}, {"window_size": (5, 2)}, {"window_size": (-1, 3)}, {"window_size": (0, 0)}]


def lengths_up_to(longest, batch=301):
    lengths = torch.randint(0, longest + 1, (batch,), generator=torch.Generator().manual_seed(longest))
    lengths[[0, -1]] = 0
    lengths[5:8] = longest
    return lengths.tolist()


def assert_packed_is_accurate(op, lengths, longest, inputs, dtype=torch.int32, **kwargs):
    cu = offsets(lengths, dtype).cuda()
    info = kernel_info(
        op.__name__, *inputs, max_seqlen_q=longest, **{k: v for k, v in kwargs.items() if "scale" not in k}
    )
    assert info["backend"] == "packed"
    assert_accurate(lambda q, k, v: op(q, k, v, cu, None, longest, **kwargs), *inputs)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("longest", [1, 32, 50])
def test_masks(longest, mask):
    lengths = lengths_up_to(longest)
    inputs = cuda_qkv(sum(lengths), sum(lengths), 2, 2)
    assert_packed_is_accurate(jagged_flash_attention, lengths, longest, inputs, **mask)
    assert_packed_is_accurate(gdpa, lengths, longest, inputs, scale=0.1, **mask)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation):
    lengths = lengths_up_to(32)
    inputs = cuda_qkv(sum(lengths), sum(lengths), 4, 2)
    kwargs = {"activation": activation, "scale": 0.125, "out_scale": 0.01}
    assert_packed_is_accurate(gdpa, lengths, 32, inputs, **kwargs)


@pytest.mark.parametrize(
    ("dim", "dim_v", "dtype", "kv_heads", "longest"),
    [
        (24, 24, torch.bfloat16, 1, 32),
        (48, 80, torch.float16, 2, 32),
        (128, 128, torch.bfloat16, 4, 32),
        (64, 40, torch.bfloat16, 4, 64),
        (128, 16, torch.bfloat16, 1, 20),
        (64, 32, torch.bfloat16, 4, 20),
        (16, 128, torch.bfloat16, 4, 20),
        (64, 64, torch.float32, 2, 32),
        (128, 40, torch.float32, 4, 9),
    ],
)
def test_head_sizes_types_and_groups(dim, dim_v, dtype, kv_heads, longest):
    lengths = lengths_up_to(longest)
    inputs = cuda_qkv(sum(lengths), sum(lengths), 4, kv_heads, dim, dim_v, dtype)
    assert_packed_is_accurate(jagged_flash_attention, lengths, longest, inputs, torch.int64, causal=True)
    assert_packed_is_accurate(gdpa, lengths, longest, inputs, torch.int64, activation="silu", scale=dim**-0.5)


@pytest.mark.parametrize("lengths", [[0, 9, 3], [9, 0, 0, 3], [9, 3, 0] * 70, [0, 0], [], [1, 0, 1]])
def test_empty_sequences_and_slack(lengths):
    rows = sum(lengths)
    slack = torch.full((200, 4, 64), torch.nan, device="cuda").bfloat16()
    inputs = [torch.cat([x, slack]) for x in cuda_qkv(rows, rows)]
    cu = offsets(lengths).cuda()
    grad = torch.cat([randn(rows, 4, 64, seed=9), slack])
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        for op in (jagged_flash_attention, gdpa):
            with_slack = evaluate(lambda *x: op(*x, cu, None, 9), *inputs, grad=grad)  # noqa: B023
            clean = evaluate(lambda *x: op(*x, cu, None, 9), *(x[:rows] for x in inputs), grad=grad[:rows])  # noqa: B023
            for a, b in zip(with_slack, clean, strict=True):
                assert torch.equal(a[:rows], b)
                assert b.isfinite().all()
                assert (a[rows:] == 0).all()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("poison", [1e3, torch.nan, torch.inf])
def test_isolation_strides_and_equal_runs(poison):
    lengths = lengths_up_to(32)
    cu, rows = offsets(lengths).cuda(), sum(lengths)
    start, end = int(cu[6]), int(cu[7])
    inputs = cuda_qkv(rows, rows)
    changed = [x.clone() for x in inputs]
    for x in changed:
        x[start:end] *= poison
    kept = torch.cat([torch.arange(start), torch.arange(end, rows)]).cuda()
    views = torch.cat(inputs, 1).split(4, 1)
    for op in (jagged_flash_attention, gdpa):
        first, again, other, strided = (
            evaluate(lambda *x: op(*x, cu, None, 32), *x)  # noqa: B023
            for x in (inputs, inputs, changed, views)
        )
        for a, b, c, d in zip(first, again, other, strided, strict=True):
            assert torch.equal(a, b)
            assert torch.equal(a[kept], c[kept])
            assert torch.equal(a, d)


def test_gradient_of_lse():
    lengths = lengths_up_to(32)
    cu, rows = offsets(lengths).cuda(), sum(lengths)

    def lse(q, k, v):
        out, lse = jagged_flash_attention(q, k, v, cu, None, 32, return_lse=True)
        return torch.cat([out.flatten(1), lse.T.to(out.dtype)], 1)

    assert_accurate(lse, *cuda_qkv(rows, rows))


def test_more_units_than_a_grid_axis_holds_and_offsets_beyond_int32():
    cu = offsets([3] * 20_000, torch.int32).cuda()
    inputs = cuda_qkv(60_000, 60_000, 8, 8, 16, 16)
    assert_accurate(lambda q, k, v: jagged_flash_attention(q, k, v, cu, None, 3), *inputs)
    lengths = [32] * 65_540 + [17]
    cu, rows = offsets(lengths).cuda(), sum(lengths)
    assert rows * 8 * 128 > 2**31
    inputs = [torch.zeros(8, rows, 128, device="cuda", dtype=torch.bfloat16).transpose(0, 1) for _ in range(3)]
    last = [randn(17, 8, 128, seed=seed) for seed in (1, 2, 3)]
    for x, y in zip(inputs, last, strict=True):
        x[-17:] = y
    grad = torch.zeros_like(inputs[0])
    grad[-17:] = randn(17, 8, 128, seed=9)
    results = evaluate(lambda *x: jagged_flash_attention(*x, cu, None, 32), *inputs, grad=grad)
    one = offsets([17]).cuda()
    alone = evaluate(lambda *x: jagged_flash_attention(*x, one, None, 32), *last, grad=grad[-17:])
    for a, b in zip(results, alone, strict=True):
        torch.testing.assert_close(a[-17:], b, rtol=1e-2, atol=1e-2)


def test_nothing_waits_and_graphs_follow_the_offsets():
    lengths = lengths_up_to(32)
    cu, rows = offsets(lengths).cuda(), sum(lengths)
    inputs = [x.requires_grad_() for x in cuda_qkv(rows, rows)]

    def step(cu):
        return evaluate(lambda *x: jagged_flash_attention(*x, cu, None, 32), *inputs, grad=inputs[0])

    step(cu)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(cu.clone())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = jagged_flash_attention(*inputs, cu, None, 32)
    other = offsets(lengths[::-1]).cuda()
    cu.copy_(other)
    graph.replay()
    assert torch.equal(out, step(other)[0])


def test_compiled_is_eager():
    lengths = lengths_up_to(32)
    cu, rows = offsets(lengths).cuda(), sum(lengths)
    inputs = cuda_qkv(rows, rows)
    for op in (jagged_flash_attention, gdpa):
        compiled = torch.compile(op, fullgraph=True, dynamic=True)
        eager = evaluate(lambda *x: op(*x, cu, None, 32), *inputs)  # noqa: B023
        actual = evaluate(lambda *x: compiled(*x, cu, None, 32), *inputs)  # noqa: B023
        assert all(torch.equal(a, b) for a, b in zip(actual, eager, strict=True))


def test_every_row_is_in_one_tile():
    for longest, block in ((32, 64), (1, 64), (64, 128)):
        lengths = lengths_up_to(longest, 1000)
        cu, rows = offsets(lengths).cuda(), sum(lengths)
        packing = build_packing(cu, rows + 100, longest, block)
        first, last = packing.storage[: 2 * packing.capacity].view(2, -1)[
            :, : rows // packing.min_rows + packing.num_chunks
        ]
        covered = torch.cat([torch.arange(a, b) for a, b in zip(first.tolist(), last.tolist(), strict=True)])
        assert torch.equal(covered, torch.arange(rows))
        assert (last - first).max() <= block
        starts = torch.repeat_interleave(cu[:-1], cu.diff())
        assert torch.equal(packing.storage[2 * packing.capacity :][:rows], starts.int())
