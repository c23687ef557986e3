"""The attention ops as torch sees them: schemas, fake kernels, compilation, checkpointing, FLOPs."""

import functools

import pytest
import torch
from kernel_cases import assert_close, offsets, qkv, tokens, with_gradients
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from lightning_gem.kernels import gdpa, jagged_flash_attention, kernel_info, pairs, pffn, pma_attention
from lightning_gem.kernels.dot_product import registration as gdpa_ops
from lightning_gem.kernels.dot_product.activations import ACTIVATIONS
from lightning_gem.kernels.flash import registration as flash_ops
from lightning_gem.kernels.masking import visible_pairs, visible_roles

OPS = torch.ops.lightning_gem


def flash_arguments(requires_grad=True, bias=False, broadcast=False):
    query, key, value = (x.requires_grad_(requires_grad) for x in qkv(14, 12, heads=4, dim=8, dtype=torch.float32))
    attn_bias = tokens(3, 1, 9, 9, dtype=torch.float32).requires_grad_(requires_grad) if bias else None
    cu_q = None if broadcast else offsets([5, 0, 7])
    return (
        *(query, key, value, cu_q, offsets([9, 1, 2]), None, 9, attn_bias, None, 0, True, "auto"),
        *(0.3, 0.0, False, 3, -1, broadcast),
    )


def gdpa_arguments(requires_grad=True, targets=False, broadcast=False):
    query, key, value = (x.requires_grad_(requires_grad) for x in qkv(12, 12, heads=4, dim=8, dtype=torch.float32))
    cu = offsets([5, 0, 7])
    return (
        *(query, key, value, None if broadcast else cu, cu, 7, None, offsets([1, 2]) if targets else None, None, 0),
        *(True, "auto", "silu", 0.3, 0.5, True, -1, -1, 2 if targets else 0, broadcast),
    )


@pytest.mark.parametrize("kwargs", [{}, {"bias": True}, {"broadcast": True}, {"requires_grad": False}])
def test_opcheck_of_softmax(kwargs):
    arguments = flash_arguments(**kwargs)
    torch.library.opcheck(OPS.jagged_flash_attention.default, arguments)
    plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    out, lse = flash_ops.forward_op(*plain)
    for grad_lse, needs in ((None, (True, True, False)), (torch.ones_like(lse), (True, False, False))):
        backward = (torch.ones_like(out), grad_lse, out, lse, *plain, *needs)
        torch.library.opcheck(OPS.jagged_flash_attention_backward.default, backward)


@pytest.mark.parametrize("kwargs", [{}, {"targets": True}, {"broadcast": True}, {"requires_grad": False}])
def test_opcheck_of_gdpa(kwargs):
    arguments = gdpa_arguments(**kwargs)
    torch.library.opcheck(OPS.gdpa.default, arguments)
    plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    out = gdpa_ops.forward_op(*plain)
    torch.library.opcheck(OPS.gdpa_backward.default, (torch.ones_like(out), *plain, True, False))


def batches(num):
    """Batches of changing lengths, and (query, key, value) of them."""
    generator = torch.Generator().manual_seed(0)
    for step in range(num):
        lengths = torch.randint(0, 9 + step, (5,), generator=generator)
        cu = offsets(lengths.tolist())
        yield cu, int(lengths.max()), [x.requires_grad_() for x in qkv(int(cu[-1]), int(cu[-1]), dtype=torch.float32)]


OPS_TO_COMPILE = {
    "softmax": lambda q, k, v, cu, longest: jagged_flash_attention(q, k, v, cu, None, longest, longest, causal=True),
    "softmax without bounds": lambda q, k, v, cu, longest: jagged_flash_attention(q, k, v, cu),
    "gdpa": lambda q, k, v, cu, longest: gdpa(q, k, v, cu, cu, longest, longest, window_size=(3, 3)),
    "pma": lambda q, k, v, cu, longest: pma_attention(k[:2] * 1.0, k, v, cu, longest),
    "pffn": lambda q, k, v, cu, longest: pffn(q, q.new_ones(5, 3, 2, 4), q.new_ones(5, 3, 2, 4), cu, longest),
    "shared pffn": lambda q, k, v, cu, longest: pffn(q, q.new_ones(3, 2, 4), q.new_ones(3, 2, 4), cu, longest),
}


