"""Norms, gates, jagged operations, norm + linear, grouped GEMM and fused BCE beside torch, on one GPU.

    python -m benchmarks.kernels_around [--output benchmarks/results] [--only norm,gate] [--rounds 30]

Every case runs ours, eager torch and compiled torch, interleaved round by round with the L2 cache flushed before each
call, and prints medians beside the error against float64. GB/s count every tensor that must be read or written once;
`share` compares them with a device copy, or FLOP/s with `torch.mm` of the same shapes, measured in the same rounds.
"""

import argparse
import csv
import datetime
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import triton
from torch import Tensor
from torch.nn import functional as F

from lightning_gem import kernels as ours
from lightning_gem.kernels.jagged.reference import max_pool

BF16 = torch.bfloat16
COMPILED = True
ROOT = Path(__file__).parents[1]


@dataclass
class Case:
    """One workload: functions of the same inputs, and what it must move or compute.

    Attributes:
        name: Op, shape and pass.
        run: Functions by peer; the first is ours, and each returns a tensor or a tuple of tensors.
        exact: The same in float64 from the first rows, or None.
        gigabytes: Read and written once, or 0.
        teraflops: Counted for GEMMs, or 0.
        memory: Also measure the peak memory.
    """

    name: str
    run: dict[str, Callable[[], Any]]
    exact: Callable[[], Any] | None = None
    gigabytes: float = 0.0
    teraflops: float = 0.0
    memory: bool = False


def randn(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float32).mul_(scale).to(dtype)


