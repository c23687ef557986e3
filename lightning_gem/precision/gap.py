"""What a recipe costs in quality, from predictions of both kinds for the same examples."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Status = Literal["pass", "fail", "inconclusive"]
NORMAL_95 = 1.959963984540054
COLUMNS = ("weight", "squared_weight", "count", "low", "high", "dd", "dh", "hh", "p_low", "p_high", "label")


@dataclass(frozen=True)
class Gap:
    """A paired comparison.

    Attributes:
        examples: Examples with a label.
        ne: Relative change of the normalized entropy, which is that of the log loss: positive is worse.
        low: Lower end of its confidence interval.
        high: Upper end.
        calibration: Mean prediction over mean label.
        reference_calibration: The same of the reference.
        status: ``pass``: the interval lies below the tolerance; ``fail``: above; else ``inconclusive``.
        needed: Examples at which an interval around the same gap would be conclusive; ``examples`` if it is, and
            infinite where the gap is the tolerance.
    """

    examples: int
    ne: float
    low: float
    high: float
    calibration: float
    reference_calibration: float
    status: Status
    needed: float


def paired_sums(logits: Tensor, reference: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Sums of one task that :func:`gap` needs, float64 ``(11,)``; those of several batches or ranks are added.

    Args:
        logits: (B,).
        reference: (B,), of the reference.
        labels: 0, 1 or NaN where there is none.
        weights: 0 where the label does not count.
    """
    weight = torch.where(labels.isnan(), 0.0, weights).double()
    label = labels.nan_to_num().double()
    # Without a label a logit may be anything.
    first, second = (torch.where(weight > 0, x.double(), 0.0) for x in (logits, reference))
    low, high = (F.binary_cross_entropy_with_logits(x, label, reduction="none") for x in (first, second))
    difference, squared = low - high, weight.square()
    rows = (
        weight,
        squared,
        (weight > 0).double(),
        weight * low,
        weight * high,
        squared * difference * difference,
        squared * difference * high,
        squared * high * high,
        weight * first.sigmoid(),
        weight * second.sigmoid(),
        weight * label,
    )
    return torch.stack(rows).sum(1)


def gap(sums: Tensor, tolerance: float = 2e-4, deviations: float = NORMAL_95) -> Gap:
    """The comparison from its sums.

    The gap is a ratio of means of the same examples; its variance is that of ``difference - ratio * reference`` over
    the examples (delta method).

    Args:
        sums: From :func:`paired_sums`.
        tolerance: Largest relative change of the normalized entropy.
        deviations: Half width of the interval in standard errors.
    """
    s = dict(zip(COLUMNS, sums.tolist(), strict=True))
    examples = round(s["count"])
    if examples == 0 or s["high"] == 0:
        nan = math.nan
        return Gap(examples, nan, nan, nan, nan, nan, "inconclusive", math.inf)
    ratio = s["low"] / s["high"] - 1
    variance = s["dd"] - 2 * ratio * s["dh"] + ratio * ratio * s["hh"]
    half = deviations * math.sqrt(max(variance, 0.0)) / s["high"]
    calibrations = [s[key] / s["label"] if s["label"] else math.nan for key in ("p_low", "p_high")]
    status: Status = "inconclusive"
    if ratio + half < tolerance:
        status = "pass"
    elif ratio - half > tolerance:
        status = "fail"
    needed = float(examples)
    if status == "inconclusive":
        room = abs(tolerance - ratio)
        needed = examples * (half / room) ** 2 if room > 0 else math.inf
    return Gap(examples, ratio, ratio - half, ratio + half, calibrations[0], calibrations[1], status, needed)
