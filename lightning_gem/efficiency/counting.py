"""FLOPs of modules that have no formulas: counted once for every class of shapes."""

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils.flop_counter import FlopCounterMode


def shape_class(batch: Any) -> Hashable:
    """Shapes of all tensors of a batch, sizes rounded up to two significant bits: few classes for jagged batches."""
    return tuple(tuple(_rounded(size) for size in tensor.shape) for tensor in tensors_of(batch))


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """All tensors in nested containers, dataclasses and objects with ``values()`` such as KeyedJaggedTensor."""
    for leaf in _pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dataclass_fields__"):
            for name in leaf.__dataclass_fields__:
                yield from tensors_of(getattr(leaf, name))
        elif callable(getattr(leaf, "values", None)):
            values = leaf.values()
            if isinstance(values, Tensor):
                yield values


def _rounded(size: int) -> int:
    bits = max(size.bit_length() - 2, 0)
    return -(-size >> bits) << bits if size > 0 else 0


class FlopCounter:
    """Counts the products of the first step of every class of shapes; remembers the count for the others.

    Triton kernels and custom ops count if they have a FLOP formula (those of ``lightning_gem.kernels`` do).
    """

    def __init__(self) -> None:
        self.known: dict[Hashable, int] = {}
        self._mode: FlopCounterMode | None = None
        self._class: Hashable = None

    def start(self, batch: Any) -> None:
        """Counts the step that begins, unless its class is known."""
        self.stop()
        self._class = shape_class(batch)
        if self._class not in self.known and not torch.compiler.is_compiling():
            self._mode = FlopCounterMode(display=False)
            self._mode.__enter__()

    def stop(self) -> tuple[int, bool]:
        """Ends the step: its FLOPs, and whether they were counted in it, which slows a step down."""
        if self._mode is None:
            return self.known.get(self._class, 0), False
        mode, self._mode = self._mode, None
        mode.__exit__(None, None, None)
        self.known[self._class] = mode.get_total_flops()
        return self.known[self._class], True
