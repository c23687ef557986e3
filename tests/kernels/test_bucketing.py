"""The buckets behind the vectorised references."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import PAIRED_BATCH, QUICK, offsets, qkv

from lightning_gem.kernels.bucketing import bucket_qkv, plan_buckets, unpad_queries

CPU = torch.device("cpu")


@QUICK
@given(lengths=PAIRED_BATCH, slack=st.sampled_from([0, 3]))
def test_every_sequence_is_padded_with_zeros_and_comes_back(lengths, slack):
    cu_q, cu_k = offsets([q for q, _ in lengths]), offsets([k for _, k in lengths])
    query, key, value = qkv(int(cu_q[-1]) + slack, int(cu_k[-1]) + slack)

    plan, parts = bucket_qkv(query, key, value, cu_q, cu_k)

    for bucket, q, k, v in parts:
        for row, sequence in enumerate(bucket.sequences.tolist()):
            for padded, packed, cu_seqlens in ((q, query, cu_q), (k, key, cu_k), (v, value, cu_k)):
                start, end = cu_seqlens[sequence], cu_seqlens[sequence + 1]
                assert torch.equal(padded[row, :, : end - start], packed[start:end].transpose(0, 1))
                assert (padded[row, :, end - start :] == 0).all()
    back = unpad_queries(plan, [q for _, q, _, _ in parts], len(query))
    assert torch.equal(back[: cu_q[-1]], query[: cu_q[-1]])
    assert (back[cu_q[-1] :] == 0).all()


def test_heavy_tailed_lengths_are_not_padded_to_the_longest():
    lengths = [2000] + [5] * 500
    plan = plan_buckets(offsets(lengths), offsets(lengths), 1, CPU)
    padded = sum(len(bucket.sequences) * bucket.size_q * bucket.size_k for bucket in plan.buckets)
    assert padded == sum(length**2 for length in lengths)
    assert len(plan.buckets) == 2


def test_few_buckets_and_little_padding_for_log_normal_lengths():
    generator = torch.Generator().manual_seed(0)
    lengths = (20 * torch.randn(1024, generator=generator).exp()).long().clamp(max=512)
    cu_seqlens = offsets(lengths.tolist())
    plan = plan_buckets(cu_seqlens, cu_seqlens, 1, CPU)
    padded = sum(len(bucket.sequences) * bucket.size_q * bucket.size_k for bucket in plan.buckets)
    assert len(plan.buckets) <= 8
    assert padded < 2 * int(lengths.square().sum())


def test_few_short_sequences_share_one_bucket():
    assert len(plan_buckets(offsets([1, 9, 17, 33]), offsets([1, 9, 17, 33]), 1, CPU).buckets) == 1


def test_a_batch_without_sequences_has_one_empty_bucket():
    plan = plan_buckets(offsets([]), offsets([]), 1, CPU)
    assert [len(bucket.sequences) for bucket in plan.buckets] == [0]
