"""Jagged pooling, broadcasts and concatenation in plain PyTorch: vectorised, with loops as the definition of pools."""

import torch
from torch import Tensor


def sum_pool_loop(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The definition, one sequence at a time."""
    offsets = cu_seqlens.tolist()
    sums = [x[start:end].sum(0) for start, end in zip(offsets[:-1], offsets[1:], strict=True)]
    return torch.stack(sums) if sums else x.new_zeros(0, *x.shape[1:])


def sum_pool(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Vectorised, without a synchronisation, in float32 or better; the result keeps that precision."""
    num_sequences = len(cu_seqlens) - 1
    # Slack rows fall into one more, last sequence, which is dropped.
    sequence = sequence_of_row(cu_seqlens, len(x))
    precise = x.to(torch.promote_types(x.dtype, torch.float32))
    return precise.new_zeros(num_sequences + 1, *x.shape[1:]).index_add(0, sequence, precise)[:num_sequences]


def sequence_of_row(cu_seqlens: Tensor, num_rows: int) -> Tensor:
    """Sequence of each row; slack rows get the number of sequences."""
    rows = torch.arange(num_rows, device=cu_seqlens.device)
    return torch.bucketize(rows, cu_seqlens[1:].to(torch.int64), right=True)


def max_pool_loop(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The definition, one sequence at a time."""
    offsets = cu_seqlens.tolist()
    best = [
        x[start:end].max(0).values if end > start else x[:0].sum(0)
        for start, end in zip(offsets[:-1], offsets[1:], strict=True)
    ]
    return torch.stack(best) if best else x.new_zeros(0, *x.shape[1:])


def max_pool(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Vectorised: the maximum and its first position in the sequence; an empty sequence gives 0 and 2^31 - 1."""
    flat = x.flatten(1)
    shape = (len(cu_seqlens), flat.shape[1])  # one more sequence, which takes the slack
    sequence = sequence_of_row(cu_seqlens, len(x))
    with torch.no_grad():
        to = sequence[:, None].expand_as(flat)
        best = flat.new_full(shape, -torch.inf).scatter_reduce(0, to, flat, "amax")
        is_best = (flat == best[sequence]) | (flat.isnan() & best[sequence].isnan())
        position = torch.arange(len(x), device=x.device)
        position = (position - cu_seqlens.to(torch.int64)[sequence])[:, None].expand_as(flat)
        none = torch.full(shape, 2**31 - 1, dtype=torch.int64, device=x.device)
        index = none.scatter_reduce(0, to, torch.where(is_best, position, 2**31 - 1), "amin")[:-1]
    real = index < 2**31 - 1
    row = torch.where(real, index + cu_seqlens[:-1, None], 0)
    padded = torch.cat([flat, flat.new_zeros(1, flat.shape[1])]) if len(x) == 0 else flat
    out = torch.where(real, padded.gather(0, row), 0)
    return out.view(-1, *x.shape[1:]), index.to(torch.int32).view(-1, *x.shape[1:])


def rows_of_dense(dense: Tensor, cu_seqlens: Tensor, num_rows: int, per_position: bool) -> tuple[Tensor, Tensor]:
    """The dense row of every packed row, zeros where there is none, and which rows belong to a sequence."""
    sequence = sequence_of_row(cu_seqlens, num_rows)
    real = sequence < len(cu_seqlens) - 1
    inside = real
    if per_position:
        position = torch.arange(num_rows, device=dense.device) - cu_seqlens.to(torch.int64)[sequence]
        inside = real & (position < dense.shape[1])
        sequence = sequence * dense.shape[1] + position
        dense = dense.flatten(0, 1)
    if len(dense) == 0:
        return dense.new_zeros(num_rows, *dense.shape[1:]), real
    values = dense[torch.where(inside, sequence, 0)]
    return torch.where(_column(inside, values), values, 0), real


def dense_add(x: Tensor, dense: Tensor, cu_seqlens: Tensor, per_position: bool) -> Tensor:
    """Adds the dense row of its sequence to every packed row; slack becomes 0."""
    values, real = rows_of_dense(dense, cu_seqlens, len(x), per_position)
    return torch.where(_column(real, x), x + values, 0)


def dense_mul(x: Tensor, dense: Tensor, cu_seqlens: Tensor, per_position: bool) -> Tensor:
    """Multiplies every packed row by the dense row of its sequence; slack becomes 0."""
    values, real = rows_of_dense(dense, cu_seqlens, len(x), per_position)
    return torch.where(_column(real, x), x, 0) * values


def _column(mask: Tensor, like: Tensor) -> Tensor:
    return mask.view(-1, *[1] * (like.ndim - 1))


def concat_rows(cu_seqlens: list[Tensor], part_rows: list[int]) -> list[Tensor]:
    """Where each row of each part goes; slack of all parts goes behind the last sequence."""
    places = []
    for i, (cu, num_rows) in enumerate(zip(cu_seqlens, part_rows, strict=True)):
        sequence = sequence_of_row(cu, num_rows)
        place = torch.arange(num_rows, device=cu.device)
        for j, (other, other_rows) in enumerate(zip(cu_seqlens, part_rows, strict=True)):
            other = torch.cat([other.to(torch.int64), other.new_tensor([other_rows], dtype=torch.int64)])
            if j != i:
                place = place + other[sequence + (1 if j < i else 0)]
        places.append(place)
    return places


def concat(tensors: list[Tensor], cu_seqlens: list[Tensor]) -> Tensor:
    """Vectorised concatenation per sequence; the slack of all parts follows as zeros."""
    places = concat_rows(cu_seqlens, [len(t) for t in tensors])
    parts = []
    for tensor, cu in zip(tensors, cu_seqlens, strict=True):
        real = torch.arange(len(tensor), device=tensor.device) < cu[-1]
        parts.append(torch.where(_column(real, tensor), tensor, 0))
    # Rows are sorted by where they go: a gather, whose gradient is cheap and deterministic.
    return torch.cat(parts)[torch.cat(places).argsort()]


def split(x: Tensor, cu_seqlens: list[Tensor], part_rows: list[int]) -> list[Tensor]:
    """Undoes ``concat``: rows of each part, zeros in its slack."""
    parts = []
    for place, cu, num_rows in zip(concat_rows(cu_seqlens, part_rows), cu_seqlens, part_rows, strict=True):
        real = torch.arange(num_rows, device=x.device) < cu[-1]
        values = x[torch.where(real, place, 0)] if len(x) else x.new_zeros(num_rows, *x.shape[1:])
        parts.append(torch.where(_column(real, values), values, 0))
    return parts


def broadcast_backward(
    grad_out: Tensor, x: Tensor, dense: Tensor, cu_seqlens: Tensor, mode: str
) -> tuple[Tensor, Tensor]:
    """Gradients of ``dense_add`` or ``dense_mul`` for ``x`` (N, D) and ``dense`` (B, D) or (B, L, D)."""
    sequence = sequence_of_row(cu_seqlens, len(x))
    real = (sequence < len(cu_seqlens) - 1)[:, None]
    grad_x = grad_dense = torch.where(real, grad_out, 0)
    if mode == "multiply":
        values, _ = rows_of_dense(dense, cu_seqlens, len(x), dense.ndim == 3)
        grad_x, grad_dense = grad_x * values, grad_dense * torch.where(real, x, 0)
    place = sequence
    if dense.ndim == 3:
        position = torch.arange(len(x), device=x.device) - cu_seqlens.to(torch.int64)[sequence]
        inside = (position < dense.shape[1])[:, None]
        grad_dense = torch.where(inside, grad_dense, 0)
        place = sequence * dense.shape[1] + torch.where(inside[:, 0], position, 0)
    rows = dense.shape[:-1].numel()
    place = torch.where(real[:, 0], place, rows)  # slack falls into one more row, which is dropped
    summed = dense.new_zeros(rows + 1, dense.shape[-1]).index_add(0, place, grad_dense.to(dense.dtype))[:rows]
    return grad_x.to(x.dtype), summed.view(dense.shape).clone()
