"""FP8 on one Hopper GPU: norm + linear forward and backward beside bf16, GEMMs alone, quantisation beside a copy.

    python -m benchmarks.precision_speed [--output benchmarks/results] [--only layers,gemm,quantise] [--rounds 20]

Peers run interleaved, round by round, with the L2 cache flushed before each call; medians, beside the relative error
against float32. ``layers`` include every conversion; their gradients go to the input and to the weight.
"""

import argparse
import csv
import datetime
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernels_around import Timer
from lightning_gem.kernels import norm_linear
from lightning_gem.precision import gluon_scaled, triton_rows
from lightning_gem.precision.linear import low_precision_linear
from lightning_gem.precision.mx import mx_quantize
from lightning_gem.precision.norm_linear import low_precision_norm_linear
from lightning_gem.precision.scaled import Scaled, dequantize
from lightning_gem.precision.triton_quantize import mx_quantize_triton

BF16 = torch.bfloat16
ROOT = Path(__file__).parents[1]
ROWS = 262_144
SHAPES = ((512, 1536), (1024, 4096))
Row = dict[str, Any]
Run = Callable[[], Any]


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device="cuda").mul_(scale).to(BF16)


def relative(actual: Tensor, exact: Tensor) -> float:
    """Relative error by norm, over at most 2**28 numbers."""
    a, e = (t.flatten()[: 2**28].float() for t in (actual, exact))
    return float((a - e).norm() / e.norm())


