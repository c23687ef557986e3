"""Runs block_interpreted.py in a process of its own: Triton reads the variable when it is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "block_interpreted.py"],
        cwd=HERE,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{HERE}:{HERE.parents[1]}"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
