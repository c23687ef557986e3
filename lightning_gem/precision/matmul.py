"""Products of MXFP8 blocks: block-scaled tensor cores where they exist, exact emulation everywhere else."""

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_gem.precision.mx import FORMATS, MXBlocks, mx_dequantize, mx_to_blocked
from lightning_gem.precision.recipes import Kind

Backend = Literal["auto", "native", "emulated"]


def native_mx(device: torch.device) -> bool:
    """Whether the device multiplies MXFP8 blocks in hardware: NVIDIA's sm_100 and sm_103."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10


def native_rows(device: torch.device) -> bool:
    """Whether the device multiplies FP8 with a scale per row: NVIDIA's sm_90. Others can, unchecked."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def choose_backend(device: torch.device, backend: Backend = "auto", kind: Kind = "mx") -> Literal["native", "emulated"]:
    """What computes on a device, from its capability alone.

    Args:
        device: Where the tensors are.
        backend: ``auto``, or what is demanded.
        kind: Of the recipe; ``block`` and ``tensor`` are emulated everywhere.

    Raises:
        ValueError: If ``native`` is demanded from a device without it, or for another name.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"backend {backend!r} is unknown: use one of {', '.join(get_args(Backend))}")
    if backend == "emulated":
        return "emulated"
    if (kind == "mx" and native_mx(device)) or (kind == "row" and native_rows(device)):
        return "native"
    if backend == "native":
        if kind == "row":
            raise ValueError(
                f"native FP8 with a scale per row needs a GPU of compute capability 9.0 (Hopper), the tensors are on "
                f"{device}: use backend='auto', which emulates it exactly"
            )
        if kind != "mx":
            raise ValueError(f"FP8 with a scale per {kind} is emulated on every device: use backend='auto'")
        raise ValueError(
            f"native MXFP8 needs a GPU of compute capability 10 (Blackwell), the tensors are on {device}: "
            "use backend='auto', which emulates it exactly"
        )
    return "emulated"


def mx_matmul(a: MXBlocks, b: MXBlocks, dtype: torch.dtype, backend: Backend = "auto") -> Tensor:
    """``A B^T`` of blocks along the contracted axis, accumulated in float32.

    Args:
        a: ``data`` ``(..., m, k)``: rows of 1 x 32 blocks.
        b: ``data`` ``(..., n, k)``, with the same leading dimensions.
        dtype: Type of the result.
        backend: ``native`` and ``emulated`` differ by the order of accumulation only.

    Returns:
        ``(..., m, n)``.
    """
    if choose_backend(a.data.device, backend) == "native":
        return _native(a.data, a.scale, a.fmt, b.data, b.scale, b.fmt, dtype)
    # The numbers fit bfloat16, whose tensor cores accumulate in float32. float32 is for results of more precision.
    exact = torch.bfloat16 if a.data.is_cuda and dtype == torch.bfloat16 else torch.float32
    left, right = _contracted_last(a, exact), _contracted_last(b, exact)
    with torch.autocast(a.data.device.type, enabled=False):
        return torch.matmul(left, right.mT).to(dtype)


def _contracted_last(blocks: MXBlocks, dtype: torch.dtype) -> Tensor:
    return mx_dequantize(blocks, dtype).movedim(blocks.axis, -1)


def _native(
    a: Tensor, scale_a: Tensor, fmt_a: str, b: Tensor, scale_b: Tensor, fmt_b: str, dtype: torch.dtype
) -> Tensor:
    if a.ndim > 2:
        parts = zip(a, scale_a, b, scale_b, strict=True)
        return torch.stack([_native(x, scale_x, fmt_a, y, scale_y, fmt_b, dtype) for x, scale_x, y, scale_y in parts])
    rows, columns = a.shape[0], b.shape[0]
    if 0 in (rows, columns, a.shape[1]):
        return torch.zeros(rows, columns, dtype=dtype, device=a.device)
    # The bias stays outside, and so does torch.nn.functional.scaled_mm: torch's FLOP counter does not know it.
    out = torch._scaled_mm(
        a.contiguous().view(FORMATS[fmt_a].dtype),
        F.pad(b, (0, 0, 0, -columns % 16)).contiguous().view(FORMATS[fmt_b].dtype).t(),
        mx_to_blocked(scale_a).view(torch.float8_e8m0fnu),
        mx_to_blocked(scale_b).view(torch.float8_e8m0fnu),
        out_dtype=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32,
    )
    return out.narrow(1, 0, columns).to(dtype)
