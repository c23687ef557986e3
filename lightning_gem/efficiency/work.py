"""What one training step had to compute."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepWork:
    """Work of one step on one rank, from the real lengths of its batch. Recomputation never counts.

    A LightningModule that knows its work has a method ``step_work(batch) -> StepWork | None``; of all others torch's
    counter sees a step (:class:`lightning_gem.efficiency.counting.FlopCounter`).

    Attributes:
        samples: Requests.
        flops: Of forward and backward, in torch's convention: the backward of attention counts 2.5 times its forward,
            because it computes the scores again.
        strict_flops: The same with 2 times, as for any other product; None where it is not known.
        tokens: Events of all sequences.
        padded_tokens: Events if every sequence were padded to the longest of the batch.
    """

    samples: int
    flops: float
    strict_flops: float | None = None
    tokens: int = 0
    padded_tokens: int = 0
