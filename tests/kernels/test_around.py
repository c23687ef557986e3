"""Operations around attention on a CPU: the references, the custom ops, and the Triton code in its interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from around_cases import all_cases
from torch.utils.flop_counter import FlopCounterMode

from lightning_gem import kernels
from lightning_gem.kernels.gate.reference import GATE_DERIVATIVES, GATES

CASES = all_cases()
CU = kernels.lengths_to_cu_seqlens(torch.tensor([3, 0, 4]))
OPS = torch.ops.lightning_gem


@pytest.mark.parametrize("name", CASES)
def test_references(name):
    CASES[name].check("cpu", torch.float64, 1e-10, 1e-9)


@pytest.mark.parametrize("name", GATES)
def test_derivatives_are_those_of_autograd(name):
    """What ops give on a CPU where autograd does not record, kinks included."""
    x = torch.tensor([-5.0, -3.0, -2.5, -2.0, -0.5, 0.0, 0.5, 2.0, 2.5, 3.0, 5.0], dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(GATES[name](leaf).sum(), leaf)
    torch.testing.assert_close(GATE_DERIVATIVES[name](x), expected)


def test_triton_code_in_the_interpreter():
    here = Path(__file__).parent
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        str(here / "test_around_triton.py"),
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=here.parents[1])
    assert done.returncode == 0, done.stdout[-3000:]
    assert "100%" in done.stdout


def _rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


CALLS = {
    "norm": lambda: (
        OPS.norm.default,
        (_rows(7, 8), _rows(7, 8), _rows(8), _rows(8), _rows(7, 8), 1e-5, True, "silu", True),
    ),
    "plain norm": lambda: (OPS.norm.default, (_rows(7, 8), None, None, None, None, 1e-5, False, "identity", False)),
    "norm_linear": lambda: (OPS.norm_linear.default, (_rows(7, 8), _rows(5, 8), True, 1e-5)),
    "gate": lambda: (OPS.gate.default, (_rows(7, 8), _rows(7, 8, seed=1), "sigmoid")),
    "packed_gate": lambda: (OPS.packed_gate.default, (_rows(7, 8), "silu")),
    "sum_pool": lambda: (OPS.jagged_pool.default, (_rows(9, 4), CU, "sum")),
    "mean_pool": lambda: (OPS.jagged_pool.default, (_rows(9, 4), CU, "mean")),
    "max_pool": lambda: (OPS.jagged_pool.default, (_rows(9, 4), CU, "max")),
    "dense_add": lambda: (OPS.jagged_broadcast.default, (_rows(9, 4), _rows(3, 4), CU, "add")),
    "dense_mul": lambda: (OPS.jagged_broadcast.default, (_rows(9, 4), _rows(3, 5, 4), CU, "multiply")),
    "concat": lambda: (OPS.jagged_concat.default, ([_rows(9, 4), _rows(7, 4)], [CU, CU])),
    "split": lambda: (OPS.jagged_split.default, (_rows(16, 4), [CU, CU], [9, 7])),
    "grouped_mm": lambda: (OPS.grouped_mm.default, (_rows(9, 4), _rows(3, 4, 5), CU)),
    "linear_bce": lambda: (
        OPS.linear_bce.default,
        (_rows(9, 4), _rows(2, 4), _rows(2), torch.ones(9, 2), None, None, None, True, True),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name):
    op, arguments = CALLS[name]()
    tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(op, arguments, test_utils=tests)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "linear_bce"])
def test_custom_op_equals_the_public_function(name):
    """On a CPU the public functions run the references; the ops must agree, gradients included."""
    op, arguments = CALLS[name]()
    public = {
        "norm": lambda x, r, w, b, s, *_: kernels.jagged_layer_norm(
            x, w, b, activation="silu", residual=r, skip=s, return_sum=True
        ),
        "plain norm": lambda x, *_: kernels.jagged_rms_norm(x),
        "norm_linear": lambda x, w, *_: kernels.norm_linear(x, w, norm="layer"),
        "gate": lambda v, s, _: kernels.gated(v, s),
        "packed_gate": lambda x, _: kernels.swiglu(x),
        "sum_pool": lambda x, cu, _: kernels.jagged_sum_pool(x, cu),
        "mean_pool": lambda x, cu, _: kernels.jagged_mean_pool(x, cu),
        "max_pool": lambda x, cu, _: kernels.jagged_max_pool(x, cu),
        "dense_add": lambda x, d, cu, _: kernels.jagged_dense_add(x, d, cu),
        "dense_mul": lambda x, d, cu, _: kernels.jagged_dense_mul(x, d, cu),
        "concat": lambda tensors, cu: kernels.jagged_concat(tensors, cu)[0],
        "split": lambda x, cu, totals: kernels.jagged_split(x, cu, totals),
        "grouped_mm": lambda x, w, cu: kernels.grouped_mm(x, w, cu),
    }[name]
    flat = [t for a in arguments for t in (a if isinstance(a, list) else [a])]
    leaves = [t for t in flat if isinstance(t, torch.Tensor) and t.requires_grad]
    results = []
    for function in (op, public):
        out = function(*arguments)
        outs = [t for t in (out if isinstance(out, (list, tuple)) else [out]) if t.requires_grad]
        outs = [t for t in outs if t.numel()]
        grads = [torch.linspace(-1, 1, t.numel()).view(t.shape) for t in outs]
        results.append([*outs, *torch.autograd.grad(outs, leaves, grads)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


def test_fused_bce_multiplies_its_gradients():
    _, arguments = CALLS["linear_bce"]()
    x, w, b, y = arguments[:4]
    total, *_ = OPS.linear_bce(*arguments)
    expected, losses = kernels.fused_linear_bce(x, w, b, y)
    torch.testing.assert_close(total, expected)
    assert not losses.requires_grad
    grads = torch.autograd.grad(total * 3, (x, w, b))
    for actual, exact in zip(grads, torch.autograd.grad(expected * 3, (x, w, b)), strict=True):
        torch.testing.assert_close(actual, exact)


def test_fused_bce_refuses_a_second_backward():
    _, arguments = CALLS["linear_bce"]()
    total, *_ = OPS.linear_bce(*arguments)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_flops_are_counted():
    for name, flops in (("norm_linear", 3 * 2 * 7 * 8 * 5), ("grouped_mm", 3 * 2 * 9 * 4 * 5), ("linear_bce", 3 * 144)):
        op, arguments = CALLS[name]()
        with FlopCounterMode(display=False) as counter:
            out = op(*arguments)
            (out[0] if isinstance(out, tuple) else out).sum().backward()
        ours = sum(
            count
            for by_op in counter.get_flop_counts().values()
            for op, count in by_op.items()
            if "lightning_gem" in str(op)
        )
        assert ours in (flops, 4 * flops), name  # counted per module, too


def test_public_functions_compile_without_a_break():
    def step(x, w, dense, cu, y):
        x = kernels.jagged_dense_add(x, dense, cu)
        x = x + kernels.grouped_mm(x, w.expand(3, 8, 8), cu)
        x = kernels.jagged_layer_norm(x, activation="silu", residual=x)
        out = kernels.swiglu(kernels.norm_linear(x, w))
        pooled = kernels.jagged_max_pool(out, cu) + kernels.jagged_mean_pool(out, cu)
        return kernels.fused_linear_bce(pooled, w[:2, :4], None, y)[0]

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (8, 9, 12):  # rows 7 and up are slack
        inputs = (_rows(rows, 8), _rows(8, 8), _rows(3, 8))
        y = torch.ones(3, 2)
        actual = torch.autograd.grad(compiled(*inputs, CU, y), inputs)
        for a, e in zip(actual, torch.autograd.grad(step(*inputs, CU, y), inputs), strict=True):
            torch.testing.assert_close(a, e)


def test_mixed_dtypes_have_the_common_one():
    x, y = torch.randn(4, 8, dtype=torch.bfloat16), torch.randn(4, 8)
    assert kernels.jagged_rms_norm(x, residual=y).dtype == torch.float32
    assert kernels.jagged_rms_norm(x, torch.ones(8)).dtype == torch.bfloat16
    assert kernels.gated(x, y).dtype == torch.float32


def test_missing_labels_do_not_count():
    x = torch.randn(6, 4, requires_grad=True)
    w = torch.randn(2, 4, requires_grad=True)
    y = torch.tensor([[1.0, torch.nan]] * 6)
    total, losses = kernels.fused_linear_bce(x, w, None, y)
    assert losses[1] == 0
    grads = torch.autograd.grad(total, (x, w))
    assert all(g.isfinite().all() for g in grads)
    assert (grads[1][1] == 0).all()


X, W = torch.randn(4, 8), torch.randn(3, 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kernels.jagged_rms_norm(X.int()), "x must be floating point"),
        (lambda: kernels.jagged_rms_norm(X, torch.ones(7)), r"weight must be \(8,\)"),
        (lambda: kernels.jagged_layer_norm(X, residual=X[:2]), "residual must be floating point"),
        (lambda: kernels.jagged_layer_norm(X, activation="swish"), "activation 'swish' is unknown"),
        (lambda: kernels.jagged_rms_norm(X, return_sum=True), "return_sum=True needs a residual"),
        (lambda: kernels.norm_linear(X, W[:, :4]), r"weight must be \(O, K\)"),
        (lambda: kernels.norm_linear(X, W.double()), "must share a floating dtype"),
        (lambda: kernels.norm_linear(X, W, norm="batch"), "norm must be 'rms' or 'layer'"),
        (lambda: kernels.gated(X, X[:1]), "value and scores must have one shape"),
        (lambda: kernels.swiglu(X[:, :3]), r"x must be \(\.\.\., 2D\)"),
        (lambda: kernels.gated(X, X, "tanh"), "activation 'tanh' is unknown"),
        (lambda: kernels.jagged_max_pool(X, torch.tensor([0, 9])), "ends at 9, but there are 4 rows"),
        (lambda: kernels.jagged_concat([], []), "at least one"),
        (lambda: kernels.jagged_concat([X, X], [CU[:1] * 0, CU[:2] * 0]), "must describe the same sequences"),
        (lambda: kernels.jagged_split(X, [torch.tensor([0, 9])]), "ends at 9, but there are 4 rows"),
        (lambda: kernels.jagged_dense_add(X, W[:1], torch.tensor([0, 1, 4])), "dense must be"),
        (lambda: kernels.jagged_dense_add(X, torch.ones(1, 3, 8), torch.tensor([0, 4])), "the longest sequence has 4"),
        (lambda: kernels.grouped_mm(X, torch.ones(2, 8, 3), torch.tensor([0, 4])), "one offset more than the 2 groups"),
        (lambda: kernels.grouped_mm(X, W, CU), r"weight must be \(E, K, O\)"),
        (lambda: kernels.fused_linear_bce(X, W, None, X), r"target must be \(N, T\) = \(4, 3\)"),
        (lambda: kernels.fused_linear_bce(X, W, torch.ones(2), X[:, :3]), r"bias must be \(T,\) = \(3,\)"),
        (lambda: kernels.fused_linear_bce(X, W, None, X[:, :3], reduction="none"), "reduction must be"),
    ],
)
def test_errors_name_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()
