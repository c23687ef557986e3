"""Rows in MXFP8 on the wire: 33 bytes for 32 numbers, in one uint8 buffer.

A block is its 32 codes and then its scale, so a buffer can be cut at any block, by rows or by elements, and one
``all_to_all_single`` or ``all_gather`` moves it, with NCCL and gloo alike. Blocks never span two embeddings as long as
their widths are multiples of 32. Nothing is summed in this format: sums are of decoded numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gem.precision.mx import BLOCK, Format, decode, mx_quantize

PACKED = BLOCK + 1


def pack(x: Tensor, fmt: Format = "e4m3") -> Tensor:
    """Packs the last dimension.

    Args:
        x: (..., n) bfloat16, float16 or float32; n is padded to a multiple of 32 with zeros.
        fmt: Format of the codes.

    Returns:
        uint8 (..., 33 n / 32).
    """
    blocks = mx_quantize(x, -1, fmt)
    codes = blocks.data.unflatten(-1, (blocks.scale.shape[-1], BLOCK))
    return torch.cat([codes, blocks.scale.unsqueeze(-1)], -1).flatten(-2)


def unpack(buffer: Tensor, size: int, dtype: torch.dtype = torch.float32, fmt: Format = "e4m3") -> Tensor:
    """The numbers of a buffer.

    Args:
        buffer: From :func:`pack`.
        size: Length of the last dimension that was packed.
        dtype: Of the numbers.
        fmt: Format of the codes.

    Raises:
        ValueError: If the buffer is no whole number of blocks, or does not fit the size.
    """
    count, rest = divmod(buffer.shape[-1], PACKED)
    if rest or count != -(-size // BLOCK):
        raise ValueError(
            f"a buffer of {buffer.shape[-1]} bytes a row does not hold {size} numbers: {packed_size(size)} bytes do"
        )
    blocks = buffer.unflatten(-1, (count, PACKED))
    values = decode(blocks[..., :BLOCK].flatten(-2).contiguous(), blocks[..., BLOCK].contiguous(), fmt)
    return values[..., :size].to(dtype)


def packed_size(size: int) -> int:
    """Bytes of a row of so many numbers."""
    return -(-size // BLOCK) * PACKED


def all_to_all_rows(
    x: Tensor,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    low_precision_gradient: bool = False,
) -> Tensor:
    """``all_to_all_single`` of rows in MXFP8, differentiable.

    Args:
        x: (N, D).
        output_splits: Rows from every rank; None: as many from each.
        input_splits: Rows to every rank; None: as many to each.
        group: Processes.
        low_precision_gradient: Send the gradient in MXFP8 too, instead of in its own type.

    Returns:
        (sum of ``output_splits``, D) in the dtype of ``x``.
    """
    out: Tensor = _AllToAll.apply(x, output_splits, input_splits, group, low_precision_gradient)
    return out


def all_gather_rows(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Rows of all ranks, in their order, moved in MXFP8; the gradient is summed in float32.

    Args:
        x: (N, D), as many rows on every rank.
        group: Processes.

    Returns:
        (N times ranks, D) in the dtype of ``x``.
    """
    out: Tensor = _AllGather.apply(x, group)
    return out


def _exchange(
    x: Tensor, outputs: Sequence[int] | None, inputs: Sequence[int] | None, group: dist.ProcessGroup | None
) -> Tensor:
    rows = len(x) if outputs is None else sum(outputs)
    out = x.new_empty(rows, *x.shape[1:])
    dist.all_to_all_single(
        out,
        x.contiguous(),
        None if outputs is None else list(outputs),
        None if inputs is None else list(inputs),
        group=group,
    )
    return out


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, outputs: Any, inputs: Any, group: Any, low: bool) -> Tensor:
        ctx.outputs, ctx.inputs, ctx.group, ctx.low = outputs, inputs, group, low
        return unpack(_exchange(pack(x), outputs, inputs, group), x.shape[1], x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.low:
            back = _exchange(pack(grad), ctx.inputs, ctx.outputs, ctx.group)
            return unpack(back, grad.shape[1], grad.dtype), None, None, None, None
        return _exchange(grad, ctx.inputs, ctx.outputs, ctx.group), None, None, None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.rows = group, len(x)
        packed = pack(x)
        out = packed.new_empty(len(packed) * dist.get_world_size(group), packed.shape[1])
        dist.all_gather_into_tensor(out, packed, group=group)
        return unpack(out, x.shape[1], x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # gloo has no reduce_scatter of some types: every rank takes its rows of the sum.
        total = grad.to(torch.float32).contiguous()
        dist.all_reduce(total, group=ctx.group)
        first = dist.get_rank(ctx.group) * ctx.rows
        return total[first : first + ctx.rows].to(grad.dtype), None


@dataclass
class CodecContext:
    """Widths by rank after padding, as TorchRec's pooled all-to-all asks for them."""

    padded_dim_sum_per_rank: list[int] | None = None


class MXFP8Codec:
    """A TorchRec ``QuantizedCommCodec``, for both directions of all-to-alls and all-gathers of embeddings::

        codecs = QuantizedCommCodecs(forward=MXFP8Codec(), backward=MXFP8Codec())
        sharder = EmbeddingBagCollectionSharder(
            qcomm_codecs_registry={CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name: codecs}
        )

    Never for reduce-scatter: codes cannot be added. TorchRec pads the pooled embeddings of a rank on their way out; for
    their gradients, and for sequences of embeddings, widths must be multiples of 32.

    Args:
        fmt: Format of the codes; ``e5m2`` for gradients of wide range.
    """

    def __init__(self, fmt: Format = "e4m3") -> None:
        self.fmt: Format = fmt

    @property
    def quantized_dtype(self) -> torch.dtype:
        """uint8."""
        return torch.uint8

    def encode(self, input_tensor: Tensor, ctx: CodecContext | None = None) -> Tensor:
        """Flat buffer of a tensor whose number of elements is a multiple of 32."""
        self.calc_quantized_size(input_tensor.numel())
        return pack(input_tensor.detach().reshape(-1), self.fmt)

    def decode(self, input_grad: Tensor, ctx: CodecContext | None = None) -> Tensor:
        """Flat float32 numbers of a flat buffer."""
        return unpack(input_grad, input_grad.numel() // PACKED * BLOCK, torch.float32, self.fmt)

    def calc_quantized_size(self, input_len: int, ctx: CodecContext | None = None) -> int:
        """Bytes of so many numbers."""
        if input_len % BLOCK:
            raise ValueError(
                f"MXFP8 moves multiples of {BLOCK} numbers, got {input_len}: make embedding widths multiples of {BLOCK}"
            )
        return input_len // BLOCK * PACKED

    def create_context(self) -> CodecContext:
        """A context per call."""
        return CodecContext()

    def padded_size(
        self, input_tensor: Tensor, dim_per_rank: list[int], my_rank: int, qcomm_ctx: CodecContext | None
    ) -> tuple[int, int]:
        """Width of this rank's pooled embeddings after padding, and the padding."""
        width = dim_per_rank[my_rank]
        padding = -width % BLOCK
        if input_tensor.ndim == 1:
            return len(input_tensor) + padding, padding
        if qcomm_ctx is not None:
            qcomm_ctx.padded_dim_sum_per_rank = [size + -size % BLOCK for size in dim_per_rank]
        return input_tensor.shape[1] + padding, padding
