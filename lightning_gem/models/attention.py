"""Self-attention over one event sequence."""

from typing import Literal

from torch import Tensor, nn

from lightning_gem.kernels import block_attention, jagged_flash_attention, rotary
from lightning_gem.models.functional import rms_norm


class SelfAttention(nn.Module):
    """Pre-norm residual self-attention with rotary time encoding: ``s + W_o attention(W_qkv RMSNorm(s))``.

    Args:
        width: Width of the tokens.
        num_heads: Heads.
        attention: ``full``, ``window`` (symmetric) or ``block``.
        window: Reach of the window, or size of the block.
        rotate_values: Rotate the values too.
    """

    # Whether block attention's kernel may rotate: score operands are taken as they are.
    rotates_in_kernel = True

    def __init__(
        self,
        width: int,
        num_heads: int,
        attention: Literal["full", "window", "block"],
        window: int,
        rotate_values: bool,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention = attention
        self.window = window
        self.rotate_values = rotate_values
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, tokens: Tensor, cu_seqlens: Tensor, max_seqlen: int, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Updates packed tokens ``(N, width)``."""
        projected = self.query_key_value(rms_norm(tokens)).unflatten(-1, (3 * self.num_heads, -1))
        if self.attention == "block" and self.rotates_in_kernel:
            query, key, value = projected.chunk(3, dim=1)
            out = block_attention(
                query,
                key,
                value,
                cu_seqlens,
                max_seqlen,
                block_size=self.window,
                rotary=angles,
                rotate_value=self.rotate_values,
            )
        else:
            num_rotated = (3 if self.rotate_values else 2) * self.num_heads
            rotated = rotary(projected[:, :num_rotated], *angles)
            query, key = rotated[:, : 2 * self.num_heads].chunk(2, dim=1)
            value = (rotated if self.rotate_values else projected)[:, 2 * self.num_heads :]
            query, key = self.score_operands(query, key)
            reach = (self.window, self.window) if self.attention == "window" else (-1, -1)
            if self.attention == "block":
                out = block_attention(query, key, value, cu_seqlens, max_seqlen, block_size=self.window)
            else:
                out = jagged_flash_attention(
                    query, key, value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, window_size=reach
                )
        return tokens + self.out(out.flatten(-2))

    def score_operands(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """What the scores are computed from; a precision recipe replaces it."""
        return query, key
