"""What the registrations of the attention ops share.

Every attention is two custom ops, forward and backward, opaque to the compiler. Both decide when they run what runs
them (``dispatch``), so their arguments hold everything that decides: no state is hidden between forward and backward.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from lightning_gem.kernels.attention.spec import AttentionSpec
from lightning_gem.kernels.checks import check_offset_values
from lightning_gem.kernels.launch import interpreted
from lightning_gem.kernels.schedule import Schedules, TileSchedule


def nobody_watches(query: Tensor) -> bool:
    """Whether a plain function may stand in for a custom op.

    Tracing and dispatch modes (compilers, fake tensors, FLOP counters, selective checkpointing) must see the op itself.
    """
    return (
        not torch.compiler.is_compiling()
        and not is_in_torch_dispatch_mode()
        and type(query) in (Tensor, torch.nn.Parameter)
    )


def runs_reference_directly(query: Tensor, backend: str) -> bool:
    """Whether the differentiable reference stands in for the custom op: on a CPU, where nobody is watching.

    The backward of the op computes the forward again, which autograd on the reference saves.
    """
    return (
        query.device.type == "cpu" and backend in ("auto", "reference") and not interpreted() and nobody_watches(query)
    )


def make_schedules(
    query: Tensor,
    key: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor,
    schedule: Tensor | None,
    schedule_block: int,
    share_schedule: bool,
) -> Schedules:
    """The schedules of a call, from the arguments of an op."""
    given = None if schedule is None else TileSchedule.from_storage(schedule, schedule_block)
    return Schedules(cu_seqlens_q, cu_seqlens_k, len(query), len(key), given, share_schedule)


def check_values(
    query: Tensor,
    key: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> None:
    """Raises ValueError for wrong numbers in offsets, where looking at them is free: on a CPU."""
    check_offset_values("cu_seqlens_k", cu_seqlens_k, key, max_seqlen_k)
    if cu_seqlens_q is not None:
        check_offset_values("cu_seqlens_q", cu_seqlens_q, query, max_seqlen_q)


def fake_forward(spec: AttentionSpec, query: Tensor, value: Tensor, cu_seqlens_k: Tensor) -> tuple[Tensor, Tensor]:
    """Shapes of the output and the log of the denominators."""
    num_heads = query.shape[1]
    rows = query.shape[0]
    if spec.broadcast_query:
        rows = rows * (cu_seqlens_k.shape[0] - 1)
    precise = torch.promote_types(query.dtype, torch.float32)
    return (
        query.new_empty((rows, num_heads, value.shape[2])),
        query.new_empty((num_heads, rows), dtype=precise),
    )


def fake_gradients(*inputs: tuple[Tensor | None, bool, Tensor]) -> tuple[Tensor, ...]:
    """A contiguous gradient per (input, needed, any tensor); empty where not needed."""
    return tuple(
        anything.new_empty(0) if x is None or not needed else x.new_empty(x.shape) for x, needed, anything in inputs
    )


def dense_gradients(gradients: tuple[Tensor | None, ...], anything: Tensor) -> tuple[Tensor, ...]:
    """Gradients as an op returns them: contiguous; empty where not needed."""
    return tuple(anything.new_empty(0) if g is None else g.contiguous() for g in gradients)


def no_second_derivative(ctx: Any, *_: Any) -> None:
    """What differentiating a backward op does."""
    raise RuntimeError(
        "attention has no second derivative here: compute it on a CPU in eager mode, where the ops are plain torch "
        "functions, or call backward without create_graph=True"
    )
