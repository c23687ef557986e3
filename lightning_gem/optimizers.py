"""One optimizer object over two worlds: dense parameters, and embedding tables that are updated inside backward.

TorchRec attaches the optimizer of a table to the table's parameter, to be run as soon as its gradient is there;
sharding then fuses it into the lookup kernel. Lightning knows only optimizers with ``step``. ``DenseAndTables`` joins
both, so that schedulers, checkpoints and loggers see one optimizer whose last parameter group holds the learning rate
of the tables.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.optim import Optimizer
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

TABLES = "tables"


def table_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of all TorchRec collections inside ``module``, by their qualified names."""
    return {
        f"{prefix}.{name}" if prefix else name: parameter
        for prefix, child in module.named_modules()
        if isinstance(child, EmbeddingBagCollection | EmbeddingCollection | ShardedModule)
        for name, parameter in child.named_parameters()
    }


def are_sharded(module: nn.Module) -> bool:
    """Whether TorchRec collections inside ``module`` were sharded, so that their updates are fused into backward."""
    return any(isinstance(child, ShardedModule) for child in module.modules())


def dense_parameters(module: nn.Module) -> list[nn.Parameter]:
    """All other trainable parameters."""
    tables = {id(parameter) for parameter in table_parameters(module).values()}
    return [parameter for parameter in module.parameters() if parameter.requires_grad and id(parameter) not in tables]


def table_optimizers(module: nn.Module, lr: float, eps: float, in_backward: bool) -> dict[str, Optimizer]:
    """Row-wise AdaGrad for every table (one accumulated square per row; source: TorchRec, FBGEMM).

    Args:
        module: Any module with TorchRec collections inside, already on its device.
        lr: Learning rate.
        eps: Added to the root of the accumulated squares.
        in_backward: Attach the optimizer to its table, to run inside backward as soon as the gradient is there. Not
            where the gradient is still to be averaged over ranks after that (DDP).

    Returns:
        Optimizers by the qualified name of the table's parameter; of sharded collections, whose lookups have theirs
        fused in, by the name of the collection.
    """
    fused = {name: child.fused_optimizer for name, child in module.named_modules() if isinstance(child, ShardedModule)}
    if fused:
        return fused
    tables = table_parameters(module)
    if not in_backward:
        return {name: RowWiseAdagrad([parameter], lr=lr, eps=eps) for name, parameter in tables.items()}
    fresh = [parameter for parameter in tables.values() if not hasattr(parameter, "_in_backward_optimizers")]
    _apply_optimizer_in_backward(RowWiseAdagrad, fresh, {"lr": lr, "eps": eps})
    # The attribute is set by torch and unknown to type checkers.
    return {name: vars(parameter)["_in_backward_optimizers"][0] for name, parameter in tables.items()}


class DenseAndTables(Optimizer):
    """A dense optimizer whose last parameter group stands for the tables.

    Args:
        dense: Optimizer of the dense parameters.
        tables: What :func:`table_optimizers` returned.
        lr: Learning rate of the tables.
        in_backward: Whether the tables update themselves in backward; else they are stepped with the dense parameters.
        follow: Parameter group of ``dense`` whose learning rate that of the tables stays proportional to, for
            schedulers that know of ``dense`` only.
    """

    def __init__(
        self,
        dense: Optimizer,
        tables: dict[str, Optimizer],
        lr: float,
        in_backward: bool,
        follow: dict[str, Any] | None = None,
    ) -> None:
        self.dense = dense
        self.in_backward = in_backward
        self.tables = tables
        self.follow = follow
        # A scheduler has changed the rate already when it was made.
        initial = follow.get("initial_lr", follow["lr"]) if follow is not None else 0.0
        self.ratio = lr / initial if initial else 1.0
        group = {"params": [], "lr": lr, "name": TABLES}
        # The base class is told of no parameters: groups and state are views of the dense optimizer's.
        super().__init__([{"params": [nn.Parameter(torch.empty(0))]}], {})
        self.param_groups = [*dense.param_groups, group]
        self.state = dense.state
        self.defaults = dense.defaults
        self.push_learning_rate()

    def push_learning_rate(self) -> None:
        """Sets the tables' learning rate in their optimizers."""
        if self.follow is not None:
            self.param_groups[-1]["lr"] = self.ratio * self.follow["lr"]
        for optimizer in self.tables.values():
            for group in optimizer.param_groups:
                group["lr"] = self.param_groups[-1]["lr"]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients and hands the tables the learning rate of the coming backward."""
        self.dense.zero_grad(set_to_none)
        self.push_learning_rate()
        for optimizer in self.tables.values():
            optimizer.zero_grad(set_to_none)  # fused ones hand the learning rate to their lookup here

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Runs ``closure`` (which may update the tables in its backward), then steps what is left to step."""
        result = self.dense.step(closure)
        if not self.in_backward:
            self.push_learning_rate()
            for optimizer in self.tables.values():
                optimizer.step()
        return result

    def state_dict(self) -> dict[str, Any]:
        """State of both, the tables' by name."""
        return {
            "dense": self.dense.state_dict(),
            "tables": {name: optimizer.state_dict()["state"] for name, optimizer in self.tables.items()},
            "tables_group": {key: value for key, value in self.param_groups[-1].items() if key != "params"},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned.

        Raises:
            ValueError: If the tables are not the same.
        """
        saved, own = set(state_dict["tables"]), set(self.tables)
        if saved != own:
            raise ValueError(f"the checkpoint has optimizer state of other tables: {sorted(saved ^ own)[:4]} differ")
        self.dense.load_state_dict(state_dict["dense"])
        for name, optimizer in self.tables.items():
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state_dict["tables"][name]})
        self.param_groups = [*self.dense.param_groups, {**self.param_groups[-1], **state_dict["tables_group"]}]
        self.state = self.dense.state
        self.push_learning_rate()
