"""Runs the Triton kernels in Triton's interpreter, which has to be on before Triton is imported: in other processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
PARTS = [
    "packed",
    "not packed and (gdpa or dense or context or half)",
    "not packed and not (gdpa or dense or context or half)",
]


@pytest.mark.parametrize("selection", PARTS)
def test_kernels_in_the_interpreter(selection):
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "interpreted.py", "-x", "-p", "no:cacheprovider", "-k", selection],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
