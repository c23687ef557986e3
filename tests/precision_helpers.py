"""A small training in low precision that several tests share."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_gem.models import GEM, GEMConfig, GEMModule
from tests.helpers import ToyData


def make_module(data: ToyData) -> GEMModule:
    return GEMModule(
        data.schema,
        network=partial(GEM, config=GEMConfig(width=32)),
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        table_lr=0.05,
        decay="none",
    )


def make_trainer(folder: Path, precision: Any, **arguments: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "plugins": [precision],
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "default_root_dir": folder,
        "max_steps": 2,
        "limit_val_batches": 0,
    }
    return Trainer(**{**defaults, **arguments})
