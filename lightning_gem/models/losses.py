"""Multi-task binary cross-entropy in float32."""

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_gem.data.schema import Task


def task_losses(logits: Tensor, labels: Tensor, weights: Tensor, tasks: list[Task], entire_space: bool) -> Tensor:
    """Weighted mean cross-entropy of every task.

    Args:
        logits: ``(B, num_tasks)``, any float dtype.
        labels: 0, 1 or NaN, ``(B, num_tasks)``.
        weights: ``(B, num_tasks)``; 0 where the label does not count.
        tasks: Tasks in the order of the columns.
        entire_space: Train a task that is given another one (conversion given click) on all rows through the product of
            both probabilities (ESMM, arXiv 1804.07931), instead of on the rows where the other task's label is 1.

    Returns:
        float32 ``(num_tasks,)``; 0 for a task without any label in the batch.
    """
    logits, labels, weights = logits.float(), labels.float(), weights.float()
    names = [task.name for task in tasks]
    losses = []
    for i, task in enumerate(tasks):
        label, weight = labels[:, i], weights[:, i]
        if entire_space and task.given is not None:
            given = names.index(task.given)
            happened = labels[:, given] == 1
            # Where the first event did not happen the second did not either, and that is known.
            label = torch.where(happened, label, labels[:, given])
            weight = torch.where(happened, weight, weights[:, given])
            loss = _product_cross_entropy(logits[:, given], logits[:, i], label.nan_to_num())
        else:
            loss = F.binary_cross_entropy_with_logits(logits[:, i], label.nan_to_num(), reduction="none")
        weight = torch.where(label.isnan(), 0.0, weight)
        losses.append((weight * loss).sum() / weight.sum().clamp(min=torch.finfo(torch.float32).tiny))
    return torch.stack(losses)


def _product_cross_entropy(first: Tensor, second: Tensor, label: Tensor) -> Tensor:
    """Cross-entropy of ``sigmoid(first) * sigmoid(second)``, stable where the product is near 0 or 1."""
    log_p = F.logsigmoid(first) + F.logsigmoid(second)
    # 1 - p q = (1 - p) + p (1 - q), each a sigmoid: no cancellation.
    log_not_p = torch.logaddexp(F.logsigmoid(-first), F.logsigmoid(first) + F.logsigmoid(-second))
    return -(label * log_p + (1 - label) * log_not_p)
