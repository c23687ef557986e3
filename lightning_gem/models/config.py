"""What a GEM network is made of: plain dataclasses, so that presets are YAML and not code."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class SequenceConfig:
    """Tower of one event sequence. Every sequence has its own: event-level personalization.

    Args:
        width: Width of its tokens.
        num_heads: Attention heads; the width divided by it is the head dimension.
        num_seeds: Learned queries that pool the sequence.
        num_tokens: Tokens that the pooled summary hands to the interaction.
        attention: Which events see each other in self-attention: all (``full``), those at most ``window`` apart
            (``window``), or those of the same block of ``window`` events counted from the sequence's start (``block``).
        window: Reach of the window, or size of the block.
        num_layers: The tower is active in the first ``num_layers`` layers and keeps its last summary afterwards; the
            depth of the network when not given.
    """

    width: int = 32
    num_heads: int = 2
    num_seeds: int = 8
    num_tokens: int = 4
    attention: Literal["full", "window", "block"] = "block"
    window: int = 64
    num_layers: int | None = None


@dataclass
class ExpertsConfig:
    """Mixture of Wukong experts.

    Args:
        num_experts: Experts that run in parallel.
        mode: ``partition``: each expert sees its own slice of the tokens, outputs are concatenated. ``ensemble``: each
            sees all tokens, outputs are summed.
        num_fm_tokens: Tokens made by the factorization machine of each expert.
        num_linear_tokens: Tokens made by the linear compression of each expert.
        rank: Columns of the factorization machine's low-rank projection.
        hidden: Hidden width of the expert's MLP.
        depth: Linear layers of the expert's MLP.
    """

    num_experts: int = 2
    mode: Literal["partition", "ensemble"] = "partition"
    num_fm_tokens: int = 2
    num_linear_tokens: int = 2
    rank: int = 4
    hidden: int = 32
    depth: int = 2


@dataclass
class GEMConfig:
    """The network.

    Args:
        width: Width of the non-sequence tokens.
        num_layers: Layers. Even ones refresh the summaries of the sequences, odd ones run self-attention.
        num_context_tokens: Tokens that summarise the non-sequence side in every layer; also the hidden width of the
            personalised feed-forward network.
        num_dense_tokens: Tokens made from the numeric features.
        kronecker_rank: Terms of the Kronecker sum that compresses the pooled seeds.
        sequences: Towers by sequence name; a sequence that is not named gets ``default_sequence``.
        default_sequence: Tower of the sequences without an entry.
        experts: Mixture of Wukong experts of every layer.
        head_hidden: Hidden widths of the MLP that all tasks share.
        task_hidden: Hidden widths of each task's own MLP.
        wide: Add a linear map of the request's embeddings and numbers to the logits: it keeps their size, which norms
            of the experts and the heads take away.
        activation: Activation of the personalised feed-forward network and the MLPs.
        time_scale: Seconds that count as one unit of age in the rotary time encoding.
        time_features: Feed the events' age and gap, both in log scale, to the event tokenizer.
        rotate_values: Rotate the values of self-attention too.
        event_gate: Gate the event features by each other before the event tokenizer (MaskNet).
        embedding_init: Tables start uniform in plus and minus this; TorchRec's ``1 / sqrt(rows)`` when not given.
        dropout: Dropout of the tokens that enter the first layer and of the hidden layers of the heads.
        sequence_mode: ``two_way``: the context conditions the sequences and their summaries enrich the context.
            ``one_way``: the sequences ignore the context. ``none``: no sequences at all.
        computation_skip: Alternate between refreshing summaries and self-attention; without it every layer does both.
        pooling: ``hsp``: seeds compressed by a Kronecker sum. ``pma``: as many seeds as tokens, one projection.
        personalization: ``gdpa``: generalised dot-product attention to keys and values made from the context.
            ``linear``: a generated matrix per request, as in InterFormer.
        pool_before_pffn: Pool the sequences before the feed-forward network updates them.
        refresh_last: Where a tower's last layer updates the tokens after pooling them, pool once more (with the weights
            of the latest pooling), since otherwise nothing would read the result.
    """

    width: int = 32
    num_layers: int = 2
    num_context_tokens: int = 8
    num_dense_tokens: int = 1
    kronecker_rank: int = 2
    sequences: dict[str, SequenceConfig] = field(default_factory=dict)
    default_sequence: SequenceConfig = field(default_factory=SequenceConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    head_hidden: list[int] = field(default_factory=lambda: [32])
    task_hidden: list[int] = field(default_factory=list)
    wide: bool = False
    activation: Literal["hardswish", "gelu_tanh", "silu", "relu"] = "hardswish"
    time_scale: float = 86400.0
    time_features: bool = True
    rotate_values: bool = False
    event_gate: bool = False
    embedding_init: float | None = None
    dropout: float = 0.0
    sequence_mode: Literal["two_way", "one_way", "none"] = "two_way"
    computation_skip: bool = True
    pooling: Literal["hsp", "pma"] = "hsp"
    personalization: Literal["gdpa", "linear"] = "gdpa"
    pool_before_pffn: bool = False
    refresh_last: bool = True

    def tower(self, name: str) -> SequenceConfig:
        """Configuration of the tower of a sequence."""
        return self.sequences.get(name, self.default_sequence)

    def depth(self, name: str) -> int:
        """Layers in which the tower of a sequence is active."""
        return min(self.tower(name).num_layers or self.num_layers, self.num_layers)

    def is_pooling_layer(self, layer: int) -> bool:
        """Whether a layer refreshes the summaries (type G)."""
        return layer % 2 == 0 or not self.computation_skip

    def is_attention_layer(self, layer: int) -> bool:
        """Whether a layer runs self-attention (type L)."""
        return layer % 2 == 1 or not self.computation_skip

    def refreshes(self, name: str, layer: int) -> bool:
        """Whether the tower pools once more at the end of ``layer``."""
        updated_since = self.is_attention_layer(layer) or self.pool_before_pffn
        return self.refresh_last and layer == self.depth(name) - 1 and updated_since

    @property
    def num_expert_outputs(self) -> int:
        """Tokens that leave the mixture of experts."""
        experts = self.experts
        per_expert = experts.num_fm_tokens + experts.num_linear_tokens
        return per_expert * (experts.num_experts if experts.mode == "partition" else 1)

    def num_interaction_tokens(self, sequences: list[str]) -> int:
        """Tokens that enter the mixture of experts."""
        if self.sequence_mode == "none":
            return self.num_context_tokens
        return self.num_context_tokens + sum(self.tower(name).num_tokens for name in sequences)

    def check(self, sequences: list[str]) -> None:
        """Validates the configuration against the names of the schema's sequences.

        Raises:
            ValueError: Naming the field and the fix.
        """
        unknown = sorted(set(self.sequences) - set(sequences))
        if unknown:
            raise ValueError(f"config.sequences names {unknown[0]!r}, the schema has only {sorted(sequences)}")
        if self.num_layers < 1:
            raise ValueError(f"config.num_layers must be positive, not {self.num_layers}")
        if self.experts.depth < 2:
            raise ValueError(f"config.experts.depth must be at least 2, not {self.experts.depth}")
        num_tokens = self.num_interaction_tokens(sequences)
        num_experts = self.experts.num_experts
        if self.experts.mode == "partition" and num_tokens % num_experts:
            raise ValueError(
                f"{num_tokens} tokens (num_context_tokens={self.num_context_tokens} and num_tokens of each sequence) "
                f"cannot be divided over {num_experts} experts: make num_context_tokens "
                f"{self.num_context_tokens + num_experts - num_tokens % num_experts}, or use mode: ensemble"
            )
        for name in sequences:
            tower = self.tower(name)
            head_dim, rest = divmod(tower.width, tower.num_heads)
            if rest or head_dim % 4:
                raise ValueError(
                    f"sequence {name!r}: width {tower.width} over {tower.num_heads} heads must give a head dimension "
                    "that is a multiple of 4 (rotary pairs of position and of time)"
                )
