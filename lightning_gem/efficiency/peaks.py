"""Peak matrix rates of devices: dense, without sparsity. A device that is not listed has no peak, never a guess."""

import re
import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Peak:
    """Nominal dense rates in TFLOP/s.

    Attributes:
        name: What the rates belong to.
        bf16: bfloat16 and float16, the denominator of MFU in mixed precision, too.
        fp8: float8; None where there is none.
        source: Where the figures come from, or how they were measured.
    """

    name: str
    bf16: float
    fp8: float | None
    source: str

    def mfu(self, flops: float, seconds: float, devices: int = 1) -> float:
        """Share of the bfloat16 rate of so many devices that so many FLOPs in so many seconds are."""
        return flops / (seconds * devices * self.bf16 * 1e12)


_HOPPER = "NVIDIA data sheet, half of the rate with sparsity"
# The driver's names, the most specific first.
_PEAKS: list[tuple[str, Peak]] = [
    (r"\bGB300\b", Peak("GB300", 2500.0, 5000.0, "NVIDIA GB300 NVL72 data sheet, dense, per GPU")),
    (r"\bB300\b", Peak("B300", 2250.0, 4500.0, "NVIDIA HGX B300 data sheet, half of the rate with sparsity")),
    (r"\bGB200\b", Peak("GB200", 2500.0, 5000.0, "NVIDIA GB200 NVL72 data sheet, dense, per GPU")),
    (r"\bB200\b", Peak("B200", 2250.0, 4500.0, "NVIDIA HGX B200 data sheet, half of the rate with sparsity")),
    (r"\bH200 NVL\b", Peak("H200 NVL", 835.5, 1671.0, _HOPPER)),
    (r"\bH200\b", Peak("H200 SXM", 989.5, 1979.0, _HOPPER)),
    (r"\bGH200\b", Peak("GH200", 989.5, 1979.0, _HOPPER)),
    (r"\bH100 NVL\b", Peak("H100 NVL", 835.5, 1671.0, _HOPPER)),
    (r"\bH100 PCIe\b", Peak("H100 PCIe", 756.5, 1513.0, _HOPPER)),
    (r"\bH100 (80GB HBM3|SXM)", Peak("H100 SXM", 989.5, 1979.0, _HOPPER)),
    (r"\bA100\b", Peak("A100", 312.0, None, "NVIDIA A100 data sheet")),
    (r"\bL40S\b", Peak("L40S", 362.0, 733.0, "NVIDIA L40S data sheet, half of the rate with sparsity")),
    (r"\bMI350X\b", Peak("MI350X", 2300.0, 4600.0, "AMD Instinct MI350X data sheet")),
    (r"\bMI300X\b", Peak("MI300X", 1307.4, 2614.9, "AMD Instinct MI300X data sheet")),
]


def find_peak(device_name: str) -> Peak | None:
    """The peak of a device by the name that its driver gives it (``torch.cuda.get_device_name()``); None if unknown."""
    for pattern, peak in _PEAKS:
        if re.search(pattern, device_name, re.IGNORECASE):
            return peak
    return None


def measure_peak(device: torch.device, size: int = 1024, seconds: float = 0.2) -> Peak:
    """The best rate of a float32 product on ``device``: a stand-in for CPUs, whose peak no table knows.

    Args:
        device: Where to multiply.
        size: Rows and columns of the matrices.
        seconds: How long to try; the fastest product counts.
    """
    a, b = torch.randn(2, size, size, device=device).unbind()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end or best == float("inf"):
        start = time.perf_counter()
        torch.mm(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return Peak(str(device), 2 * size**3 / best / 1e12, None, f"measured: float32 product of {size} x {size}")
