"""What the metrics share: the reading of examples, and states that keep their precision and add up over ranks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import logsigmoid
from torchmetrics import Metric


def accumulator_dtype(device: torch.device) -> torch.dtype:
    """The widest floating-point type of a device: float64, but float32 on MPS."""
    return torch.float32 if device.type == "mps" else torch.float64


def read_examples(logits: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Flattens and widens the columns of a batch, without a host synchronisation.

    Args:
        logits: Logits of one task, any shape and dtype.
        labels: Labels in [0, 1], of the same shape; NaN marks a missing label.
        weights: Weights, of the same shape; 0 marks a missing label too. All 1 if None.

    Returns:
        Logits, labels and weights, flat, in ``accumulator_dtype``. All three are 0 where the label is missing, so that
        no NaN or infinity from there can reach a sum.

    Raises:
        ValueError: The shapes differ.
    """
    check_shape("labels", labels, logits)
    weights = torch.ones_like(labels, dtype=torch.float32) if weights is None else weights
    check_shape("weights", weights, logits)
    dtype = accumulator_dtype(logits.device)
    logits, labels, weights = (column.detach().reshape(-1).to(dtype) for column in (logits, labels, weights))
    missing = labels.isnan() | (weights == 0)
    return logits.masked_fill(missing, 0), labels.masked_fill(missing, 0), weights.masked_fill(missing, 0)


def bce_sum(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of the binary cross-entropy.

    Exact for the smallest losses too: the formula of torch loses those of sure negatives by cancellation.
    """
    return -(weights * (labels * logsigmoid(logits) + (1 - labels) * logsigmoid(-logits))).sum()


def check_shape(name: str, column: Tensor, logits: Tensor) -> None:
    """Raises a ValueError unless the column has the shape of the logits."""
    if column.shape != logits.shape:
        raise ValueError(
            f"`{name}` has shape {tuple(column.shape)} but `logits` has shape {tuple(logits.shape)}: pass tensors of "
            "one shape, those of a single task (for instance `labels[:, task]` with `logits[:, task]`)."
        )


def all_reduce_sum(tensor: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """A ``dist_sync_fn`` for states that add up: the sum over ranks, as the only item to be reduced.

    The default of torchmetrics gathers the states of all ranks first: world size times the memory (4 GiB for a 1 MiB
    histogram on 4,096 ranks), with a barrier and an exchange of sizes that reads back to the host.
    """
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    return [total]


class RecMetric(Metric):
    """A metric whose states keep their dtype, and whose ``compute`` always synchronises.

    Args:
        **kwargs: Those of ``torchmetrics.Metric``. ``compute_with_cache`` is off unless given: a rank without new
            data would answer from its cache while the others wait for it in the collective.
    """

    is_differentiable = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"compute_with_cache": False, **kwargs})

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Follows a module to another device only.

        ``module.to(torch.bfloat16)``, as Lightning does for ``precision="bf16-true"``, would make accumulators that
        stop at 256; ``module.to_empty(...)`` would leave garbage in them.
        """

        def move(state: Tensor) -> Tensor:
            device = fn(torch.empty(0, device=state.device)).device
            return state.to(device, accumulator_dtype(device) if state.dtype == torch.float64 else state.dtype)

        return super()._apply(move, *args, **kwargs)


class SumMetric(RecMetric):
    """A metric whose states are sums over examples: over ranks they are added by one all-reduce each."""

    full_state_update = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"dist_sync_fn": all_reduce_sum, **kwargs})

    def add_sums(self, name: str, *shape: int) -> None:
        """Adds a state of zeros. The name must be the class's own: a collection merges equal states of one name."""
        # on the CPU even if the model is being built on the meta device, which has no zeros
        self.add_state(name, torch.zeros(shape, dtype=torch.float64, device="cpu"), dist_reduce_fx="sum")
