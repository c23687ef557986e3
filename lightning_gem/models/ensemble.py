"""An ensemble of one network: less variance from initial weights and order, at a multiple of the cost."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_gem.data.batch import RecBatch
from lightning_gem.data.schema import Schema
from lightning_gem.models.gem import GEM


class Ensemble(nn.Module):
    """Copies of a network with initial weights and dropout of their own, each trained on its own loss.

    Worth it where rows are few: every copy costs as much as the network, tables included.

    Args:
        schema: Features and tasks.
        network: Makes one copy from the schema.
        size: Number of copies.

    Raises:
        ValueError: If ``size`` is not positive.
    """

    def __init__(self, schema: Schema, network: Callable[[Schema], nn.Module] = GEM, size: int = 3) -> None:
        super().__init__()
        if size < 1:
            raise ValueError(f"size is the number of networks of an ensemble and must be positive, not {size}")
        self.members = nn.ModuleList(network(schema) for _ in range(size))

    def forward(self, batch: RecBatch) -> Tensor:
        """Returns the mean logits ``(B, num_tasks)``; while training, those of every copy ``(size, B, num_tasks)``."""
        logits = torch.stack([member(batch) for member in self.members])
        return logits if self.training else logits.mean(dim=0)
