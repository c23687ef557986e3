"""Learning rate factors over steps."""

import math
from collections.abc import Callable
from typing import Literal

Decay = Literal["none", "linear", "cosine"]


def warmup_then_decay(warmup_steps: int, decay: Decay, total_steps: float) -> Callable[[int], float]:
    """Factor by step: a linear rise over ``warmup_steps``, then constant or a fall to 0 at ``total_steps``."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        if decay == "none" or not math.isfinite(total_steps):
            return 1.0
        progress = min(1.0, (step - warmup_steps) / max(1.0, total_steps - warmup_steps))
        return 1.0 - progress if decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))

    return factor
