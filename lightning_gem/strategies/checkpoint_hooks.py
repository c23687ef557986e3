"""What Lightning asks of a strategy about checkpoints."""

import logging
import os
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from lightning_gem.strategies import checkpoint as checkpoints
from lightning_gem.strategies import processes
from lightning_gem.strategies.background import BackgroundSaver
from lightning_gem.strategies.compat import RESUME_END
from lightning_gem.strategies.embeddings import ShardedTables
from lightning_gem.strategies.rank_state import restore_streams
from lightning_gem.strategies.requeue import Requeue, StepEnd
from lightning_gem.strategies.steps import RankStep
from lightning_gem.strategies.table_rates import same_squares

log = logging.getLogger(__name__)


class CheckpointHooks(ParallelStrategy):
    """A strategy whose checkpoints are directories of ``torch.distributed.checkpoint``.

    Args:
        async_checkpoints: Whether to write beside the training.
        grow_tables: Whether to load tables with fewer rows.
        timeout: Time after which a collective fails.
    """

    def __init__(self, async_checkpoints: bool, grow_tables: bool, timeout: timedelta) -> None:
        super().__init__()
        self.grow_tables = grow_tables
        self.timeout = timeout
        self._trainer: Trainer | None = None
        self._saver = BackgroundSaver(timeout) if async_checkpoints else None
        self._requeue = Requeue()
        self._requeue_now = False
        self._agreed_on_path = False
        self._random_streams: dict[str, Any] | None = None

    @property
    def tables(self) -> ShardedTables | None:
        """The sharded tables, if the module has any."""
        raise NotImplementedError

    # Steps.

    def _watch_steps(self, trainer: Trainer) -> None:
        """At the beginning of every run of the trainer."""
        self._trainer = trainer
        self._agreed_on_path = False
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, StepEnd) for callback in callbacks):
            callbacks.append(StepEnd(self._end_of_step))

    @property
    def _save_failed(self) -> bool:
        return self._saver is not None and self._saver.failed()

    def _start_of_step(self, ranks: list[RankStep]) -> None:
        """Answers what the ranks told each other; collective.

        Raises:
            RuntimeError: On every rank, if a checkpoint could not be written beside the training.
        """
        if any(rank.failed for rank in ranks):
            self._finish_save()
        self._requeue_now = any(rank.asked for rank in ranks)
        if self._random_streams is not None:
            restore_streams(self._random_streams)
            self._random_streams = None

    def _end_of_step(self) -> None:
        if self._requeue_now:
            self._requeue.answer()
            self._requeue_now = False

    def on_train_start(self) -> None:
        """Takes signals from now on."""
        self._requeue.install(self.cluster_environment)

    def on_train_end(self) -> None:
        """Waits for the checkpoint that is being written; collective."""
        self._finish_save()

    def _end_checkpoints(self) -> None:
        """At the end of every run of the trainer, be it by an exception of one rank."""
        self._requeue.uninstall()
        if self._saver is not None and (problem := self._saver.wait()):
            log.error("hybrid_sharded: %s", problem)

    # Checkpoints.

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights are loaded into their shards."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """The optimizers are restored in :meth:`load_checkpoint`."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Sharded weights; every rank has to ask."""
        assert self.lightning_module is not None
        if self.tables is not None and self.tables.config.sync_interval > 1:
            self.tables.synchronize()
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Sharded state by parameter name, and the parameter groups without their parameters."""
        assert self.lightning_module is not None
        return checkpoints.optimizer_state(self.lightning_module, optimizer, self.tables)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing is left to do after :meth:`load_checkpoint`."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing is left to do after :meth:`load_checkpoint`."""

    @property
    def _data_key(self) -> str | None:
        """Entry of the data module in checkpoints."""
        data: Any = getattr(self._trainer, "datamodule", None)
        return type(data).__qualname__ if data is not None else None

    def _finish_save(self) -> None:
        """Waits for the save that goes on in the background; collective.

        Raises:
            RuntimeError: On every rank, if any could not write.
        """
        if self._saver is not None:
            problem = self._saver.wait()
            processes.raise_together(RuntimeError(problem) if problem else None)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Writes one DCP directory, which appears under its name when it is complete; collective."""
        if storage_options is not None:
            raise ValueError("storage_options is not supported by hybrid_sharded: checkpoints are local directories")
        path = Path(self.broadcast(str(filepath)))
        self._finish_save()
        # The job is ended as soon as it has asked to be started again.
        checkpoints.save(checkpoint, path, self._data_key, None if self._requeue_now else self._saver)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Removes a checkpoint, but not before the one that replaces it is complete."""
        if self._saver is not None and self._saver.busy:
            self._saver.afterwards(partial(super().remove_checkpoint, filepath))
        else:
            super().remove_checkpoint(filepath)

    def _agree_on_path(self, path: str | None) -> str | None:
        """Asked once in every run, by ranks that load and by ranks that found nothing to load."""
        if self._agreed_on_path:
            return path
        self._agreed_on_path = True
        return processes.agree_on_path(path)

    def _agree_if_nothing_loads(self, barrier: str | None) -> None:
        if barrier == RESUME_END:
            self._agree_on_path(None)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads what :meth:`save_checkpoint` wrote on any number of ranks; collective.

        Raises:
            ValueError: If it is a file with weights only.
        """
        assert self.lightning_module is not None
        path = Path(self._agree_on_path(str(checkpoint_path)) or checkpoint_path)
        self._finish_save()
        fitting = self._trainer is not None and self._trainer.state.fn == TrainerFn.FITTING
        if path.suffix == ".safetensors":
            # Modules look for entries of their own in what is loaded.
            raise ValueError(f"{path} has weights only: give it as `weights` of the strategy instead of ckpt_path")
        optimizers = list(self.optimizers) if fitting else []
        with same_squares(optimizers, self.tables):
            loaded = checkpoints.load(
                path, self.lightning_module, optimizers, self.tables, self.grow_tables, self._data_key, resume=fitting
            )
        self._random_streams = loaded.pop(checkpoints.RANDOM)
        return loaded
