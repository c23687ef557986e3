"""Public op: a matrix product per group of rows."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lightning_gem.kernels.checks import autocast, check_cu_seqlens
from lightning_gem.kernels.custom_op import custom_op, register_autograd, register_fake
from lightning_gem.kernels.grouped import reference


def grouped_mm(x: Tensor, weight: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Rows of group e times matrix e: ``out[start:end] = x[start:end] @ weight[e]``, in one launch.

    Torch's grouped GEMM runs where it can (bfloat16 on a GPU of compute capability 8.0 or more, K and O multiples of
    8); otherwise a loop over the groups, which reads the offsets. Groups may be empty: their weights get gradient 0;
    rows from ``cu_seqlens[-1]`` on are never read, and are 0 in the result and in the gradient. Under autocast, inputs
    are cast.

    Args:
        x: (N, K), packed by group.
        weight: (E, K, O) in the dtype of ``x``.
        cu_seqlens: Offsets (E+1,), int32 or int64.

    Returns:
        (N, O) in the dtype of ``x``.

    Raises:
        ValueError: For shapes, dtypes or offsets that do not fit together.
    """
    x, weight = autocast(x, weight)
    if x.ndim != 2 or weight.ndim != 3 or weight.shape[1] != x.shape[1]:
        raise ValueError(f"weight must be (E, K, O) for x (N, K), got {tuple(weight.shape)} for {tuple(x.shape)}")
    if not x.is_floating_point() or x.dtype != weight.dtype or x.device != weight.device:
        raise ValueError(
            f"x and weight must share a floating dtype and a device, got {x.dtype} on {x.device} and "
            f"{weight.dtype} on {weight.device}: cast the weight with weight.to(x)"
        )
    check_cu_seqlens("cu_seqlens", cu_seqlens, x, None)
    if len(cu_seqlens) != len(weight) + 1:
        raise ValueError(f"cu_seqlens must have one offset more than the {len(weight)} groups, got {len(cu_seqlens)}")
    if x.is_cuda or torch.compiler.is_compiling():  # a compiler cannot follow the loop
        out: Tensor = torch.ops.lightning_gem.grouped_mm(x, weight, cu_seqlens)
        return out
    return reference.grouped_mm(x, weight, cu_seqlens)


def _has_grouped_gemm(x: Tensor, weight: Tensor) -> bool:
    return (
        x.is_cuda
        and x.dtype == torch.bfloat16
        and x.shape[1] % 8 == 0
        and weight.shape[2] % 8 == 0
        and x.numel() > 0
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
    )


def _call(a: Tensor, b: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Torch's op under its public or, in older releases, its private name."""
    function = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    out: Tensor = function(a, b, offs=cu_seqlens[1:].to(torch.int32))
    return out


def _zero_slack(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    from lightning_gem.kernels import triton_slack

    triton_slack.zero_slack_(x, cu_seqlens)
    return x


@custom_op("grouped_mm")
def _forward(x: Tensor, weight: Tensor, cu_seqlens: Tensor) -> Tensor:
    if not _has_grouped_gemm(x, weight):
        return reference.grouped_mm(x, weight, cu_seqlens)
    return _zero_slack(_call(x.contiguous(), weight.contiguous(), cu_seqlens), cu_seqlens)


@register_fake(_forward)
def _(x: Tensor, weight: Tensor, cu_seqlens: Tensor) -> Tensor:
    return torch.empty(x.shape[0], weight.shape[2], dtype=x.dtype, device=x.device)


@custom_op("grouped_mm_backward")
def _backward(grad_out: Tensor, x: Tensor, weight: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    if not _has_grouped_gemm(x, weight):
        return reference.grouped_mm_backward(grad_out, x, weight, cu_seqlens)
    grad_out = grad_out.contiguous()
    grad_x = _zero_slack(_call(grad_out, weight.contiguous().transpose(1, 2), cu_seqlens), cu_seqlens)
    grad_weight = _call(x.contiguous().t(), grad_out, cu_seqlens)
    empty = (cu_seqlens.diff() == 0).view(-1, 1, 1)
    return grad_x, grad_weight.masked_fill_(empty, 0)


@register_fake(_backward)
def _(grad_out: Tensor, x: Tensor, weight: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    grad_x, grad_weight = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, weight))
    return grad_x, grad_weight


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _autograd(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    return (*torch.ops.lightning_gem.grouped_mm_backward(grad_out, *ctx.saved_tensors), None)


register_autograd(_forward, _autograd, _setup_context)


@register_flop_formula(torch.ops.lightning_gem.grouped_mm)
def _flops(x_shape: Any, weight_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * x_shape[0] * weight_shape[1] * weight_shape[2]


@register_flop_formula(torch.ops.lightning_gem.grouped_mm_backward)
def _flops_backward(
    grad_shape: Any, x_shape: Any, weight_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    return 4 * x_shape[0] * weight_shape[1] * weight_shape[2]
