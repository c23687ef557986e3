"""What one step of training means on many ranks: whose samples count how much, and when it must not go on."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gem.strategies.batches import gather_numbers


@dataclass(frozen=True)
class RankStep:
    """What a rank tells the others before a step.

    Attributes:
        samples: Size of its batch; -1 if unknown.
        counts: Whether the batch counts, or only stands in.
        asked: Whether it was asked to save and to be started again.
        failed: Whether its checkpoint could not be written.
    """

    samples: int
    counts: bool
    asked: bool = False
    failed: bool = False


def exchange(own: RankStep, device: torch.device) -> list[RankStep]:
    """What every rank tells; collective."""
    numbers = gather_numbers([own.samples, own.counts, own.asked, own.failed], device)
    return [RankStep(samples, *map(bool, flags)) for samples, *flags in numbers]


def loss_weight(ranks: list[RankStep], rank: int, weighting: Literal["samples", "ranks"]) -> float:
    """Factor on this rank's loss that makes the mean over ranks the mean over samples (or over ranks that count)."""
    by_samples = weighting == "samples" and all(step.samples >= 0 for step in ranks)
    weights = [(step.samples if by_samples else 1) * step.counts for step in ranks]
    return weights[rank] * len(ranks) / max(sum(weights), 1)


def check_equal(ranks: list[RankStep]) -> None:
    """Refuses unequal batches.

    Raises:
        ValueError: On every rank.
    """
    samples = [step.samples for step in ranks]
    if len(set(samples)) > 1:
        raise ValueError(
            f"the batches of the ranks have {samples} samples: tables of an EmbeddingBagCollection that are split by "
            "rows need equal batches. Use drop_last, or tables.sharding: table_wise"
        )


def tell_experts(experts: dict[str, Any], ranks: list[RankStep]) -> None:
    """Hands the exchanges of expert modules the batch sizes of their group, where they differ."""
    samples = [step.samples for step in ranks]
    unequal = len(set(samples)) > 1 and -1 not in samples
    for module in experts.values():
        exchange = module.expert_exchange
        if exchange is not None:
            group = dist.get_process_group_ranks(exchange.group)
            exchange.samples = [samples[rank] for rank in group] if unequal else None


def nonfinite_ranks(loss: Tensor, device: torch.device) -> list[int]:
    """Ranks whose loss is not finite; collective."""
    finite = bool(torch.isfinite(loss.detach()).all())
    return [rank for rank, (ok,) in enumerate(gather_numbers([int(finite)], device)) if not ok]
