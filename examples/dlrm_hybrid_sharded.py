"""TorchRec's DLRM, unchanged, under HybridShardedStrategy: two processes on this machine, random clicks.

python examples/dlrm_hybrid_sharded.py --devices 2
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_gem.strategies import HybridShardedStrategy, TableConfig

ROWS = {"user": 10_000, "item": 2_000, "country": 50}
BATCH_SIZE = 256


class Clicks(LightningModule):
    """DLRM with one optimizer over everything."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=name, embedding_dim=16, num_embeddings=rows, feature_names=[name])
            for name, rows in ROWS.items()
        ]
        collection = EmbeddingBagCollection(device=torch.device("cpu"), tables=tables)
        self.model = DLRM(
            collection, dense_in_features=4, dense_arch_layer_sizes=[32, 16], over_arch_layer_sizes=[32, 1]
        )

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Binary cross-entropy."""
        logits = self.model(batch["dense"], batch["sparse"]).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch["label"])
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The strategy takes the tables out of it and keeps its learning rate for them."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class RandomClicks(IterableDataset[dict[str, Any]]):
    """Batches in which the first number decides; other ones on every rank."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        generator = torch.Generator().manual_seed(torch.distributed.get_rank())
        for _ in range(100):
            lengths = torch.randint(0, 3, (len(ROWS), BATCH_SIZE), generator=generator)
            ids = [
                torch.randint(0, rows, (int(length.sum()),), generator=generator)
                for rows, length in zip(ROWS.values(), lengths, strict=True)
            ]
            dense = torch.randn(BATCH_SIZE, 4, generator=generator)
            yield {
                "sparse": KeyedJaggedTensor(list(ROWS), torch.cat(ids), lengths=lengths.flatten()),
                "dense": dense,
                "label": (dense[:, 0] > 0).float(),
            }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    seed_everything(0)
    trainer = Trainer(
        accelerator="cpu",
        devices=parser.parse_args().devices,
        strategy=HybridShardedStrategy(tables=TableConfig(optimizer="row_wise_adagrad")),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Clicks(), DataLoader(RandomClicks(), batch_size=None))
