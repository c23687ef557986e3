"""Offsets and pooling of jagged tensors."""

import pytest
import torch
from hypothesis import given
from kernel_cases import BATCH, QUICK, assert_close, offsets, tokens, with_gradients

from lightning_gem.kernels import jagged_mean_pool, jagged_sum_pool, lengths_to_cu_seqlens
from lightning_gem.kernels.jagged.reference import sum_pool_loop


@QUICK
@given(lengths=BATCH)
def test_pools_are_the_definition(lengths):
    cu_seqlens = offsets(lengths)
    x = tokens(sum(lengths), 3)
    summed = with_gradients(lambda x: jagged_sum_pool(x, cu_seqlens), x)
    assert_close(summed, with_gradients(lambda x: sum_pool_loop(x, cu_seqlens), x))

    count = torch.tensor(lengths).clamp(min=1)[:, None]
    mean = with_gradients(lambda x: jagged_mean_pool(x, cu_seqlens), x)
    assert_close(mean, with_gradients(lambda x: sum_pool_loop(x, cu_seqlens) / count, x))


@pytest.mark.parametrize("pool", [jagged_sum_pool, jagged_mean_pool])
def test_pools_ignore_slack_and_keep_trailing_dimensions(pool):
    x = tokens(6, 2, 3, dtype=torch.bfloat16)
    poisoned = torch.cat([x, torch.full((2, 2, 3), torch.nan, dtype=x.dtype)])
    out, grad = with_gradients(lambda x: pool(x, offsets([2, 0, 4], torch.int32)), poisoned)
    assert out.shape == (3, 2, 3)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, pool(x, offsets([2, 0, 4])))
    assert (out[1] == 0).all()
    assert (grad[6:] == 0).all()


def test_sums_are_kept_in_float32():
    ones = torch.ones(4096, 1, dtype=torch.bfloat16)  # a bfloat16 sum of ones stops at 256
    assert jagged_sum_pool(ones, offsets([4096])) == 4096
    assert jagged_mean_pool(ones, offsets([4096])) == 1


@pytest.mark.parametrize("pool", [jagged_sum_pool, jagged_mean_pool])
def test_pools_accept_an_empty_batch_and_empty_sequences(pool):
    assert pool(tokens(0, 3), offsets([])).shape == (0, 3)
    out, grad = with_gradients(lambda x: pool(x, offsets([0, 0])), tokens(0, 3))
    assert (out == 0).all()
    assert grad.shape == (0, 3)


def test_pool_gradcheck():
    x = tokens(7, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: jagged_mean_pool(x, offsets([3, 0, 2])), x)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_start_at_zero_and_keep_the_dtype(dtype):
    out = lengths_to_cu_seqlens(torch.tensor([2, 0, 3], dtype=dtype))
    assert out.tolist() == [0, 2, 2, 5]
    assert out.dtype == dtype
    assert lengths_to_cu_seqlens(torch.empty(0, dtype=dtype)).tolist() == [0]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (torch.tensor([1.0]), "lengths must be int32 or int64"),
        (torch.tensor([[1]]), "lengths must be int32 or int64"),
        (torch.tensor([3, -1]), "must not be negative, got -1"),
        (torch.tensor([2**30, 2**30], dtype=torch.int32), "beyond int32"),
    ],
)
def test_bad_lengths_are_named(lengths, message):
    with pytest.raises(ValueError, match=message):
        lengths_to_cu_seqlens(lengths)


def test_bad_pool_inputs_are_named():
    with pytest.raises(ValueError, match="x must be floating point"):
        jagged_sum_pool(torch.ones(3, dtype=torch.int64), offsets([3]))
    with pytest.raises(ValueError, match="cu_seqlens ends at 4, but there are 3 rows"):
        jagged_mean_pool(tokens(3, 1), offsets([4]))
