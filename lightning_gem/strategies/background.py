"""Saving beside the training: the state is copied to host memory first, a thread writes the copy."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

log = logging.getLogger(__name__)


class StagedPlanner(DefaultSavePlanner):
    """Plans a save at once and copies what it will write, so that the state may change afterwards.

    Args:
        state: Tensors by name.
        is_coordinator: Whether this is the first rank.
    """

    def __init__(self, state: dict[str, Any], is_coordinator: bool) -> None:
        super().__init__()
        super().set_up_planner(state, is_coordinator=is_coordinator)
        self._local_plan = super().create_local_plan()
        self._copies = {item.index: _to_host(super(StagedPlanner, self).resolve_data(item)) for item in self.plan.items}
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        self.state_dict = {}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing is left to do."""

    def create_local_plan(self) -> SavePlan:
        """What was planned."""
        return self._local_plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The copy."""
        return self._copies[write_item.index]


def _to_host(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    copy = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda, memory_format=torch.contiguous_format)
    return copy.copy_(value.detach(), non_blocking=True)


class BackgroundSaver:
    """At most one save that goes on beside the training.

    Args:
        timeout: Time after which its collectives fail.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._group: dist.ProcessGroup | None = None
        self._pending: Future[None] | None = None
        self._path: Path | None = None
        self._after: list[Callable[[], None]] = []

    @property
    def group(self) -> dist.ProcessGroup:
        """Processes for the collectives of the thread; the first use is collective."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        return self._group

    @property
    def busy(self) -> bool:
        """Whether a save has not been waited for."""
        return self._pending is not None

    def start(self, path: Path, write: Callable[[], None]) -> None:
        """Runs ``write`` in the thread."""
        assert self._pending is None
        self._path = path
        self._pending = self._executor.submit(_run, write)

    def afterwards(self, action: Callable[[], None]) -> None:
        """Runs ``action`` when the save has succeeded: what it replaces must not go before."""
        self._after.append(action)

    def failed(self) -> bool:
        """Whether the save is over and failed here; does not wait."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def wait(self) -> str | None:
        """Waits for the save; a sentence about its failure, if it failed here."""
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        after, self._after = self._after, []
        error = pending.exception()
        if error is not None:
            return f"checkpoint {self._path} could not be written: {error}"
        for action in after:
            action()
        return None


def _run(write: Callable[[], None]) -> None:
    try:
        write()
    except CheckpointException as error:  # which is no Exception
        raise RuntimeError(explain(error)) from error


def explain(error: CheckpointException) -> str:
    """Which rank failed with what, in one line."""
    rank, (cause, _) = min(error.failures.items())
    return f"{cause} (rank {rank})"
