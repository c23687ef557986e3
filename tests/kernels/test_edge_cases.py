"""Cases that broke other libraries' variable-length kernels, on every attention op and every kind of mask.

The numbers in brackets are issues where users reported the case: FA is Dao-AILab/flash-attention, GR is
meta-recsys/generative-recommenders.
"""

import threading

import pytest
import torch
from kernel_cases import (
    CROSS_OPS,
    SELF_OPS,
    assert_close,
    offsets,
    qkv,
    signal_to_noise_db,
    tokens,
    with_gradients,
)

from lightning_gem.kernels import gdpa, jagged_flash_attention
from lightning_gem.kernels.dot_product.reference import gdpa_loop
from lightning_gem.kernels.flash.reference import attention_loop


@pytest.fixture(params=SELF_OPS)
def self_op(request):
    return SELF_OPS[request.param]


@pytest.fixture(params=CROSS_OPS)
def cross_op(request):
    return CROSS_OPS[request.param]


def run(op, lengths, inputs=None, **kwargs):
    """(out, dq, dk, dv) of a self-attention op."""
    inputs = qkv(sum(lengths), sum(lengths)) if inputs is None else inputs
    return with_gradients(lambda q, k, v: op(q, k, v, offsets(lengths)), *inputs, **kwargs)


@pytest.mark.parametrize("lengths", [[0, 9, 3], [9, 0, 0, 3], [9, 3, 0]])
def test_empty_sequences_change_nothing(self_op, lengths):
    """[FA 2562, FA 2568]"""
    assert_close(run(self_op, lengths), run(self_op, [9, 3]))


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_batches_without_tokens_stay_in_the_graph(self_op, lengths):
    leaf = tokens(0, 2, 4).requires_grad_()
    self_op(leaf, leaf, leaf, offsets(lengths)).sum().backward()
    assert leaf.grad is not None
    slack = tokens(3, 2, 4).requires_grad_()
    self_op(slack, slack, slack, offsets(lengths)).sum().backward()
    assert (slack.grad == 0).all()


def test_no_queries_give_zero_gradients_to_keys(cross_op):
    """[FA 2421, FA 1713]"""
    cu_q, cu_k = offsets([0, 3]), offsets([4, 3])
    _, _, grad_key, grad_value = with_gradients(lambda q, k, v: cross_op(q, k, v, cu_q, cu_k), *qkv(3, 7))
    assert (grad_key[:4] == 0).all()
    assert (grad_value[:4] == 0).all()
    assert grad_value[4:].abs().sum() > 0


def test_no_keys_give_zero_outputs_and_gradients(cross_op):
    cu_q, cu_k = offsets([4, 3]), offsets([0, 3])
    out, *grads = with_gradients(lambda q, k, v: cross_op(q, k, v, cu_q, cu_k), *qkv(7, 3))
    assert (out[:4] == 0).all()
    assert (grads[0][:4] == 0).all()
    assert all(grad.isfinite().all() for grad in grads)


def test_no_keys_anywhere(cross_op):
    out, *grads = with_gradients(lambda q, k, v: cross_op(q, k, v, offsets([4, 3]), offsets([0, 0])), *qkv(7, 0))
    assert (out == 0).all()
    assert (grads[0] == 0).all()


def test_queries_that_a_mask_blinds_give_zero():
    """[cudnn-frontend 676]: causal from the end, so that 5 queries before 2 keys leave 3 queries without any."""
    for op in (jagged_flash_attention, gdpa):
        out, *grads = with_gradients(
            lambda q, k, v: op(q, k, v, offsets([5, 1]), offsets([2, 1]), causal=True),  # noqa: B023
            *qkv(6, 3),
        )
        assert (out[:3] == 0).all()
        assert out[3:].abs().min() > 0
        assert (grads[0][:3] == 0).all()
        assert all(grad.isfinite().all() for grad in grads)


def test_lengths_of_one_and_zero():
    """[FA 1537]"""
    query, key, value = qkv(2, 2)
    cu_seqlens = offsets([0, 1, 0, 1])
    assert_close([jagged_flash_attention(query, key, value, cu_seqlens, None, 1, 1)], [value])


def test_slack_is_never_read_and_comes_back_as_zero(self_op):
    """[FA 1228, fla-org/flash-linear-attention 892]"""
    inputs = [torch.cat([x, torch.full((5, 2, 4), torch.nan, dtype=x.dtype)]) for x in qkv(12, 12)]
    grad = torch.cat([tokens(12, 2, 4, seed=9), torch.full((5, 2, 4), torch.nan, dtype=torch.float64)])
    results = run(self_op, [9, 3], inputs, grad=grad)
    for with_slack, without in zip(results, run(self_op, [9, 3], grad=grad[:12]), strict=True):
        assert torch.equal(with_slack[:12], without)
        assert (with_slack[12:] == 0).all()


