"""The context summary: the non-sequence tokens compressed to a few, from which sequence weights are generated."""

import torch
from torch import Tensor, nn

from lightning_gem.kernels import gated


class ContextSummary(nn.Module):
    """Mixes tokens, then gates and projects the channels: ``W (sigmoid(W_g y) * y)`` with ``y = A x``.

    Args:
        num_tokens: Tokens in.
        num_context_tokens: Tokens out.
        width: Width of both.
    """

    def __init__(self, num_tokens: int, num_context_tokens: int, width: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.empty(num_context_tokens, num_tokens))
        self.gate = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the token mix."""
        nn.init.normal_(self.mix, std=self.mix.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(B, num_tokens, width)`` to ``(B, num_context_tokens, width)``."""
        mixed = self.mix @ x
        return self.out(gated(mixed, self.gate(mixed)))
