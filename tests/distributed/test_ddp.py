"""Two processes over gloo equal one process with the union of their batches."""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy

from lightning_gem.models import GEM, GEMConfig, GEMModule
from tests.helpers import ToyData, ToySource


class OrderedToyData(ToyData):
    """Rows in a given order, never shuffled."""

    def __init__(self, order: list[int], batch_size: int) -> None:
        super().__init__(num_rows=len(order), batch_size=batch_size)
        self.order = order
        self.shuffle_rows = 0

    def setup(self, stage: str) -> None:
        """Reorders the rows of the training split."""
        super().setup(stage)
        source = self.sources["train"]
        assert isinstance(source, ToySource)
        source.rows = source.rows.take(np.array(self.order))


class SeedAndSave(Callback):
    """Seeds and saves in the processes that train: the parent has no network, and may have another environment."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Seeds, before the network is built."""
        seed_everything(0)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves."""
        trainer.save_checkpoint(self.path)


def train(folder: Path, order: list[int], batch_size: int, devices: int) -> dict[str, torch.Tensor]:
    """Weights after two steps."""
    data = OrderedToyData(order, batch_size)
    module = GEMModule(
        data.schema,
        network=partial(GEM, config=GEMConfig(width=16)),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        # Each rank divides by its own number of conversions, so their mean is not that of the union.
        task_weights={"conversion": 0.0},
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=DDPStrategy(start_method="forkserver") if devices > 1 else "auto",
        max_epochs=1,
        callbacks=[SeedAndSave(folder / "end.ckpt")],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        limit_val_batches=0,
        default_root_dir=folder,
        log_every_n_steps=1,
        gradient_clip_val=1.0,
    )
    trainer.fit(module, data)
    state = torch.load(folder / "end.ckpt", weights_only=True)["state_dict"]
    return {name: value for name, value in state.items() if name.startswith("network.")}


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    blocks = [list(range(start, start + 16)) for start in (0, 16, 32, 48)]
    two = train(tmp_path, sum(blocks, []), batch_size=16, devices=2)
    one = train(tmp_path, blocks[0] + blocks[2] + blocks[1] + blocks[3], batch_size=32, devices=1)
    assert set(one) == set(two)
    for name, value in one.items():
        torch.testing.assert_close(
            two[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
