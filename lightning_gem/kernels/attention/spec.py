"""What an attention op computes, apart from its tensors."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionSpec:
    """One family of attention: ``out_scale * weights(scale * Q K^T) V`` over packed sequences.

    Attributes:
        activation: None is softmax; otherwise the name of an activation, or one name per query head.
        scale: Factor on Q K^T.
        out_scale: Factor on the result (1 with softmax).
        causal: Hide keys to the right, aligned at the end of the sequences.
        window_left: Keys visible to the left of the own position; -1 is unlimited.
        window_right: The same to the right; without effect where ``causal``.
        broadcast_query: One set of queries serves every sequence.
        contextual_seqlen: The first tokens of a sequence, which see all of it but the targets (with ``causal``).
        has_targets: A tensor with the number of targets of each sequence comes with the tensors (with ``causal``).
        softcap: ``softcap * tanh(scores / softcap)`` before the softmax; 0 is off.
    """

    activation: str | tuple[str, ...] | None
    scale: float
    out_scale: float = 1.0
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    broadcast_query: bool = False
    contextual_seqlen: int = 0
    has_targets: bool = False
    softcap: float = 0.0

    @property
    def window_size(self) -> tuple[int, int]:
        """The window as the public ops take it."""
        return self.window_left, self.window_right

    @property
    def right(self) -> int:
        """Keys visible to the right, causality included; -1 is unlimited."""
        return 0 if self.causal else self.window_right

    @property
    def has_roles(self) -> bool:
        """Whether the position of a token decides its role: context, history or target."""
        return self.has_targets or self.contextual_seqlen > 0
