"""What every Triton launch needs: when Triton runs, on which device, and with how many programs."""

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator

import torch
from torch import Tensor

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


# Read once: Triton itself reads the variable when it is imported, and torch.compile need not look at either.
_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton kernels run in its interpreter, on CPU tensors (``TRITON_INTERPRET=1``)."""
    return _INTERPRETED


def runs_triton(x: Tensor) -> bool:
    """Whether an op on ``x`` runs its Triton kernel; otherwise its PyTorch reference runs."""
    return _HAS_TRITON and x.dtype in _DTYPES and (x.is_cuda or (_INTERPRETED and x.device.type == "cpu"))


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def multiprocessors(x: Tensor) -> int:
    """Streaming multiprocessors of the device of ``x``; 2 in the interpreter, so that programs loop there too."""
    if not x.is_cuda:
        return 2
    return _multiprocessors(x.device.index if x.device.index is not None else torch.cuda.current_device())


@contextlib.contextmanager
def on_device(x: Tensor) -> Iterator[None]:
    """Makes the device of ``x`` current, since Triton launches on the current one."""
    with torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext():
        yield


def as_rows(x: Tensor) -> Tensor:
    """Views (..., D) as rows with a last stride of 1: (N, D), or (N, H, D) where two strides are needed; else copies.

    A slice of a fused projection, (N, H, D) inside (N, 3, H, D), needs no copy.
    """
    if x.ndim == 1:
        x = x[None]
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        x = x.contiguous()
    for shape in ((-1, x.shape[-1]), (-1, *x.shape[-2:])):
        if x.numel() == 0 or len(shape) > x.ndim:
            break
        with contextlib.suppress(RuntimeError):
            return x.view(shape)
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def row_layout(*tensors: Tensor) -> tuple[int, list[tuple[Tensor, int, int]]]:
    """Describes tensors of one shape as rows: how many inner rows share an outer stride, and (tensor, outer, inner).

    Row ``r`` of a tensor begins ``r // count * outer + r % count * inner`` elements after its start.
    """
    rows = [as_rows(t) for t in tensors]
    if all(t.ndim == 2 for t in rows):
        return 1, [(t, t.stride(0), 0) for t in rows]
    views = [t if t.ndim == 3 else t.view(-1, *tensors[0].shape[-2:]) for t in rows]
    return tensors[0].shape[-2], [(t, t.stride(0), t.stride(1)) for t in views]
