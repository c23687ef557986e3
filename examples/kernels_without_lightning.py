"""Trains a small jagged attention layer with nothing but torch and ``lightning_gem.kernels``.

    python examples/kernels_without_lightning.py [--steps 300]

The task is recall: a user's history is a set of (item, rating) events, and the question is the rating of one of its
items. Histories have 1 to 40 events and stay packed from start to end; nothing is padded. On a CPU this takes seconds;
on an NVIDIA GPU the same calls run Triton kernels.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_gem.kernels import (
    gdpa,
    jagged_dense_add,
    jagged_flash_attention,
    jagged_rms_norm,
    lengths_to_cu_seqlens,
)

NUM_ITEMS, LONGEST, HEADS, DIM = 32, 40, 2, 32


class Recall(nn.Module):
    """Self-attention over the events, then one query per history over what came out."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * DIM
        self.items = nn.Embedding(NUM_ITEMS, width)
        self.ratings = nn.Embedding(2, width)
        self.events = nn.Linear(width, 3 * width, bias=False)
        self.question = nn.Linear(width, width, bias=False)
        self.memory = nn.Linear(width, 2 * width, bias=False)
        self.head = nn.Linear(width, 1)

    def forward(self, items: Tensor, ratings: Tensor, asked: Tensor, cu_seqlens: Tensor) -> Tensor:
        question = self.items(asked)
        tokens = jagged_dense_add(self.items(items) + self.ratings(ratings), question, cu_seqlens)
        q, k, v = self.events(jagged_rms_norm(tokens)).unflatten(1, (3, HEADS, DIM)).unbind(1)
        tokens = tokens + gdpa(q, k, v, cu_seqlens, None, LONGEST, LONGEST, activation="silu", scale=1 / DIM).flatten(1)
        k, v = self.memory(jagged_rms_norm(tokens)).unflatten(1, (2, HEADS, DIM)).unbind(1)
        q = self.question(question).unflatten(1, (HEADS, DIM))
        one_each = torch.arange(len(asked) + 1, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
        answer = jagged_flash_attention(q, k, v, one_each, cu_seqlens, 1, LONGEST)
        return self.head(answer.flatten(1)).squeeze(1)


def make_batch(size: int, generator: torch.Generator, device: torch.device) -> tuple[tuple[Tensor, ...], Tensor]:
    """Items (N,), ratings (N,), the item asked for (B,), offsets (B+1,); and the rating to recall (B,)."""
    lengths = torch.randint(1, LONGEST + 1, (size,), generator=generator)
    cu_seqlens = lengths_to_cu_seqlens(lengths)
    owner = torch.repeat_interleave(torch.arange(size), lengths)
    # Every user rates every item one way, so that repeated events agree.
    taste = torch.randint(0, 2, (size, NUM_ITEMS), generator=generator)
    items = torch.randint(0, NUM_ITEMS, (int(cu_seqlens[-1]),), generator=generator)
    asked = items[cu_seqlens[:-1] + (torch.rand(size, generator=generator) * lengths).long()]
    rating = taste[torch.arange(size), asked].float()
    inputs = (items, taste[owner, items], asked, cu_seqlens)
    return tuple(x.to(device) for x in inputs), rating.to(device)


def main(steps: int = 300) -> float:
    """Trains, and returns the accuracy on fresh users."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(0)
    model = Recall().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        inputs, rating = make_batch(128, generator, device)
        loss = F.binary_cross_entropy_with_logits(model(*inputs), rating)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:4d}  loss {loss.item():.3f}")
    with torch.no_grad():
        inputs, rating = make_batch(2000, generator, device)
        accuracy = ((model(*inputs) > 0) == (rating > 0.5)).float().mean().item()
    print(f"accuracy on new users: {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    main(parser.parse_args().steps)
