"""Logs how efficiently a run trains: throughput, MFU over all ranks, data wait, balance between ranks."""

import time
import warnings
from collections.abc import Sized
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_gem.efficiency import FlopCounter, Peak, StepWork, find_peak, measure_peak


@dataclass
class Window:
    """What this rank did since the last log.

    Attributes:
        start: When it began, in seconds of ``time.perf_counter``.
        wait: Seconds between the end of a step and the beginning of the next, in which the host fetched a batch.
        left_out: Seconds of steps that do not count, because their FLOPs were being counted, or which validated.
        works: Work of every step.
        gaps: Events at the end of a step and at the beginning of the next, on a GPU.
    """

    start: float
    wait: float = 0.0
    left_out: float = 0.0
    works: list[StepWork] = field(default_factory=list)
    gaps: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)


class EfficiencyMonitor(Callback):
    """Logs averages over the steps between two logs (``trainer.log_every_n_steps``) to every logger.

    All names begin with ``efficiency/``:

    * ``samples_per_second``, ``tokens_per_second``: of all ranks.
    * ``step_seconds`` (for one batch), ``peak_memory_gb``: of the rank that needs the most.
    * ``mfu``, ``mfu_strict``: FLOPs of all ranks over what their peak allows, in both conventions of
      :class:`StepWork`. The denominator, ``peak_tflops``, is the nominal dense bfloat16 rate, whatever the precision.
    * ``data_wait``: share of the time spent waiting for batches; on a GPU the time in which it idled between steps.
    * ``padding_avoided``: share of the events that padding to the longest would have added.
    * ``imbalance``: FLOPs of the heaviest rank over the mean, averaged over steps.

    Nothing here waits for a device before a log. Steps in which FLOPs are counted, because the module has no formulas,
    are left out of the averages; so is validation.

    Args:
        peak_tflops: Dense bfloat16 rate of one device, for those that :func:`find_peak` does not know. On a CPU, None
            measures a float32 product.

    Source: the efficiency framework of Meta's GEM ("GEM Training: How Meta Doubled the Efficiency of Its LLM-Scale Ads
    Foundation Model"): E2E MFU = FLOPs of all ranks / (time * ranks * peak).
    """

    def __init__(self, peak_tflops: float | None = None) -> None:
        if peak_tflops is not None and peak_tflops <= 0:
            raise ValueError(f"peak_tflops is the rate of one device and must be positive, got {peak_tflops}")
        self.peak_tflops = peak_tflops
        self.peak: Peak | None = None
        self.latest: dict[str, float] = {}
        self.counter = FlopCounter()
        self._window = Window(0.0)
        self._end: float | None = None
        self._end_event: torch.cuda.Event | None = None
        self._work: StepWork | None = None
        self._began = 0.0
        self._step = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finds the peak of the device, and says which it is."""
        self.peak = peak_of(pl_module.device, self.peak_tflops)
        self._step = trainer.global_step
        if self.peak is not None:
            for logger in trainer.loggers:
                logger.log_hyperparams({"efficiency_peak": f"{self.peak.name}: {self.peak.bf16:.4g} TFLOP/s"})

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins anew: what lies between epochs is not the time of steps."""
        self._restart()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Notes the wait for the batch, and its work."""
        now = time.perf_counter()
        if self._end is not None:
            self._window.wait += now - self._end
        if pl_module.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            if self._end_event is not None:
                self._window.gaps.append((self._end_event, event))
        self._began = now
        step_work = getattr(pl_module, "step_work", None)
        self._work = None if step_work is None else step_work(batch)
        if self._work is None:
            self.counter.start(batch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends the step, and logs where a log is due."""
        work, counted = self._work, False
        if work is None:
            flops, counted = self.counter.stop()
            work = StepWork(samples=_batch_size(batch), flops=flops)
        if counted:
            self._window.left_out += time.perf_counter() - self._began
        else:
            self._window.works.append(work)
        stepped, self._step = trainer.global_step > self._step, trainer.global_step  # not while gradients accumulate
        due = stepped and trainer.global_step % trainer.log_every_n_steps == 0  # type: ignore[attr-defined]
        if due and self._window.works:
            self._log(pl_module)
            self._restart()
        self._end = time.perf_counter()
        if pl_module.device.type == "cuda":
            self._end_event = torch.cuda.Event(enable_timing=True)
            self._end_event.record()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops the clock."""
        self._began = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes validation out of the time of the steps."""
        self._window.left_out += time.perf_counter() - self._began
        self._end, self._end_event = None, None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Ends a count that the step did not end."""
        self.counter.stop()

    def _restart(self) -> None:
        self._window = Window(time.perf_counter())
        self._end, self._end_event = None, None

    def _log(self, pl_module: LightningModule) -> None:
        """Gathers the window of all ranks: the only synchronisation, once a log."""
        window, works = self._window, self._window.works
        seconds = max(time.perf_counter() - window.start - window.left_out, 1e-9)
        wait = window.wait
        if window.gaps:
            window.gaps[-1][1].synchronize()
            wait = sum(begin.elapsed_time(end) for begin, end in window.gaps) / 1e3
        strict = [work.strict_flops for work in works if work.strict_flops is not None]
        flops = torch.tensor([work.flops for work in works], dtype=torch.float64)
        memory = torch.cuda.max_memory_allocated(pl_module.device) / 1e9 if pl_module.device.type == "cuda" else 0.0
        sums = [
            sum(work.samples for work in works),
            sum(work.tokens for work in works),
            sum(work.padded_tokens for work in works),
            sum(strict) if len(strict) == len(works) else float("nan"),
        ]
        own = torch.cat([flops, torch.tensor([*sums, seconds, wait, memory], dtype=torch.float64)])
        ranks = _gather(own, pl_module.device)
        by_step = ranks[:, : len(works)]
        samples, tokens, padded, strict_flops = ranks[:, len(works) : -3].sum(0).tolist()
        slowest, longest_wait, most_memory = ranks[:, -3:].max(0).values.tolist()
        metrics = {
            "samples_per_second": samples / slowest,
            "step_seconds": slowest / len(works),
            "data_wait": min(longest_wait / slowest, 1.0),
            "imbalance": float((by_step.max(0).values / by_step.mean(0).clamp(min=1e-30)).mean()),
        }
        if tokens:
            metrics |= {"tokens_per_second": tokens / slowest, "padding_avoided": 1 - tokens / padded}
        if memory:
            metrics["peak_memory_gb"] = most_memory
        if self.peak is not None:
            mfu = self.peak.mfu(float(by_step.sum()), slowest, len(ranks))
            metrics |= {"peak_tflops": self.peak.bf16, "mfu": mfu}
            if strict_flops == strict_flops:
                metrics["mfu_strict"] = self.peak.mfu(strict_flops, slowest, len(ranks))
        self.latest = metrics
        for name, value in metrics.items():
            shown = name in ("samples_per_second", "mfu")
            pl_module.log(f"efficiency/{name}", value, prog_bar=shown, batch_size=1)


def peak_of(device: torch.device, peak_tflops: float | None = None) -> Peak | None:
    """The given rate, else that of the device, measured on a CPU; None, and a warning, for an unknown GPU."""
    if peak_tflops is not None:
        return Peak("given", peak_tflops, None, "peak_tflops")
    if device.type == "cpu":
        return measure_peak(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    peak = find_peak(name)
    if peak is None:
        warnings.warn(f"no peak rate is known for {name!r}, so MFU is not logged: give peak_tflops", stacklevel=2)
    return peak


def _batch_size(batch: Any) -> int:
    """Requests of a foreign batch, by Lightning's rules; 0 where they do not tell."""
    if isinstance(batch, Sized) and not isinstance(batch, (list, tuple, dict)):
        return len(batch)
    try:
        return extract_batch_size(batch)
    except (RuntimeError, MisconfigurationException):
        return 0


def _gather(own: Tensor, device: torch.device) -> Tensor:
    """(ranks, n): ``own`` (n,) of every rank."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return own[None]
    mine = own.to(device)
    parts = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, mine)
    return torch.stack(parts).cpu()
