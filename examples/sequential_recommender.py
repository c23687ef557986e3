"""A sequential recommender after HSTU under HybridShardedStrategy: next items from histories of any length.

python examples/sequential_recommender.py --devices 2

The blocks follow Actions Speak Louder than Words (arXiv 2402.17152): pointwise SiLU attention with a bias of relative
positions, and a gate instead of a feed-forward layer. The item table is a TorchRec EmbeddingCollection, so it is
sharded and updated inside backward; nothing in the module knows of it.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

NUM_ITEMS = 1000
MAX_LENGTH = 32


class Block(nn.Module):
    """One layer: ``(B, L, D)`` to ``(B, L, D)``."""

    def __init__(self, width: int, num_heads: int, max_length: int) -> None:
        super().__init__()
        self.num_heads, self.max_length = num_heads, max_length
        self.norm_in, self.norm_out = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project = nn.Linear(width, 4 * width)
        self.output = nn.Linear(width, width)
        self.position_bias = nn.Parameter(torch.zeros(2 * max_length - 1))

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        """``allowed`` is ``(B, L, L)``: which events an event may look at."""
        batch, length, width = x.shape
        gate, *heads = F.silu(self.project(self.norm_in(x))).chunk(4, dim=-1)
        value, query, key = (part.view(batch, length, self.num_heads, -1).transpose(1, 2) for part in heads)
        position = torch.arange(length, device=x.device)
        bias = self.position_bias[position[:, None] - position[None, :] + self.max_length - 1]
        scores = F.silu(query @ key.transpose(-1, -2) / key.shape[-1] ** 0.5 + bias) * allowed[:, None]
        pooled = (scores / length) @ value
        pooled = pooled.transpose(1, 2).reshape(batch, length, width)
        return x + self.output(self.norm_out(pooled) * gate)


class NextItem(LightningModule):
    """Scores all candidates of a batch for the next event of each history."""

    def __init__(self, width: int = 16, num_layers: int = 2, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        item = EmbeddingConfig(
            name="item", embedding_dim=width, num_embeddings=NUM_ITEMS, feature_names=["history", "candidates"]
        )
        self.items = EmbeddingCollection(device=torch.device("cpu"), tables=[item])
        self.blocks = nn.ModuleList(Block(width, 2, MAX_LENGTH) for _ in range(num_layers))
        self.head = nn.Linear(width, width)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Cross-entropy of the item that came next, among candidates of the same request."""
        embedded = self.items(batch["ids"])
        x = embedded["history"].to_padded_dense(MAX_LENGTH)
        lengths = embedded["history"].lengths()
        position = torch.arange(MAX_LENGTH, device=x.device)
        is_event = position < lengths[:, None]
        allowed = (position[:, None] >= position[None, :]) & is_event[:, None, :]
        for block in self.blocks:
            x = block(x, allowed)
        last = x[torch.arange(len(x), device=x.device), (lengths - 1).clamp(min=0)]
        candidates = embedded["candidates"].values().view(len(x), -1, x.shape[-1])
        scores = torch.einsum("bd,bcd->bc", self.head(last), candidates)
        # The first candidate is the item that came next.
        loss = F.cross_entropy(scores, torch.zeros_like(lengths, dtype=torch.long))
        self.log("loss", loss, prog_bar=True, batch_size=len(x))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One optimizer over everything."""
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def request(index: int) -> tuple[Tensor, Tensor]:
    """A history that walks through the items, and its candidates: the next step and three others."""
    generator = torch.Generator().manual_seed(index)
    length = int(torch.randint(0, MAX_LENGTH + 1, (), generator=generator))
    start = int(torch.randint(0, NUM_ITEMS, (), generator=generator))
    items = (start + 7 * torch.arange(length + 1)) % NUM_ITEMS
    others = torch.randint(0, NUM_ITEMS, (3,), generator=generator)
    return items[:-1], torch.cat([items[-1:], others])


def collate(indices: list[int]) -> dict[str, Any]:
    """A batch of requests."""
    histories, candidates = zip(*(request(index) for index in indices), strict=True)
    lengths = torch.tensor([len(ids) for ids in [*histories, *candidates]])
    return {"ids": KeyedJaggedTensor(["history", "candidates"], torch.cat([*histories, *candidates]), lengths=lengths)}


class Requests(IterableDataset[dict[str, Any]]):
    """Batches, other ones on every rank."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        start = 1_000_000 * torch.distributed.get_rank()
        for step in range(100):
            yield collate(list(range(start + 64 * step, start + 64 * (step + 1))))


if __name__ == "__main__":
    from lightning_gem.strategies import HybridShardedStrategy, TableConfig

    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    seed_everything(0)
    trainer = Trainer(
        accelerator="cpu",
        devices=parser.parse_args().devices,
        strategy=HybridShardedStrategy(tables=TableConfig(optimizer="row_wise_adagrad"), wrap=["Block"]),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(NextItem(), DataLoader(Requests(), batch_size=None))
