"""Two real processes give the value of one process with all the data."""

import itertools
import time
import warnings
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_gem.metrics import AUC, GAUC, Calibration, LogLoss, NormalizedEntropy, WindowedNormalizedEntropy

FACTORIES = {
    "ne": NormalizedEntropy,
    "window_ne": partial(WindowedNormalizedEntropy, window=40, slots=4),
    "log_loss": LogLoss,
    "calibration": Calibration,
    "auc": AUC,
    "gauc": GAUC,
    "gauc_sampled": partial(GAUC, max_samples=600),
}


def examples(name, n, seed):
    generator = torch.Generator().manual_seed(seed)
    columns = {
        "logits": torch.randn(n, generator=generator).bfloat16(),
        "labels": (torch.rand(n, generator=generator) < 0.4).float(),
        "weights": torch.rand(n, generator=generator),
    }
    columns["labels"][::9] = torch.nan
    if name.startswith("gauc"):
        columns["users"] = torch.randint(0, 100, (n,), generator=generator)  # the same users on all ranks
    return columns


# batches of rank 0 and of rank 1: alike, uneven, none on one rank, none at all
CASES = {
    "even": ([10] * 6, [10] * 6),
    "uneven": ([30, 40, 7], [10]),
    "one_rank_empty": ([10] * 6, []),
    "other_rank_empty": ([], [10] * 6),
    "both_empty": ([], []),
    "large": ([400] * 3, [250] * 5),
}


def batches(name, case, rank):
    return [examples(name, n, seed=100 * rank + i) for i, n in enumerate(CASES[case][rank])]


def worker(rank, folder):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # "compute before update", which is what is tested
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
    results = {}
    for name, factory in FACTORIES.items():
        for case in CASES:
            metric = factory()
            for batch in batches(name, case, rank):
                metric.update(**batch)
            first = metric.compute()
            if rank == 0:  # only this rank goes on; a cached value on the other would leave it waiting
                metric.update(**examples(name, 20, seed=1000))
            results[name, case] = first, metric.compute()
    torch.save(results, f"{folder}/results{rank}.pt")
    dist.destroy_process_group()


def run_workers(folder):
    context = mp.start_processes(worker, (folder,), nprocs=2, join=False, start_method="forkserver")
    deadline = time.monotonic() + 120
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < deadline, "the ranks hang"
    finally:
        for process in context.processes:
            process.kill()
    return [torch.load(f"{folder}/results{rank}.pt") for rank in range(2)]


def single_process(name, case, more):
    parts = [batches(name, case, rank) for rank in range(2)]
    if more:
        parts[0].append(examples(name, 20, seed=1000))
    if name == "window_ne":  # the windows of the ranks, by hand: enough of their latest batches
        parts = [latest(part, 40) for part in parts]
    metric = NormalizedEntropy() if name == "window_ne" else FACTORIES[name]()
    for batch in parts[0] + parts[1]:
        metric.update(**batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return metric.compute()


def latest(part, window):
    kept, rows = [], 0
    for batch in reversed(part):
        if rows >= window:
            break
        kept.append(batch)
        rows += len(batch["logits"])
    return kept


def users_sampled_by_hand():
    """Each rank keeps 300 of its examples; users of the lower limit count, with all that both ranks have of them."""
    limits = []
    for rank in range(2):
        metric = GAUC(max_samples=300)
        for batch in batches("gauc_sampled", "large", rank):
            metric.update(**batch)
        metric.compute()
        limits.append(metric.hash_limit)
    metric = GAUC()
    for rank in range(2):
        for batch in batches("gauc_sampled", "large", rank):
            metric.update(**batch)
    exact = metric.compute()
    metric.hash_limit = min(limits)
    assert metric.compute() != exact
    return metric.compute()


def test_two_processes_equal_one(tmp_path):
    # one test, so that processes are started once, however pytest-xdist spreads the tests
    results = run_workers(tmp_path)
    for (name, case), more in itertools.product(results[0], (False, True)):
        values = [result[name, case][more] for result in results]
        assert values[0].isfinite() or case == "both_empty"
        if (name, case) != ("gauc_sampled", "large"):
            expected = single_process(name, case, more)
        elif not more:
            expected = users_sampled_by_hand()
        else:
            expected = values[0]
        for rank, value in enumerate(values):
            torch.testing.assert_close(
                value,
                expected,
                rtol=1e-12,
                atol=0,
                equal_nan=True,
                msg=lambda message, at=(name, case, more, rank): f"{at}: {message}",
            )
