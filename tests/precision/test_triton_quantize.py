"""The Triton kernel gives the codes of the torch functions, and compiles for Hopper and Blackwell without either."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_in_the_interpreter() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "interpreted.py", "interpreted_rows.py", "-x", "-p", "no:cacheprovider"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


@pytest.mark.parametrize("arch", [90, 100])
def test_compiles(arch: int) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    output = subprocess.run(
        [sys.executable, "offline_compile.py", str(arch)],
        env=environment,
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    assert output.returncode == 0, output.stderr[-3000:]
    results = [json.loads(line) for line in output.stdout.splitlines()]
    assert len(results) == 5
    for result in results:
        assert result["cast"], result  # in hardware
        assert result["stack"] == 0, result
        assert result["shared"] <= 65_536, result
