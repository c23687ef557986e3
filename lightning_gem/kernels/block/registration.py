"""Block attention as two custom ops, forward and backward, opaque to the compiler."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from lightning_gem.kernels.attention.registration import no_second_derivative, nobody_watches
from lightning_gem.kernels.block.reference import block_attention_bucketed
from lightning_gem.kernels.custom_op import custom_op, register_autograd, register_fake
from lightning_gem.kernels.launch import interpreted, on_device
from lightning_gem.kernels.pairs import block_pairs, causal_block_pairs

MAX_HEAD_DIM = 256
MAX_BLOCK_SIZE = 128
# Largest operands, by the size of a number: four of them and the weights share the memory of a multiprocessor. Float32
# products are taken in three parts, which need memory of their own.
_MAX_TILE_NUMBERS = {2: 128 * 128, 4: 64 * 64}


def why_not_triton(query: Tensor, value: Tensor, block_size: int) -> str | None:
    """Why the Triton kernels cannot do this work, from shapes, dtypes and devices alone; None if they can."""
    if query.device.type != "cuda" and not (query.device.type == "cpu" and interpreted()):
        return f"the tensors are on {query.device}"
    if query.dtype == torch.float64:
        return "float64 has no matrix units"
    if block_size > MAX_BLOCK_SIZE:
        return f"block_size is above {MAX_BLOCK_SIZE}"
    dim = max(query.shape[2], value.shape[2])
    if dim > MAX_HEAD_DIM:
        return f"a head_dim is above {MAX_HEAD_DIM}"
    tile = 64 if block_size <= 64 else 128
    if tile * dim > _MAX_TILE_NUMBERS[query.element_size()]:
        return f"blocks of {block_size} tokens with {dim} features in {query.dtype} do not fit into shared memory"
    if query.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(query.device) < (8, 0):
        return "the GPU is older than sm_80"
    return None


def choose(query: Tensor, value: Tensor, block_size: int, backend: str) -> str:
    """``triton`` or ``reference``.

    Raises:
        ValueError: If backend is ``triton`` and cannot do this work.
    """
    if backend == "reference":
        return backend
    reason = why_not_triton(query, value, block_size)
    if reason is None:
        return "triton"
    if backend == "triton":
        raise ValueError(f"backend 'triton' cannot run: {reason}; use 'auto' or 'reference'")
    return "reference"


def runs_reference_directly(query: Tensor, value: Tensor, block_size: int, backend: str) -> bool:
    """Whether the differentiable reference stands in for the custom op, as it does where nobody is watching.

    The backward of the op computes the forward again, which autograd on the reference saves.
    """
    return choose(query, value, block_size, backend) == "reference" and nobody_watches(query)


@custom_op("block_attention")
def block_attention_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    block_size: int,
    scale: float,
    activation: str | None,
    causal: bool,
    rotate_value: bool,
    backend: str,
) -> Tensor:
    """See ``block_attention``; cos and sin rotate query and key."""
    inputs = (query, key, value, cu_seqlens, cos, sin, block_size, scale, activation, causal, rotate_value)
    if choose(query, value, block_size, backend) == "reference":
        return block_attention_bucketed(*inputs).contiguous()
    from lightning_gem.kernels.block import triton_kernels

    with on_device(query):
        return triton_kernels.forward(*inputs)


@custom_op("block_attention_backward")
def block_attention_backward_op(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    block_size: int,
    scale: float,
    activation: str | None,
    causal: bool,
    rotate_value: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    options = (cu_seqlens, cos, sin, block_size, scale, activation, causal, rotate_value)
    if choose(query, value, block_size, backend) == "reference":
        # Autograd does not record inside a custom op; a thread of its own knows nothing of that.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(_reference_gradients, grad_out, query, key, value, *options).result()
    from lightning_gem.kernels.block import triton_kernels

    with on_device(query):
        return triton_kernels.backward(grad_out, query, key, value, *options)


def _reference_gradients(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (x.detach().requires_grad_() for x in (query, key, value))
    out = block_attention_bucketed(query, key, value, *options)
    grad_query, grad_key, grad_value = torch.autograd.grad(out, (query, key, value), grad_out)
    return grad_query.contiguous(), grad_key.contiguous(), grad_value.contiguous()


@register_fake(block_attention_op)
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty((query.shape[0], query.shape[1], value.shape[2]))


@register_fake(block_attention_backward_op)
def _(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.options = inputs[6:]


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
    gradients = block_attention_backward_op(grad_out, *ctx.saved_tensors, *ctx.options)
    return (*gradients, *[None] * 9)


register_autograd(block_attention_op, _backward, _setup_context)
register_autograd(block_attention_backward_op, no_second_derivative)


@register_flop_formula(torch.ops.lightning_gem.block_attention, get_raw=True)
def _forward_flops(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    block_size: int,
    scale: float,
    activation: str | None,
    causal: bool,
    *_: Any,
    **__: Any,
) -> int:
    """Two products: 2 H (D + Dv) per visible pair. Rotations count 0, by convention."""
    pairs = _count_pairs(query, cu_seqlens, block_size, causal)
    return 2 * query.shape[1] * (query.shape[2] + value.shape[2]) * pairs


@register_flop_formula(torch.ops.lightning_gem.block_attention_backward, get_raw=True)
def _backward_flops(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    block_size: int,
    scale: float,
    activation: str | None,
    causal: bool,
    *_: Any,
    **__: Any,
) -> int:
    """Five products, one of which computes the scores again: 2 H (3 D + 2 Dv) per visible pair."""
    pairs = _count_pairs(query, cu_seqlens, block_size, causal)
    return 2 * query.shape[1] * (3 * query.shape[2] + 2 * value.shape[2]) * pairs


def _count_pairs(query: Tensor, cu_seqlens: Tensor, block_size: int, causal: bool) -> int:
    """Visible pairs; without real offsets those of whole blocks in all rows."""
    if isinstance(cu_seqlens, FakeTensor) or cu_seqlens.device.type == "meta":
        lengths = torch.tensor([int(query.shape[0])])
    else:
        lengths = cu_seqlens.cpu().diff()
    return (causal_block_pairs if causal else block_pairs)(lengths, block_size)
