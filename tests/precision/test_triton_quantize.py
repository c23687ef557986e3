"""The Triton kernel gives the codes of the torch functions, and compiles for Hopper and Blackwell without either."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from offline import compiled_offline

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
    results = compiled_offline(Path(__file__).with_name("offline_compile.py"), str(arch))
    assert len(results) == 5
    for result in results:
        assert result["cast"], result  # in hardware
        assert result["stack"] == 0, result
        assert result["shared"] <= 65_536, result