class Bench:
    """Times interleaved peers and keeps the table."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.timer = Timer()
        self.table: list[Row] = []

    def __call__(
        self,
        case: str,
        peers: dict[str, Run],
        errors: Callable[[str, Any], dict[str, float]] | None = None,
        gigabytes: dict[str, float] | float = 0.0,
        teraflops: float = 0.0,
        base: str | None = None,
    ) -> None:
        """Runs a case; the speed-up is over the fastest of the peers whose name starts with ``base``."""
        rows: dict[str, Row] = {}
        for name in list(peers):
            try:
                out = peers[name]()
                rows[name] = {"case": case, "peer": name, **(errors(name, out) if errors else {})}
                del out
                peers[name]()
            except Exception as exception:  # a peer that cannot run is reported, not fatal
                self.report({"case": case, "peer": name, "note": repr(exception)[:200]})
                del peers[name]
        times: dict[str, list[float]] = {name: [] for name in peers}
        for _ in range(self.rounds):
            for name, function in peers.items():
                times[name].append(self.timer(function))
        medians = {name: statistics.median(values) for name, values in times.items()}
        bases = [value for name, value in medians.items() if base and name.startswith(base)]
        for name, ms in medians.items():
            row = rows[name] | {"ms": round(ms, 4), "spread": round(max(times[name]) / min(times[name]) - 1, 3)}
            size = gigabytes.get(name, 0.0) if isinstance(gigabytes, dict) else gigabytes
            if size:
                row["TB/s"] = round(size / ms, 3)
                if "copy" in medians and isinstance(gigabytes, dict):
                    row["share of copy"] = round(row["TB/s"] / (gigabytes["copy"] / medians["copy"]), 3)
            if teraflops:
                row["TFLOP/s"] = round(teraflops / ms * 1e3, 1)
            if bases:
                row["speed-up"] = round(min(bases) / ms, 3)
            self.report(row)
        torch.cuda.empty_cache()

    def report(self, row: Row) -> None:
        """Prints and keeps a line."""
        self.table.append(row)
        print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)


def layers(bench: Bench, compiled: bool) -> None:
    """Norm, then linear, forward and backward."""
    for width, outs in SHAPES:
        x, weight, grad = randn(ROWS, width), randn(outs, width, scale=width**-0.5), randn(ROWS, outs)
        x.requires_grad_()
        weight.requires_grad_()

        def unfused(x: Tensor, w: Tensor) -> Tensor:
            return F.linear(F.rms_norm(x, x.shape[1:], eps=1e-5), w)

        functions: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
            "bf16 eager": unfused,
            "bf16 norm_linear": norm_linear,
            "fp8_rowwise": lambda x, w: low_precision_norm_linear(x, w, None, "fp8_rowwise"),
            "fp8_forward": lambda x, w: low_precision_norm_linear(x, w, None, "fp8_forward"),
            "fp8_rowwise, unfused norm": lambda x, w: low_precision_linear(
                F.rms_norm(x, x.shape[1:], eps=1e-5), w, None, "fp8_rowwise"
            ),
        }
        if compiled:
            torch._dynamo.reset()
            functions["bf16 compiled"] = torch.compile(unfused, dynamic=False)
        wide = [t.detach().float().requires_grad_() for t in (x, weight)]
        exact = unfused(*wide)
        exact_grads = torch.autograd.grad(exact, wide, grad.float())

        def step(f: Callable[[Tensor, Tensor], Tensor], x: Tensor = x, w: Tensor = weight, g: Tensor = grad) -> Run:
            def run() -> Any:
                out = f(x, w)
                return out.detach(), *torch.autograd.grad(out, (x, w), g)

            return run

        def errors(
            name: str, out: Any, exact: Tensor = exact, grads: tuple[Tensor, ...] = exact_grads
        ) -> dict[str, float]:
            pairs = zip(("error", "error dx", "error dw"), out, (exact, *grads), strict=True)
            return {key: float(f"{relative(a, e):.3g}") for key, a, e in pairs}

        name = f"rms norm + linear {ROWS}x{width} -> {outs}"
        flops = 6 * ROWS * width * outs / 1e12
        bench(
            f"{name} forward + backward",
            {key: step(f) for key, f in functions.items()},
            errors,
            teraflops=flops,
            base="bf16",
        )
        with torch.no_grad():
            x.requires_grad_(False)
            weight.requires_grad_(False)
            forwards = {key: lambda f=f, x=x, w=weight: f(x, w) for key, f in functions.items()}
            bench(f"{name} forward", forwards, teraflops=flops / 3, base="bf16")


def gemm(bench: Bench) -> None:
    """Operands already quantised: the three GEMMs of a layer."""
    for width, outs in SHAPES:
        for kind, (m, k, n) in {
            "forward": (ROWS, width, outs),
            "input gradient": (ROWS, outs, width),
            "weight gradient": (outs, ROWS, width),
        }.items():
            a, b = randn(m, k), randn(n, k)
            low_a, low_b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
            scale_a, scale_b = (torch.rand(size, 1, device="cuda") + 0.5 for size in (m, n))
            one = torch.ones((), device="cuda")

            def tensorwise(fast: bool, a: Tensor = low_a, b: Tensor = low_b, one: Tensor = one) -> Run:
                return lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=BF16, use_fast_accum=fast)

            def rowwise(
                fast: bool, a: Tensor = low_a, b: Tensor = low_b, s: Tensor = scale_a, t: Tensor = scale_b
            ) -> Run:
                return lambda: torch._scaled_mm(a, b.t(), s, t.t(), out_dtype=BF16, use_fast_accum=fast)

            peers: dict[str, Run] = {
                "bf16": lambda a=a, b=b: torch.mm(a, b.t()),
                "tensor, fast": tensorwise(True),
                "tensor, accurate": tensorwise(False),
            }
            if kind == "weight gradient":
                for part in (8192, 16384, 32768):
                    peers[f"gluon, parts of {part}"] = lambda a=low_a, b=low_b, p=part: gluon_scaled.matmul_parts(
                        a, b, p
                    )
            else:
                peers["row, fast"] = rowwise(True)
                peers["row, accurate"] = rowwise(False)
                for config in ((256, 3), (128, 4)):
                    peers[f"gluon {config}"] = lambda a=low_a, b=low_b, s=scale_a, t=scale_b, c=config: (
                        gluon_scaled.matmul_rows(a, b, s, t, c)
                    )
            limit = min(m, 4096)
            codes = low_a[:limit].float() @ low_b.float().t()
            low, high = Scaled(low_a[:limit], scale_a[:limit], 1, k), Scaled(low_b, scale_b, 1, k)
            values = dequantize(low) @ dequantize(high).t()

            def errors(name: str, out: Any, c: Tensor = codes, v: Tensor = values, r: int = limit) -> dict[str, float]:
                if name == "bf16":
                    return {}
                scaled = name.startswith("row") or name.startswith("gluon (")
                return {"error": float(f"{relative(out[:r], v if scaled else c):.3g}")}

            bench(f"{kind} {m}x{k} x {k}x{n}", peers, errors, teraflops=2 * m * k * n / 1e12, base="bf16")


def quantise_cases(bench: Bench) -> Iterator[None]:
    for rows, width in ((ROWS, 512), (ROWS, 1536), (ROWS, 4096)):
        x = randn(rows, width)
        source = torch.empty(x.nbytes, dtype=torch.uint8, device="cuda").random_(0, 255)
        target = torch.empty_like(source)
        size = x.numel() / 1e9
        peers: dict[str, Run] = {"copy": lambda s=source, t=target: t.copy_(s)}
        sizes = {"copy": 4 * size}
        for name, kinds in (
            ("mx rows", {}),
            ("mx columns", {"rows": False, "columns": True}),
            ("mx both", {"columns": True}),
            ("mx square", {"rows": False, "square": True}),
        ):
            peers[name] = lambda x=x, k=kinds: mx_quantize_triton(x, **k)
            sizes[name] = (2 + (2 if name == "mx both" else 1) * 33 / 32) * size
        peers["fp8 rows"] = lambda x=x: triton_rows.quantize(x, None, None, None, 0.0, "identity")
        peers["rms norm, fp8 rows"] = lambda x=x: triton_rows.quantize(x, None, None, "rms", 1e-5, "identity")
        sizes["fp8 rows"] = sizes["rms norm, fp8 rows"] = 3 * size
        for tile in ((8, 128, 4), (8, 256, 8), (16, 128, 8), (16, 64, 4), (32, 64, 8), (4, 256, 8)):
            peers[f"fp8 both {tile}"] = lambda x=x, t=tile: triton_rows.quantize_both(x, tile=t)
            sizes[f"fp8 both {tile}"] = 4 * size
        codes, scales = triton_rows.quantize(x, None, None, None, 0.0, "identity")
        ratio = torch.ones_like(scales)
        for tile in ((32, 64, 4), (16, 128, 4), (32, 128, 8)):
            peers[f"shift, transposed {tile}"] = lambda c=codes, r=ratio, t=tile: triton_rows.shift_transposed(
                c, r, tile=t
            )
            sizes[f"shift, transposed {tile}"] = 2 * size
        bench(f"quantise {rows}x{width}", peers, gigabytes=sizes)
        yield


def quantise(bench: Bench) -> None:
    """Quantisation beside a copy; bytes count every tensor once."""
    x = randn(4096, 512)
    exact = mx_quantize(x)
    assert torch.equal(mx_quantize_triton(x)["rows"].data, exact.data)
    for _ in quantise_cases(bench):
        pass


COLUMNS = (
    "case", "peer", "ms", "spread", "speed-up", "TFLOP/s", "TB/s", "share of copy", "error", "error dx", "error dw",
    "note",
)  # fmt: skip


def main() -> None:
    """Runs the chosen cases, prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--only", default="layers,gemm,quantise")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--no-compiled", action="store_true", help="leave out torch.compile")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    bench = Bench(options.rounds)
    chosen = options.only.split(",")
    if "gemm" in chosen:
        gemm(bench)
    if "quantise" in chosen:
        quantise(bench)
    if "layers" in chosen:
        layers(bench, not options.no_compiled)
    today = datetime.date.today().isoformat()
    device = torch.cuda.get_device_name()
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{today}_precision_speed_{device.split()[-1].lower()}.csv"
    with path.open("w", newline="") as file:
        file.write(f"# {today}, {device}, torch {torch.__version__}, triton {triton.__version__}, ")
        file.write(f"python -m benchmarks.precision_speed {' '.join(sys.argv[1:])}, medians, L2 flushed\n")
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(bench.table)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
