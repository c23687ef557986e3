"""The examples do what they say."""

import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_kernels_without_lightning():
    main = runpy.run_path(str(EXAMPLES / "kernels_without_lightning.py"))["main"]
    assert main(steps=120) > 0.9  # a coin gives 0.5
