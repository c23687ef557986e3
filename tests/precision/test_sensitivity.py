"""The probe: its figures, what it writes, demotion, resume."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything

from lightning_gem.callbacks import SensitivityProbe
from lightning_gem.precision import MXFP8Precision
from lightning_gem.precision.convert import Converted
from lightning_gem.precision.mx import mx_dequantize, mx_quantize
from lightning_gem.precision.statistics import operand_statistics, product_statistics, signal_to_noise
from tests.helpers import ToyData
from tests.precision_helpers import make_module, make_trainer


def test_operand_statistics() -> None:
    x = torch.randn(512, 256, generator=torch.Generator().manual_seed(0))
    decibels, flushed, saturated = operand_statistics(x, -1).tolist()
    assert decibels == pytest.approx(31.5, abs=0.1)
    assert flushed < 1e-3
    assert saturated == 0
    _, _, saturated = operand_statistics(x, -1, scale="floor").tolist()
    assert saturated > 1e-3
    wide = torch.ones(4, 32)
    wide[:, 0], wide[0, 1:] = 1e6, 0.0
    _, flushed, _ = operand_statistics(wide, -1).tolist()
    assert flushed == pytest.approx(93 / 97)
    assert operand_statistics(torch.zeros(2, 32), 0).tolist() == [120.0, 0.0, 0.0]
    back = mx_dequantize(mx_quantize(x, 0))
    assert operand_statistics(x, 0)[0] == signal_to_noise(x, back)
    for kind in ("row", "block", "tensor"):
        decibels, flushed, saturated = operand_statistics(x, 0, kind=kind).tolist()
        assert decibels == pytest.approx(31.5, abs=0.2)
        assert flushed < 2e-3
        assert saturated == 0
    y = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    assert product_statistics(x, -1, y, -1, "e4m3", "e4m3").item() == pytest.approx(28.5, abs=0.2)


def fit(folder: Path, steps: int, ckpt_path: str | None = None, **arguments: Any) -> tuple[Any, Any, SensitivityProbe]:
    seed_everything(0)
    data, probe = ToyData(num_rows=256), SensitivityProbe(every_n_steps=2, rows=64, **arguments)
    trainer = make_trainer(folder, MXFP8Precision(keep_last_layers=1), max_steps=steps, callbacks=[probe])
    module = make_module(data)
    trainer.fit(module, data, ckpt_path=ckpt_path, weights_only=True)
    return trainer, module, probe


def enabled(module: Any) -> dict[str, bool]:
    return {name: m.precision_enabled for name, m in module.named_modules() if isinstance(m, Converted)}


def test_healthy_layers_stay(tmp_path: Path) -> None:
    trainer, module, probe = fit(tmp_path, 6)
    assert all(enabled(module).values())
    assert set(probe.statistics) == set(enabled(module))
    for name, row in probe.statistics.items():
        for key in ("x_db", "weight_db", "grad_db"):
            assert 28 < row[key] < 60, (name, key, row)
        for key in ("out_db", "grad_x_db", "grad_weight_db"):
            least = 15 if key == "grad_weight_db" else 22  # sums that cancel lose more
            assert least < row[key] < 60, (name, key, row)
        assert row["x_saturated"] == row["grad_saturated"] == 0
    assert 25 < trainer.callback_metrics["precision/least_out_db"] < 35
    assert trainer.callback_metrics["precision/demoted"] == 0
    assert all(m.precision_probe is None for m in module.modules() if isinstance(m, Converted))
    written = json.loads((tmp_path / "precision.json").read_text())["trainer"]["plugins"][0]
    assert written["init_args"]["exclude"] == []
    assert written["init_args"]["keep_last_layers"] == 1
    assert json.loads((tmp_path / "precision.statistics.json").read_text()) == probe.statistics


def test_probing_changes_nothing(tmp_path: Path) -> None:
    _, probed, _ = fit(tmp_path, 4)
    seed_everything(0)
    data = ToyData(num_rows=256)
    trainer, module = make_trainer(tmp_path, MXFP8Precision(keep_last_layers=1), max_steps=4), make_module(data)
    trainer.fit(module, data)
    for name, value in module.state_dict().items():
        assert torch.equal(value, probed.state_dict()[name]), name


def test_demotion_survives_a_resume_and_becomes_a_configuration(tmp_path: Path) -> None:
    trainer, module, probe = fit(tmp_path, 4, least_db=100.0, patience=2)
    assert probe.beyond
    assert not any(enabled(module).values())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    _, resumed, again = fit(tmp_path, 6, str(tmp_path / "a.ckpt"), least_db=100.0, patience=2)
    assert not any(enabled(resumed).values())
    assert again.demoted == probe.demoted
    arguments = json.loads((tmp_path / "precision.json").read_text())["trainer"]["plugins"][0]["init_args"]
    assert len(arguments["exclude"]) == len(probe.demoted)
    arguments["exclude"] = arguments["exclude"][1:]
    plugin = MXFP8Precision(**arguments)
    assert plugin.convert_module(resumed) is resumed
    assert plugin.converted == [probe.demoted[0]]


def test_watching_only(tmp_path: Path) -> None:
    _, module, probe = fit(tmp_path, 4, least_db=100.0, patience=2, demote=False)
    assert all(enabled(module).values())
    assert len(
        json.loads((tmp_path / "precision.json").read_text())["trainer"]["plugins"][0]["init_args"]["exclude"]
    ) == (len(probe.statistics))


def test_errors() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        SensitivityProbe(every_n_steps=0)
