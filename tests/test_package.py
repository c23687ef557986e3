"""The wheel holds what git holds, and the console script answers."""

import runpy
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "plain_lightning_cli.py"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_the_wheel_holds_what_git_holds(tmp_path: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split(
        "\n"
    )
    source = tmp_path / "source"
    listed = [name for name in listed if (ROOT / name).is_file()]
    for name in listed:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(source)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("lightning_gem/")}
    assert packed == {name for name in listed if name.startswith("lightning_gem/")}


@pytest.mark.parametrize(
    "run", [lambda **how: runpy.run_module("lightning_gem", **how), lambda **how: runpy.run_path(str(EXAMPLE), **how)]
)
def test_the_entry_points_answer(
    run: Callable[..., object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["program", "fit", "--help"])
    with pytest.raises(SystemExit) as stopped:
        run(run_name="__main__")
    assert not stopped.value.code
    assert "--data" in capsys.readouterr().out


def test_the_console_script_is_installed() -> None:
    script = Path(sys.executable).parent / "lightning-gem"
    if not script.exists():
        pytest.skip("the package is not installed in this environment")
    assert subprocess.run([script, "--help"], capture_output=True).returncode == 0
