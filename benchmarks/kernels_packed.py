"""Self-attention over very short sequences beside torch's variable-length attention, on one GPU.

    python -m benchmarks.kernels_packed [--rounds 15] [--output benchmarks/results]

Lengths are uniform on [0, 32], B=16,384, H=4, D=64, bfloat16. All peers run in one process, round by round, with the L2
cache flushed before every call; medians are printed beside the relative error of the output, and of the worst gradient,
against float32 on the first sequences. ``roofline`` is the share of the device's copy rate, every tensor moved once.
"""

import argparse
import csv
import datetime
import inspect
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from lightning_gem.kernels import gdpa, jagged_flash_attention, lengths_to_cu_seqlens
from lightning_gem.kernels.attention.packed import block_rows, build_packing

BATCH, LONGEST, HEADS, DIM = 16_384, 32, 4, 64
EXACT_SEQUENCES = 512

Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def peers() -> dict[str, Attention]:
    """Functions of (query, key, value, cu_seqlens) by name."""
    found: dict[str, Attention] = {}
    for backend in ("packed", "triton", "hopper"):
        found[f"softmax, {backend}"] = lambda q, k, v, cu, backend=backend: jagged_flash_attention(  # type: ignore[misc]
            q, k, v, cu, None, LONGEST, LONGEST, backend=backend
        )
    for backend in ("packed", "triton"):
        found[f"gelu_tanh, {backend}"] = lambda q, k, v, cu, backend=backend: gdpa(  # type: ignore[misc]
            q, k, v, cu, None, LONGEST, LONGEST, scale=DIM**-0.5, backend=backend
        )
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return found
    print("varlen_attn", inspect.signature(varlen_attn))
    found["softmax, varlen_attn"] = lambda q, k, v, cu: varlen_attn(q, k, v, cu, cu, LONGEST, LONGEST)
    return found


def exact(name: str, q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
    if name.startswith("softmax"):
        return jagged_flash_attention(q, k, v, cu, backend="reference")
    return gdpa(q, k, v, cu, scale=DIM**-0.5, backend="reference")


def errors(name: str, op: Attention, inputs: tuple[Tensor, ...], grad: Tensor, cu: Tensor) -> tuple[float, float]:
    """Relative errors of the output and of the worst gradient."""
    cu = cu[: EXACT_SEQUENCES + 1]
    rows = int(cu[-1])
    results = []
    for function, dtype in ((op, inputs[0].dtype), (lambda *x: exact(name, *x), torch.float32)):
        leaves = [x[:rows].to(dtype).requires_grad_() for x in inputs]
        out = function(*leaves, cu)
        results.append((out, *torch.autograd.grad(out, leaves, grad[:rows].to(dtype))))
    worst = [float((a.float() - e).norm() / e.norm()) for a, e in zip(*results, strict=True)]
    return worst[0], max(worst[1:])


def timed(run: Callable[[], Any], flush: Tensor) -> float:
    """Microseconds on the device; the flush also keeps it busy until all is launched."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)


def copy_rate(flush: Tensor) -> float:
    """Bytes read and written per microsecond by a large copy."""
    half = len(flush) // 2
    times = [timed(lambda: flush[:half].copy_(flush[half:]), flush) for _ in range(10)]
    return 2 * half / statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    lengths = torch.randint(0, LONGEST + 1, (BATCH,), generator=torch.Generator().manual_seed(1))
    cu = lengths_to_cu_seqlens(lengths.to("cuda", torch.int32))
    rows = int(cu[-1])
    inputs = tuple(torch.randn(rows, HEADS, DIM, device="cuda").bfloat16() for _ in range(3))
    grad = torch.randn(rows, HEADS, DIM, device="cuda").bfloat16()
    flush = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    rate = copy_rate(flush)
    # Outputs and gradients are written, all others read; the log of the denominators is small.
    tensor_bytes = rows * HEADS * DIM * 2
    floor = {"forward": 4 * tensor_bytes / rate, "backward": 7 * tensor_bytes / rate}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"{rows} rows, copy {rate / 1e6:.2f} TB/s, floors {floor['forward']:.0f} and {floor['backward']:.0f} us")

    runs, table = {}, []
    for name, op in peers().items():
        try:
            error = errors(name, op, inputs, grad, cu)
        except ValueError as reason:
            print(f"{name}: {reason}")
            continue
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = op(*leaves, cu)

        def forward(op: Attention = op) -> Tensor:
            return op(*inputs, cu)

        def backward(out: Tensor = out, leaves: list[Tensor] = leaves) -> tuple[Tensor, ...]:
            return torch.autograd.grad(out, leaves, grad, retain_graph=True)

        runs[name] = (forward, backward, error)
        forward()
        backward()
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(arguments.rounds):
        for name, (forward, backward, _) in runs.items():
            times.setdefault((name, "forward"), []).append(timed(forward, flush))
            times.setdefault((name, "backward"), []).append(timed(backward, flush))
    print(f"{'':24}{'forward us':>11}{'roofline':>9}{'error':>10}{'backward us':>13}{'roofline':>9}{'error':>10}")
    for name, (_, _, error) in runs.items():
        medians = {side: statistics.median(times[name, side]) for side in floor}
        row = {"name": name}
        text = f"{name:24}"
        for side, width, err in (("forward", 11, error[0]), ("backward", 13, error[1])):
            share = floor[side] / medians[side]
            text += f"{medians[side]:{width}.1f}{share:9.1%}{err:10.2e}"
            row |= {
                f"{side}_us": f"{medians[side]:.1f}",
                f"{side}_roofline": f"{share:.3f}",
                f"{side}_error": f"{err:.2e}",
            }
        table.append(row)
        print(text)
    packing = [timed(lambda: build_packing(cu, rows, LONGEST, block_rows(LONGEST)), flush) for _ in range(10)]
    print(f"packing, once per batch: {statistics.median(packing):.1f} us")
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        device = torch.cuda.get_device_name().replace(" ", "_").lower()
        path = arguments.output / f"{datetime.date.today()}_kernels_packed_{device}.csv"
        versions = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=[*table[0], *versions], lineterminator="\n")
            writer.writeheader()
            writer.writerows(row | versions for row in table)


if __name__ == "__main__":
    main()
