"""Cases of the operations around attention, shared by their tests on CPU, in the interpreter and on a GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_gem import kernels
from lightning_gem.kernels.bce.reference import linear_bce
from lightning_gem.kernels.dot_product.activations import ACTIVATIONS
from lightning_gem.kernels.gate.reference import GATES
from lightning_gem.kernels.jagged import reference as jagged


@dataclass
class Case:
    """An op, what it must equal, and its differentiable inputs (made in float64 on a CPU)."""

    op: Callable[..., Any]
    exact: Callable[..., Any]
    inputs: list[Tensor]
    other: tuple[Any, ...] = ()  # inputs without gradients, moved to the device

    def check(self, device: str, dtype: torch.dtype, forward: float, backward: float) -> None:
        """Compares outputs and gradients with float64, by norm; outputs must be the same in a second run."""
        inputs = [t.to(dtype).double() for t in self.inputs]
        exact, exact_grads, grads = _run(self.exact, inputs, self.other, None)
        leaves = [t.to(device, dtype) for t in inputs]
        other = tuple(_moved(o, device) for o in self.other)
        out, out_grads, _ = _run(self.op, leaves, other, grads)
        for actual, expected in zip(out, exact, strict=True):
            _close(actual, expected, forward)
        for actual, expected in zip(out_grads, exact_grads, strict=True):
            _close(actual, expected, backward)
        again, again_grads, _ = _run(self.op, leaves, other, grads)
        for a, b in zip([*out, *out_grads], [*again, *again_grads], strict=True):
            assert torch.equal(a.nan_to_num(), b.nan_to_num())


def _moved(x: Any, device: str) -> Any:
    if isinstance(x, Tensor):
        return x.to(device)
    return [_moved(y, device) for y in x] if isinstance(x, (list, tuple)) else x


def _run(
    function: Callable[..., Any], inputs: list[Tensor], other: tuple[Any, ...], grads: list[Tensor] | None
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = function(*leaves, *other)
    outs = list(out) if isinstance(out, (tuple, list)) else [out]
    differentiable = [t for t in outs if t.requires_grad]
    if grads is None:
        generator = torch.Generator().manual_seed(7)
        grads = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in differentiable]
    # Expanded gradients, as sum() makes them, are not contiguous.
    given = [g.to(t.device, t.dtype) for g, t in zip(grads, differentiable, strict=True)]
    result = torch.autograd.grad(differentiable, leaves, given, materialize_grads=True)
    return [t.detach() for t in outs], list(result), grads


def _close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape
    assert not actual.isnan().any()
    difference = float((actual.double().cpu() - expected).norm())
    assert difference <= tolerance * float(expected.norm()) + 1e-9 * expected.numel(), difference


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _offsets(*lengths: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return kernels.lengths_to_cu_seqlens(torch.tensor(lengths, dtype=dtype))


def _norm(layer: bool, activation: str, residual: bool, affine: bool, skip: bool, shape: tuple[int, ...]) -> Case:
    inputs = [_random(*shape, seed=1)]
    names = [name for name, used in (("residual", residual), ("weight", affine), ("bias", affine and layer)) if used]
    names += ["skip"] if skip else []
    inputs += [
        _random(*(shape[-1:] if name in ("weight", "bias") else shape), seed=i + 2) for i, name in enumerate(names)
    ]

    def op(x: Tensor, *rest: Tensor) -> Any:
        function = kernels.jagged_layer_norm if layer else kernels.jagged_rms_norm
        return function(x, **dict(zip(names, rest, strict=True)), activation=activation, return_sum=residual)

    def exact(x: Tensor, *rest: Tensor) -> Any:
        given = dict(zip(names, rest, strict=True))
        total = x + given["residual"] if residual else x
        if layer:
            out = F.layer_norm(total, shape[-1:], given.get("weight"), given.get("bias"), 1e-5)
        else:
            out = F.rms_norm(total, shape[-1:], given.get("weight"), 1e-5)
        out = ACTIVATIONS[activation](out)
        out = out + given["skip"] if skip else out
        return (out, total) if residual else out

    return Case(op, exact, inputs)


def _concat_exact(x: Tensor, y: Tensor, z: Tensor, *cu_seqlens: Tensor) -> Tensor:
    rows = []
    for b in range(len(cu_seqlens[0]) - 1):
        rows += [t[cu[b] : cu[b + 1]] for t, cu in zip((x, y, z), cu_seqlens, strict=True)]
    joined = torch.cat(rows)
    return torch.cat([joined, joined.new_zeros(len(x) + len(y) + len(z) - len(joined), *x.shape[1:])])


def _split_exact(w: Tensor, first: Tensor, second: Tensor, totals: list[int]) -> list[Tensor]:
    joined = first + second
    parts: list[list[Tensor]] = [[], []]
    for b in range(len(first) - 1):
        middle = int(joined[b] + first[b + 1] - first[b])
        parts[0].append(w[int(joined[b]) : middle])
        parts[1].append(w[middle : int(joined[b + 1])])
    return [
        torch.cat([*part, w.new_zeros(total - sum(map(len, part)), *w.shape[1:])])
        for part, total in zip(parts, totals, strict=True)
    ]


def _mean_exact(x: Tensor, cu: Tensor) -> Tensor:
    return jagged.sum_pool_loop(x, cu) / cu.diff().clamp(min=1).view(-1, *[1] * (x.ndim - 1))


def _dense_exact(x: Tensor, dense: Tensor, cu: Tensor, multiply: bool) -> Tensor:
    rows = []
    for b in range(len(cu) - 1):
        part = x[cu[b] : cu[b + 1]]
        given = dense[b, : len(part)] if dense.ndim > x.ndim else dense[b]
        rows.append(part * given if multiply else part + given)
    joined = torch.cat(rows)
    return torch.cat([joined, joined.new_zeros(len(x) - len(joined), *x.shape[1:])])


def _bce(rows: int, dim: int, tasks: int, mean: bool, **given: bool) -> Case:
    target = (_random(rows, tasks, seed=5) > 0.5).float()
    target[_random(rows, tasks, seed=6) > 1] = torch.nan
    mask = None
    if given.get("mask"):
        mask = _random(rows, tasks, seed=7).abs().float()
        mask[::3] = 0
    if given.get("flags"):
        mask = _random(rows, tasks, seed=7) > 0
    weights = [_random(tasks, seed=8).abs().float() if given.get(name) else None for name in ("task", "positive")]
    reduction = "mean" if mean else "sum"

    def op(x: Tensor, w: Tensor, b: Tensor, *other: Any) -> Any:
        y, m, task, positive = other
        return kernels.fused_linear_bce(x, w, b, y, mask=m, task_weight=task, pos_weight=positive, reduction=reduction)

    def exact(x: Tensor, w: Tensor, b: Tensor, *other: Any) -> Any:
        total, losses = linear_bce(x, w, b, *other, reduction)
        return total, losses.detach()

    inputs = [_random(rows, dim, seed=1), _random(tasks, dim, seed=2) * dim**-0.5, _random(tasks, seed=3)]
    return Case(op, exact, inputs, (target, mask, *weights))


def _norm_linear(layer: bool, rows: tuple[int, ...], dim: int, outs: int) -> Case:
    def exact(x: Tensor, w: Tensor) -> Tensor:
        shape = x.shape[-1:]
        return F.linear(F.layer_norm(x, shape, eps=1e-5) if layer else F.rms_norm(x, shape, eps=1e-5), w)

    return Case(
        lambda x, w: kernels.norm_linear(x, w, norm="layer" if layer else "rms"),
        exact,
        [_random(*rows, dim, seed=1) * 2 + 1, _random(outs, dim, seed=2)],
    )


def _jagged(lengths: tuple[int, ...], slack: int, dim: int, offsets: torch.dtype) -> dict[str, Case]:
    cu = _offsets(*lengths, dtype=offsets)
    x = _random(sum(lengths) + slack, dim, seed=1)
    second, third = _offsets(*[2] * len(lengths), dtype=torch.int64), _offsets(*[i % 3 for i in range(len(lengths))])
    y, z = _random(int(second[-1]), dim, seed=2), _random(int(third[-1]) + 1, dim, seed=3)
    dense, by_position = _random(len(lengths), dim, seed=4), _random(len(lengths), max(lengths) + 1, dim, seed=5)
    totals = [len(x), len(y)]
    cases = {
        "sum_pool": Case(kernels.jagged_sum_pool, jagged.sum_pool_loop, [x], (cu,)),
        "mean_pool": Case(kernels.jagged_mean_pool, _mean_exact, [x], (cu,)),
        "max_pool": Case(kernels.jagged_max_pool, jagged.max_pool_loop, [x], (cu,)),
        "concat": Case(
            lambda x, y, z, *cu: kernels.jagged_concat([x, y, z], cu)[0], _concat_exact, [x, y, z], (cu, second, third)
        ),
        "split": Case(
            lambda w, a, b, totals: kernels.jagged_split(w, [a, b], totals),
            _split_exact,
            [_random(sum(totals), dim, seed=6)],
            (cu, second, totals),
        ),
        "split with other slack": Case(
            lambda w, a, b, totals: kernels.jagged_split(w, [a, b], totals),
            _split_exact,
            [_random(sum(totals) + 3, dim, seed=6)],
            (cu, second, [int(cu[-1]), int(second[-1])]),
        ),
    }
    for name, multiply in (("add", False), ("mul", True)):
        op = kernels.jagged_dense_mul if multiply else kernels.jagged_dense_add
        for kind, given in (("", dense), (" by position", by_position)):
            cases[f"dense_{name}{kind}"] = Case(
                op, lambda x, d, cu, m=multiply: _dense_exact(x, d, cu, m), [x, given], (cu,)
            )
    return cases


def all_cases() -> dict[str, Case]:
    """Every case by name."""
    cases = {}
    for i, activation in enumerate(ACTIVATIONS):
        layer, other = i % 2 == 0, i % 3 == 0
        cases[f"norm {activation}"] = _norm(layer, activation, other, not other, i % 2 == 1, (13, 24))
    cases["norm heads"] = _norm(True, "identity", True, True, True, (70, 3, 48))
    cases["norm one row"] = _norm(False, "identity", False, True, False, (1, 100))
    cases["norm wide"] = _norm(True, "identity", True, True, False, (9, 2500))
    cases["norm many rows"] = _norm(True, "silu", True, True, True, (1500, 32))
    cases["norm plain"] = _norm(False, "identity", False, False, False, (300, 64))
    for activation, function in GATES.items():
        cases[f"gate {activation}"] = Case(
            lambda v, s, a=activation: kernels.gated(v, s, a),
            lambda v, s, f=function: v * f(s),
            [_random(19, 2, 40, seed=1), _random(19, 2, 40, seed=2)],
        )
    cases["swiglu"] = Case(kernels.swiglu, lambda x: x[..., :50] * F.silu(x[..., 50:]), [_random(33, 100)])
    cases["hard swish gate"] = Case(
        kernels.hard_swish_gate, lambda x: x[..., :512] * F.hardswish(x[..., 512:]), [_random(5, 3, 1024)]
    )
    cases["gate transposed"] = Case(
        lambda x: kernels.swiglu(x.t()), lambda x: x.t()[:, :20] * F.silu(x.t()[:, 20:]), [_random(40, 33)]
    )
    for lengths, slack, dim in (((3, 0, 70, 1), 2, 24), ((0, 0), 0, 16), ((5,), 3, 640), ((0, 150, 2, 0), 0, 96)):
        dtype = torch.int64 if slack else torch.int32
        for name, case in _jagged(lengths, slack, dim, dtype).items():
            cases[f"{name} {lengths}"] = case
    cases["bce"] = _bce(100, 24, 3, True)
    cases["bce weights"] = _bce(70, 48, 1, False, mask=True, task=True, positive=True)
    cases["bce flags"] = _bce(33, 128, 17, True, flags=True, task=True)
    cases["bce wide"] = _bce(70, 264, 4, True, mask=True)
    for layer in (False, True):
        cases[f"norm_linear layer={layer}"] = _norm_linear(layer, (50,), 48, 72)
        cases[f"norm_linear layer={layer}, one row"] = _norm_linear(layer, (1,), 8, 16)
        cases[f"norm_linear layer={layer}, batch"] = _norm_linear(layer, (5, 20), 64, 40)
    return cases
