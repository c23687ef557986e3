"""EfficiencyMonitor on modules that are not ours, with a clock of its own: what it logs is exact."""

import time

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset

from lightning_gem.callbacks import EfficiencyMonitor, efficiency
from lightning_gem.efficiency import StepWork


class Clock:
    """Seconds that pass only when something says so."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


class SlowRows(Dataset):
    """Rows that take ``seconds`` of the clock each."""

    def __init__(self, clock, seconds, rows=64):
        self.clock, self.seconds, self.rows = clock, seconds, rows

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        self.clock.now += self.seconds
        return torch.ones(8)


class Foreign(LightningModule):
    """Four rows a step, ``seconds`` of the clock each step."""

    def __init__(self, clock, seconds):
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)
        self.clock, self.seconds = clock, seconds

    def training_step(self, batch, batch_idx):
        self.clock.now += self.seconds
        return self.layer(batch).sum()

    def validation_step(self, batch, batch_idx):
        self.clock.now += 1000

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Known(Foreign):
    """The same with a formula."""

    def step_work(self, batch):
        return StepWork(samples=len(batch), flops=1e9, strict_flops=8e8, tokens=30, padded_tokens=40)


def fit(tmp_path, module, rows, monitor, **kwargs):
    """Metrics that were logged, by name, one value per log."""
    logged = {}
    logger = CSVLogger(tmp_path)
    save, logger.log_metrics = (
        logger.log_metrics,
        lambda metrics, step=None: (
            [logged.setdefault(name, []).append(float(value)) for name, value in metrics.items()],
            save(metrics, step),
        ),
    )
    trainer = Trainer(
        accelerator="cpu", logger=logger, callbacks=[monitor], max_epochs=1, log_every_n_steps=4,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, default_root_dir=tmp_path,
        **kwargs,
    )  # fmt: skip
    trainer.fit(module, DataLoader(rows, batch_size=4), DataLoader(SlowRows(module.clock, 1, 4), batch_size=4))
    return {name.removeprefix("efficiency/"): values for name, values in logged.items()}, trainer


def test_figures_of_a_known_run(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    monitor = EfficiencyMonitor(peak_tflops=0.1)
    logged, trainer = fit(tmp_path, Known(clock, 0.3), SlowRows(clock, 0.05), monitor, num_sanity_val_steps=0)
    # A step takes 0.3 s, its four rows 0.2 s. In the first window there is nothing before the first step to wait after.
    assert logged["samples_per_second"][1] == pytest.approx(4 / 0.5)
    assert logged["tokens_per_second"][1] == pytest.approx(30 / 0.5)
    assert logged["step_seconds"][1] == pytest.approx(0.5)
    assert logged["data_wait"][1] == pytest.approx(0.2 / 0.5)
    assert logged["mfu"][1] == pytest.approx(1e9 / 0.5 / 1e11)
    assert logged["mfu_strict"][1] == pytest.approx(8e8 / 0.5 / 1e11)
    assert logged["padding_avoided"] == [0.25] * 4
    assert logged["imbalance"] == [1.0] * 4
    assert logged["peak_tflops"] == pytest.approx([0.1] * 4)
    assert trainer.progress_bar_metrics["efficiency/mfu"] == pytest.approx(logged["mfu"][-1])


def test_modules_without_formulas_are_counted_once(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    monitor = EfficiencyMonitor(peak_tflops=1.0)
    logged, _ = fit(tmp_path, Foreign(clock, 0.5), SlowRows(clock, 0.0), monitor)
    flops = 2 * 2 * 4 * 8 * 4
    assert list(monitor.counter.known.values()) == [flops]
    # The first step, in which FLOPs were counted, is left out of the first window.
    assert logged["step_seconds"] == pytest.approx([0.5] * 4)
    assert logged["mfu"] == pytest.approx([flops / 0.5 / 1e12] * 4)
    assert "mfu_strict" not in logged
    assert "tokens_per_second" not in logged


def test_validation_and_accumulation_are_no_steps(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    logged, _ = fit(
        *(tmp_path, Known(clock, 0.5), SlowRows(clock, 0.0), EfficiencyMonitor(1.0)),
        val_check_interval=2,
        accumulate_grad_batches=2,
    )
    assert logged["step_seconds"] == pytest.approx([0.5] * 2)  # 16 batches, 8 steps, a log every 4
    assert logged["samples_per_second"] == pytest.approx([8.0] * 2)


def test_ranks_are_taken_together(tmp_path, monkeypatch):
    """The other rank has thrice the FLOPs, and takes twice as long."""
    clock = Clock(monkeypatch)
    scale = torch.tensor([3.0] * 4 + [1.0] * 4 + [2.0, 1.0, 1.0])
    monkeypatch.setattr(efficiency, "_gather", lambda own, device: torch.stack([own, own * scale]))
    logged, _ = fit(tmp_path, Known(clock, 0.5), SlowRows(clock, 0.0), EfficiencyMonitor(1.0))
    assert logged["imbalance"] == pytest.approx([1.5] * 4)
    assert logged["step_seconds"] == pytest.approx([1.0] * 4)
    assert logged["samples_per_second"] == pytest.approx([8.0] * 4)
    assert logged["mfu"] == pytest.approx([4e9 / 1.0 / 2e12] * 4)


def test_a_device_without_a_peak_warns_and_has_no_mfu(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    monkeypatch.setattr(efficiency, "measure_peak", lambda device: efficiency.find_peak("NVIDIA Future"))
    monitor = EfficiencyMonitor()
    logged, _ = fit(tmp_path, Known(clock, 0.5), SlowRows(clock, 0.0), monitor)
    assert "mfu" not in logged
    assert "samples_per_second" in logged
    with pytest.warns(UserWarning, match="no peak rate is known for 'meta'"):
        assert efficiency.peak_of(torch.device("meta")) is None


def test_bad_peak():
    with pytest.raises(ValueError, match="peak_tflops is the rate of one device and must be positive, got 0"):
        EfficiencyMonitor(peak_tflops=0)
