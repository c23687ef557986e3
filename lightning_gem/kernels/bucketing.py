"""Packed tokens to a few padded rectangles and back: the helper behind every vectorised reference.

A batch of packed sequences can run as one dense computation only after padding, and padding to the longest sequence is
quadratic waste when lengths are heavy-tailed (500 sequences of 5 tokens beside one of 2,000). So sequences of similar
length share a *bucket*: lengths are rounded up to powers of two, and neighbouring buckets merge again while the padding
this adds costs less than the fixed cost of one more bucket. There are about log2(longest) buckets, and no Python loop
over sequences.

Devices: the plan is made on the CPU. For offsets on a GPU this costs one copy to the host (one synchronisation) per
distinct offsets tensor; everything after that is asynchronous.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

# What one more bucket costs (a dozen small tensor ops, forward and backward), in query-key pairs. Measured on a CPU;
# the optimum is flat: a factor of four either way is lost in the noise.
_BUCKET_COST_IN_PAIRS = 4096


@dataclass(frozen=True)
class Bucket:
    """Sequences that are padded to one (size_q, size_k) rectangle; both sizes are at least 1.

    Attributes:
        sequences: Index of each sequence in the batch, (n,).
        lengths_k: Real number of keys of each sequence, (n,).
        shifts: Real keys minus real queries, (n,); (1,) where it is the same for all, as in self-attention.
        size_q: Padded number of queries.
        size_k: Padded number of keys.
        keys_padded: False when every sequence has exactly ``size_k`` keys.
        may_lack_keys: True when some sequence has no key at all.
    """

    sequences: Tensor
    lengths_k: Tensor
    shifts: Tensor
    size_q: int
    size_k: int
    keys_padded: bool
    may_lack_keys: bool


@dataclass(frozen=True)
class BucketPlan:
    """The buckets of a batch, and where each packed (token, head) row lies in their padded storage.

    Padded storage is one tensor of rows, bucket after bucket, each bucket (n, num_heads, size) rows: heads come before
    tokens, so that batched matrix products need no further copies.
    """

    buckets: list[Bucket]
    slots_q: Tensor
    slots_k: Tensor


def plan_buckets(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, num_heads: int, device: torch.device) -> BucketPlan:
    """Groups the sequences of a batch into buckets.

    Args:
        cu_seqlens_q: Query offsets (B+1,), on any device.
        cu_seqlens_k: Key offsets (B+1,), on any device; the same object as ``cu_seqlens_q`` for self-attention.
        num_heads: Heads of queries and keys.
        device: Where the plan's tensors are needed.

    Returns:
        The plan. It has at least one bucket, so that results stay connected to the autograd graph in an empty batch.
    """
    offsets_q = cu_seqlens_q.to("cpu", torch.int64)
    offsets_k = offsets_q if cu_seqlens_k is cu_seqlens_q else cu_seqlens_k.to("cpu", torch.int64)
    lengths_q, lengths_k = offsets_q.diff(), offsets_k.diff()
    order, shapes = _group_by_size(lengths_q, lengths_k)
    counts = [count for count, _, _ in shapes]
    buckets = []
    for sequences, (_, size_q, size_k) in zip(order.split(counts), shapes, strict=True):
        k = lengths_k[sequences]
        shifts = k - lengths_q[sequences]
        shortest = int(k.min()) if len(k) else 0
        buckets.append(
            Bucket(
                sequences=sequences.to(device),
                lengths_k=k.to(device),
                shifts=(shifts[:1] if (shifts == shifts[:1]).all() else shifts).to(device),
                size_q=size_q,
                size_k=size_k,
                keys_padded=shortest < size_k,
                may_lack_keys=shortest == 0,
            )
        )
    slots_q = _slots(offsets_q, order, counts, [size_q for _, size_q, _ in shapes], num_heads, device)
    if offsets_k is offsets_q:
        return BucketPlan(buckets, slots_q, slots_q)
    slots_k = _slots(offsets_k, order, counts, [size_k for _, _, size_k in shapes], num_heads, device)
    return BucketPlan(buckets, slots_q, slots_k)


def bucket_qkv(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor
) -> tuple[BucketPlan, list[tuple[Bucket, Tensor, Tensor, Tensor]]]:
    """Splits packed attention inputs into zero-padded buckets; slack rows are never read.

    Args:
        query: (total_q, H, D); without ``cu_seqlens_q`` it is (S, H, D), shared by every sequence.
        key: (total_k, Hkv, D), Hkv dividing H.
        value: (total_k, Hkv, Dv).
        cu_seqlens_q: Query offsets (B+1,) or None.
        cu_seqlens_k: Key offsets (B+1,).

    Returns:
        The plan, and per bucket its q (n, H, size_q, D), k (n, H, size_k, D) and v (n, H, size_k, Dv).
    """
    num_heads = query.shape[1]
    if key.shape[1] < num_heads:
        group = num_heads // key.shape[1]
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    shared_offsets = torch.arange(len(cu_seqlens_k)) * len(query)
    offsets_q = shared_offsets if cu_seqlens_q is None else cu_seqlens_q
    plan = plan_buckets(offsets_q, cu_seqlens_k, num_heads, query.device)

    shapes_q = [(len(bucket.sequences), num_heads, bucket.size_q) for bucket in plan.buckets]
    shapes_k = [(len(bucket.sequences), num_heads, bucket.size_k) for bucket in plan.buckets]
    if cu_seqlens_q is None:
        queries = [query.transpose(0, 1).expand(n, -1, -1, -1) for n, _, _ in shapes_q]
    else:
        queries = _pad(query, plan.slots_q, shapes_q)
    keys, values = _pad(key, plan.slots_k, shapes_k), _pad(value, plan.slots_k, shapes_k)
    return plan, list(zip(plan.buckets, queries, keys, values, strict=True))


def unpad_queries(plan: BucketPlan, padded: Sequence[Tensor], num_rows: int) -> Tensor:
    """Packs one (n, H, size_q, ...) tensor per bucket into (num_rows, H, ...), in the order of the batch.

    Rows that belong to no sequence are zero.
    """
    return _unpad(plan.slots_q, padded, num_rows)


def unpad_keys(plan: BucketPlan, padded: Sequence[Tensor], num_rows: int) -> Tensor:
    """The same for one (n, H, size_k, ...) tensor per bucket."""
    return _unpad(plan.slots_k, padded, num_rows)


def pad_queries(plan: BucketPlan, packed: Tensor) -> list[Tensor]:
    """Packed (rows, H, ...) queries to one zero-padded (n, H, size_q, ...) tensor per bucket."""
    num_heads = packed.shape[1]
    return _pad(packed, plan.slots_q, [(len(bucket.sequences), num_heads, bucket.size_q) for bucket in plan.buckets])


def _unpad(slots: Tensor, padded: Sequence[Tensor], num_rows: int) -> Tensor:
    rows = torch.cat([part.flatten(0, 2) for part in padded]).index_select(0, slots.flatten())
    rows = rows.unflatten(0, slots.shape)
    slack = num_rows - len(rows)
    return torch.cat([rows, rows.new_zeros(slack, *rows.shape[1:])]) if slack else rows


def _group_by_size(lengths_q: Tensor, lengths_k: Tensor) -> tuple[Tensor, list[tuple[int, int, int]]]:
    """Order of the sequences, bucket after bucket, and (number of sequences, size_q, size_k) of every bucket."""
    powers = 2 ** torch.arange(3, 32)  # everything up to 8 tokens is one size
    size_class = torch.bucketize(lengths_q, powers) * 32 + torch.bucketize(lengths_k, powers)
    size_class, order = size_class.sort(stable=True)
    counts = size_class.unique_consecutive(return_counts=True)[1].tolist()
    if not counts:
        return order, [(0, 1, 1)]

    buckets: list[tuple[int, int, int]] = []
    for q, k in zip(lengths_q[order].split(counts), lengths_k[order].split(counts), strict=True):
        bucket = (len(q), max(1, int(q.max())), max(1, int(k.max())))
        if buckets:
            last = buckets[-1]
            union = (last[0] + bucket[0], max(last[1], bucket[1]), max(last[2], bucket[2]))
            if prod(union) <= prod(last) + prod(bucket) + _BUCKET_COST_IN_PAIRS:
                buckets[-1] = union
                continue
        buckets.append(bucket)
    return order, buckets


def _slots(
    offsets: Tensor, order: Tensor, counts: list[int], sizes: list[int], num_heads: int, device: torch.device
) -> Tensor:
    """Padded row of every packed (token, head): (total, num_heads)."""
    size = torch.repeat_interleave(torch.tensor(sizes), torch.tensor(counts))
    start = num_heads * (size.cumsum(0) - size)
    shift_and_size = torch.empty(2, len(order), dtype=torch.int64)
    shift_and_size[0, order] = start - offsets[order]
    shift_and_size[1, order] = size
    total, lengths = int(offsets[-1]), offsets.diff().to(device)
    shift, stride = torch.repeat_interleave(shift_and_size.to(device), lengths, dim=1, output_size=total)
    first_head = torch.arange(total, device=device) + shift
    return first_head[:, None] + stride[:, None] * torch.arange(num_heads, device=device)


def _pad(packed: Tensor, slots: Tensor, shapes: list[tuple[int, int, int]]) -> list[Tensor]:
    """(total, H, dim) to one zero-padded (n, H, size, dim) tensor per bucket."""
    rows = [n * heads * size for n, heads, size in shapes]
    full = sum(rows) == slots.numel()
    storage = (packed.new_empty if full else packed.new_zeros)(sum(rows), packed.shape[2])
    storage = storage.index_copy_(0, slots.flatten(), packed[: len(slots)].flatten(0, 1))
    return [part.unflatten(0, shape) for part, shape in zip(storage.split(rows), shapes, strict=True)]
