"""Mixture of Wukong experts: dense experts in parallel, no router."""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_gem.models.config import ExpertsConfig
from lightning_gem.models.functional import activate, rms_norm


class WukongExperts(nn.Module):
    """``num_experts`` Wukong blocks (arXiv 2403.02545) as batched GEMMs; all parameters have the experts first.

    Expert ``m`` on its tokens ``X`` (``n x d``): ``F = MLP(norm(flatten(X (X^T Y))))`` reshaped to tokens, ``C = L X``,
    ``out = norm([F || C] + R X)``. Follows the protocol for expert parallelism of the hybrid sharded strategy: where
    ``expert_exchange`` is set, the parameters hold some of the experts, and inputs and outputs travel to and from them.

    Args:
        num_tokens: Tokens in; divisible by the number of experts in mode ``partition``.
        width: Width of the tokens.
        config: Sizes and mode.
        activation: Activation of the MLPs.
    """

    def __init__(self, num_tokens: int, width: int, config: ExpertsConfig, activation: str) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.expert_mode = config.mode
        self.expert_exchange: Any = None
        self.config = config
        self.activation = activation
        experts, rank, hidden = config.num_experts, config.rank, config.hidden
        self.num_tokens = num_tokens // experts if config.mode == "partition" else num_tokens
        num_out = config.num_fm_tokens + config.num_linear_tokens
        sizes = [self.num_tokens * rank, *[hidden] * (config.depth - 1), config.num_fm_tokens * width]
        self.low_rank = nn.Parameter(torch.empty(experts, self.num_tokens, rank))
        self.mlp = nn.ParameterList(
            nn.Parameter(torch.empty(experts, fan_in, fan_out))
            for fan_in, fan_out in zip(sizes[:-1], sizes[1:], strict=True)
        )
        self.linear = nn.Parameter(torch.empty(experts, config.num_linear_tokens, self.num_tokens))
        self.residual = nn.Parameter(torch.empty(experts, num_out, self.num_tokens))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all weights with the variance of one over the fan-in."""
        nn.init.normal_(self.low_rank, std=self.num_tokens**-0.5)
        for weight in self.mlp:
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        nn.init.normal_(self.linear, std=self.num_tokens**-0.5)
        nn.init.normal_(self.residual, std=self.num_tokens**-0.5)

    def batched_weights(self) -> list[Tensor]:
        """Matrices that :meth:`batched_product` multiplies by, each ``(experts, in, out)``."""
        return list(self.mlp)

    def batched_product(self, x: Tensor, weight: Tensor) -> Tensor:
        """``(experts, rows, in)`` times ``(experts, in, out)``; a precision recipe replaces it."""
        return torch.bmm(x, weight)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(B, num_tokens, width)`` to the experts' tokens ``(B, n, width)``."""
        exchange = self.expert_exchange
        if self.expert_mode == "partition":
            x = x.unflatten(1, (self.num_experts, self.num_tokens)).transpose(0, 1)
            out = self._run(x if exchange is None else exchange.enter(x))
            out = out if exchange is None else exchange.leave(out)
            return out.transpose(0, 1).flatten(1, 2)
        x = x if exchange is None else exchange.enter(x)
        out = self._run(x.expand(len(self.linear), *x.shape)).sum(dim=0)
        return out if exchange is None else exchange.leave(out)

    def _run(self, x: Tensor) -> Tensor:
        """Maps each expert's ``(M, B, num_tokens, width)`` to ``(M, B, n, width)``."""
        experts, batch, _, width = x.shape
        # (M, B, n, d) times (M, 1, d, k), where the second factor is X^T Y.
        projected = x.transpose(2, 3) @ self.low_rank.unsqueeze(1)
        hidden = rms_norm((x @ projected).flatten(2))
        for i, weight in enumerate(self.mlp):
            hidden = self.batched_product(hidden, weight)
            if i < len(self.mlp) - 1:
                hidden = activate(hidden, self.activation)
        machine = hidden.view(experts, batch, self.config.num_fm_tokens, width)
        linear = self.linear.unsqueeze(1) @ x
        return rms_norm(torch.cat([machine, linear], dim=2), residual=self.residual.unsqueeze(1) @ x)
