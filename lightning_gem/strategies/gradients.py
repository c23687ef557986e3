"""One gradient norm over parameters that live on different meshes."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_by_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scales all gradients so that their common 2-norm is at most ``max_norm``; collective.

    Tables have no gradient here: they were updated inside the backward.

    Args:
        parameters: Plain ones (the same on all ranks) and DTensors of any meshes.
        max_norm: Limit.

    Returns:
        The norm before, float32 scalar.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    by_mesh: dict[object, list[Tensor]] = {}
    for gradient in gradients:
        by_mesh.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(gradient)
    squares = []
    for group in by_mesh.values():
        norm = torch.nn.utils.get_total_norm(group)
        squares.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).float().square())
    total = torch.stack(squares).sum().sqrt() if squares else torch.zeros(())
    for group in by_mesh.values():
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for gradient in group:
            (gradient.to_local() if isinstance(gradient, DTensor) else gradient).mul_(scale)
    return total
