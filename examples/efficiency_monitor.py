"""EfficiencyMonitor on a LightningModule that knows nothing of it: samples per second, data wait, MFU.

python examples/efficiency_monitor.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gem.callbacks import EfficiencyMonitor


class ClickModel(LightningModule):
    """A plain network over numeric features."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        features, clicked = batch
        return nn.functional.binary_cross_entropy_with_logits(self.network(features)[:, 0], clicked)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(rows: int = 65_536) -> dict[str, float]:
    """Trains for one epoch; returns what was logged last."""
    seed_everything(1)
    features = torch.randn(rows, 64)
    clicked = (features[:, 0] * features[:, 1] > 0).float()
    trainer = Trainer(
        max_epochs=1,
        log_every_n_steps=16,
        callbacks=[EfficiencyMonitor()],
        logger=CSVLogger("runs/efficiency"),
        enable_checkpointing=False,
    )
    trainer.fit(ClickModel(), DataLoader(TensorDataset(features, clicked), batch_size=512))
    return {name: float(value) for name, value in trainer.logged_metrics.items()}


if __name__ == "__main__":
    for name, value in main().items():
        print(f"{name:34} {value:.4g}")
