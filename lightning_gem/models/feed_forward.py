"""Personalised feed-forward networks over sequence tokens: the context decides what every event is turned into."""

import torch
from torch import Tensor, nn

from lightning_gem.kernels import pffn
from lightning_gem.models.functional import layer_norm, rms_norm


class GDPAFeedForward(nn.Module):
    """Generalised dot-product attention of the tokens to keys and values made from the context.

    ``u = LayerNorm(s); g = act(norm(u) K^T / sqrt(d)) V + u; s = RMSNorm(g) + s``. The number of keys is the hidden
    width of the feed-forward network. Source: Kunlun (arXiv 2602.10016) and the residual wiring published with Meta's
    kernels.

    Args:
        width: Width of the tokens.
        num_heads: Heads.
        context_width: Width of the context tokens; None: keys and values are parameters, the same for every request.
        num_keys: Context tokens.
        activation: Activation of the kernel.
    """

    def __init__(self, width: int, num_heads: int, context_width: int | None, num_keys: int, activation: str) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.activation = activation
        self.key_value: nn.Module | None = None
        self.shared_key_value: nn.Parameter | None = None
        if context_width is None:
            self.shared_key_value = nn.Parameter(torch.empty(num_keys, 2 * width))
            self.reset_parameters()
        else:
            self.key_value = nn.Linear(context_width, 2 * width, bias=False)

    def reset_parameters(self) -> None:
        """Draws the keys and values that do not depend on the request."""
        if self.shared_key_value is not None:
            nn.init.normal_(self.shared_key_value, std=self.shared_key_value.shape[1] ** -0.5)

    def forward(self, tokens: Tensor, context: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """Updates packed tokens ``(N, width)`` of sequences with context ``(B, num_keys, context_width)``."""
        key_value = self.shared_key_value if self.key_value is None else self.key_value(context)
        assert key_value is not None
        key, value = (part.unflatten(-1, (self.num_heads, -1)) for part in key_value.chunk(2, dim=-1))
        normed = layer_norm(tokens)
        query = rms_norm(normed.unflatten(-1, (self.num_heads, -1)))
        out = pffn(
            query,
            rms_norm(key),
            value.contiguous(),
            cu_seqlens,
            max_seqlen,
            activation=self.activation,
            scale=query.shape[-1] ** -0.5,
        )
        return rms_norm(out.flatten(-2), residual=normed, skip=tokens)


class LinearFeedForward(nn.Module):
    """One generated matrix per request, ``s = LayerNorm(s) W(context) + s`` (InterFormer, arXiv 2411.09852).

    Args:
        width: Width of the tokens.
        context_width: Width of the context tokens.
        num_keys: Context tokens.
    """

    def __init__(self, width: int, context_width: int, num_keys: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.empty(width, num_keys))
        self.project = nn.Linear(context_width, width, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the mix of context tokens."""
        nn.init.normal_(self.mix, std=self.mix.shape[1] ** -0.5)

    def forward(self, tokens: Tensor, context: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """Updates packed tokens ``(N, width)`` of sequences with context ``(B, num_keys, context_width)``."""
        # With the identity as activation, attention to the rows of W^T and the unit vectors is the product with W.
        matrix = self.mix @ self.project(context)
        unit = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device).expand_as(matrix)
        out = pffn(
            layer_norm(tokens).unsqueeze(1),
            rms_norm(matrix).transpose(1, 2).unsqueeze(2),
            unit.unsqueeze(2),
            cu_seqlens,
            max_seqlen,
            activation="identity",
            scale=matrix.shape[-1] ** -0.5,
        )
        return rms_norm(out.flatten(-2), skip=tokens)
