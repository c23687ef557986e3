"""The paper's preset on thousands of ranks, under the fake process group."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("world", "rank"), [(1024, 0), (4096, 2065)])
def test_paper_preset_on_many_ranks(world: int, rank: int) -> None:
    command = [sys.executable, "-m", "tests.simulated.dry_run", str(world), str(rank)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["total"] > 10**12
    assert 5e9 < report["dense"] < 6e9
    # 512 ranks share them; first dimensions that do not divide leave some ranks more than others.
    assert report["local"] < 2 * report["dense"] / 512
    layout = report["layout"]
    # A trillion elements of 4 bytes over 256 ranks; whole tables are too large to spread evenly.
    assert layout["table_weights"] == pytest.approx(4 * (report["total"] - report["dense"]) / 256, rel=0.3)
    assert layout["dense_parameters"] == 4 * report["local"]
    assert set(layout["by_axis"]) >= {"table", "table_replicate", "shard", "expert_shard"}
    assert all(layout["by_axis"].values())
