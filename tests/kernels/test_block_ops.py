"""Block attention and rotation as custom ops: compilers, FLOP counters and checkpointing see one op each way."""

from functools import partial
from pathlib import Path

import pytest
import torch
from block_cases import CASES, exactly, make_case, run_case
from kernel_cases import assert_close, offsets, qkv, tokens, with_gradients
from offline import compiled_offline
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from lightning_gem.kernels import block_attention, pairs, rotary
from lightning_gem.kernels.block.registration import block_attention_backward_op, block_attention_op
from lightning_gem.kernels.rope.registration import rotary_op

HERE = Path(__file__).parent
OPTIONS = (8, 0.25, None, True, False, "auto")


def angles(rows, dim=4, dtype=torch.float64):
    angle = tokens(rows, dim // 2, seed=4, dtype=dtype)
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "rotary" in case[-1]])
def test_fused_rotation_is_rotation_and_attention(name):
    inputs, grad, cu_seqlens, options = make_case(name, torch.float64, slack=0)
    turn, rotate_value = options.pop("rotary"), options.pop("rotate_value", False)

    def unfused(q, k, v):
        v = rotary(v, *turn) if rotate_value else v
        return block_attention(rotary(q, *turn), rotary(k, *turn), v, cu_seqlens, **options)

    assert_close(exactly(name, slack=0), with_gradients(unfused, *inputs, grad=grad))


def test_slack_stays_zero_with_angles():
    results = exactly("rotated values", slack=3)
    for result, without in zip(results, exactly("rotated values", slack=0), strict=True):
        assert (result[-3:] == 0).all()
        assert result.isfinite().all()
        assert result[:-3].shape == without.shape


def test_gradients_of_angles():
    turn = [x.requires_grad_() for x in angles(9)]
    inputs = [x.requires_grad_() for x in qkv(9, 9)]
    assert torch.autograd.gradcheck(
        lambda q, k, v, c, s: block_attention(q, k, v, offsets([6, 3]), rotary=(c, s), rotate_value=True, block_size=4),
        (*inputs, *turn),
    )


@pytest.mark.parametrize("turn", [None, angles(11)])
def test_opcheck(turn):
    inputs = [x.requires_grad_() for x in qkv(11, 11, heads=4)]
    cos, sin = (None, None) if turn is None else turn
    arguments = (*inputs, offsets([7, 0, 4]), cos, sin, *OPTIONS)
    torch.library.opcheck(block_attention_op, arguments)
    grad = tokens(11, 4, 4, seed=9)
    torch.library.opcheck(
        block_attention_backward_op,
        (grad, *(x.detach() for x in inputs), *arguments[3:]),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )
    torch.library.opcheck(rotary_op, (tokens(11, 2, 4).requires_grad_(), *angles(11), False))


def test_op_equals_the_function_it_stands_for():
    inputs, grad, cu_seqlens, options = make_case("rotated values", torch.float64)
    cos, sin = options["rotary"]

    def op(q, k, v):
        return block_attention_op(q, k, v, cu_seqlens, cos, sin, 64, 64**-0.5, None, True, True, "auto")

    assert_close(with_gradients(op, *inputs, grad=grad), run_case(inputs, grad, cu_seqlens, options, "auto"))


def test_compiled_with_changing_lengths():
    compiles = 0

    def backend(module, _):
        nonlocal compiles
        compiles += 1
        return module.forward

    def attend(q, k, v, cu_seqlens, cos, sin):
        return block_attention(q, k, v, cu_seqlens, block_size=8, rotary=(cos, sin))

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=backend)
    for i in range(20):
        lengths = [5 + i, 0, 3 * i]
        rows = sum(lengths)
        inputs = [x.requires_grad_() for x in qkv(rows, rows)]
        arguments = (*inputs, offsets(lengths), *angles(rows))
        out = compiled(*arguments)
        assert torch.equal(out, attend(*arguments))
        out.sum().backward()
        assert all(x.grad is not None for x in inputs)
    assert compiles <= 2


def test_aot_compiled_gradients():
    inputs, grad, cu_seqlens, options = make_case("grouped heads", torch.float64, slack=0)
    compiled = torch.compile(partial(block_attention, **options), fullgraph=True, backend="aot_eager")
    actual = with_gradients(lambda q, k, v: compiled(q, k, v, cu_seqlens), *inputs, grad=grad)
    assert_close(actual, exactly("grouped heads", slack=0))


