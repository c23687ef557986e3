"""Block attention and rotation on one GPU, beside what torch offers, in one process.

    python benchmarks/kernels_block.py [--out benchmarks/results/DATE_kernels_block_h200.csv] [--flex]

All candidates of a case take the same inputs. They run in turns, with the second-level cache flushed before each run,
and the median of the device times counts. TFLOP/s count visible pairs only: 4 H D per pair forward, 2.5 times that
backward.
The floor is the time in which a copy on the same device moves what has to be moved: query, key, value and gradient of
the output in; output or gradients out. Errors are relative (Frobenius norm) to float64 on a sample of the sequences.
"""

import argparse
import csv
import datetime
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from lightning_gem.kernels import block_attention, lengths_to_cu_seqlens, rotary
from lightning_gem.kernels.block.reference import block_offsets
from lightning_gem.kernels.pairs import block_pairs, causal_block_pairs

HEADS, DIM = 4, 128
SAMPLE = 8  # sequences of which errors are measured
ROOT = Path(__file__).parents[1]
MARK = "ours"


@dataclass
class Case:
    """One work item: lengths drawn uniformly, and the options of ``block_attention``."""

    name: str
    num_sequences: int = 512
    shortest: int = 0
    longest: int = 2048
    options: dict[str, Any] = field(default_factory=dict)
    rotary_dtype: torch.dtype | None = None


CASES = [
    Case("block-64"),
    Case("block-64-production", 1152, 800, 2000),
    Case("block-64-rotary", rotary_dtype=torch.float16),
    Case("block-64-rotary-fp32-angles", rotary_dtype=torch.float32),
    Case("block-64-gelu_tanh", options={"activation": "gelu_tanh"}),
    Case("block-64-causal", options={"causal": True}),
    Case("block-16", options={"block_size": 16}),
    Case("block-128", options={"block_size": 128}),
]


