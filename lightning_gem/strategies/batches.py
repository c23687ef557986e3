"""Batches of any type: how many samples they hold, and ranks that run out of them."""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric
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


@dataclasses.dataclass
class Filler:
    """A batch that stands in where a rank has none left: it takes part in all collectives and counts for nothing."""

    batch: Any


class EvenLoader:
    """Gives every rank as many batches as the rank that has most.

    Ranks agree before every batch whether any has one left; those that have none repeat their first one, or one of
    another rank, as a :class:`Filler`. Everything else is the loader's.

    Args:
        loader: Loader of this rank.
        length: Batches of the longest rank, None if unknown.
        device: Where small collectives run.
    """

    def __init__(self, loader: Any, length: int | None, device: torch.device) -> None:
        self.loader = loader
        self.length = length
        self.device = device

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("the length of this loader is unknown")
        return self.length

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while it is copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.loader)
        kept: Any = None
        while True:
            batch = next(iterator, None)
            has_batch = gather_numbers([int(batch is not None)], self.device)
            owners = [rank for rank, (has,) in enumerate(has_batch) if has]
            if not owners:
                return
            if kept is None:
                kept = batch
                if len(owners) < len(has_batch):
                    objects = [batch]
                    dist.broadcast_object_list(objects, owners[0])
                    kept = objects[0] if batch is None else batch
            yield Filler(kept) if batch is None else batch


def even_loader(loader: Any, device: torch.device) -> Any:
    """Wraps a loader unless all ranks are known to have the same number of batches; collective."""
    try:
        own = len(loader)
    except (TypeError, NotImplementedError):
        own = -1
    lengths = [length for (length,) in gather_numbers([own], device)]
    if -1 not in lengths and len(set(lengths)) == 1:
        return loader
    return EvenLoader(loader, None if -1 in lengths else max(lengths), device)


def gather_numbers(numbers: list[int], device: torch.device) -> list[list[int]]:
    """The numbers of every rank; collective."""
    mine = torch.tensor(numbers, device=device)
    everyone = mine.new_empty(dist.get_world_size() * len(numbers))
    dist.all_gather_into_tensor(everyone, mine)
    return everyone.view(-1, len(numbers)).tolist()


@contextmanager
def nothing_counted(module: Any) -> Iterator[None]:
    """Lets a step of a LightningModule run without updating metrics or logged means."""
    metrics: list[Any] = [child for child in module.modules() if isinstance(child, Metric)]
    updates = [metric.update for metric in metrics]
    log = module.log

    def log_nothing(*args: Any, **kwargs: Any) -> None:
        log(*args, **{**kwargs, "batch_size": 0})

    try:
        for metric in metrics:
            metric.update = lambda *args, **kwargs: None
        module.log = log_nothing
        yield
    finally:
        del module.log
        for metric, update in zip(metrics, updates, strict=True):
            metric.update = update
