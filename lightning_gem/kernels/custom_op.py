"""Custom ops whose calls cost little: the model makes hundreds of them in a step.

``torch.library.custom_op`` reads the schema anew in every call with gradients, and checks every result for aliases of
arguments: together a few hundred microseconds. These do neither; ``opcheck`` in the tests checks the aliases.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("lightning_gem", "FRAGMENT")
Op = torch._ops.OpOverload


def custom_op(name: str) -> Callable[[Callable[..., Any]], Op]:
    """Makes ``torch.ops.lightning_gem.<name>`` of a function that changes none of its arguments, for all devices.

    Args:
        name: Name without namespace.

    Returns:
        A decorator. The function needs type hints, and no defaults; it returns new tensors only.
    """

    def define(function: Callable[..., Any]) -> Op:
        _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        op = getattr(torch.ops.lightning_gem, name).default
        op.__doc__ = function.__doc__
        return op

    return define


def register_fake(op: Op) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates the function that gives the shapes of the results of ``op``."""
    return torch.library.register_fake(op.name(), lib=_LIBRARY)


def register_autograd(
    op: Op, backward: Callable[..., Any], setup_context: Callable[[Any, tuple[Any, ...], Any], None] | None = None
) -> None:
    """Gives ``op`` a gradient.

    Args:
        op: What :func:`custom_op` made.
        backward: Of (ctx, \\*gradients of the results), returns a tuple of as many gradients as ``op`` has arguments.
        setup_context: Of (ctx, inputs, output), saves what ``backward`` needs.
    """
    if any(isinstance(x.type, torch.ListType) for x in (*op._schema.arguments, *op._schema.returns)):
        torch.library.register_autograd(op.name(), backward, setup_context=setup_context, lib=_LIBRARY)
        return

    def forward(ctx: Any, *args: Any) -> Any:
        *inputs, keyset = args
        with torch._C._AutoDispatchBelowAutograd():
            output = op.redispatch(keyset & torch._C._after_autograd_keyset, *inputs)
        if setup_context is not None:
            setup_context(ctx, tuple(inputs), output)
        return output

    def backward_and_nothing_for_keyset(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return (*backward(ctx, *gradients), None)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward_and_nothing_for_keyset)}
    function: Any = type(f"BackwardOf_{op._opname}", (torch.autograd.Function,), methods)

    def dispatch(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return function.apply(*args, keyset)
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    _LIBRARY.impl(op._opname, dispatch, "Autograd", with_keyset=True)