class Clock:
    """Medians of device times of functions that run in turns."""

    def __init__(self) -> None:
        # Large, so that the host has the time to launch what is timed: 2 GiB take the device half a millisecond.
        self.flush = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")

    def medians(self, functions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
        """Milliseconds of every function."""
        for function in functions.values():
            for _ in range(2):
                function()
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in functions}
        for _ in range(rounds):
            for name, function in functions.items():
                self.flush.zero_()
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                function()
                end.record()
                events[name].append((start, end))
            torch.cuda.synchronize()
        return {name: statistics.median(a.elapsed_time(b) for a, b in pairs) for name, pairs in events.items()}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def attention_rows(case: Case, clock: Clock, rounds: int, with_flex: bool) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(case.shortest, case.longest + 1, (case.num_sequences,), generator=generator)
    cu_seqlens = lengths_to_cu_seqlens(lengths.to(torch.int32)).cuda()
    num_rows = int(lengths.sum())
    block_size, causal = case.options.get("block_size", 64), case.options.get("causal", False)
    count = causal_block_pairs if causal else block_pairs
    pairs = count(lengths, block_size)
    torch.manual_seed(0)
    query, key, value, grad = (torch.randn(num_rows, HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (query, key, value)]
    angles = None
    angle_bytes = 0
    if case.rotary_dtype is not None:
        angle = 3 * torch.randn(num_rows, DIM // 2, device="cuda")
        angles = angle.cos().to(case.rotary_dtype), angle.sin().to(case.rotary_dtype)
        angle_bytes = sum(x.nbytes for x in angles)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return block_attention(q, k, v, cu_seqlens, case.longest, rotary=angles, **case.options)

    candidates: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {MARK: ours}
    if angles is not None:
        cos, sin = angles
        candidates["ours, rotation unfused"] = lambda q, k, v: block_attention(
            rotary(q, cos, sin), rotary(k, cos, sin), v, cu_seqlens, case.longest, **case.options
        )
    if "activation" not in case.options:
        candidates["torch varlen_attn"] = varlen_candidate(cu_seqlens, block_size, causal, angles)
        if with_flex and angles is None:
            candidates["torch FlexAttention"] = flex_candidate(lengths, block_size, causal)

    sample = slice(0, int(lengths[:SAMPLE].sum()))
    exact_leaves = [x.detach()[sample].double().requires_grad_() for x in leaves]
    exact_angles = None if angles is None else tuple(x[sample].double() for x in angles)
    exact = block_attention(*exact_leaves, cu_seqlens[: SAMPLE + 1], rotary=exact_angles, **case.options)
    exact_gradients = torch.autograd.grad(exact, exact_leaves, grad[sample].double())

    forwards, backwards, errors = {}, {}, {}
    for name, op in candidates.items():
        out = op(*leaves)
        gradients = torch.autograd.grad(out, leaves, grad, retain_graph=True)
        errors[name] = (
            relative_error(out.detach()[sample], exact.detach()),
            max(relative_error(a[sample], e) for a, e in zip(gradients, exact_gradients, strict=True)),
        )
        forwards[name] = lambda op=op: op(*(x.detach() for x in leaves))
        backwards[name] = lambda out=out: torch.autograd.grad(out, leaves, grad, retain_graph=True)
    tensor = query.nbytes
    floor_bytes = {"forward": 4 * tensor + angle_bytes, "backward": 7 * tensor + angle_bytes}
    flops = {"forward": 4 * HEADS * DIM * pairs, "backward": 10 * HEADS * DIM * pairs}
    rows = []
    for way, functions in (("forward", forwards), ("backward", backwards)):
        for name, milliseconds in clock.medians(functions, rounds).items():
            rows.append(
                {
                    "case": case.name,
                    "direction": way,
                    "candidate": name,
                    "ms": milliseconds,
                    "tflops": flops[way] / milliseconds / 1e9,
                    "needed_gb": floor_bytes[way] / 1e9,
                    "error": errors[name][way == "backward"],
                }
            )
    return rows


def varlen_candidate(
    cu_seqlens: Tensor, block_size: int, causal: bool, angles: tuple[Tensor, Tensor] | None
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Every block is a sequence of its own; rotations are torch's, compiled."""
    from torch.nn.attention.varlen import varlen_attn

    from lightning_gem.kernels.rope.reference import rotary_halves

    blocks = block_offsets(cu_seqlens, block_size).to("cuda", torch.int32)
    options: dict[str, Any] = {"window_size": (-1, 0)} if causal else {}
    rotate = torch.compile(rotary_halves, dynamic=True)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if angles is not None:
            q, k = rotate(q, *angles), rotate(k, *angles)
        return varlen_attn(q, k, v, blocks, blocks, block_size, block_size, **options)

    return run


def flex_candidate(lengths: Tensor, block_size: int, causal: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """One packed sequence with a mask; building the mask is not timed."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    sequence = torch.repeat_interleave(lengths).cuda()
    position = torch.cat([torch.arange(int(n)) for n in lengths]).cuda()

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        visible = (sequence[i] == sequence[j]) & (position[i] // block_size == position[j] // block_size)
        return visible & (j <= i) if causal else visible

    n = len(sequence)
    block_mask = torch.compile(create_block_mask)(mask, None, None, n, n, device="cuda")
    compiled = torch.compile(flex_attention)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        return compiled(q, k, v, block_mask=block_mask)[0].transpose(0, 1)

    return run


def rotary_rows(clock: Clock, rounds: int) -> list[dict[str, Any]]:
    """Queries and keys as slices of one projection."""
    from lightning_gem.kernels.rope.reference import rotary_halves

    num_rows = 524_288
    fused = torch.randn(num_rows, 3 * HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    x = fused[:, : 2 * HEADS]
    angle = 3 * torch.randn(num_rows, DIM // 2, device="cuda")
    cos, sin = angle.cos(), angle.sin()
    compiled = torch.compile(rotary_halves, dynamic=True)
    candidates = {
        MARK: lambda: rotary(x, cos, sin),
        "torch compiled": lambda: compiled(x, cos, sin),
        "torch eager": lambda: rotary_halves(x, cos, sin),
    }
    exact = rotary_halves(x[:4096].double(), cos[:4096].double(), sin[:4096].double())
    needed = 2 * x.numel() * 2 + cos.nbytes + sin.nbytes
    return [
        {
            "case": "rotary of query and key, fp32 angles",
            "direction": "forward",
            "candidate": name,
            "ms": milliseconds,
            "tflops": 0.0,
            "needed_gb": needed / 1e9,
            "error": relative_error(candidates[name]()[:4096], exact),
        }
        for name, milliseconds in clock.medians(candidates, rounds).items()
    ]


def copy_rate(clock: Clock, rounds: int) -> float:
    """Gigabytes per second that a copy on the device reads and writes."""
    source = torch.randn(1 << 29, device="cuda").to(torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * source.nbytes / clock.medians({"copy": lambda: target.copy_(source)}, rounds)["copy"] / 1e6


def main() -> None:
    """Prints the table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--flex", action="store_true", help="also compile FlexAttention (slow to start)")
    parser.add_argument("--cases", nargs="*", default=[case.name for case in CASES])
    args = parser.parse_args()
    clock = Clock()
    bandwidth = copy_rate(clock, args.rounds)
    rows = [
        row for case in CASES if case.name in args.cases for row in attention_rows(case, clock, args.rounds, args.flex)
    ] + rotary_rows(clock, args.rounds)
    about = (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, "
        f"Python {sys.version.split()[0]}, bf16, H={HEADS}, D={DIM}; copy {bandwidth / 1e3:.2f} TB/s"
    )
    print(about)
    for row in rows:
        row["floor_share"] = row["needed_gb"] / bandwidth * 1e3 / row["ms"]
        print(
            f"{row['case']:<36} {row['direction']:<8} {row['candidate']:<22} {row['ms']:8.3f} ms "
            f"{row['tflops']:7.1f} TFLOP/s  {row['floor_share']:6.1%} of the floor  error {row['error']:.1e}"
        )
    args.output.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name().split()[-1].lower()
    path = args.output / f"{datetime.date.today()}_kernels_block_{device}.csv"
    with path.open("w", newline="") as file:
        file.write(f"# {datetime.date.today()}, {about}\n# python -m benchmarks.kernels_block\n")
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows({key: f"{x:.4g}" if isinstance(x, float) else x for key, x in row.items()} for row in rows)
    print(path)


if __name__ == "__main__":
    main()