def backward(function: Callable[..., Any], inputs: list[Tensor], grads: list[Tensor]) -> Callable[[], Any]:
    """A call of the backward pass alone, on a graph that is kept."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = function(*leaves)
    outs = [t for t in (out if isinstance(out, (tuple, list)) else [out]) if t.requires_grad]
    return lambda: torch.autograd.grad(outs, leaves, grads, retain_graph=True)


def double(function: Callable[..., Any], inputs: list[Tensor], grads: list[Tensor] | None = None) -> Callable[[], Any]:
    """The same in float64: outputs, or gradients where ``grads`` are given."""

    def run() -> Any:
        leaves = [t.double().requires_grad_() for t in inputs]
        out = function(*leaves)
        if grads is None:
            return out
        outs = out if isinstance(out, (tuple, list)) else [out]
        return torch.autograd.grad(list(outs), leaves, [g.double() for g in grads])

    return run


def pair(
    name: str,
    op: Callable[..., Any],
    torch_op: Callable[..., Any],
    inputs: list[Tensor],
    exact_op: Callable[..., Any] | None = None,
    saved: int | None = None,
    written: int | None = None,
    with_compiled: bool = False,
) -> Iterator[Case]:
    """Forward and backward of one op beside eager and compiled torch; ``inputs`` all get gradients.

    Bytes that the backward must read besides the gradients and must write are those of the inputs, if not given.
    """
    out = op(*inputs)
    outs = list(out) if isinstance(out, (tuple, list)) else [out]
    grads = [torch.randn_like(t) for t in outs]
    size_in, size_out = sum(t.nbytes for t in inputs), sum(t.nbytes for t in outs)
    peers = {"ours": op, "eager": torch_op}
    if with_compiled and COMPILED:
        torch._dynamo.reset()
        peers["compiled"] = torch.compile(torch_op, dynamic=False)
    yield Case(
        f"{name} forward",
        {peer: lambda f=function: f(*inputs) for peer, function in peers.items()},
        double(exact_op or torch_op, inputs),
        (size_in + size_out) / 1e9,
    )
    saved = size_in if saved is None else saved
    written = size_in if written is None else written
    yield Case(
        f"{name} backward",
        {peer: backward(function, inputs, grads) for peer, function in peers.items()},
        double(exact_op or torch_op, inputs, grads),
        (saved + size_out + written) / 1e9,
    )


def norm_cases() -> Iterator[Case]:
    rows = 262_144
    for width in (128, 512, 1024):
        n = rows * 512 // width
        x, residual = randn(n, width), randn(n, width)
        weight, bias = randn(width), randn(width)
        shape = (width,)
        yield from pair(
            f"rms_norm {n}x{width}",
            ours.jagged_rms_norm,
            lambda x, s=shape: F.rms_norm(x, s, eps=1e-5),
            [x],
            with_compiled=width == 512,
        )
        yield from pair(
            f"layer_norm affine {n}x{width}",
            ours.jagged_layer_norm,
            lambda x, w, b, s=shape: F.layer_norm(x, s, w, b, 1e-5),
            [x, weight, bias],
            with_compiled=width == 512,
        )
        if width == 512:
            yield from pair(
                f"rms_norm residual, sum returned {n}x{width}",
                lambda x, r: ours.jagged_rms_norm(x, residual=r, return_sum=True),
                lambda x, r, s=shape: (F.rms_norm(x + r, s, eps=1e-5), x + r),
                [x, residual],
                saved=x.nbytes,
                written=x.nbytes,
                with_compiled=True,
            )
            yield from pair(
                f"layer_norm silu {n}x{width}",
                lambda x: ours.jagged_layer_norm(x, activation="silu"),
                lambda x, s=shape: F.silu(F.layer_norm(x, s, eps=1e-5)),
                [x],
            )


def gate_cases() -> Iterator[Case]:
    x = randn(131_072, 2048)
    yield from pair(
        "swiglu 131072x2048",
        ours.swiglu,
        lambda x: F.silu(x[:, x.shape[1] // 2 :]) * x[:, : x.shape[1] // 2],
        [x],
        with_compiled=True,
    )
    a, b = randn(262_144, 512), randn(262_144, 512)
    yield from pair("sigmoid gate 262144x512", ours.gated, lambda v, s: torch.sigmoid(s) * v, [a, b])


def jagged_batch(batch: int, longest: int, width: int) -> tuple[Tensor, Tensor]:
    lengths = torch.randint(0, longest + 1, (batch,), device="cuda", dtype=torch.int32)
    cu = ours.lengths_to_cu_seqlens(lengths)
    return randn(int(cu[-1]), width), cu


def jagged_cases() -> Iterator[Case]:
    torch.manual_seed(0)
    x, cu = jagged_batch(512, 1024, 512)
    y, cu_y = jagged_batch(512, 64, 512)
    z, cu_z = jagged_batch(512, 512, 512)
    offsets = cu.long()
    lengths = cu.diff()
    sequence = torch.repeat_interleave(torch.arange(512, device="cuda"), lengths.long())
    dense = randn(512, 512)
    size = f"{len(x)}x512"
    yield from pair(
        f"sum_pool {size}",
        lambda x: ours.jagged_sum_pool(x, cu),
        lambda x: torch.segment_reduce(x, "sum", offsets=offsets, axis=0, initial=0),
        [x],
        lambda x: x.new_zeros(512, x.shape[1]).index_add(0, sequence, x),
        saved=0,
    )
    yield from pair(
        f"max_pool {size}",
        lambda x: ours.jagged_max_pool(x, cu),
        lambda x: torch.segment_reduce(x, "max", offsets=offsets, axis=0, initial=-1e9),
        [x],
        lambda x: max_pool(x, cu)[0],
        saved=0,
    )
    yield from pair(
        f"dense_add {size}",
        lambda x, d: ours.jagged_dense_add(x, d, cu),
        lambda x, d: x + d[sequence],
        [x, dense],
        saved=0,
        with_compiled=True,
    )
    yield from pair(
        f"dense_mul {size}", lambda x, d: ours.jagged_dense_mul(x, d, cu), lambda x, d: x * d[sequence], [x, dense]
    )
    offs = [cu.long(), cu_y.long(), cu_z.long()]
    order = torch.cat(
        [
            torch.arange(len(t), device="cuda")
            + sum(
                o[torch.bucketize(torch.arange(len(t), device="cuda"), c[1:].long(), right=True) + (1 if j < i else 0)]
                for j, o in enumerate(offs)
                if j != i
            )
            for i, (t, c) in enumerate(((x, cu), (y, cu_y), (z, cu_z)))
        ]
    ).argsort()
    yield from pair(
        f"concat of 3, {len(order)}x512",
        lambda x, y, z: ours.jagged_concat([x, y, z], [cu, cu_y, cu_z])[0],
        lambda x, y, z: torch.cat([x, y, z])[order],
        [x, y, z],
        saved=0,
    )


def norm_linear_cases() -> Iterator[Case]:
    for rows, width, outs in ((262_144, 512, 1536), (262_144, 512, 512), (65_536, 2048, 2048)):
        x, weight = randn(rows, width), randn(outs, width, scale=width**-0.5)
        grad = randn(rows, outs)
        flops = 2 * rows * width * outs / 1e12
        name = f"{rows}x{width} -> {outs}"

        def unfused(x: Tensor, w: Tensor) -> Tensor:
            return F.linear(F.rms_norm(x, x.shape[1:], eps=1e-5), w)

        def unfused_layer(x: Tensor, w: Tensor) -> Tensor:
            return F.linear(F.layer_norm(x, x.shape[1:], eps=1e-5), w)

        peers = {"ours": ours.norm_linear, "eager": unfused}
        if COMPILED and outs == 1536:
            torch._dynamo.reset()
            peers["compiled"] = torch.compile(unfused, dynamic=False)
        yield Case(
            f"rms norm + linear {name} forward",
            {
                **{peer: lambda x=x, w=weight, f=f: f(x, w) for peer, f in peers.items()},
                "gemm alone": lambda x=x, w=weight: torch.mm(x, w.t()),
            },
            double(unfused, [x, weight]),
            teraflops=flops,
        )
        if outs == 1536:
            yield Case(
                f"layer norm + linear {name} forward",
                {
                    "ours": lambda x=x, w=weight: ours.norm_linear(x, w, norm="layer"),
                    "eager": lambda x=x, w=weight: unfused_layer(x, w),
                    "gemm alone": lambda x=x, w=weight: torch.mm(x, w.t()),
                },
                double(unfused_layer, [x, weight]),
                teraflops=flops,
            )
            yield Case(
                f"rms norm + linear {name} backward",
                {
                    **{peer: backward(f, [x, weight], [grad]) for peer, f in peers.items()},
                    "gemm alone": lambda x=x, w=weight, g=grad: (g @ w, g.t() @ x),
                },
                double(unfused, [x, weight], [grad]),
                teraflops=2 * flops,
            )


def bce_cases() -> Iterator[Case]:
    for rows, width, tasks in ((1_048_576, 256, 8), (1_048_576, 512, 4)):
        x, weight, bias = randn(rows, width), randn(tasks, width, dtype=torch.float32, scale=0.05), randn(tasks).float()
        target = (torch.rand(rows, tasks, device="cuda") < 0.2).float()
        target[torch.rand_like(target) < 0.3] = torch.nan
        shares = torch.rand_like(target)
        leaves = [t.requires_grad_() for t in (x, weight, bias)]

        def unfused(x: Tensor, w: Tensor, b: Tensor, target: Tensor = target, shares: Tensor = shares) -> Tensor:
            logits = F.linear(x, w.to(x.dtype), b.to(x.dtype)).to(torch.promote_types(x.dtype, torch.float32))
            share = torch.where(target.isnan(), 0.0, shares)
            loss = F.binary_cross_entropy_with_logits(logits, target.nan_to_num().to(logits.dtype), reduction="none")
            return ((share * loss).sum(0) / share.sum(0)).sum()

        def step(loss: Callable[..., Tensor], leaves: list[Tensor] = leaves) -> Callable[[], Any]:
            def run() -> Any:
                total = loss(*leaves)
                return total.detach(), *torch.autograd.grad(total, leaves)

            return run

        def exact(leaves: list[Tensor] = leaves, loss: Callable[..., Tensor] = unfused) -> Any:
            wide = [t.detach().double().requires_grad_() for t in leaves]
            total = loss(*wide)
            return total.detach(), *torch.autograd.grad(total, wide)

        yield Case(
            f"linear + BCE {rows}x{width}, {tasks} tasks, forward + backward",
            {
                "ours": step(lambda x, w, b, t=target, s=shares: ours.fused_linear_bce(x, w, b, t, mask=s)[0]),
                "eager": step(unfused),
                **({"compiled": step(torch.compile(unfused, dynamic=False))} if COMPILED else {}),
            },
            exact,
            (2 * x.nbytes + 2 * target.nbytes) / 1e9,
            memory=True,
        )


def grouped_cases() -> Iterator[Case]:
    x, weight = randn(131_072, 512), randn(16, 512, 512, scale=512**-0.5)
    cu = ours.lengths_to_cu_seqlens(
        torch.tensor([0, 16384, 8192, 24576] * 2 + [8192, 0, 4096, 4096] * 2, device="cuda")
    )

    def loop(x: Tensor, w: Tensor) -> Tensor:
        ends = cu.tolist()
        return torch.cat([x[a:b] @ m for a, b, m in zip(ends[:-1], ends[1:], w, strict=True)])

    rows = int(cu[-1])
    x = x[:rows].contiguous()
    flops = 2 * rows * 512 * 512 / 1e12
    grad = randn(rows, 512)
    yield Case(
        f"grouped_mm 16 experts, {rows}x512 -> 512 forward",
        {"ours": lambda: ours.grouped_mm(x, weight, cu), "eager": lambda: loop(x, weight)},
        double(loop, [x, weight]),
        teraflops=flops,
    )
    yield Case(
        f"grouped_mm 16 experts, {rows}x512 -> 512 backward",
        {
            "ours": backward(lambda x, w: ours.grouped_mm(x, w, cu), [x, weight], [grad]),
            "eager": backward(loop, [x, weight], [grad]),
        },
        double(loop, [x, weight], [grad]),
        teraflops=2 * flops,
    )


CASES = {
    "norm": norm_cases,
    "bce": bce_cases,
    "norm_linear": norm_linear_cases,
    "gate": gate_cases,
    "jagged": jagged_cases,
    "grouped": grouped_cases,
}


def flatten(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else [t for t in out if t is not None]


def error(actual: Any, expected: list[Tensor]) -> float:
    """Largest relative error of the tensors, by norm."""
    worst = 0.0
    for a, e in zip(flatten(actual), expected, strict=False):
        difference = float((a.double() - e).norm() / e.norm().clamp(min=1e-30))
        worst = max(worst, difference) if difference == difference else float("nan")
    return worst


class Timer:
    """Times calls with events, after flushing the cache."""

    def __init__(self) -> None:
        self.scrub = torch.empty(64 * 2**20, dtype=torch.int32, device="cuda")

    def __call__(self, function: Callable[[], Any]) -> float:
        """Milliseconds of one call."""
        self.scrub.zero_()
        torch.cuda._sleep(4_000_000)  # two milliseconds in which the CPU gets ahead: GPU time is measured
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


def peak(function: Callable[[], Any]) -> float:
    """Gigabytes that a call holds at most, beyond what was allocated before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def measure(case: Case, rounds: int, timer: Timer, copy: Callable[[], Any], copy_gb: float) -> list[dict[str, Any]]:
    """Rows of the table: one per peer."""
    expected = None
    if case.exact is not None:
        expected = [t.detach() for t in flatten(case.exact())]
    failures, errors = {}, {}
    for name, function in list(case.run.items()):
        try:
            out = function()
            errors[name] = error(out, expected) if expected is not None and name != "gemm alone" else float("nan")
            del out
            function()
        except Exception as exception:  # a peer that cannot run is reported, not fatal
            failures[name] = repr(exception)[:300]
            del case.run[name]
    del expected
    torch.cuda.empty_cache()
    peaks = {name: peak(function) for name, function in case.run.items()} if case.memory else {}
    times: dict[str, list[float]] = {name: [] for name in [*case.run, "copy"]}
    for _ in range(rounds):
        for name, function in case.run.items():
            times[name].append(timer(function))
        times["copy"].append(timer(copy))
    medians = {name: statistics.median(values) for name, values in times.items()}
    copy_rate = copy_gb / medians["copy"]  # TB/s
    table = []
    for name in case.run:
        ms = medians[name]
        row: dict[str, Any] = {"case": case.name, "peer": name, "ms": round(ms, 4), "error": f"{errors[name]:.2e}"}
        if case.gigabytes:
            row["TB/s"] = round(case.gigabytes / ms, 2)
            row["share of copy"] = round(case.gigabytes / ms / copy_rate, 3)
        if case.teraflops:
            row["TFLOP/s"] = round(case.teraflops / ms * 1e3, 1)
            if "gemm alone" in medians:
                row["share of GEMM"] = round(medians["gemm alone"] / ms, 3)
        if name in peaks:
            row["peak GB"] = round(peaks[name], 3)
        row["copy TB/s"] = round(copy_rate, 2)
        table.append(row)
    table += [{"case": case.name, "peer": name, "error": message} for name, message in failures.items()]
    return table


