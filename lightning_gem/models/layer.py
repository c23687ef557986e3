"""One layer: summarise the context, update the sequences, pool them, let everything interact."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_gem.models.attention import SelfAttention
from lightning_gem.models.config import GEMConfig
from lightning_gem.models.context import ContextSummary
from lightning_gem.models.experts import WukongExperts
from lightning_gem.models.feed_forward import GDPAFeedForward, LinearFeedForward
from lightning_gem.models.pooling import HierarchicalSeedPooling, PlainSeedPooling


@dataclass
class SequenceGeometry:
    """What does not change from layer to layer: boundaries ``(B + 1,)``, longest history, rotary cosine and sine."""

    cu_seqlens: Tensor
    max_seqlen: int
    angles: tuple[Tensor, Tensor]


class Tower(nn.Module):
    """The part of a layer that belongs to one sequence; pieces that its type of layer lacks are None.

    Args:
        config: The network.
        name: Name of the sequence.
        layer: Index of the layer.
    """

    def __init__(self, config: GEMConfig, name: str, layer: int) -> None:
        super().__init__()
        tower = config.tower(name)
        self.pool_before_pffn = config.pool_before_pffn
        self.feed_forward: nn.Module | None = None
        self.pooling: nn.Module | None = None
        self.attention: nn.Module | None = None
        if config.is_pooling_layer(layer):
            context_width = None if config.sequence_mode == "one_way" else config.width
            if config.personalization == "linear" and context_width is not None:
                self.feed_forward = LinearFeedForward(tower.width, context_width, config.num_context_tokens)
            else:
                self.feed_forward = GDPAFeedForward(
                    tower.width, tower.num_heads, context_width, config.num_context_tokens, config.activation
                )
            if config.pooling == "hsp":
                self.pooling = HierarchicalSeedPooling(
                    tower.width,
                    tower.num_heads,
                    tower.num_seeds,
                    tower.num_tokens,
                    config.width,
                    config.kronecker_rank,
                )
            else:
                self.pooling = PlainSeedPooling(tower.width, tower.num_heads, tower.num_tokens, config.width)
        if config.is_attention_layer(layer):
            self.attention = SelfAttention(
                tower.width, tower.num_heads, tower.attention, tower.window, config.rotate_values
            )

    def forward(
        self, tokens: Tensor, summary: Tensor | None, context: Tensor, geometry: SequenceGeometry
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the updated tokens ``(N, width)`` and the summary ``(B, num_tokens, config.width)``."""
        place = (geometry.cu_seqlens, geometry.max_seqlen)
        if self.pooling is not None and self.pool_before_pffn:
            summary = self.pooling(tokens, *place, geometry.angles)
        if self.feed_forward is not None:
            tokens = self.feed_forward(tokens, context, *place)
        if self.pooling is not None and not self.pool_before_pffn:
            summary = self.pooling(tokens, *place, geometry.angles)
        if self.attention is not None:
            tokens = self.attention(tokens, *place, geometry.angles)
        return tokens, summary


class GEMLayer(nn.Module):
    """Context summary, towers and mixture of Wukong experts.

    Args:
        config: The network.
        sequences: Names of the sequences.
        layer: Index of the layer.
        num_tokens: Non-sequence tokens that enter the layer.
    """

    fully_shard_unit = True

    def __init__(self, config: GEMConfig, sequences: list[str], layer: int, num_tokens: int) -> None:
        super().__init__()
        self.context = ContextSummary(num_tokens, config.num_context_tokens, config.width)
        self.sequences = [name for name in sequences if layer < config.depth(name)]
        self.towers = nn.ModuleList(Tower(config, name, layer) for name in self.sequences)
        self.experts = WukongExperts(
            config.num_interaction_tokens(sequences), config.width, config.experts, config.activation
        )

    def forward(
        self,
        x: Tensor,
        tokens: dict[str, Tensor],
        summaries: dict[str, Tensor],
        geometry: dict[str, SequenceGeometry],
        refresh: dict[str, nn.Module],
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Updates all tokens.

        Args:
            x: Non-sequence tokens ``(B, n, width)``.
            tokens: Packed tokens of every sequence.
            summaries: Latest summary of every sequence.
            geometry: Boundaries and angles of every sequence.
            refresh: Poolings of an earlier layer, for the towers that end in this one.

        Returns:
            The updated ``x``, ``tokens`` and ``summaries``.
        """
        context = self.context(x)
        tokens, summaries = dict(tokens), dict(summaries)
        for name, tower in zip(self.sequences, self.towers, strict=True):
            tokens[name], summary = tower(tokens[name], summaries.get(name), context, geometry[name])
            if name in refresh:
                place = geometry[name]
                summary = refresh[name](tokens[name], place.cu_seqlens, place.max_seqlen, place.angles)
            assert summary is not None  # layer 0 pools, and every tower is active in it
            summaries[name] = summary
        x = self.experts(torch.cat([context, *summaries.values()], dim=1))
        return x, tokens, summaries
