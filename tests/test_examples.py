"""The examples do what they say."""

import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_kernels_without_lightning():
    main = runpy.run_path(str(EXAMPLES / "kernels_without_lightning.py"))["main"]
    assert main(steps=120) > 0.9  # a coin gives 0.5


def test_efficiency_monitor(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logged = runpy.run_path(str(EXAMPLES / "efficiency_monitor.py"))["main"](rows=16_384)
    assert logged["efficiency/mfu"] > 0
    assert 0 <= logged["efficiency/data_wait"] <= 1
    assert logged["efficiency/imbalance"] == 1
