"""FSDP2 gathers weights as MXFP8: half the bytes of bfloat16, and the numbers that the layers would compute anyway."""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from lightning_gem.precision.convert import Converted
from lightning_gem.precision.mx import BLOCK, Format, decode, mx_quantize_2d


def quantize_all_gather(model: nn.Module) -> list[str]:
    """Makes FSDP2 quantise the shards of converted linear weights before it gathers them.

    Squares of 32 x 32 lie inside a shard of whole multiples of 32 rows, and quantising what was quantised changes
    nothing, so the layers compute what they would have from a gathered bfloat16 weight. Gradients, optimizer states and
    checkpoints are of the unquantised shards. Call it after ``fully_shard`` and before the first forward pass.

    Args:
        model: With converted layers, sharded.

    Returns:
        Names of the weights that are gathered so.

    Raises:
        ValueError: If no weight can be: the recipe must block weights in squares (``mxfp8_compact``), and rows must be
            a multiple of 32 per rank.
    """
    names = []
    for name, module in model.named_modules():
        if not (isinstance(module, Converted) and isinstance(module, nn.Linear)):
            continue
        weight, recipe = module.weight, module.precision_recipe
        if not (isinstance(weight, DTensor) and recipe.kind == "mx" and recipe.compact and recipe.scale == "rceil"):
            continue
        sharded = [(place, size) for place, size in zip(weight.placements, weight.device_mesh.shape, strict=True)]
        ranks = 1
        for place, size in sharded:
            ranks *= size if isinstance(place, Shard) else 1
        by_rows = all(not isinstance(place, Shard) or place.dim == 0 for place, _ in sharded)
        if by_rows and weight.shape[0] % (BLOCK * ranks) == 0 and weight.shape[1] % BLOCK == 0:
            _extend(weight, recipe.fmt)
            names.append(f"{name}.weight")
    if not names:
        raise ValueError(
            "no weight can be gathered as MXFP8: shard the model with FSDP2, use recipe mxfp8_compact, and make the "
            f"numbers of outputs multiples of {BLOCK} times the number of ranks"
        )
    return names


def _extend(weight: DTensor, fmt: Format) -> None:
    """Gives the local shard what FSDP2 looks for."""

    def pre_all_gather(
        self: Tensor, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        # From bfloat16, as a gathered weight would be.
        dtype = mp_policy.param_dtype
        blocks = mx_quantize_2d(self.detach() if dtype is None else self.detach().to(dtype), fmt)
        return (blocks.data, blocks.scale), None

    def post_all_gather(
        self: Tensor, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        data, scale = outputs
        values = decode(data, scale, fmt, square=True).to(param_dtype)
        if out is None:
            return values, (values,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(values)
        return None

    local: Any = weight._local_tensor
    local.fsdp_pre_all_gather = MethodType(pre_all_gather, local)
    local.fsdp_post_all_gather = MethodType(post_all_gather, local)
