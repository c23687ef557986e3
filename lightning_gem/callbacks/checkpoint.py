"""A ModelCheckpoint whose last checkpoint continues a run exactly where it stopped."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint


class ResumableCheckpoint(ModelCheckpoint):
    """ModelCheckpoint that also saves ``last`` on the step at which ``max_steps`` ends the run.

    Lightning counts the epoch as finished before it saves for the last time, so a run that is continued with more steps
    would skip the rest of the epoch. The arguments are those of ``ModelCheckpoint``.
    """

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves after the last step, while the loops still stand in the middle of the epoch."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if trainer.global_step == trainer.max_steps and not self._should_skip_saving_checkpoint(trainer):
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
