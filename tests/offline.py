"""Compiles kernels for GPUs that need not be there, in a process of its own: Triton decides on import how it runs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def compiled_offline(script: Path, *arguments: str) -> list[dict[str, Any]]:
    """What a script found out about every kernel: one JSON object a line."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    output = subprocess.run(
        [sys.executable, script.name, *arguments], env=environment, cwd=script.parent, capture_output=True, text=True
    )
    assert output.returncode == 0, output.stderr[-3000:]
    return [json.loads(line) for line in output.stdout.splitlines()]
