"""From a jagged sequence to a fixed number of summary tokens."""

import torch
from torch import Tensor, nn

from lightning_gem.kernels import pma_attention, rotary
from lightning_gem.models.functional import rms_norm


class SeedPooling(nn.Module):
    """Multi-head attention of learned seeds, shared by all requests, to the events of each request.

    The keys are rotated by their age and the seeds are not, so a seed can prefer recent events.

    Args:
        width: Width of the tokens.
        num_heads: Heads.
        num_seeds: Seeds.
    """

    def __init__(self, width: int, num_heads: int, num_seeds: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.seeds = nn.Parameter(torch.empty(num_seeds, width))
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the seeds."""
        nn.init.normal_(self.seeds)

    def forward(self, tokens: Tensor, cu_seqlens: Tensor, max_seqlen: int, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Pools packed tokens ``(N, width)`` to ``(B, num_seeds, width)``; an empty sequence gives zeros."""
        query = self.query(rms_norm(self.seeds)).unflatten(-1, (self.num_heads, -1))
        key_value = self.key_value(rms_norm(tokens)).unflatten(-1, (2 * self.num_heads, -1))
        key, value = key_value.chunk(2, dim=1)
        query, key = self.score_operands(query, rotary(key, *angles))
        pooled = pma_attention(query, key, value, cu_seqlens, max_seqlen)
        return self.out(pooled.flatten(-2))

    def score_operands(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """What the scores are computed from; a precision recipe replaces it."""
        return query, key


class KroneckerCompression(nn.Module):
    """``Y = sum_i Z_i^T P W_i``: fewer tokens of another width from many seeds (SumKronLinear of Kunlun).

    Args:
        num_seeds: Tokens in.
        num_tokens: Tokens out.
        in_width: Width in.
        out_width: Width out.
        rank: Terms of the sum.
    """

    def __init__(self, num_seeds: int, num_tokens: int, in_width: int, out_width: int, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.num_tokens = num_tokens
        self.mix = nn.Parameter(torch.empty(rank * num_tokens, num_seeds))
        self.project = nn.Linear(rank * in_width, out_width, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the token mixes."""
        nn.init.normal_(self.mix, std=self.mix.shape[1] ** -0.5)

    def forward(self, pooled: Tensor) -> Tensor:
        """Maps ``(B, num_seeds, in_width)`` to ``(B, num_tokens, out_width)``."""
        mixed = (self.mix @ pooled).unflatten(1, (self.num_tokens, self.rank))
        return self.project(mixed.flatten(2))


class HierarchicalSeedPooling(nn.Module):
    """More seeds than tokens, then a Kronecker sum.

    Args:
        width: Width of the sequence tokens.
        num_heads: Heads.
        num_seeds: Seeds.
        num_tokens: Tokens out.
        out_width: Width out.
        rank: Terms of the Kronecker sum.
    """

    # Other layers may call it too, so it is sharded by itself.
    fully_shard_unit = True

    def __init__(self, width: int, num_heads: int, num_seeds: int, num_tokens: int, out_width: int, rank: int) -> None:
        super().__init__()
        self.attention = SeedPooling(width, num_heads, num_seeds)
        self.compress = KroneckerCompression(num_seeds, num_tokens, width, out_width, rank)

    def forward(self, tokens: Tensor, cu_seqlens: Tensor, max_seqlen: int, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Pools packed tokens ``(N, width)`` to ``(B, num_tokens, out_width)``."""
        return rms_norm(self.compress(self.attention(tokens, cu_seqlens, max_seqlen, angles)))


class PlainSeedPooling(nn.Module):
    """As many seeds as tokens and one projection (PMA of the Set Transformer, arXiv 1810.00825).

    Args:
        width: Width of the sequence tokens.
        num_heads: Heads.
        num_tokens: Seeds, and tokens out.
        out_width: Width out.
    """

    # Other layers may call it too, so it is sharded by itself.
    fully_shard_unit = True

    def __init__(self, width: int, num_heads: int, num_tokens: int, out_width: int) -> None:
        super().__init__()
        self.attention = SeedPooling(width, num_heads, num_tokens)
        self.project = nn.Linear(width, out_width, bias=False)

    def forward(self, tokens: Tensor, cu_seqlens: Tensor, max_seqlen: int, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Pools packed tokens ``(N, width)`` to ``(B, num_tokens, out_width)``."""
        return rms_norm(self.project(self.attention(tokens, cu_seqlens, max_seqlen, angles)))
