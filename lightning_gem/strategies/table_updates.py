"""Table updates that wait for the optimizer step instead of running in every backward.

The kernels update tables inside backward. Where gradients are accumulated over several batches, that would move the
weights between them, and add up squares of parts of a gradient. Held back, the ids and output gradients of every batch
are kept; at the step they are joined to one batch, which is looked up once more and whose backward does the one update.
The result is that of a single batch of all samples, for any optimizer. Costs: the kept ids and gradients, and a second
lookup.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# State of kernels that counts lookups, for optimizers with bias correction.
_COUNTERS = ("iter", "iter_cpu")


@dataclass
class _Batch:
    """A lookup and the gradient of its output.

    Attributes:
        indices: ``(N,)`` ids, feature by feature.
        offsets: ``(features * samples + 1,)`` bounds of the samples of every feature.
        weights: ``(N,)`` or None.
        gradient: ``(samples, columns)`` of pooled lookups, else ``(N, columns)``.
    """

    indices: Tensor
    offsets: Tensor
    weights: Tensor | None
    gradient: Tensor


class HeldUpdates:
    """Holds the updates of kernels back until :meth:`apply`.

    Args:
        kernels: FBGEMM's lookup kernels; their ``forward`` is replaced.
    """

    def __init__(self, kernels: list[Any]) -> None:
        self._kernels = kernels
        self._lookups: list[Callable[..., Tensor]] = [kernel.forward for kernel in kernels]
        self._kept: list[list[_Batch]] = [[] for _ in kernels]
        for kernel, lookup, kept in zip(kernels, self._lookups, self._kept, strict=True):
            kernel.forward = _holding(kernel, lookup, kept)

    def apply(self) -> None:
        """Updates the tables with everything that was kept since the last time."""
        for kernel, lookup, kept in zip(self._kernels, self._lookups, self._kept, strict=True):
            if kept:
                pooled = kernel.pooling_mode.name != "NONE"
                batch = join_batches(kept, len(kernel.feature_table_map), pooled)
                kept.clear()
                with torch.enable_grad():
                    output = lookup(batch.indices, batch.offsets, batch.weights)
                    torch.autograd.backward(output, batch.gradient.to(output.dtype))


def _holding(kernel: nn.Module, lookup: Callable[..., Tensor], kept: list[_Batch]) -> Callable[..., Tensor]:
    """The lookup, whose gradient is kept instead of being used."""

    def forward(
        indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None, *rest: Any, **options: Any
    ) -> Tensor:
        if not torch.is_grad_enabled():
            return lookup(indices, offsets, per_sample_weights, *rest, **options)
        if options.get("batch_size_per_feature_per_rank") is not None:
            raise ValueError(
                "features of a batch have different numbers of samples, which accumulated table gradients do not "
                "support: set accumulate_grad_batches to 1"
            )
        counters = {name: getattr(kernel, name).clone() for name in _COUNTERS if hasattr(kernel, name)}
        with torch.no_grad():
            output = lookup(indices, offsets, per_sample_weights, *rest, **options)
        for name, value in counters.items():
            getattr(kernel, name).copy_(value)
        output.requires_grad_()
        output.register_hook(
            lambda gradient: kept.append(_Batch(indices, offsets, per_sample_weights, gradient.detach()))
        )
        return output

    return forward


def join_batches(batches: list[_Batch], num_features: int, pooled: bool) -> _Batch:
    """One batch with the samples of all, feature by feature.

    Args:
        batches: At least one.
        num_features: Features that each of them has.
        pooled: Whether there is a gradient per sample, else per id.

    Returns:
        The ids of a feature are those of the first batch, then those of the second, and so on.
    """
    if len(batches) == 1:
        return batches[0]
    lengths = [batch.offsets.diff().view(num_features, -1) for batch in batches]
    # Ids per feature, of all batches in one copy to the host.
    counts = torch.stack([length.sum(dim=1) for length in lengths]).tolist()

    def interleave(parts: list[Tensor]) -> Tensor:
        """Tensors over ids, feature by feature."""
        pieces = [part.split(count) for part, count in zip(parts, counts, strict=True)]
        return torch.cat([piece for feature in zip(*pieces, strict=True) for piece in feature])

    all_lengths = torch.cat(lengths, dim=1).view(-1)
    offsets = torch.cat([all_lengths.new_zeros(1), all_lengths.cumsum(0)])
    weights = [batch.weights for batch in batches if batch.weights is not None]
    gradients = [batch.gradient for batch in batches]
    return _Batch(
        interleave([batch.indices for batch in batches]),
        offsets.to(batches[0].offsets.dtype),
        interleave(weights) if weights else None,
        torch.cat(gradients) if pooled else interleave(gradients),
    )
