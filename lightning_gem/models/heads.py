"""Task heads: a shared MLP, per-surface modulation, per-task MLPs."""

import torch
from torch import Tensor, nn

from lightning_gem.models.functional import rms_norm


class TaskHeads(nn.Module):
    """Logits of every task from the final tokens.

    Args:
        in_features: Width of the flattened tokens.
        hidden: Hidden widths of the shared MLP.
        task_hidden: Hidden widths of each task's MLP.
        num_tasks: Tasks.
        num_domains: Surfaces; with more than one, each has its own scale and shift of the shared representation.
        dropout: Dropout of the shared hidden layers.
    """

    def __init__(
        self,
        in_features: int,
        hidden: list[int],
        task_hidden: list[int],
        num_tasks: int,
        num_domains: int,
        dropout: float,
    ) -> None:
        super().__init__()
        sizes = [in_features, *hidden]
        self.shared = nn.Sequential(
            *(
                layer
                for fan_in, fan_out in zip(sizes[:-1], sizes[1:], strict=True)
                for layer in (nn.Linear(fan_in, fan_out), nn.Hardswish(), nn.Dropout(dropout))
            )
        )
        self.domain = nn.Embedding(num_domains, 2 * sizes[-1]) if num_domains > 1 else None
        task_sizes = [sizes[-1], *task_hidden]
        self.tasks = nn.ModuleList(
            nn.Sequential(
                *(
                    layer
                    for fan_in, fan_out in zip(task_sizes[:-1], task_sizes[1:], strict=True)
                    for layer in (nn.Linear(fan_in, fan_out), nn.Hardswish())
                ),
                nn.Linear(task_sizes[-1], 1),
            )
            for _ in range(num_tasks)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts with the same representation for every surface."""
        if self.domain is not None:
            nn.init.zeros_(self.domain.weight)

    def forward(self, tokens: Tensor, domain: Tensor) -> Tensor:
        """Maps ``(B, num_tokens, width)`` and surfaces ``(B,)`` to logits ``(B, num_tasks)``."""
        hidden = self.shared(rms_norm(tokens.flatten(1)))
        if self.domain is not None:
            scale, shift = self.domain(domain).chunk(2, dim=-1)
            hidden = hidden * (1 + scale) + shift
        return torch.cat([task(hidden) for task in self.tasks], dim=1)
