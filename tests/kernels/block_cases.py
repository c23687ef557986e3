"""Cases of block attention and rotary kernels, shared by the tests in Triton's interpreter and those on a GPU."""

from typing import Any

import torch
from kernel_cases import offsets, tokens
from torch import Tensor

from lightning_gem.kernels import block_attention

# (lengths, heads, key heads, D, Dv, options); lengths 0, 1, and around the sizes of blocks and tiles.
CASES: dict[str, tuple[list[int], int, int, int, int, dict[str, Any]]] = {
    "blocks of 64": ([0, 65, 0, 1], 2, 2, 32, 32, {}),
    "blocks of 32": ([70, 0], 1, 1, 32, 32, {"block_size": 32}),
    "blocks of 16, causal": ([63], 1, 1, 32, 32, {"block_size": 16, "causal": True}),
    "blocks of 128": ([130], 1, 1, 32, 32, {"block_size": 128}),
    "blocks of 48": ([50, 3], 1, 1, 32, 32, {"block_size": 48}),
    "blocks of 1": ([5], 1, 1, 16, 16, {"block_size": 1}),
    "grouped heads": ([20], 4, 2, 32, 32, {}),
    "one key head, rotated": ([20], 3, 1, 32, 32, {"rotary": True, "rotate_value": True}),
    "odd sizes": ([64], 1, 1, 24, 40, {}),
    "odd rotated sizes": ([20], 1, 1, 40, 24, {"rotary": True}),
    "wide and narrow": ([20], 1, 1, 256, 16, {}),
    "one feature": ([20], 1, 1, 1, 3, {}),
    "rotated": ([64, 1], 1, 1, 128, 128, {"rotary": True}),
    "wide, rotated": ([20], 1, 1, 256, 256, {"rotary": True, "rotate_value": True}),
    "rotated values": ([20], 1, 1, 64, 64, {"rotary": True, "rotate_value": True, "causal": True}),
    "relu": ([20], 1, 1, 32, 32, {"activation": "relu", "softmax_scale": 1.0}),
    "relu_squared": ([20], 1, 1, 32, 32, {"activation": "relu_squared"}),
    "leaky_relu": ([20], 1, 1, 32, 32, {"activation": "leaky_relu"}),
    "gelu": ([20], 1, 1, 32, 32, {"activation": "gelu", "causal": True}),
    "gelu_tanh": ([20], 1, 1, 32, 32, {"activation": "gelu_tanh", "block_size": 16}),
    "silu": ([20], 1, 1, 32, 32, {"activation": "silu", "rotary": True}),
    "hardswish": ([20], 1, 1, 32, 32, {"activation": "hardswish", "softmax_scale": 2.0}),
    "identity": ([20], 1, 1, 32, 32, {"activation": "identity"}),
    "no tokens": ([0, 0], 1, 1, 32, 32, {}),
    "no sequences": ([], 1, 1, 32, 32, {}),
}


def make_case(
    name: str, dtype: torch.dtype, slack: int = 3
) -> tuple[tuple[Tensor, ...], Tensor, Tensor, dict[str, Any]]:
    """(query, key, value), the gradient of the output, offsets, options. Slack rows are NaN, in the angles too."""
    lengths, heads, key_heads, dim, dim_v, options = CASES[name]
    rows = sum(lengths) + slack
    inputs = (
        tokens(rows, heads, dim, seed=1, dtype=dtype),
        tokens(rows, key_heads, dim, seed=2, dtype=dtype),
        tokens(rows, key_heads, dim_v, seed=3, dtype=dtype),
    )
    grad = tokens(rows, heads, dim_v, seed=9, dtype=dtype)
    options = dict(options)
    precise = torch.promote_types(dtype, torch.float32)
    if options.get("rotary"):
        angle = tokens(rows, dim // 2, seed=4, dtype=precise)
        options["rotary"] = (angle.cos(), angle.sin())
    if slack:
        for x in (*inputs, grad, *options.get("rotary", ())):
            x[rows - slack :] = torch.nan
    return inputs, grad, offsets(lengths, torch.int32), options


def run_case(
    inputs: tuple[Tensor, ...], grad: Tensor, cu_seqlens: Tensor, options: dict[str, Any], backend: str
) -> tuple[Tensor, ...]:
    """Output and gradients."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = block_attention(*leaves, cu_seqlens, None, backend=backend, **options)
    return (out.detach(), *torch.autograd.grad(out, leaves, grad))


def exactly(name: str, slack: int = 3) -> tuple[Tensor, ...]:
    """The reference in float64."""
    inputs, grad, cu_seqlens, options = make_case(name, torch.float64, slack)
    return run_case(inputs, grad, cu_seqlens, options, "reference")
