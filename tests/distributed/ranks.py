"""Runs cases in processes over gloo; one group of processes serves many cases, since starting it is slow."""

import importlib
import os
import socket
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp


def _worker(rank: int, size: int, port: int, module: str, cases: list[str], folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="test",
        GLOO_SOCKET_IFNAME="lo",
    )
    functions = importlib.import_module(module)
    for case in cases:
        try:
            result = functions.CASES[case](Path(folder))
        except BaseException:
            torch.save({"error": traceback.format_exc()}, f"{folder}/{case}.{size}.{rank}")
            raise
        torch.save({"result": result}, f"{folder}/{case}.{size}.{rank}")


def run_ranks(
    size: int, module: str, cases: list[str], folder: Path, timeout: float = 240, survivors: int | None = None
) -> dict[str, list[Any]]:
    """Results of every case by rank; of the first ``survivors`` ranks where the others are to die.

    Raises:
        AssertionError: If a case fails or the ranks hang; the message holds the trace of the first rank that failed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("forkserver")
    processes = [
        context.Process(target=_worker, args=(rank, size, port, module, cases, str(folder))) for rank in range(size)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout
    for process in processes:
        process.join(max(1.0, deadline - time.monotonic()))
    hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
    results: dict[str, list[Any]] = {}
    for case in cases:
        files = [folder / f"{case}.{size}.{rank}" for rank in range(survivors or size)]
        found = [torch.load(file, weights_only=False) if file.exists() else {} for file in files]
        errors = [entry["error"] for entry in found if "error" in entry]
        if errors:
            # A rank that fails takes the others with it: theirs are the errors about connections.
            raise AssertionError(f"{case}:\n" + min(errors, key=lambda text: "Connection" in text))
        if not all("result" in entry for entry in found):
            raise AssertionError(f"{case} did not finish on {size} ranks, hanging: {hanging}")
        results[case] = [entry["result"] for entry in found]
    return results
