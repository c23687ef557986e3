"""Attention ops beside their peers on the mission's shapes, on one GPU.

    python -m benchmarks.kernels_attention [--output benchmarks/results] [--only self,window] [--rounds 12]

All peers of a case run in one process, round by round, with the L2 cache flushed before every call; medians are printed
beside the relative error of the output, and of the worst gradient, against float32 on the first sequences of the batch.
Times are the device's; what the host takes to queue a call stands beside them.
TFLOP/s count visible (query, key) pairs: 4 * H * D for each forward, 2.5 times that backward. Where memory bounds a
case, ``roofline`` is the share of the device's copy rate, every tensor moved once.
"""

import argparse
import csv
import datetime
import inspect
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from lightning_gem import kernels as ours
from lightning_gem.kernels.pairs import block_pairs, cross_pairs, full_pairs, window_pairs

ROOT = Path(__file__).parents[1]
HEADS, DIM = 4, 128
BATCH, LONGEST = 512, 2048
EXACT_TOKENS = 12_000
HEAD_START = 5_000_000  # cycles, some 3 ms, in which the host queues a call: as in training, the device never waits

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass
class Case:
    """One workload.

    Attributes:
        name: What is computed.
        tensors: Query, key and value.
        offsets_q: Of the queries, or None where they are shared by all sequences.
        offsets_k: Of the keys.
        pairs: Visible (query, key) pairs.
        peers: Functions of query, key and value by name; the first is ours.
        exact: Our reference in float32, of (query, key, value, offsets_q, offsets_k).
        memory_bound: Report the share of the copy rate.
    """

    name: str
    tensors: tuple[Tensor, Tensor, Tensor]
    offsets_q: Tensor | None
    offsets_k: Tensor
    pairs: int
    peers: dict[str, Attention]
    exact: Callable[..., Tensor]
    memory_bound: bool = False
    results: list[dict[str, Any]] = field(default_factory=list)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float32).bfloat16()


def jagged_lengths(batch: int = BATCH, longest: int = LONGEST) -> Tensor:
    """Uniform on [0, longest]: half of a padded batch would be padding."""
    return torch.randint(0, longest + 1, (batch,), generator=torch.Generator().manual_seed(1))


def offsets(lengths: Tensor) -> Tensor:
    return ours.lengths_to_cu_seqlens(lengths.to("cuda", torch.int32))


def qkv(rows_q: int, rows_k: int, dim: int = DIM) -> tuple[Tensor, Tensor, Tensor]:
    return randn(rows_q, HEADS, dim), randn(rows_k, HEADS, dim), randn(rows_k, HEADS, dim)


