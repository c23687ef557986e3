"""Public ops: offsets and pooling of jagged tensors."""

import torch
from torch import Tensor

from lightning_gem.kernels.checks import check_cu_seqlens
from lightning_gem.kernels.jagged.reference import sum_pool

_INT32_MAX = 2**31 - 1


def lengths_to_cu_seqlens(lengths: Tensor) -> Tensor:
    """Turns lengths (B,) into offsets (B+1,): 0, then the running total; dtype and device stay.

    Args:
        lengths: int32 or int64, none negative.

    Returns:
        Offsets in the dtype of ``lengths``.

    Raises:
        ValueError: For another dtype or shape; on a CPU also for a negative length, and for a total beyond int32.
    """
    if lengths.ndim != 1 or lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"lengths must be int32 or int64 of shape (B,), got {lengths.dtype} {tuple(lengths.shape)}: "
            "pass one length per sequence"
        )
    total = torch.cat([lengths.new_zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    if lengths.device.type == "cpu":
        if (lengths < 0).any():
            raise ValueError(f"lengths must not be negative, got {int(lengths.min())}: an empty sequence has length 0")
        if lengths.dtype == torch.int32 and total[-1] > _INT32_MAX:
            raise ValueError(f"lengths add up to {int(total[-1])}, beyond int32: pass them as int64")
    return total.to(lengths.dtype)


def jagged_sum_pool(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sums the rows of each sequence: (total_tokens, ...) to (B, ...); an empty sequence gives 0.

    Rows from ``cu_seqlens[-1]`` on belong to no sequence: they count nowhere and receive gradient 0.

    Args:
        x: (total_tokens, ...), floating point; sums are kept in float32 or better.
        cu_seqlens: Offsets (B+1,), int32 or int64.

    Returns:
        (B, ...) in the dtype of ``x``.

    Raises:
        ValueError: For offsets that cannot describe ``x`` (values are read on a CPU only), or x that is not floating.
    """
    _check_floating(x)
    check_cu_seqlens("cu_seqlens", cu_seqlens, x, None)
    return sum_pool(x, cu_seqlens).to(x.dtype)


def jagged_mean_pool(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Averages the rows of each sequence: ``jagged_sum_pool`` divided by length; an empty sequence gives 0."""
    _check_floating(x)
    check_cu_seqlens("cu_seqlens", cu_seqlens, x, None)
    count = cu_seqlens.diff().clamp(min=1).view(-1, *[1] * (x.ndim - 1))
    return (sum_pool(x, cu_seqlens) / count).to(x.dtype)


def _check_floating(x: Tensor) -> None:
    if x.ndim == 0 or not x.is_floating_point():
        raise ValueError(
            f"x must be floating point (total_tokens, ...), got {x.dtype} {tuple(x.shape)}: convert it with x.float()"
        )
