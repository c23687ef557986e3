"""Public op: rotary embedding of packed tokens."""

from torch import Tensor

from lightning_gem.kernels.rope.reference import rotary_halves
from lightning_gem.kernels.rope.registration import rotary_op


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each head's features by angles of the token: pair j is made of features j and j + D/2.

    This is the half-split convention (GPT-NeoX, Llama; ``interleaved=False`` in flash-attn). Angles come per token and
    pair, so that some pairs may turn with the position and others with time (ROTE). Method: RoFormer
    (https://arxiv.org/abs/2104.09864).

    One launch rotates all heads of x, so rotate queries and keys together where they are slices of one projection.

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
    check_angles(x, cos, sin)
    if not x.is_cuda or cos.requires_grad or sin.requires_grad:
        return rotary_halves(x, cos, sin)
    return rotary_op(x, cos, sin, False)


def check_angles(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raises ValueError unless there is one floating-point angle per token and pair of x, on the device of x."""
    expected = (x.shape[0], x.shape[2] // 2)
    for name, angles in (("cos", cos), ("sin", sin)):
        if tuple(angles.shape) != expected or x.shape[2] % 2:
            raise ValueError(
                f"{name} must be (total_tokens, head_dim / 2) = {expected}, got {tuple(angles.shape)}: "
                "give one angle per token and pair, the same for all heads; head_dim must be even"
            )
        if angles.device != x.device or not angles.is_floating_point():
            raise ValueError(
                f"{name} must be floating point on {x.device}, got {angles.dtype} on {angles.device}: "
                f"move it with {name}.to(x.device)"
            )
