"""Signals that ask for a checkpoint: answered at the end of a step, by all ranks together.

Lightning's handler saves wherever the signal finds the process: in the middle of a backward, on one rank before a
collective that another has passed.
"""

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment


class Requeue:
    """Holds SLURM's signal back.

    Attributes:
        asked: Whether this rank has received it.
    """

    def __init__(self) -> None:
        self.asked = False
        self._signal: signal.Signals | None = None
        self._handler: Any = None

    def install(self, environment: Any) -> None:
        """Takes the place of Lightning's handler, if SLURM is to start the job again."""
        if self._handler is not None or not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
            return
        number = environment.requeue_signal or signal.SIGUSR1
        handler = signal.getsignal(number)
        if callable(handler):
            self._signal, self._handler = number, handler
            signal.signal(number, self._ask)

    def uninstall(self) -> None:
        """Gives the signal back."""
        if self._signal is not None:
            signal.signal(self._signal, self._handler)
            self._signal = self._handler = None

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def answer(self) -> None:
        """Does what Lightning does: saves a checkpoint and has the job started again; collective."""
        self.asked = False
        if self._handler is not None:
            self._handler(self._signal, None)


class StepEnd(Callback):
    """Calls a function after every training step, when all other callbacks are done."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Calls it."""
        self._action()