def test_no_result_depends_on_uninitialised_memory(self_op):
    """[tilelang 2461]: in deterministic mode torch fills new memory with NaN."""
    expected = run(self_op, [9, 0, 3, 70])
    torch.use_deterministic_algorithms(True)
    try:
        actual = run(self_op, [9, 0, 3, 70])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_slices_of_one_fused_tensor(self_op):
    """[GR 583]"""
    fused = tokens(12, 6, 5)
    views = [part[..., :4] for part in fused.split(2, dim=1)]
    assert_close(run(self_op, [9, 3], views), run(self_op, [9, 3], [x.contiguous() for x in views]))


def test_two_runs_are_bit_equal(self_op):
    """[FA 414, FA 746, FA 988]"""
    lengths = [70, 9, 0, 3]
    assert all(torch.equal(a, b) for a, b in zip(run(self_op, lengths), run(self_op, lengths), strict=True))


def test_sequences_never_read_each_other(self_op):
    """[pytorch 177378]"""
    lengths, kept = [9, 3, 65, 4], [*range(9), *range(12, 81)]
    inputs = qkv(81, 81)
    changed = [x.clone() for x in inputs]
    for x in changed:
        x[9:12] = 1e3 * x[9:12] + 1.0
    for before, after in zip(run(self_op, lengths, inputs), run(self_op, lengths, changed), strict=True):
        assert torch.equal(before[kept], after[kept])
        assert not torch.equal(before, after)


def test_order_of_the_batch_does_not_matter(self_op):
    lengths = [9, 3, 65, 4]
    inputs = qkv(81, 81)
    parts = [x.split(lengths) for x in inputs]
    reversed_inputs = [torch.cat(part[::-1]) for part in parts]
    out = self_op(*inputs, offsets(lengths))
    reversed_out = self_op(*reversed_inputs, offsets(lengths[::-1]))
    assert_close([torch.cat(reversed_out.split(lengths[::-1])[::-1])], [out])


def test_gradients_with_unusual_strides(self_op):
    """[pytorch 138317, pytorch 109607]: the stride 0 of sum(), and a transposed gradient."""
    grad = tokens(4, 2, 12).permute(2, 1, 0)
    assert_close(run(self_op, [9, 3], grad=grad), run(self_op, [9, 3], grad=grad.contiguous()))
    ones = torch.ones(1, 1, 1, dtype=torch.float64).expand(12, 2, 4)
    assert_close(run(self_op, [9, 3], grad=ones), run(self_op, [9, 3], grad=ones.contiguous()))


@pytest.mark.parametrize("magnitude", [1e3, 1e4])
def test_large_inputs_stay_finite(self_op, magnitude):
    """[pytorch 119320, pytorch 125674]"""
    results = run(self_op, [9, 0, 70], [magnitude * x for x in qkv(79, 79, dtype=torch.float32)])
    assert all(x.isfinite().all() for x in results)


@pytest.mark.parametrize(("dim", "value_dim"), [(24, 24), (48, 80), (80, 48), (96, 3), (1, 1)])
def test_any_head_size(dim, value_dim):
    cu_seqlens = offsets([9, 3])
    inputs = qkv(12, 12, dim=dim, value_dim=value_dim)
    softmax = with_gradients(lambda q, k, v: jagged_flash_attention(q, k, v, cu_seqlens), *inputs)
    loop = with_gradients(
        lambda q, k, v: attention_loop(q, k, v, cu_seqlens, cu_seqlens, softmax_scale=dim**-0.5)[0], *inputs
    )
    assert_close(softmax, loop)
    activated = with_gradients(lambda q, k, v: gdpa(q, k, v, cu_seqlens), *inputs)
    loop = with_gradients(lambda q, k, v: gdpa_loop(q, k, v, cu_seqlens, cu_seqlens, activation="gelu_tanh"), *inputs)
    assert_close(activated, loop)


@pytest.mark.parametrize(("dtype", "decibels"), [(torch.bfloat16, 40.0), (torch.float16, 55.0), (torch.float32, 110.0)])
def test_precision(self_op, dtype, decibels):
    inputs = [x.to(dtype) for x in qkv(150, 150, dim=32, value_dim=32)]
    lengths = [70, 0, 15, 65]
    results = run(self_op, lengths, inputs)
    exact = run(self_op, lengths, [x.double() for x in inputs], grad=tokens(150, 2, 32, seed=9).to(dtype).double())
    for actual, expected in zip(results, exact, strict=True):
        assert actual.dtype == dtype
        assert signal_to_noise_db(actual, expected) > decibels


