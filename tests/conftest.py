"""Settings of the whole suite."""

import multiprocessing
import os
from pathlib import Path

import pytest

# The suite runs one process per core: more threads would only fight over them. Child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "offline")
# Ranks and workers are forked from a server that has imported all this: as clean as new processes, seconds faster.
multiprocessing.set_forkserver_preload(["lightning_gem.cli", "torchrec.distributed", "tests.helpers"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps tests/distributed in one process: they share groups of ranks, and more ranks at once would only wait."""
    for item in items:
        if "distributed" in Path(item.path).parts:
            item.add_marker(pytest.mark.xdist_group("distributed"))
