"""From embeddings and numbers to tokens."""

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedTensor

from lightning_gem.kernels import gated
from lightning_gem.models.functional import activate


class FeatureTokenizer(nn.Module):
    """One token per categorical feature, plus tokens made from the numeric features.

    Features of the same embedding width are projected by one batched GEMM, each with its own matrix.

    Args:
        embedding_dims: Embedding width by feature name.
        num_dense: Numeric features.
        num_dense_tokens: Tokens made from them.
        width: Width of the tokens.
        activation: Activation of the numeric features' MLP.
    """

    def __init__(
        self, embedding_dims: dict[str, int], num_dense: int, num_dense_tokens: int, width: int, activation: str
    ) -> None:
        super().__init__()
        self.groups: dict[int, list[str]] = {}
        for name, dim in embedding_dims.items():
            self.groups.setdefault(dim, []).append(name)
        self.projections = nn.ParameterList(
            nn.Parameter(torch.empty(len(names), dim, width)) for dim, names in self.groups.items()
        )
        self.width = width
        self.activation = activation
        self.dense_in = self.dense_out = None
        if num_dense:
            self.dense_in = nn.Linear(num_dense, width, bias=False)
            self.dense_out = nn.Linear(width, num_dense_tokens * width, bias=False)
        self.num_tokens = len(embedding_dims) + (num_dense_tokens if num_dense else 0)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the projections of the categorical features."""
        for projection in self.projections:
            nn.init.normal_(projection, std=projection.shape[1] ** -0.5)

    def forward(self, embeddings: KeyedTensor | None, dense: Tensor) -> Tensor:
        """Returns tokens ``(B, num_tokens, width)``."""
        tokens = []
        if embeddings is not None:
            by_name = embeddings.to_dict()
            for names, projection in zip(self.groups.values(), self.projections, strict=True):
                stacked = torch.stack([by_name[name] for name in names]).to(projection.dtype)
                tokens.append(torch.bmm(stacked, projection).transpose(0, 1))
        if self.dense_in is not None and self.dense_out is not None:
            hidden = activate(self.dense_in(dense.to(self.dense_in.weight.dtype)), self.activation)
            tokens.append(self.dense_out(hidden).view(len(dense), -1, self.width))
        return torch.cat(tokens, dim=1)


class EventTokenizer(nn.Module):
    """One token per event from the concatenated embeddings and numbers of the event.

    Args:
        in_features: Width of the concatenation.
        width: Width of the tokens.
        activation: Activation between the two linear maps.
        gate: Multiply the input by a gate made from itself (MaskNet, as in InterFormer, arXiv 2411.09852).
    """

    def __init__(self, in_features: int, width: int, activation: str, gate: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(in_features, in_features, bias=False) if gate else None
        self.hidden = nn.Linear(in_features, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.activation = activation

    def forward(self, events: Tensor) -> Tensor:
        """Maps ``(N, in_features)`` to ``(N, width)``."""
        events = events.to(self.hidden.weight.dtype)
        if self.gate is not None:
            events = gated(events, self.gate(events))
        return self.out(activate(self.hidden(events), self.activation))
