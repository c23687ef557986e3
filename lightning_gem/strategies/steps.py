"""What one step of training means on many ranks: whose samples count how much, and when it must not go on."""

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gem.strategies.batches import gather_numbers, num_samples


def exchange_sizes(batch: Any, is_filler: bool, device: torch.device) -> list[tuple[int, bool]]:
    """Tells all ranks the batch sizes of the step; collective.

    Returns:
        Samples (-1 if unknown) by rank, and whether they count.
    """
    own = num_samples(batch)
    return [
        (size, bool(counts))
        for size, counts in gather_numbers([-1 if own is None else own, int(not is_filler)], device)
    ]


def loss_weight(sizes: list[tuple[int, bool]], rank: int, weighting: Literal["samples", "ranks"]) -> float:
    """Factor on this rank's loss that makes the mean over ranks the mean over samples (or over ranks that count)."""
    by_samples = weighting == "samples" and all(size >= 0 for size, _ in sizes)
    weights = [(size if by_samples else 1) * counts for size, counts in sizes]
    return weights[rank] * len(sizes) / max(sum(weights), 1)


def check_equal(sizes: list[tuple[int, bool]]) -> None:
    """Refuses unequal batches.

    Raises:
        ValueError: On every rank.
    """
    samples = [size for size, _ in sizes]
    if len(set(samples)) > 1:
        raise ValueError(
            f"the batches of the ranks have {samples} samples: tables of an EmbeddingBagCollection that are split by "
            "rows need equal batches. Use drop_last, or tables.sharding: table_wise"
        )


def tell_experts(experts: dict[str, Any], sizes: list[tuple[int, bool]]) -> None:
    """Hands the exchanges of expert modules the batch sizes of their group, where they differ."""
    samples = [size for size, _ in sizes]
    unequal = len(set(samples)) > 1 and -1 not in samples
    for module in experts.values():
        exchange = module.expert_exchange
        if exchange is not None:
            ranks = dist.get_process_group_ranks(exchange.group)
            exchange.samples = [samples[rank] for rank in ranks] if unequal else None


def nonfinite_ranks(loss: Tensor, device: torch.device) -> list[int]:
    """Ranks whose loss is not finite; collective."""
    finite = bool(torch.isfinite(loss.detach()).all())
    return [rank for rank, (ok,) in enumerate(gather_numbers([int(finite)], device)) if not ok]