def varlen(cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, window: int | None = None) -> dict[str, Attention]:
    """torch's variable-length attention (FlashAttention-2), where this torch has it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return {}
    kwargs: dict[str, Any] = {}
    if window is not None:
        if "window_size" not in inspect.signature(varlen_attn).parameters:
            return {}
        kwargs["window_size"] = (window, window)
    return {"varlen_attn": lambda q, k, v: varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, **kwargs)}


def flex(cu: Tensor, window: int | None = None) -> dict[str, Attention]:
    """FlexAttention, compiled, over one packed sequence with a document mask; the mask is not timed."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    rows = int(cu[-1])
    document = torch.repeat_interleave(torch.arange(len(cu) - 1, device="cuda"), cu.diff().long())

    def visible(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        same = document[q] == document[k]
        return same if window is None else same & (q - k <= window) & (k - q <= window)

    mask = torch.compile(create_block_mask)(visible, None, None, rows, rows, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        return compiled(q, k, v, block_mask=mask).squeeze(0).transpose(0, 1)

    return {"flex_attention": run}


def padded(lengths: Tensor, longest: int, keys: int | None, activation: str | None) -> dict[str, Attention]:
    """What users without jagged kernels do: pad, compute densely (softmax: SDPA; else einsum, compiled), unpad.

    The activations are zero at zero, so that padding adds nothing; softmax needs a mask.
    """
    place = torch.cat([b * longest + torch.arange(int(n)) for b, n in enumerate(lengths)]).cuda()
    batch = len(lengths)
    mask = (torch.arange(longest) < lengths[:, None])[:, None, None].cuda()

    def pad(x: Tensor) -> Tensor:
        return x.new_zeros(batch * longest, *x.shape[1:]).index_copy(0, place, x).unflatten(0, (batch, longest))

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if activation is None:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * DIM**-0.5
        weights = F.gelu(scores, approximate="tanh") if activation == "gelu_tanh" else F.silu(scores)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v)

    compiled = torch.compile(dense, dynamic=False)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        others = (pad(k), pad(v)) if keys is None else (k.unflatten(0, (batch, keys)), v.unflatten(0, (batch, keys)))
        return compiled(pad(q), *others).flatten(0, 1).index_select(0, place)

    return {"padded SDPA" if activation is None else "padded einsum, compiled": run}


def softmax(**kwargs: Any) -> Callable[..., Tensor]:
    return lambda q, k, v, cu_q, cu_k, *longest: ours.jagged_flash_attention(q, k, v, cu_q, cu_k, *longest, **kwargs)


def activated(activation: str, **kwargs: Any) -> Callable[..., Tensor]:
    return lambda q, k, v, cu_q, cu_k, *longest: ours.gdpa(
        q, k, v, cu_q, cu_k, *longest, activation=activation, scale=q.shape[2] ** -0.5, **kwargs
    )


def self_cases() -> Iterator[Case]:
    lengths = jagged_lengths()
    cu = offsets(lengths)
    rows = int(cu[-1])
    tensors = qkv(rows, rows)
    pairs = full_pairs(lengths)
    peers = varlen(cu, cu, LONGEST, LONGEST) | flex(cu) | padded(lengths, LONGEST, None, None)
    yield _case("self, full, softmax", tensors, cu, cu, pairs, softmax(), peers, (LONGEST, LONGEST))
    del peers
    for activation in ("gelu_tanh", "silu"):
        peers = padded(lengths, LONGEST, None, activation) if activation == "gelu_tanh" else {}
        yield _case(
            f"self, full, {activation}", tensors, cu, cu, pairs, activated(activation), peers, (LONGEST, LONGEST)
        )
    small = qkv(rows, rows, 64)
    peers = varlen(cu, cu, LONGEST, LONGEST)
    yield _case("self, full, softmax, D=64", small, cu, cu, pairs, softmax(), peers, (LONGEST, LONGEST))
    yield _case("self, full, gelu_tanh, D=64", small, cu, cu, pairs, activated("gelu_tanh"), {}, (LONGEST, LONGEST))
    # The same mean length without jaggedness.
    mean = LONGEST // 2
    dense = torch.full((rows // mean,), mean)
    cu = offsets(dense)
    tensors = qkv(int(cu[-1]), int(cu[-1]))
    for name, op in (("softmax", softmax()), ("gelu_tanh", activated("gelu_tanh"))):
        yield _case(f"dense of length {mean}, {name}", tensors, cu, cu, full_pairs(dense), op, {}, (mean, mean))


def window_cases() -> Iterator[Case]:
    lengths = jagged_lengths()
    cu = offsets(lengths)
    rows = int(cu[-1])
    tensors = qkv(rows, rows)
    pairs = window_pairs(lengths, 100)
    window = {"window_size": (100, 100)}
    peers = varlen(cu, cu, LONGEST, LONGEST, 100) | flex(cu, 100)
    yield _case("window 100, softmax", tensors, cu, cu, pairs, softmax(**window), peers, (LONGEST, LONGEST))
    yield _case("window 100, silu", tensors, cu, cu, pairs, activated("silu", **window), {}, (LONGEST, LONGEST))


def block_cases() -> Iterator[Case]:
    lengths = jagged_lengths()
    cu = offsets(lengths)
    rows = int(cu[-1])
    tensors = qkv(rows, rows)
    cuts = torch.cat([torch.tensor([64] * (int(n) // 64) + ([int(n) % 64] if n % 64 else [])) for n in lengths])
    cu_cut = offsets(cuts)

    def op(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *longest: int) -> Tensor:
        return ours.block_attention(q, k, v, cu_q, longest[0] if longest else None)

    peers = varlen(cu_cut, cu_cut, 64, 64)
    case = _case("blocks of 64, softmax", tensors, cu, cu, block_pairs(lengths, 64), op, peers, (LONGEST, LONGEST))
    case.memory_bound = True
    yield case


def short_key_cases() -> Iterator[Case]:
    lengths = jagged_lengths()
    cu = offsets(lengths)
    for keys in (128, 256):
        cu_k = torch.arange(BATCH + 1, device="cuda", dtype=torch.int32) * keys
        tensors = qkv(int(cu[-1]), BATCH * keys)
        pairs = cross_pairs(lengths, keys)
        peers = varlen(cu, cu_k, LONGEST, keys)
        yield _case(f"{keys} keys, softmax", tensors, cu, cu_k, pairs, softmax(), peers, (LONGEST, keys))
        # No peer has activations; softmax over the same pairs shows what attention costs there.
        peers = {f"{name}, softmax": function for name, function in peers.items()}
        peers |= padded(lengths, LONGEST, keys, "gelu_tanh")
        yield _case(f"{keys} keys, gelu_tanh", tensors, cu, cu_k, pairs, activated("gelu_tanh"), peers, (LONGEST, keys))


def short_query_cases() -> Iterator[Case]:
    lengths = jagged_lengths()
    cu_k = offsets(lengths)
    rows = int(cu_k[-1])
    cu_q = torch.arange(BATCH + 1, device="cuda", dtype=torch.int32) * 128
    tensors = qkv(BATCH * 128, rows)
    peers = varlen(cu_q, cu_k, 128, LONGEST)
    pairs = cross_pairs(128, lengths)
    yield _case("128 private queries, softmax", tensors, cu_q, cu_k, pairs, softmax(), peers, (128, LONGEST))
    seeds = (randn(64, HEADS, DIM), *tensors[1:])
    repeated = offsets(torch.full((BATCH,), 64))
    peers = {
        f"{name}, seeds repeated": lambda q, k, v, f=f: f(q.repeat(BATCH, 1, 1), k, v)
        for name, f in varlen(repeated, cu_k, 64, LONGEST).items()
    }
    op = softmax(broadcast_query=True)
    case = _case("64 broadcast seeds, softmax", seeds, None, cu_k, cross_pairs(64, lengths), op, peers, (64, LONGEST))
    case.memory_bound = True
    yield case


def short_sequence_cases() -> Iterator[Case]:
    lengths = jagged_lengths(16_384, 32)
    cu = offsets(lengths)
    rows = int(cu[-1])
    tensors = qkv(rows, rows, 64)
    pairs = full_pairs(lengths)
    peers = varlen(cu, cu, 32, 32)
    yield _case("0..32 tokens, softmax, D=64", tensors, cu, cu, pairs, softmax(), peers, (32, 32))
    yield _case("0..32 tokens, silu, D=64", tensors, cu, cu, pairs, activated("silu"), {}, (32, 32))


CASES = {
    "self": self_cases,
    "window": window_cases,
    "block": block_cases,
    "short_key": short_key_cases,
    "short_query": short_query_cases,
    "short_sequence": short_sequence_cases,
}


def _case(
    name: str,
    tensors: tuple[Tensor, Tensor, Tensor],
    cu_q: Tensor | None,
    cu_k: Tensor,
    pairs: int,
    op: Callable[..., Tensor],
    peers: dict[str, Attention],
    longest: tuple[int, int],
) -> Case:
    # For self-attention the op is told so, by one and the same offsets tensor.
    mine = {"ours": lambda q, k, v: op(q, k, v, cu_q, cu_k, *longest)}
    return Case(name, tensors, cu_q, cu_k, pairs, mine | peers, op)


def first_sequences(case: Case) -> tuple[int, int, int]:
    """Sequences, queries and keys at the start of the batch, few enough for float32."""
    ends_k = case.offsets_k.tolist()
    ends_q = [len(case.tensors[0])] * len(ends_k) if case.offsets_q is None else case.offsets_q.tolist()
    both = ends_k if case.offsets_q is None else [max(q, k) for q, k in zip(ends_q, ends_k, strict=True)]
    count = max(1, sum(end <= EXACT_TOKENS for end in both[1:]))
    return count, ends_q[count], ends_k[count]


def errors(case: Case, out: Tensor, gradients: tuple[Tensor, ...], grad_out: Tensor) -> tuple[float, float]:
    """Relative Frobenius errors of the output and of the worst gradient on the first sequences."""
    count, rows_q, rows_k = first_sequences(case)
    rows_out = rows_q if case.offsets_q is not None else rows_q * count
    leaves = [x[:n].float().requires_grad_() for x, n in zip(case.tensors, (rows_q, rows_k, rows_k), strict=True)]
    cu_q = None if case.offsets_q is None else case.offsets_q[: count + 1]
    cu_k = cu_q if case.offsets_k is case.offsets_q else case.offsets_k[: count + 1]
    exact = case.exact(*(x.cpu() for x in leaves), None if cu_q is None else cu_q.cpu(), cu_k.cpu())
    grads = torch.autograd.grad(exact, leaves, grad_out[:rows_out].float().cpu())

    def relative(actual: Tensor, expected: Tensor) -> float:
        expected = expected.to(actual.device)
        return float((actual[: len(expected)].float() - expected).norm() / expected.norm())

    pairs = list(zip(gradients, grads, strict=True))
    if case.offsets_q is None:
        pairs = pairs[1:]  # the gradient of shared queries sums over all sequences
    return relative(out[:rows_out], exact.detach()), max(relative(a, e) for a, e in pairs)


def measure(case: Case, rounds: int, flush: Tensor) -> None:
    """Times all peers forward and backward, and prints a line for each."""
    grad_out = None
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    accuracy: dict[str, tuple[float, float]] = {}
    for peer, run in case.peers.items():
        leaves = [x.detach().requires_grad_() for x in case.tensors]
        try:
            out = run(*leaves)
            grad_out = randn(*out.shape) if grad_out is None else grad_out
            gradients = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
        except Exception as error:  # a peer that cannot is reported, not hidden
            print(f"{case.name:32} {peer:26} failed: {str(error).splitlines()[0][:100]}", flush=True)
            continue
        same = "softmax" in case.name or "softmax" not in peer
        accuracy[peer] = errors(case, out.detach(), gradients, grad_out) if same else (float("nan"), float("nan"))
        del gradients

        def forward(run: Attention = run) -> None:
            with torch.no_grad():
                run(*case.tensors)

        def backward(out: Tensor = out, leaves: list[Tensor] = leaves, grad_out: Tensor = grad_out) -> None:
            torch.autograd.grad(out, leaves, grad_out, retain_graph=True)

        calls[peer, "forward"], calls[peer, "backward"] = forward, backward
    times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    hosts: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for round_ in range(rounds + 2):
        for key, call in calls.items():
            flush.zero_()
            torch.cuda._sleep(HEAD_START)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            began = time.perf_counter()
            call()
            host = time.perf_counter() - began
            end.record()
            torch.cuda.synchronize()
            if round_ >= 2:
                times[key].append(start.elapsed_time(end))
                hosts[key].append(host)
    query, key, _ = case.tensors
    for (peer, direction), samples in times.items():
        milliseconds = statistics.median(samples)
        factor = 4 if direction == "forward" else 10
        teraflops = factor * query.shape[1] * query.shape[2] * case.pairs / milliseconds / 1e9
        error = accuracy[peer][direction == "backward"]
        case.results.append(
            {
                "case": case.name,
                "direction": direction,
                "peer": peer,
                "milliseconds": round(milliseconds, 4),
                "teraflops": round(teraflops, 1),
                "host_microseconds": round(statistics.median(hosts[peer, direction]) * 1e6),
                "bytes": moved(case, direction) if case.memory_bound else 0,
                "relative_error": f"{error:.2e}",
            }
        )


def moved(case: Case, direction: str) -> int:
    """Bytes that must be read or written, each tensor once."""
    query, key, value = (x.nbytes for x in case.tensors)
    out = query if case.offsets_q is not None else query * (len(case.offsets_k) - 1)
    return query + key + value + out if direction == "forward" else 2 * (query + key + value) + out


def copy_rate() -> float:
    """Terabytes per second of a device copy, read plus written."""
    source = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    milliseconds = triton.testing.do_bench(lambda: target.copy_(source), return_mode="median")
    return 2 * source.nbytes / milliseconds / 1e9


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"comma-separated names out of {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device, today = torch.cuda.get_device_name(), datetime.date.today().isoformat()
    rate = copy_rate()
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    print(f"{device}, torch {torch.__version__}, triton {triton.__version__}, copy {rate:.2f} TB/s")
    results: list[dict[str, Any]] = []
    versions = {"device": device, "torch": torch.__version__, "triton": triton.__version__, "date": today}
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / f"{today}_kernels_attention_{device.split()[-1].lower()}.csv"
    for name in filter(None, arguments.only.split(",")) if arguments.only else CASES:
        for case in CASES[name]():
            measure(case, arguments.rounds, flush)
            for row in case.results:
                share = f"{row['bytes'] / row['milliseconds'] / 1e9 / rate:6.1%}" if row["bytes"] else ""
                print(
                    f"{row['case']:32} {row['direction']:8} {row['peer']:26} {row['milliseconds']:8.3f} ms "
                    f"{row['teraflops']:6.0f} TFLOP/s {row['host_microseconds']:5d} us "
                    f"{row['relative_error']} {share}",
                    flush=True,
                )
                row |= {"roofline": share.strip(), "copy_tb_per_s": round(rate, 3)}
            results += case.results
            write(path, [row | versions for row in results])
            del case
            torch.cuda.empty_cache()
            torch._dynamo.reset()
    print(path)


if __name__ == "__main__":
    main()
