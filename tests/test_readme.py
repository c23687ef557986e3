"""What the README shows works."""

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from lightning_gem.cli import main

README = (Path(__file__).parents[1] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_own_data_in_twenty_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = blocks("yaml")[0]
    assert len(recipe.splitlines()) <= 22
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rng = np.random.default_rng(0)
    columns = {
        "user": rng.integers(0, 50, 2000),
        "item": rng.integers(0, 500, 2000),
        "time": rng.integers(10**9, 10**9 + 10**6, 2000),
        "price": rng.random(2000),
        "click": rng.integers(0, 2, 2000),
    }
    pq.write_table(pa.table(columns), "log.parquet")
    Path("mine.yaml").write_text(recipe)
    assert yaml.safe_load(recipe)["trainer"] == {"max_epochs": 1}
    commands = [line for block in blocks("bash") for line in block.splitlines() if "mine.yaml" in line]
    assert len(commands) == 4
    for command in commands:
        arguments = command.split("#")[0].split()
        assert arguments[0] == ".venv/bin/lightning-gem"
        main([*arguments[1:], "--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"])
    assert pq.read_table("predictions").num_rows == 200


def test_python_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("python")
    code = code.replace("20_000", "600").replace("max_epochs=1", "max_epochs=1, accelerator='cpu', logger=False")
    exec(compile(code, "README.md", "exec"), {})
