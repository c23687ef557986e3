"""Recipe ``auto``: FP8 where it is faster than bf16 on this kind of GPU, bf16 everywhere else.

What is faster is a table of measurements, keyed by number of rows and widths. It is data: rank 0 measures and
broadcasts, checkpoints carry it, and a run that resumes or a rank that joins chooses as the others do. What no table
covers stays in bf16.
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gem.precision.matmul import native_rows
from lightning_gem.precision.recipes import RECIPES, PrecisionRecipe

CANDIDATES = ("fp8_rowwise", "fp8_forward")
# FP8 must gain this much: less is noise.
LEAST_GAIN = 1.03
ROWS = (16_384, 65_536)

Table = dict[str, str]
_table: Table = {}


def key(rows: int, outs: int, width: int) -> str:
    """Name of an entry: the rows are one of ``ROWS``."""
    return f"{rows}x{width}->{outs}"


def table() -> Table:
    """The table in force."""
    return dict(_table)


def use(entries: Table) -> None:
    """Replaces the table."""
    _table.clear()
    _table.update(entries)


def choose(rows: int, weight: Tensor, device: torch.device) -> PrecisionRecipe | None:
    """The recipe of a product, None for bf16: from the device, the widths and the bucket of the rows alone.

    Args:
        rows: Rows of the activations; the entry of the largest measured number of rows below decides.
        weight: (..., outputs, inputs).
        device: Where the product is.
    """
    if not native_rows(device) or weight.dtype == torch.float32 and not torch.is_autocast_enabled(device.type):
        return None
    outs, width = weight.shape[-2:]
    measured = [size for size in ROWS if size <= rows and key(size, outs, width) in _table]
    return RECIPES.get(_table[key(max(measured), outs, width)]) if measured else None


def measure(widths: Iterable[tuple[int, int]], device: torch.device, rows: Iterable[int] = ROWS) -> Table:
    """Times bf16 and the candidates, forward and backward with all conversions; collective where processes are joined.

    Args:
        widths: Outputs and inputs of the layers.
        device: A GPU of compute capability 9.0; elsewhere the table is empty.
        rows: Numbers of rows.

    Returns:
        ``bf16`` or a recipe per key.
    """
    entries: list[Table] = [{}]
    joined = dist.is_available() and dist.is_initialized()
    if native_rows(device) and (not joined or dist.get_rank() == 0):
        for outs, width in sorted(set(widths)):
            for size in rows:
                entries[0][key(size, outs, width)] = fastest(size, outs, width, device)
    if joined:
        dist.broadcast_object_list(entries, src=0)
    return entries[0]


def fastest(rows: int, outs: int, width: int, device: torch.device) -> str:
    """``bf16`` or the name of a recipe that beats it."""
    from lightning_gem.precision.linear import low_precision_linear

    generator = torch.Generator(device).manual_seed(0)
    x, weight, grad = (
        torch.randn(*shape, device=device, generator=generator, dtype=torch.float32).to(torch.bfloat16)
        for shape in ((rows, width), (outs, width), (rows, outs))
    )
    x.requires_grad_()
    weight.requires_grad_()

    def step(recipe: str) -> Callable[[], None]:
        def run() -> None:
            out = (
                torch.nn.functional.linear(x, weight)
                if recipe == "bf16"
                else low_precision_linear(x, weight, None, recipe)
            )
            torch.autograd.grad(out, (x, weight), grad)

        return run

    # Gradients must be on where this is called from a hook that has them off.
    with torch.enable_grad():
        times = {name: _milliseconds(step(name)) for name in ("bf16", *CANDIDATES)}
    best = min(times, key=lambda name: times[name])
    return best if times[best] * LEAST_GAIN < times["bf16"] else "bf16"


def _milliseconds(function: Callable[[], None], repeats: int = 7) -> float:
    for _ in range(2):
        function()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in events)[repeats // 2]
