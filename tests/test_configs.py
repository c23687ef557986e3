"""Every recipe runs two steps, trains its whole network, and saves a checkpoint."""

from pathlib import Path

import pytest
import torch
import yaml

from lightning_gem.cli import main

ROOT = Path(__file__).parents[1]
# What makes the large presets fit into this test: one request, two layers, no wide matrices but those of the towers,
# and tables of 100 rows. The sequences and their towers stay.
NETWORK = "--model.network.init_args.config"
SMALLER = [
    *("--data.batch_size=1", "--data.num_workers=0", "--data.num_embeddings=100"),
    *(f"{NETWORK}.experts.hidden=16", f"{NETWORK}.head_hidden=[8]", f"{NETWORK}.num_layers=2"),
]
LARGE = ("small", "base_1b", "paper")


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_two_steps(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = path.read_text()
    if "../shared/data" in text and not (ROOT.parent / "shared" / "data").exists():
        pytest.skip("the real data sets are not in ../shared/data")
    assert yaml.safe_load(text)["trainer"]["logger"], "recipes log to CSV and W&B"
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    extra = SMALLER if path.stem in LARGE else []
    main(
        [
            "fit",
            *("--config", str(path)),
            *("--trainer.max_steps=2", "--trainer.limit_val_batches=1", "--trainer.num_sanity_val_steps=0"),
            *("--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_progress_bar=false"),
            f"--trainer.default_root_dir={tmp_path}",
            f"--checkpoint.dirpath={tmp_path}",
            *extra,
        ]
    )
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 2
    moments = checkpoint["optimizer_states"][0]["dense"]["state"]
    assert len(moments) == len(checkpoint["optimizer_states"][0]["dense"]["param_groups"][0]["params"])
