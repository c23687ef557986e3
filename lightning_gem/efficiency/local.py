"""Local MFU: every layer alone on one device, on a real batch, forward and backward, nothing recomputed.

Source: the efficiency framework of Meta's GEM ("GEM Training: How Meta Doubled the Efficiency of Its LLM-Scale Ads
Foundation Model"). The mean over layers is weighted by their time, the only weights with which E2E MFU = local MFU x
scaling ratio.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils.flop_counter import FlopCounterMode

from lightning_gem.efficiency.counting import tensors_of
from lightning_gem.efficiency.peaks import Peak

# Name, layer, and what it was given.
Call = tuple[str, nn.Module, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class LayerProfile:
    """One call of one layer.

    Attributes:
        name: Path of the module.
        seconds: Median time of forward and backward; of the forward alone where nothing needs a gradient.
        flops: Of both, in torch's convention.
        gigabytes: Inputs, outputs and parameters, read or written once forward and twice backward: the least that a
            layer moves.
        mfu: FLOPs over what the peak allows; None without a peak.
    """

    name: str
    seconds: float
    flops: int
    gigabytes: float
    mfu: float | None


def layers_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The parts of a model that are profiled: its children, and the members of lists and wrappers in place of these.

    A wrapper is a module of which only one child has parameters, such as a LightningModule around a network.
    """
    children = list(module.named_children())
    heavy = [child for _, child in children if next(child.parameters(), None) is not None]
    for name, child in children:
        wrapped = heavy == [child] and any(child.children())
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)) or wrapped:
            yield from ((f"{name}.{path}", layer) for path, layer in layers_of(child))
        else:
            yield name, child


def profile_layers(
    model: nn.Module, forward: Callable[[], Any], peak: Peak | None = None, repetitions: int = 5
) -> list[LayerProfile]:
    """Runs ``forward`` once to see what its layers are given, then each layer alone.

    Gradients are not accumulated, no optimizer runs, and buffers and the random state stay as they were.

    Args:
        model: What ``forward`` calls; its layers are those of :func:`layers_of`.
        forward: A forward pass with gradients.
        peak: Of the device.
        repetitions: Timed runs of every layer, after one that is not.
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = [d for d in {p.device for p in model.parameters()} if d.type == "cuda"]
    # A layer may use parameters of another one. Tables whose optimizer runs in their backward would change.
    parameters = [p for p in model.parameters() if p.requires_grad and not hasattr(p, "_in_backward_optimizers")]
    try:
        with torch.random.fork_rng(devices=devices):
            return [_profile(*call, parameters, peak, repetitions) for call in _calls(model, forward)]
    finally:
        for buffer, before in buffers:
            buffer.copy_(before)


def _calls(model: nn.Module, forward: Callable[[], Any]) -> list[Call]:
    """The calls of the layers in a forward pass."""
    calls: list[Call] = []
    handles = [
        layer.register_forward_pre_hook(
            lambda layer, args, kwargs, name=name: calls.append((name, layer, args, kwargs)), with_kwargs=True
        )
        for name, layer in layers_of(model)
    ]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def local_mfu(layers: list[LayerProfile], peak: Peak) -> float:
    """MFU of the layers together, weighted by time."""
    seconds = sum(layer.seconds for layer in layers)
    return peak.mfu(sum(layer.flops for layer in layers), seconds) if seconds else 0.0


def _profile(
    name: str,
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    parameters: list[nn.Parameter],
    peak: Peak | None,
    repetitions: int,
) -> LayerProfile:
    args, kwargs = _map_tensors(lambda x: x.detach().requires_grad_(x.requires_grad), (args, kwargs))
    wanted = [*parameters, *(t for t in tensors_of((args, kwargs)) if t.requires_grad)]

    def run() -> Any:
        # Views, because torch's counter cannot follow gradients to leaves that a module is given.
        own_args, own_kwargs = _map_tensors(lambda x: x.view_as(x) if x.requires_grad else x, (args, kwargs))
        out = layer(*own_args, **own_kwargs)
        outs = [t for t in tensors_of(out) if t.requires_grad]
        if outs and wanted:
            torch.autograd.grad(outs, wanted, [torch.ones_like(t) for t in outs], allow_unused=True)
        return out

    with FlopCounterMode(display=False) as counter:
        out = run()
    device = next((t.device for t in tensors_of((args, kwargs, list(layer.parameters())))), torch.device("cpu"))
    seconds = statistics.median(_seconds(run, device) for _ in range(repetitions))
    flops = counter.get_total_flops()
    moved = sum(t.nbytes for t in tensors_of((args, kwargs, out, list(layer.parameters()))))
    mfu = None if peak is None else peak.mfu(flops, seconds)
    return LayerProfile(name, seconds, flops, 3 * moved / 1e9, mfu)


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same structure of containers and dataclasses with other tensors; all other objects stay as they are."""

    def leaf(x: Any) -> Any:
        if isinstance(x, Tensor):
            return function(x)
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            fields = [field.name for field in dataclasses.fields(x) if field.init]
            return dataclasses.replace(x, **{name: _map_tensors(function, getattr(x, name)) for name in fields})
        return x

    return _pytree.tree_map(leaf, value)