def test_autocast_computes_in_its_dtype(self_op):
    query, key, value = qkv(12, 12, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = self_op(query, key.bfloat16(), value, offsets([9, 3]))
        double = self_op(query.double(), key.double(), value.double(), offsets([9, 3]))
    assert mixed.dtype == torch.bfloat16
    assert torch.equal(mixed, self_op(query.bfloat16(), key.bfloat16(), value.bfloat16(), offsets([9, 3])))
    assert double.dtype == torch.float64
    assert torch.equal(double, self_op(query.double(), key.double(), value.double(), offsets([9, 3])))


def test_offsets_of_either_type_and_loose_bounds():
    query, key, value = qkv(12, 12)
    expected = jagged_flash_attention(query, key, value, offsets([9, 3]))
    loose = jagged_flash_attention(query, key, value, offsets([9, 3], torch.int32), None, 1000, 1000)
    assert torch.equal(loose, expected)


def test_only_some_inputs_need_gradients(self_op):
    query, key, value = qkv(12, 12)
    assert not self_op(query, key, value, offsets([9, 3])).requires_grad
    expected = run(self_op, [9, 3])
    value.requires_grad_()
    self_op(query, key, value, offsets([9, 3])).backward(tokens(12, 2, 4, seed=9))
    assert_close([value.grad], [expected[3]])


def test_backward_in_another_thread(self_op):
    """[triton 10002]"""
    expected = run(self_op, [9, 3])
    results: list[tuple[torch.Tensor, ...]] = []
    thread = threading.Thread(target=lambda: results.append(run(self_op, [9, 3])))
    thread.start()
    thread.join()
    assert_close(results[0], expected)


ERRORS = [
    (lambda q, k, v: (q[0], k, v, offsets([12])), {}, r"query must be \(total_tokens, num_heads, head_dim\)"),
    (lambda q, k, v: (q.long(), k, v, offsets([12])), {}, "query must be bfloat16, float16, float32 or float64"),
    (lambda q, k, v: (q, k.float(), v, offsets([12])), {}, "key must have the dtype and device of query"),
    (lambda q, k, v: (q, k[..., :3], v, offsets([12])), {}, "key must have the head_dim of query"),
    (lambda q, k, v: (q, k, v[:3], offsets([12])), {}, "value must have the tokens and heads of key"),
    (lambda q, k, v: (q[:, :1], k, v, offsets([12])), {}, "query has 1 heads, which is no multiple of the 2"),
    (lambda q, k, v: (q, k, v, torch.tensor([0.0, 12.0])), {}, r"must be int32 or int64 of shape \(B\+1,\)"),
    (lambda q, k, v: (q, k, v, torch.tensor([1, 12])), {}, "must start at 0 and never decrease"),
    (lambda q, k, v: (q, k, v, torch.tensor([0, 7, 5])), {}, "must start at 0 and never decrease"),
    (lambda q, k, v: (q, k, v, offsets([13])), {}, "ends at 13, but there are 12 rows"),
    (lambda q, k, v: (q, k, v, offsets([12]), offsets([6, 6])), {}, "describes 2 sequences, but cu_seqlens_q 1"),
    (lambda q, k, v: (q, k, v, offsets([12]), None, 11), {}, "max_seqlen 11 is below the longest sequence"),
    (lambda q, k, v: (q, k, v, None), {}, "cu_seqlens_q may be None only with broadcast_query"),
    (lambda q, k, v: (q, k, v, offsets([12])), {"broadcast_query": True}, "pass cu_seqlens_q=None"),
    (lambda q, k, v: (q, k, v, offsets([12])), {"window_size": (-2, 0)}, r"window_size must be \(left, right\)"),
]


@pytest.mark.parametrize("op", [jagged_flash_attention, gdpa])
@pytest.mark.parametrize(("arguments", "kwargs", "message"), ERRORS)
def test_bad_arguments_are_named(op, arguments, kwargs, message):
    with pytest.raises(ValueError, match=message):
        op(*arguments(*qkv(12, 12)), **kwargs)


@pytest.mark.parametrize("shape", [(2, 12, 12), (3, 1, 12, 12), (1, 3, 12, 12), (1, 1, 8, 12), (1, 1, 12, 8)])
def test_bad_bias_is_named(shape):
    with pytest.raises(ValueError, match="attn_bias must be float"):
        jagged_flash_attention(*qkv(12, 12), offsets([9, 3]), attn_bias=tokens(*shape))
