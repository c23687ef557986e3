"""What can be said about a failure of another rank."""

import logging
from datetime import timedelta

from lightning_gem.strategies.compat import default_store, distributed_is_initialized

log = logging.getLogger(__name__)


def silent_ranks(rank: int, world_size: int, patience: timedelta = timedelta(seconds=5)) -> list[int]:
    """Ranks that do not report to the store within ``patience``; called by every rank that failed.

    Returns:
        The silent ranks; nothing if the store itself is gone, which the first rank keeps.
    """
    try:
        store = default_store()
        store.set(f"failed/{rank}", "1")
        keys = [f"failed/{other}" for other in range(world_size)]
        try:
            store.wait(keys, patience)
        except RuntimeError:
            return [other for other, key in enumerate(keys) if not store.check([key])]
    except RuntimeError:
        pass
    return []


class RollCall:
    """Asks once, after a failure, which ranks are gone: a broken connection names none."""

    def __init__(self) -> None:
        self._silent: list[int] | None = None

    def missing(self, rank: int, world_size: int) -> str | None:
        """A sentence about the ranks that are gone; None if all are there."""
        if self._silent is None:
            alive = distributed_is_initialized() and world_size > 1
            self._silent = silent_ranks(rank, world_size) if alive else []
        if not self._silent:
            return None
        return f"rank {', '.join(map(str, self._silent))} gives no sign of life"
