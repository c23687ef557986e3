"""The paired comparison: known answers, coverage of its interval, what the callback logs and does."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything

from lightning_gem.callbacks import QualityGuard, SensitivityProbe
from lightning_gem.precision import MXFP8Precision
from lightning_gem.precision.convert import Converted
from lightning_gem.precision.gap import gap, paired_sums
from tests.helpers import ToyData
from tests.precision_helpers import make_module, make_trainer


def test_known_answer() -> None:
    """Two examples by hand, one without a label, one without weight."""
    p, q = torch.tensor([0.8, 0.4, 0.5, 0.5]).double(), torch.tensor([0.9, 0.2, 0.1, 0.9]).double()
    labels, weights = torch.tensor([1.0, 0.0, math.nan, 1.0]), torch.tensor([1.0, 1.0, 1.0, 0.0])
    found = gap(paired_sums(torch.logit(p), torch.logit(q), labels, weights))
    low, high = [-math.log(0.8), -math.log(0.6)], [-math.log(0.9), -math.log(0.8)]
    ratio = sum(low) / sum(high) - 1
    residuals = [a - b - ratio * b for a, b in zip(low, high, strict=True)]
    half = 1.959963984540054 * math.sqrt(sum(r * r for r in residuals)) / sum(high)
    assert found.examples == 2
    assert found.ne == pytest.approx(ratio)
    assert (found.low, found.high) == (pytest.approx(ratio - half), pytest.approx(ratio + half))
    assert (found.calibration, found.reference_calibration) == (pytest.approx(1.2), pytest.approx(1.1))


def noisy(n: int, noise: float, bias: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(n, generator=generator).double()
    labels = torch.bernoulli(truth.sigmoid(), generator=generator)
    low = truth + bias + noise * torch.randn(n, generator=generator)
    return paired_sums(low, truth, labels, torch.ones(n))


def test_status_and_examples_needed() -> None:
    same = gap(noisy(1000, 0.0, 0.0, 0))
    assert (same.ne, same.low, same.high, same.status, same.needed) == (0.0, 0.0, 0.0, "pass", 1000)
    assert gap(noisy(20_000, 0.01, 0.0, 0)).status == "pass"
    assert gap(noisy(20_000, 0.01, 0.5, 0)).status == "fail"
    few = gap(noisy(500, 0.05, 0.0, 0))
    assert few.status == "inconclusive"
    # Interval shrinks with the root of the number of examples: at the number needed it touches the tolerance.
    half = (few.high - few.low) / 2 * math.sqrt(few.examples / few.needed)
    assert half == pytest.approx(abs(2e-4 - few.ne))
    none = gap(torch.zeros(11))
    assert (none.examples, none.status) == (0, "inconclusive")
    assert math.isnan(none.ne)


def test_interval_covers() -> None:
    """95 % of the intervals hold the gap of a million examples."""
    expected = gap(noisy(1_000_000, 0.3, 0.0, 12345)).ne
    found = [gap(noisy(2000, 0.3, 0.0, seed)) for seed in range(200)]
    covered = sum(item.low < expected < item.high for item in found)
    assert 180 <= covered <= 199


def fit(folder: Path, precision: MXFP8Precision, callbacks: list[Any], steps: int = 4) -> tuple[Any, Any]:
    seed_everything(0)
    data = ToyData(num_rows=256)
    trainer = make_trainer(
        folder, precision, max_steps=steps, limit_val_batches=None, val_check_interval=2, callbacks=callbacks
    )
    module = make_module(data)
    trainer.fit(module, data)
    return trainer, module


def test_callback(tmp_path: Path) -> None:
    guard = QualityGuard(limit_batches=2)
    trainer, module = fit(tmp_path, MXFP8Precision(), [guard])
    assert set(guard.gaps) == {task.name for task in module.tasks}
    found = guard.gaps["click"]
    assert found.low < found.ne < found.high
    assert abs(found.ne) < 0.02
    assert trainer.callback_metrics["precision/ne_gap/click"].item() == pytest.approx(found.ne)
    assert all(m.precision_enabled for m in module.modules() if isinstance(m, Converted))


@pytest.mark.parametrize("action", ["stop", "demote"])
def test_actions(tmp_path: Path, action: Any) -> None:
    guard, probe = QualityGuard(tolerance=1e-9, action=action, demote_layers=2), SensitivityProbe(1, demote=False)
    seed_everything(0)
    original = guard.on_validation_epoch_end

    def failing(trainer: Any, module: Any) -> None:
        original(trainer, module)
        guard._act(trainer, module, ["click"])

    guard.on_validation_epoch_end = failing  # type: ignore[method-assign]
    trainer, module = fit(tmp_path, MXFP8Precision(), [guard, probe])
    disabled = [n for n, m in module.named_modules() if isinstance(m, Converted) and not m.precision_enabled]
    if action == "stop":
        assert trainer.should_stop
        assert trainer.global_step == 2
    else:
        assert disabled
        assert set(disabled) == set(probe.demoted)


def test_errors() -> None:
    with pytest.raises(ValueError, match="'log', 'demote' or 'stop'"):
        QualityGuard(action="shout")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be positive"):
        QualityGuard(tolerance=0)
