"""The command line: ``lightning-gem fit | validate | test | predict``."""

import netrc
import os
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_info

from lightning_gem.callbacks import PredictionWriter, QualityTable, ResumableCheckpoint
from lightning_gem.data import RecDataModule
from lightning_gem.models import GEMModule


class LoggedConfig(SaveConfigCallback):
    """Saves the configuration in the log folder, and sends it to every logger as hyperparameters."""

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Runs on rank zero before the first metric is logged."""
        config = yaml.safe_load(self.parser.dump(self.config, skip_none=False))
        for logger in trainer.loggers:
            logger.log_hyperparams(config)


class GEMCLI(LightningCLI):
    """LightningCLI for :class:`GEMModule` and any :class:`RecDataModule`.

    Beyond LightningCLI it links the data module's schema to the model, keeps the best checkpoint by normalized entropy
    and the last one (of interrupted runs too), writes predictions to Parquet, prints a table of the quality, and keeps
    Weights & Biases offline where no key is configured.
    """

    def __init__(self, args: ArgsType = None, run: bool = True) -> None:
        super().__init__(
            GEMModule,
            RecDataModule,
            subclass_mode_data=True,
            save_config_callback=LoggedConfig,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=42,
            auto_configure_optimizers=False,
            args=args,
            run=run,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the link and the callbacks that are always on."""
        parser.link_arguments("data.schema", "model.schema", apply_on="instantiate")
        parser.add_lightning_class_args(ResumableCheckpoint, "checkpoint")
        parser.set_defaults(
            {
                "checkpoint.monitor": "val/ne",
                "checkpoint.filename": "{epoch}-{step}",
                "checkpoint.save_last": True,
                "checkpoint.save_on_exception": True,
                "checkpoint.enable_version_counter": False,
            }
        )
        parser.add_lightning_class_args(QualityTable, "quality_table")
        parser.add_lightning_class_args(PredictionWriter, "predictions")

    def before_instantiate_classes(self) -> None:
        """Gives checkpoints a folder that the next run finds, and W&B a mode that needs no key."""
        config = self.config[self.subcommand] if self.subcommand else self.config
        if config.checkpoint.dirpath is None:
            config.checkpoint.dirpath = str(Path(config.trainer.default_root_dir or ".") / "checkpoints")
        if self.subcommand in ("validate", "test", "predict"):
            _check_checkpoint(self.subcommand, config.ckpt_path, Path(config.checkpoint.dirpath))
        if self.subcommand == "predict" and config.return_predictions is None:
            config.return_predictions = False  # they go to files
        if not _has_wandb_key():
            os.environ.setdefault("WANDB_MODE", "offline")

    def after_fit(self) -> None:
        """Says where everything lies."""
        checkpoint = self.trainer.checkpoint_callback
        if isinstance(checkpoint, ModelCheckpoint):
            rank_zero_info(
                f"best checkpoint: {checkpoint.best_model_path}\nlast checkpoint: {checkpoint.last_model_path}"
            )
        for logger in self.trainer.loggers:
            if isinstance(logger, CSVLogger):
                rank_zero_info(f"metrics:         {Path(logger.log_dir) / 'metrics.csv'}")
            if isinstance(logger, WandbLogger) and self.trainer.is_global_zero:
                folder = Path(logger.experiment.dir).parent
                offline = logger.experiment.settings.mode in ("offline", "dryrun")
                rank_zero_info(f"W&B run:         {f'wandb sync {folder}' if offline else logger.experiment.url}")


def _check_checkpoint(subcommand: str, ckpt_path: str | None, folder: Path) -> None:
    """Refuses to evaluate a network that was never trained, which Lightning does with a warning at most."""
    if ckpt_path is None:
        raise ValueError(f"{subcommand} needs a checkpoint: add --ckpt_path last, or --ckpt_path and a file")
    if ckpt_path == "last" and not list(folder.glob("last*.ckpt")):
        raise FileNotFoundError(f"there is no last.ckpt in {folder.resolve()}: fit first, or give --ckpt_path a file")


def _has_wandb_key() -> bool:
    """Whether a key is in the environment or was stored by ``wandb login``."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        hosts = netrc.netrc().hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return any("wandb" in host for host in hosts)


def main(args: Any = None) -> None:
    """Entry point of the console script."""
    GEMCLI(args)