@pytest.mark.parametrize("name", OPS_TO_COMPILE)
def test_compiles_twice_at_most_for_changing_lengths(name):
    """[pytorch 141486, pytorch 136196, FBGEMM 5873]"""
    op = OPS_TO_COMPILE[name]
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(op, fullgraph=True, dynamic=True, backend=counter)
    for cu, longest, inputs in batches(20):
        if len(inputs[0]) < 2:
            continue
        results = []
        for function in (compiled, op):
            out = function(*inputs, cu, longest)
            gradients = torch.autograd.grad(out, inputs, torch.ones_like(out), materialize_grads=True)
            results.append([out, *gradients])
        assert_close(results[0], results[1], 1e-5)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("op", [OPS.jagged_flash_attention, OPS.gdpa])
def test_selective_checkpointing_by_name(op):
    """The op that is kept runs once, the other one twice."""
    calls = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    def policy(ctx, func, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if func.overloadpacket is op else CheckpointPolicy.PREFER_RECOMPUTE

    def layer(q, k, v):
        return gdpa(jagged_flash_attention(q, k, v, cu).sin(), k, v, cu).cos()

    cu, inputs = offsets([5, 0, 9]), qkv(14, 14, dtype=torch.float32)
    expected = with_gradients(layer, *inputs)
    context = functools.partial(create_selective_checkpoint_contexts, policy)
    with Count():
        actual = with_gradients(lambda *x: checkpoint(layer, *x, use_reentrant=False, context_fn=context), *inputs)
    assert_close(actual, expected, 1e-5)
    other = OPS.gdpa if op is OPS.jagged_flash_attention else OPS.jagged_flash_attention
    assert calls.count(op) == 1
    assert calls.count(other) == 2


MASKS = [
    {},
    {"causal": True},
    {"window_size": (4, 2)},
    {"window_size": (-1, 0)},
    {"causal": True, "window_size": (3, 9)},
]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_flops_count_the_visible_pairs(mask):
    lengths_q, lengths_k = [5, 0, 12, 7], [9, 4, 8, 0]
    causal, window = mask.get("causal", False), mask.get("window_size", (-1, -1))
    visible = sum(int(visible_pairs(q, k, causal, window).sum()) for q, k in zip(lengths_q, lengths_k, strict=True))
    assert pairs.attention_pairs(lengths_q, lengths_k, causal, window) == visible
    inputs = qkv(30, 21, heads=4, kv_heads=2, dim=8, value_dim=6, dtype=torch.float32)  # with slack
    for op in (jagged_flash_attention, gdpa):
        with FlopCounterMode(display=False) as counter:
            leaves = [x.requires_grad_() for x in inputs]
            out = op(*leaves, offsets(lengths_q), offsets(lengths_k), **mask)
            assert counter.get_total_flops() == 2 * 4 * (8 + 6) * visible
            out.sum().backward()
        assert counter.get_total_flops() == 2 * 4 * (8 + 6 + 3 * 8 + 2 * 6) * visible
        with FlopCounterMode(display=False) as counter:
            query, key, value = (x.detach() for x in inputs)
            op(query.requires_grad_(), key, value, offsets(lengths_q), offsets(lengths_k), **mask).sum().backward()
        assert counter.get_total_flops() == 2 * 4 * (8 + 6 + 2 * 8 + 6) * visible


@pytest.mark.parametrize(("context", "window"), [(0, -1), (3, -1), (1, 4), (50, 2)])
def test_flops_with_targets(context, window):
    lengths, targets = [0, 20, 7, 3], [0, 4, 7, 1]
    visible = sum(int(visible_roles(n, t, context, window).sum()) for n, t in zip(lengths, targets, strict=True))
    assert pairs.role_pairs(lengths, targets, context, window) == visible
    with FlopCounterMode(display=False) as counter:
        gdpa(
            *(*qkv(30, 30, dtype=torch.float32), offsets(lengths)),
            causal=True,
            num_targets=torch.tensor(targets),
            contextual_seqlen=context,
            window_size=(window, -1),
        )
    assert counter.get_total_flops() == 2 * 2 * (4 + 4) * visible


def test_fake_tensors_count_the_bounds():
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        query, key, value = (torch.empty(100, 4, 8) for _ in range(3))
        cu = torch.empty(6, dtype=torch.int64)
        out, lse = jagged_flash_attention(query, key, value, cu, None, 30, 30, return_lse=True)
        assert out.shape == (100, 4, 8)
        assert lse.shape == (4, 100)
        assert counter.get_total_flops() == 2 * 4 * 16 * 5 * 30 * 30
        assert pma_attention(query[:3], key, value, cu, 30).shape == (5, 3, 4, 8)
        assert counter.get_total_flops() == 2 * 4 * 16 * (5 * 30 * 30 + 5 * 3 * 30)
        gdpa(query, key, value, cu)  # without bounds: as if all sequences were of the mean length
        assert counter.get_total_flops() == 2 * 4 * 16 * (5 * 30 * 30 + 5 * 3 * 30 + 5 * 20 * 20)


def test_meta_tensors_have_shapes_and_flops():
    query, key, value = (torch.empty(100, 4, 8, device="meta", requires_grad=True) for _ in range(3))
    cu = torch.empty(6, dtype=torch.int64, device="meta")
    dense = (torch.empty(5, 7, 4, 8, device="meta"), torch.empty(5, 7, 4, 8, device="meta"))
    with FlopCounterMode(display=False) as counter:
        for out in (
            jagged_flash_attention(query, key, value, cu, None, 30, 30),
            gdpa(query, key, value, cu, None, 30, 30),
            pffn(query, *dense, cu, 30),
            pffn(query, dense[0][0], dense[1][0], cu, 30),
        ):
            assert out.shape == query.shape
            out.sum().backward()
    assert query.grad.shape == query.shape
    two_gradients, query_only = 2 * 4 * (2 + 5) * 8, 2 * 4 * (2 + 3) * 8
    assert counter.get_total_flops() == two_gradients * 2 * 5 * 30**2 + query_only * (5 * 30 * 7 + 100 * 7)


def test_gradients_of_the_ops_are_those_of_the_reference():
    """The op on a CPU, which eager code does not see, for every kind of mask."""
    cu_q, cu_k = offsets([5, 0, 70, 3]), offsets([9, 1, 66, 0])
    inputs = qkv(80, 78, heads=4, kv_heads=2, value_dim=3)

    def watched(op):
        def function(*x):
            with Watch():
                return op(*x)

        return function

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    cases = [
        lambda q, k, v: jagged_flash_attention(q, k, v, cu_q, cu_k, softcap=2.0, window_size=(3, 9)),
        lambda q, k, v: jagged_flash_attention(q, k, v, cu_q, cu_k, attn_bias=bias, causal=True),
        lambda q, k, v: jagged_flash_attention(q, k, v, cu_q, cu_k, return_lse=True)[1].clamp(min=-99),
        lambda q, k, v: jagged_flash_attention(q[:3], k, v, None, cu_k, broadcast_query=True),
        *[
            lambda q, k, v, name=name: gdpa(q, k, v, cu_q, cu_k, activation=name, window_size=(9, -1), out_scale=0.3)
            for name in [*ACTIVATIONS, ["silu", "relu", "gelu", "silu"]]
        ],
    ]
    bias = tokens(1, 4, 70, 66)
    for case in cases:
        assert_close(with_gradients(watched(case), *inputs), with_gradients(case, *inputs))


def test_second_derivatives_say_that_there_are_none():
    arguments = gdpa_arguments()
    out = gdpa_ops.forward_op(*arguments)
    (gradient,) = torch.autograd.grad(out.sum(), arguments[0], create_graph=True)
    with pytest.raises(RuntimeError, match="attention has no second derivative here"):
        gradient.sum().backward()


def test_backends_that_cannot_run_say_so():
    inputs, cu = qkv(4, 4), offsets([4])
    for op in (jagged_flash_attention, gdpa):
        assert_close([op(*inputs, cu, backend="reference")], [op(*inputs, cu)])
        with pytest.raises(ValueError, match="backend 'triton' cannot run: the tensors are on cpu"):
            op(*inputs, cu, backend="triton")
        with pytest.raises(ValueError, match="backend 'hopper' has no kernel for these inputs"):
            op(*inputs, cu, backend="hopper")
        with pytest.raises(ValueError, match="backend 'packed' is for self-attention over short sequences"):
            op(*inputs, cu, max_seqlen_q=4, backend="packed")
        with pytest.raises(ValueError, match="backend 'cuda' is unknown: use one of auto, hopper, packed, triton,"):
            op(*inputs, cu, backend="cuda")


def test_kernel_info():
    info = kernel_info("gdpa", *qkv(4, 4))
    assert info == {"backend": "reference", "arch": "cpu", "config": {}, "emulated": False}
    with pytest.raises(ValueError, match="op 'attention' is unknown"):
        kernel_info("attention", *qkv(4, 4))
