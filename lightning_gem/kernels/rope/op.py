"""Public op: rotary embedding of packed tokens."""

from torch import Tensor

from lightning_gem.kernels.rope.reference import rotary_halves


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each head's features by angles of the token: pair j is made of features j and j + D/2.

    This is the half-split convention (GPT-NeoX, Llama; ``interleaved=False`` in flash-attn). Angles come per token and
    pair, so that some pairs may turn with the position and others with time (ROTE). Method: RoFormer
    (https://arxiv.org/abs/2104.09864).

    Args:
        x: (total_tokens, H, D), D even, bfloat16, float16, float32 or float64; computed in float32 or better.
        cos: (total_tokens, D/2) cosines of the angles, any floating dtype (float32 keeps large positions exact).
        sin: (total_tokens, D/2) sines.

    Returns:
        The rotated tokens, shape and dtype of ``x``.

    Raises:
        ValueError: For shapes that do not fit together, or x that is not floating.
    """
    if x.ndim != 3 or x.shape[2] % 2 or not x.is_floating_point():
        raise ValueError(
            f"x must be floating point (total_tokens, num_heads, head_dim) with an even head_dim, "
            f"got {x.dtype} {tuple(x.shape)}: split the heads with unflatten(-1, (num_heads, head_dim))"
        )
    expected = (x.shape[0], x.shape[2] // 2)
    for name, angles in (("cos", cos), ("sin", sin)):
        if tuple(angles.shape) != expected:
            raise ValueError(
                f"{name} must be (total_tokens, head_dim / 2) = {expected}, got {tuple(angles.shape)}: "
                "give one angle per token and pair, the same for all heads"
            )
    return rotary_halves(x, cos, sin)
