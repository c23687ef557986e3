"""Dense-expert parallelism: activations travel to the experts, no router.

The ranks of the ``expert`` axis have batches of their own and share the experts of every layer, each holding whole
ones. A module takes part by this protocol, without importing anything:

* attribute ``num_experts``; every parameter in it (of its own, or in ParameterLists) has the experts as first dimension
* attribute ``expert_mode``: ``"partition"`` (each expert has inputs of its own) or ``"ensemble"`` (all see the same
  input, outputs are summed)
* attribute ``expert_exchange``, None; where it is set, ``forward`` sends the experts' input through
  ``expert_exchange.enter`` and their output through ``expert_exchange.leave``, and finds in its parameters only the
  experts of this rank:

  ==========  ===============================================  ================================================
  mode        ``enter``                                        ``leave``
  ==========  ===============================================  ================================================
  partition   ``(num_experts, B, ...)`` to ``(own, B', ...)``  ``(own, B', ...)`` to ``(num_experts, B, ...)``
  ensemble    ``(B, ...)`` to ``(B', ...)``                    ``(B', ...)``, summed over own, to ``(B, ...)``
  ==========  ===============================================  ================================================

``B'`` are the samples of all ranks of the group. An ensemble gathers its inputs and reduce-scatters its outputs; in a
partition the slices are disjoint, so all-to-all moves what the gather and the reduction would, less the rest.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from lightning_gem.strategies.compat import all_gather_single, reduce_scatter_single, reparametrize
from lightning_gem.strategies.mesh import Meshes


def find_experts(module: nn.Module) -> dict[str, Any]:
    """Modules inside ``module`` that follow the protocol, by name."""
    return {name: child for name, child in module.named_modules() if hasattr(child, "expert_exchange")}


def check_experts(name: str, module: Any, num_ranks: int) -> None:
    """Validates a module of the protocol for an expert axis.

    Raises:
        ValueError: Naming the module, the field and the fix.
    """
    if module.expert_mode not in ("partition", "ensemble"):
        raise ValueError(f'{name}.expert_mode must be "partition" or "ensemble", not {module.expert_mode!r}')
    if module.num_experts % num_ranks:
        raise ValueError(
            f"expert={num_ranks} does not divide the {module.num_experts} experts of {name}: use a divisor of "
            f"{module.num_experts}, or make the number of experts a multiple of {num_ranks}"
        )
    for key, parameter in module.named_parameters():
        if parameter.shape[0] != module.num_experts:
            raise ValueError(
                f"{name}.{key} has shape {tuple(parameter.shape)}: the first dimension of every parameter of an expert "
                f"module must be its {module.num_experts} experts"
            )


def shard_experts(module: Any, meshes: Meshes) -> None:
    """Keeps the experts of this rank, as DTensors over the expert axis, and installs the exchange."""
    mesh = meshes.experts["expert"]
    rank, size = mesh.get_local_rank(), mesh.size()
    for child in module.modules():
        for key, parameter in list(child.named_parameters(recurse=False)):
            own = parameter.detach().chunk(size)[rank].clone()
            value = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
            child.register_parameter(key, nn.Parameter(value, requires_grad=parameter.requires_grad))
    module.expert_exchange = ExpertExchange(module.expert_mode, mesh.get_group())
    forward: Callable[..., Any] = module.forward

    def forward_with_own_experts(*args: Any, **kwargs: Any) -> Any:
        local = {key: value.to_local() for key, value in module.named_parameters() if isinstance(value, DTensor)}
        with reparametrize(module, local):
            return forward(*args, **kwargs)

    module.forward = forward_with_own_experts


class ExpertExchange:
    """Moves activations between the ranks of an expert group.

    Args:
        mode: ``partition`` or ``ensemble``.
        group: Ranks that share the experts.

    Attributes:
        samples: Batch sizes of the ranks of the group, None where all have the same; set before every step.
    """

    def __init__(self, mode: str, group: dist.ProcessGroup) -> None:
        self.mode = mode
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.samples: list[int] | None = None

    def _samples(self, own: int) -> list[int]:
        samples = self.samples or [own] * self.size
        if samples[self.rank] != own:
            raise ValueError(
                f"experts got {own} samples, but the batch has {samples[self.rank]}: the first dimension of their "
                "input must be the batch, or all ranks must have batches of the same size"
            )
        return samples

    def enter(self, x: Tensor) -> Tensor:
        """Brings the inputs of all ranks to the experts of this rank."""
        if self.mode == "partition":
            samples = self._samples(x.shape[1])
            own = x.shape[0] // self.size
            # Experts of rank r go to rank r: blocks of own * B samples out, own * B_r samples in.
            received = _AllToAll.apply(
                x.flatten(0, 1), [own * x.shape[1]] * self.size, [own * n for n in samples], self.group
            )
            blocks = received.split([own * n for n in samples])
            return torch.cat([block.unflatten(0, (own, n)) for block, n in zip(blocks, samples, strict=True)], dim=1)
        samples = self._samples(x.shape[0])
        longest = max(samples)
        padded = torch.cat([x, x.new_zeros(longest - len(x), *x.shape[1:])]) if len(x) < longest else x
        gathered = _Gather.apply(padded, self.group).unflatten(0, (self.size, longest))
        return torch.cat([gathered[i, :n] for i, n in enumerate(samples)])

    def leave(self, y: Tensor) -> Tensor:
        """Brings the outputs of all experts back to the samples of this rank."""
        if self.mode == "partition":
            own = y.shape[0]
            samples = self.samples or [y.shape[1] // self.size] * self.size
            sent = torch.cat([block.flatten(0, 1) for block in y.split(samples, dim=1)])
            mine = samples[self.rank]
            received = _AllToAll.apply(sent, [own * n for n in samples], [own * mine] * self.size, self.group)
            return received.unflatten(0, (self.size * own, mine))
        samples = self.samples or [len(y) // self.size] * self.size
        longest = max(samples)
        parts = [
            torch.cat([part, part.new_zeros(longest - len(part), *part.shape[1:])]) if len(part) < longest else part
            for part in y.split(samples)
        ]
        return _Reduce.apply(torch.cat(parts), self.group)[: samples[self.rank]]


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
    all_gather_single(out, x.contiguous(), group=group)
    return out


def _reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    reduce_scatter_single(out, x.contiguous(), group=group)
    return out


def _all_to_all(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


class _Gather(torch.autograd.Function):
    """All ranks' tensors one after the other; the gradients of all ranks are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _reduce(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    """The sum over the ranks of this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather(grad, ctx.group), None


class _AllToAll(torch.autograd.Function):
    """Rows ``sent[r]`` go to rank ``r``, rows ``received[r]`` come from it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return _all_to_all(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grad, ctx.received, ctx.sent, ctx.group), None, None, None
