"""A LightningModule around TorchRec's DLRM that knows nothing of the strategy, with data for any number of ranks."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.data import DataLoader, IterableDataset
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_gem.optimizers import DenseAndTables, dense_parameters, table_optimizers
from tests.distributed.torchrec_models import DLRM, DLRM_DCN

ROWS = {"small": 20, "large": 100, "middle": 40}
KEYS = list(ROWS)
NUM_DENSE = 4
DIM = 8


class LitDLRM(LightningModule):
    """Click prediction.

    Args:
        lr: Learning rate.
        attach: Attach row-wise AdaGrad to the tables, in TorchRec's way.
        cross: Use DLRM_DCN.
        dense_lr: Learning rate of AdamW over all parameters, instead of SGD.
        table_lr: Learning rate of row-wise AdaGrad over the tables; for one process.
        rows: Rows of the smallest table.
    """

    def __init__(
        self,
        lr: float = 0.5,
        attach: bool = False,
        cross: bool = False,
        dense_lr: float = 0.0,
        table_lr: float = 0.0,
        rows: int = ROWS["small"],
    ) -> None:
        super().__init__()
        self.lr, self.dense_lr, self.table_lr = lr, dense_lr, table_lr
        tables = EmbeddingBagCollection(
            device=torch.device("cpu"),
            tables=[
                EmbeddingBagConfig(name=f"t_{key}", embedding_dim=DIM, num_embeddings=num_rows, feature_names=[key])
                for key, num_rows in {**ROWS, "small": rows}.items()
            ],
        )
        if attach:
            _apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.1, "eps": 1e-8})
        sizes: dict[str, Any] = {
            "embedding_bag_collection": tables,
            "dense_in_features": NUM_DENSE,
            "dense_arch_layer_sizes": [16, DIM],
            "over_arch_layer_sizes": [16, 1],
        }
        self.model = DLRM_DCN(**sizes, dcn_num_layers=2, dcn_low_rank_dim=4) if cross else DLRM(**sizes)
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Binary cross-entropy, the mean over the batch."""
        loss = self._loss(batch)
        self.losses.append(loss.item())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Logs the loss."""
        self.log("val_loss", self._loss(batch), sync_dist=True, batch_size=len(batch["label"]))

    def _loss(self, batch: dict[str, Any]) -> Tensor:
        logits = self.model(batch["dense"], batch["sparse"]).squeeze(1)
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, batch["label"])

    def configure_optimizers(self) -> Any:
        """One optimizer over all parameters, tables included, and a schedule."""
        optimizer: torch.optim.Optimizer
        if self.table_lr:
            tables = table_optimizers(self, self.table_lr, 1e-8, in_backward=True)
            adamw = torch.optim.AdamW(dense_parameters(self), lr=self.dense_lr)
            optimizer = DenseAndTables(adamw, tables, self.table_lr, in_backward=True, follow=adamw.param_groups[0])
        elif self.dense_lr:
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.dense_lr)
        else:
            optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 10))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def sample(index: int) -> dict[str, Any]:
    """One deterministic sample; some features have no id."""
    generator = torch.Generator().manual_seed(index)
    ids = {
        key: torch.randint(0, rows, (int(torch.randint(0, 4, (), generator=generator)),), generator=generator)
        for key, rows in ROWS.items()
    }
    dense = torch.randn(NUM_DENSE, generator=generator)
    return {"ids": ids, "dense": dense, "label": (dense[0] + len(ids["small"]) > 1).float()}


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch of samples."""
    values = [entry["ids"][key] for key in KEYS for entry in samples]
    return {
        "dense": torch.stack([entry["dense"] for entry in samples]),
        "label": torch.stack([entry["label"] for entry in samples]),
        "sparse": KeyedJaggedTensor(KEYS, torch.cat(values), lengths=torch.tensor([len(value) for value in values])),
    }


def clicks(indices: list[int]) -> dict[str, Any]:
    """A batch of the samples with these numbers."""
    return collate([sample(index) for index in indices])


class Share(IterableDataset[dict[str, Any]]):
    """The batches of one rank: sizes of every rank's batch are given step by step."""

    def __init__(self, steps: list[list[int]], rank: int, start: int, make: Callable[[list[int]], Any]) -> None:
        self.steps, self.rank, self.start, self.make = steps, rank, start, make

    def __iter__(self) -> Iterator[dict[str, Any]]:
        first = self.start
        for sizes in self.steps:
            begin = first + sum(sizes[: self.rank])
            if sizes[self.rank]:
                yield self.make(list(range(begin, begin + sizes[self.rank])))
            first += sum(sizes)


class ClickData(LightningDataModule):
    """Global batches, cut into ranks.

    Args:
        steps: Batch size of every rank in every step; by default 20 steps of 8 samples in all.
        val_steps: The same for validation.
        make: Makes a batch of the samples with some numbers; clicks by default.
    """

    def __init__(
        self,
        steps: list[list[int]] | None = None,
        val_steps: list[list[int]] | None = None,
        make: Callable[[list[int]], Any] | None = None,
    ) -> None:
        super().__init__()
        self.steps, self.val_steps = steps, val_steps
        self.make = make or clicks

    def _loader(self, steps: list[list[int]] | None, default: int, start: int) -> DataLoader[Any]:
        assert self.trainer is not None
        world = self.trainer.world_size
        steps = steps or [[8 // world] * world] * default
        return DataLoader(Share(steps, self.trainer.global_rank, start, self.make), batch_size=None)

    def train_dataloader(self) -> DataLoader[Any]:
        """Training batches."""
        return self._loader(self.steps, 20, 0)

    def val_dataloader(self) -> DataLoader[Any]:
        """Validation batches."""
        return self._loader(self.val_steps, 2, 100_000)
