"""Row-scaled FP8 on Hopper: quantisation in Triton, products in cuBLAS.

Forward GEMMs accumulate on in the tensor cores (about 14 bits below the sum), those of gradients are promoted to
float32 along the way (``ACCURATE``). A GEMM over the tokens takes scales per tensor: those of the tokens are in the
codes.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_gem.kernels.custom_op import custom_op, register_fake
from lightning_gem.kernels.launch import runs_triton
from lightning_gem.precision import scaled
from lightning_gem.precision.mx import FORMATS, Format
from lightning_gem.precision.recipes import PrecisionRecipe
from lightning_gem.precision.scaled import Scaled, token_scales

# Whether the gradient of the weight, a sum over all tokens, leaves the tensor cores' accumulator now and then.
ACCURATE = True


def quantize_rows(x: Tensor, fmt: Format = "e4m3") -> Scaled:
    """One scale per row of a matrix (m, k), as :func:`lightning_gem.precision.scaled.quantize_rows`."""
    codes, scale = torch.ops.lightning_gem.fp8_rows(x, None, None, "", 0.0, "identity", fmt)
    return Scaled(codes, scale, 1, x.shape[-1])


def normed_rows(
    x: Tensor, norm: str, eps: float, weight: Tensor | None, bias: Tensor | None, activation: str, fmt: Format = "e4m3"
) -> Scaled:
    """Rows (m, k) of ``act(norm(x) * weight + bias)`` in FP8, in one pass."""
    codes, scale = torch.ops.lightning_gem.fp8_rows(x, weight, bias, norm, eps, activation, fmt)
    return Scaled(codes, scale, 1, x.shape[-1])


def scaled_matmul(a: Scaled, b: Scaled, dtype: torch.dtype, fast: bool = True) -> Tensor:
    """``A B^T``: scales per row of both, or one for each.

    Args:
        a: ``data`` (m, k).
        b: ``data`` (n, k).
        dtype: Of the result; with scales per row it was bfloat16 before.
        fast: Stay in the tensor cores' accumulator.
    """
    rows, columns = len(a.data), len(b.data)
    if 0 in (rows, columns, a.data.shape[1]):
        return torch.zeros(rows, columns, dtype=dtype, device=a.data.device)
    left, right = _padded(a.data, 0), _padded(b.data, -columns % 16)
    if a.scale.numel() == 1 and b.scale.numel() == 1:
        scale_a, scale_b = a.scale.reshape(()), b.scale.reshape(())
        written = dtype
    else:
        scale_a, scale_b = a.scale.reshape(-1, 1), F.pad(b.scale.reshape(1, -1), (0, -columns % 16), value=1.0)
        written = torch.bfloat16
    out = torch._scaled_mm(left, right.t(), scale_a, scale_b, out_dtype=written, use_fast_accum=fast)
    return out.narrow(1, 0, columns).to(dtype)


def _padded(codes: Tensor, rows: int) -> Tensor:
    if rows == 0 and codes.shape[1] % 16 == 0:
        return codes
    return F.pad(codes.view(torch.uint8), (0, -codes.shape[1] % 16, 0, rows)).view(codes.dtype)


def gradients(
    x: Scaled,
    weight: Tensor,
    grad: Tensor,
    recipe: PrecisionRecipe,
    needed: tuple[bool, bool],
    dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the activations (m, k) and of the weight (n, k), both in FP8: the gradient is quantised once.

    Args:
        x: Activations, with scales per row.
        weight: (n, k).
        grad: (m, n).
        recipe: Of the formats.
        needed: Which of the two are.
        dtype: Of the gradient of the activations.
    """
    grad_x = grad_weight = None
    grad = grad.contiguous()
    if needed[1]:
        codes, scale, transposed = torch.ops.lightning_gem.fp8_rows_both(grad, recipe.grad_fmt)
        rows = Scaled(codes, scale, 1, grad.shape[1])
    else:
        rows = quantize_rows(grad, recipe.grad_fmt)
    if needed[0]:
        grad_x = scaled_matmul(rows, quantize_rows(weight.t().contiguous(), recipe.fmt), dtype, fast=True)
    if needed[1]:
        ratio, largest = token_scales(x.scale, rows.scale)
        inner = torch.ops.lightning_gem.fp8_shift_transposed(x.data, ratio, recipe.fmt)
        one = torch.ones_like(largest)
        grad_weight = scaled_matmul(
            Scaled(transposed, one, *transposed.shape), Scaled(inner, largest, *inner.shape), weight.dtype, not ACCURATE
        )
    return grad_x, grad_weight


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@custom_op("fp8_rows")
def _rows(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: str, eps: float, activation: str, fmt: str
) -> tuple[Tensor, Tensor]:
    if not runs_triton(x) or x.shape[1] > 16384:
        from lightning_gem.precision.norm_linear import activated_norm

        rows = scaled.quantize_rows(activated_norm(x, norm, eps, weight, bias, activation), fmt)  # type: ignore[arg-type]
        return rows.data, rows.scale
    from lightning_gem.precision import triton_rows

    return triton_rows.quantize(_unit_stride(x), weight, bias, norm or None, eps, activation, fmt)  # type: ignore[arg-type]


@register_fake(_rows)
def _(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: str, eps: float, activation: str, fmt: str
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=FORMATS[fmt].dtype), x.new_empty((x.shape[0], 1), dtype=torch.float32)


@custom_op("fp8_rows_both")
def _rows_both(x: Tensor, fmt: str) -> tuple[Tensor, Tensor, Tensor]:
    if not runs_triton(x):
        rows = scaled.quantize_rows(x, fmt)  # type: ignore[arg-type]
        return rows.data, rows.scale, _transposed(rows.data)
    from lightning_gem.precision import triton_rows

    return triton_rows.quantize_both(_unit_stride(x), fmt)  # type: ignore[arg-type]


@register_fake(_rows_both)
def _(x: Tensor, fmt: str) -> tuple[Tensor, Tensor, Tensor]:
    codes = x.new_empty(x.shape, dtype=FORMATS[fmt].dtype)
    transposed = x.new_empty((x.shape[1], (x.shape[0] + 15) // 16 * 16), dtype=FORMATS[fmt].dtype)
    return codes, x.new_empty((x.shape[0], 1), dtype=torch.float32), transposed


@custom_op("fp8_shift_transposed")
def _shift_transposed(codes: Tensor, ratio: Tensor, fmt: str) -> Tensor:
    if not (codes.is_cuda or runs_triton(ratio)):
        return _transposed((codes.to(torch.float32) * ratio).to(codes.dtype))
    from lightning_gem.precision import triton_rows

    return triton_rows.shift_transposed(codes, ratio, fmt)  # type: ignore[arg-type]


@register_fake(_shift_transposed)
def _(codes: Tensor, ratio: Tensor, fmt: str) -> Tensor:
    return codes.new_empty((codes.shape[1], (codes.shape[0] + 15) // 16 * 16))


def _transposed(codes: Tensor) -> Tensor:
    return F.pad(codes.view(torch.uint8).t(), (0, -len(codes) % 16)).contiguous().view(codes.dtype)
