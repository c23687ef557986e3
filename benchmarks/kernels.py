"""All kernel benchmarks, ours beside every peer that is installed, on one GPU.

    python -m benchmarks.kernels [attention block around ...] [-- options of those benchmarks]

Runs ``benchmarks/kernels_<name>.py`` one after the other, each in a process of its own, so that none inherits the
memory or the compiled code of another.
"""

import argparse
import subprocess
import sys
from pathlib import Path

NAMES = sorted(path.stem.removeprefix("kernels_") for path in Path(__file__).parent.glob("kernels_*.py"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES, help=f"out of {', '.join(NAMES)}; default: all")
    arguments, options = parser.parse_known_args()
    unknown = set(arguments.names) - set(NAMES)
    if unknown:
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}: use {', '.join(NAMES)}")
    codes = [
        subprocess.run([sys.executable, "-m", f"benchmarks.kernels_{name}", *options]).returncode
        for name in arguments.names
    ]
    return max(codes, default=0)


if __name__ == "__main__":
    sys.exit(main())
