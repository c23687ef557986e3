"""How many samples a batch of any type holds."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def num_samples(batch: Any) -> int | None:
    """Samples of a batch: its length, or the first dimension of the first tensor inside; None if there is neither."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else None
    if isinstance(batch, KeyedJaggedTensor):
        return batch.stride()
    if isinstance(batch, Mapping):
        parts = list(batch.values())
    elif isinstance(batch, list | tuple):
        parts = list(batch)
    elif hasattr(type(batch), "__len__") and not isinstance(batch, str | bytes):
        return len(batch)
    elif dataclasses.is_dataclass(batch):
        parts = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    else:
        return None
    # Tensors first: lists of other things may be anything.
    parts.sort(key=lambda part: not isinstance(part, Tensor))
    return next((found for part in parts if (found := num_samples(part)) is not None), None)
