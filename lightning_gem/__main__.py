"""``python -m lightning_gem``."""

from lightning_gem.cli import main

if __name__ == "__main__":
    main()
