"""What Lightning asks of a strategy about batches: loaders that end together, are read ahead, and reach the device."""

from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_gem.strategies.batches import Filler, even_loader
from lightning_gem.strategies.checkpoint_hooks import CheckpointHooks
from lightning_gem.strategies.pipeline import Ahead, LookAhead, Pipeline, without_ahead


class LoaderHooks(CheckpointHooks):
    """A strategy that hands every rank as many batches as the longest has.

    Args:
        pipeline: Whether to copy the next batch, and to exchange its ids, beside the step of this one.
        async_checkpoints: See :class:`CheckpointHooks`, as for the others.
        grow_tables: See there.
        timeout: See there.
    """

    def __init__(
        self, pipeline: bool | Literal["auto"], async_checkpoints: bool, grow_tables: bool, timeout: timedelta
    ) -> None:
        super().__init__(async_checkpoints, grow_tables, timeout)
        self.pipeline = pipeline
        self._pipeline: Pipeline | None = None
        self._is_filler = False

    def _set_up_pipeline(self, trainer: Trainer) -> None:
        is_on = self.root_device.type == "cuda" if self.pipeline == "auto" else self.pipeline
        if is_on and not is_overridden("on_before_batch_transfer", trainer.lightning_module):
            self._pipeline = self._pipeline or Pipeline(self._move, self.root_device)
            if self.tables is not None:
                self._pipeline.attach(self.tables.modules)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Makes loaders end together on all ranks, and reads training batches ahead."""
        loader = even_loader(dataloader, self.root_device) if self.world_size > 1 else dataloader
        if self._pipeline is None:
            return loader
        return LookAhead(loader, lambda: self._trainer is not None and self._trainer.training, dataloader)

    def _move(self, batch: Any) -> Any:
        batch = self.precision_plugin.convert_input(batch)
        return super().batch_to_device(batch, self.root_device, 0)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Moves a batch, and remembers whether it only stands in for one.

        Raises:
            ValueError: If several training loaders of which one ran out are combined.
        """
        if isinstance(batch, Ahead):
            assert self._pipeline is not None
            self._is_filler = batch.is_filler
            return self._pipeline.take(batch)
        batch = without_ahead(batch)
        self._is_filler = isinstance(batch, Filler)
        parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
        if any(isinstance(part, Filler) for part in parts):
            raise ValueError(
                "several training loaders are combined and one of them has fewer batches on some ranks: give every "
                "rank the same number"
            )
        return super().batch_to_device(batch.batch if isinstance(batch, Filler) else batch, device, dataloader_idx)

    def on_train_end(self) -> None:
        """Ends what is under way, for a batch that will not be used and of a checkpoint; collective."""
        if self._pipeline is not None:
            self._pipeline.drain()
        super().on_train_end()