COLUMNS = (
    "case", "peer", "ms", "TB/s", "share of copy", "TFLOP/s", "share of GEMM", "error", "peak GB", "copy TB/s",
)  # fmt: skip


def main() -> None:
    """Runs the chosen cases, prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--no-compiled", action="store_true", help="leave out torch.compile, which takes minutes")
    options = parser.parse_args()
    global COMPILED
    COMPILED = not options.no_compiled
    torch._functorch.config.donated_buffer = False  # a kept graph needs its buffers
    torch.manual_seed(0)
    timer = Timer()
    source = torch.randint(0, 255, (2**29,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    table: list[dict[str, Any]] = []
    for name in options.only.split(","):
        for case in CASES[name]():
            rows = measure(case, options.rounds, timer, lambda: target.copy_(source), 2 * source.nbytes / 1e9)
            for row in rows:
                print("  ".join(f"{row.get(column, '')!s}" for column in COLUMNS), flush=True)
            table += rows
            torch.cuda.empty_cache()
    today = datetime.date.today().isoformat()
    options.output.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name()
    path = options.output / f"{today}_kernels_around_{device.split()[-1].lower()}.csv"
    with path.open("w") as file:
        file.write(f"# {today}, {device}, torch {torch.__version__}, triton {triton.__version__}, ")
        file.write(f"python -m benchmarks.kernels_around --rounds {options.rounds}, medians, L2 flushed\n")
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(table)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
