"""What can be said about a failure of another rank."""

from datetime import timedelta

from lightning_gem.strategies.compat import default_store


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
