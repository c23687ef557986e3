"""The command line: ``lightning-gem fit | validate | test | predict``."""

import difflib
import importlib
import inspect
import netrc
import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_info

from lightning_gem.callbacks import EfficiencyMonitor, PredictionWriter, QualityTable, ResumableCheckpoint
from lightning_gem.data import RecDataModule
from lightning_gem.models import GEMModule

_DEBUG = "LIGHTNING_GEM_DEBUG"


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

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Makes a parser, of the command or of a subcommand."""
        parser = super().init_parser(**kwargs)
        parser.__class__ = _Parser
        return parser

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
        parser.add_lightning_class_args(EfficiencyMonitor, "efficiency")
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


class _Parser(LightningArgumentParser):
    """Says what is wrong in one sentence, and last; with LIGHTNING_GEM_DEBUG as jsonargparse does."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Prints the error and exits with status 2."""
        if not self.exit_on_error or os.environ.get(_DEBUG):
            super().error(message, ex)
        program = self.prog.replace(" [options]", "")
        self.exit(
            2, f"tip: {program} --help lists all options; {_DEBUG}=1 shows everything\nerror: {explain(message)}\n"
        )


_KEY = re.compile(r'Parser key "([^"]+)":?')
_CLASS = re.compile(r"Problem with given class_path '([^']+)':?")
_OPTION = re.compile(r"Option '([^']+)' is not accepted")
# Lines by which jsonargparse reports attempts rather than mistakes.
_ATTEMPTS = re.compile(
    r"Does not validate against|Subtypes:|Errors:|Expected a <class 'NoneType'>|Given value|Type \S+ expects"
    r"|Type collections\.abc"
)


def explain(message: str) -> str:
    """The deepest sentence of a nested message of jsonargparse, after the keys that lead to it."""
    keys: list[str] = []
    cls = ""
    for line in message.splitlines():
        keys += [key for key in _KEY.findall(line) if key not in keys]
        found = _CLASS.findall(line)
        cls = found[-1] if found else cls
        sentence = _CLASS.sub("", _KEY.sub("", line)).strip(" -")
        if _ATTEMPTS.match(sentence) or not sentence:
            continue
        option = _OPTION.search(sentence)
        if option and cls:
            close = difflib.get_close_matches(option[1], _parameters(cls), n=1)
            sentence += f" by {cls}" + (f": did you mean {close[0]!r}?" if close else "")
        return f"{'.'.join(keys)}: {sentence}" if keys else sentence
    return message


def _parameters(class_path: str) -> list[str]:
    module, _, name = class_path.rpartition(".")
    try:
        return list(inspect.signature(getattr(importlib.import_module(module), name)).parameters)
    except (ImportError, AttributeError, TypeError, ValueError):
        return []


def _is_mistake_of_user(error: Exception) -> bool:
    """Whether this package or the parser raised the error on purpose; others come with their traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    origin = Path(frames[-1].filename).parts if frames else ()
    return "jsonargparse" in origin or Path(__file__).parent in Path(frames[-1].filename).parents


def main(args: Any = None) -> None:
    """Entry point of the console script. Called with arguments, it raises errors as they are."""
    if args is not None or os.environ.get(_DEBUG):
        GEMCLI(args)
        return
    try:
        GEMCLI()
    except (ValueError, FileNotFoundError, RuntimeError) as error:
        if not _is_mistake_of_user(error):
            raise
        sys.exit(f"tip: {_DEBUG}=1 shows where this was raised\nerror: {explain(str(error))}")
