"""The learning rate of the tables: which optimizer of the module it comes from, and how it reaches the lookups."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from lightning_gem.optimizers import DenseAndTables
from lightning_gem.strategies.embeddings import ShardedTables

_SCALE = "square_scale"


def join_tables(
    optimizers: list[Optimizer], tables: ShardedTables, lr: float | None, attached_lr: float | None
) -> list[Optimizer]:
    """Takes the tables out of the module's optimizers and gives their learning rate to the one that held them.

    Args:
        optimizers: What ``configure_optimizers`` returned.
        tables: Sharded tables with their fused optimizers.
        lr: Learning rate of the configuration.
        attached_lr: Learning rate of the optimizers that the module attached to its tables itself.

    Raises:
        ValueError: If the learning rate of the tables is unknown.
    """
    parameters = tables.parameters()
    owner: tuple[int, dict[str, Any]] | None = None
    for i, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            kept = [parameter for parameter in group["params"] if parameter not in parameters]
            if len(kept) < len(group["params"]):
                owner = owner or (i, group)
            group["params"] = kept
    for optimizer in optimizers:
        if isinstance(optimizer, DenseAndTables):
            optimizer.param_groups[-1][_SCALE] = tables.square_scale
            return optimizers
    explicit = lr if lr is not None else attached_lr
    if owner is None and explicit is None:
        raise ValueError(
            "no optimizer of the module holds the tables, so their learning rate is unknown: set tables.lr of the "
            "strategy, or give the module's optimizer all its parameters"
        )
    position, group = owner or (0, optimizers[0].param_groups[0])
    joined = DenseAndTables(
        optimizers[position],
        tables.optimizers,
        lr=explicit if explicit is not None else group["lr"],
        in_backward=True,
        # What a module attached itself was not moved by its schedulers, and still is not.
        follow=None if attached_lr is not None else group,
    )
    joined.param_groups[-1][_SCALE] = tables.square_scale
    return [joined if i == position else optimizer for i, optimizer in enumerate(optimizers)]


def push_learning_rate(optimizers: list[Optimizer], tables: ShardedTables) -> None:
    """Hands the lookups the learning rate of the coming backward: they take it along in forward."""
    for optimizer in optimizers:
        if isinstance(optimizer, DenseAndTables):
            optimizer.push_learning_rate()
    for fused in tables.optimizers.values():
        fused.zero_grad()


@contextmanager
def same_squares(optimizers: list[Optimizer], tables: ShardedTables | None) -> Iterator[None]:
    """Around the loading of a checkpoint, whose accumulated squares may have been scaled otherwise."""
    groups = [optimizer.param_groups[-1] for optimizer in optimizers if isinstance(optimizer, DenseAndTables)]
    for group in groups:
        group[_SCALE] = 1.0  # unless the checkpoint says otherwise
    yield
    for group in groups:
        if tables is not None:
            tables.rescale_squares(group[_SCALE])
            group[_SCALE] = tables.square_scale