@pytest.mark.parametrize("causal", [False, True])
def test_flops_count_real_pairs(causal):
    lengths = torch.tensor([70, 0, 3])
    query, key, value = (x.requires_grad_() for x in qkv(75, 75, heads=4, dim=6, value_dim=5))
    with FlopCounterMode(display=False) as counter:
        block_attention(query, key, value, offsets([70, 0, 3]), block_size=16, causal=causal).sum().backward()
    count = (pairs.causal_block_pairs if causal else pairs.block_pairs)(lengths, 16)
    flops = {str(name): number for name, number in counter.get_flop_counts()["Global"].items()}
    forward = 2 * 4 * (6 + 5) * count
    backward = 2 * 4 * (3 * 6 + 2 * 5) * count
    assert sorted(flops.values()) == [forward, backward]


def test_flops_without_offsets_are_those_of_whole_blocks():
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        query = torch.empty(128, 4, 8)
        cu_seqlens = torch.empty(3, dtype=torch.int32)
        assert block_attention(query, query, query, cu_seqlens, 64).shape == query.shape
    assert counter.get_total_flops() == 2 * 4 * (8 + 8) * 128 * 64


def test_causal_block_pairs():
    for block_size in (1, 4, 64):
        visible = sum(i % block_size + 1 for length in (0, 1, 7, 64, 130) for i in range(length))
        assert pairs.causal_block_pairs([0, 1, 7, 64, 130], block_size) == visible


def test_selective_checkpointing_keeps_the_output():
    calls = []

    def policy(ctx, op, *args, **kwargs):
        calls.append(op)
        keep = op is torch.ops.lightning_gem.block_attention.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    query, key, value = (x.requires_grad_() for x in qkv(9, 9))
    out = checkpoint(
        lambda q: block_attention(q.sin(), key, value, offsets([6, 3]), block_size=4),
        query,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, policy),
    )
    actual = torch.autograd.grad(out.square().sum(), (query, key, value))
    expected = torch.autograd.grad(
        block_attention(query.sin(), key, value, offsets([6, 3]), block_size=4).square().sum(), (query, key, value)
    )
    assert_close(actual, expected)
    assert torch.ops.lightning_gem.block_attention.default in calls


def test_second_derivative_of_the_op_is_refused():
    query, key, value = (x.requires_grad_() for x in qkv(9, 9))
    out = block_attention_op(query, key, value, offsets([9]), None, None, *OPTIONS)
    (gradient,) = torch.autograd.grad(out.sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.sum().backward()


def test_bad_arguments_are_named():
    query, key, value = qkv(4, 4)
    cu_seqlens = offsets([4])
    with pytest.raises(ValueError, match="backend 'triton' cannot run: the tensors are on cpu"):
        block_attention(query, key, value, cu_seqlens, backend="triton")
    with pytest.raises(ValueError, match="backend 'cuda' is unknown"):
        block_attention(query, key, value, cu_seqlens, backend="cuda")
    with pytest.raises(ValueError, match="rotate_value=True needs angles"):
        block_attention(query, key, value, cu_seqlens, rotate_value=True)
    with pytest.raises(ValueError, match=r"cos must be .* \(4, 2\), got \(3, 2\)"):
        block_attention(query, key, value, cu_seqlens, rotary=angles(3))
    with pytest.raises(ValueError, match="cos must be floating point"):
        block_attention(query, key, value, cu_seqlens, rotary=(torch.ones(4, 2, dtype=torch.int64),) * 2)
    with pytest.raises(ValueError, match="activation 'tanh' is unknown"):
        block_attention(query, key, value, cu_seqlens, activation="tanh")


@pytest.mark.parametrize("arch", [90, 100])
def test_shipped_configurations_compile(arch):
    pytest.importorskip("triton")
    kernels = compiled_offline(HERE / "block_offline_compile.py", str(arch))
    assert len(kernels) == 4 * 9 + 1 + 9  # and rotations of their own
    for kernel in kernels:
        assert kernel["shared"] <= 232_448, kernel
        assert kernel["tmem"] <= 512, kernel
        assert not kernel["trap"], kernel
        if kernel["kernel"] in ("forward_kernel", "backward_kernel"):
            assert kernel["matrix_unit"], kernel
        # Registers that do not fit go to the stack. The widest tiles and float32 are there to work, not to be fast.
        if arch == 90 and kernel["case"] in ("softmax", "rotary fp16", "gelu", "blocks of 128"):
            assert kernel["stack"] <= 128, kernel
