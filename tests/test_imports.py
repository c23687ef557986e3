"""The arrows between the packages point one way."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "lightning_gem"
ALLOWED = {
    "kernels": set(),
    "metrics": set(),
    "data": set(),
    "optimizers": set(),
    "efficiency": set(),
    "precision": {"kernels"},
    "models": {"data", "metrics", "kernels", "optimizers", "precision", "efficiency"},
    "strategies": {"optimizers"},
    "callbacks": {"data", "metrics", "kernels", "precision", "efficiency"},
    "cli": {"models", "data", "callbacks", "strategies"},
}


def imported(path: Path) -> set[str]:
    """Parts of lightning_gem that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("lightning_gem."):
            names.add(node.module.split(".")[1])
        elif isinstance(node, ast.ImportFrom) and node.module == "lightning_gem":
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            names.update(alias.name.split(".")[1] for alias in node.names if alias.name.startswith("lightning_gem."))
    return names


@pytest.mark.parametrize("part", ALLOWED)
def test_imports_follow_the_arrows(part: str) -> None:
    files = sorted((ROOT / part).rglob("*.py")) or [ROOT / f"{part}.py"]
    for path in files:
        assert imported(path) <= ALLOWED[part] | {part}, path


def test_every_part_has_an_arrow() -> None:
    parts = {path.name if path.is_dir() else path.stem for path in ROOT.iterdir() if path.name != "__pycache__"}
    assert parts - {"__init__", "__main__", "version", "py"} == set(ALLOWED)


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("lightning_gem", "torch"),
        ("lightning_gem.kernels", "lightning"),
        ("lightning_gem.kernels", "torchrec"),
        ("lightning_gem.precision", "lightning"),
    ],
)
def test_light_imports(module: str, absent: str) -> None:
    code = f"import sys, {module}; assert {absent!r} not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT.parent)


def test_kernels_work_without_triton() -> None:
    """As on macOS, where there is none."""
    code = (
        "import sys; sys.modules['triton'] = None; import torch; from lightning_gem.kernels import gdpa\n"
        "x = torch.ones(3, 1, 4, requires_grad=True); gdpa(x, x, x, torch.tensor([0, 3])).sum().backward()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT.parent)
