"""What a trainer asks for that the strategy cannot do: refused before anything is sharded."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision, Precision

from lightning_gem.strategies.compat import detects_anomaly

_WEIGHT_CALLBACKS = ("WeightAveraging", "StochasticWeightAveraging")


def check_trainer(trainer: Trainer, precision: Precision, layer_sync: Any, async_checkpoints: bool = False) -> None:
    """Refuses what would be wrong or ignored.

    Args:
        trainer: The trainer.
        precision: Precision plugin.
        layer_sync: Lightning's plugin for ``sync_batchnorm``, or None.
        async_checkpoints: Whether checkpoints are complete only some time after they were asked for.

    Raises:
        ValueError: Naming the field and the fix.
    """
    check_precision(precision)
    if detects_anomaly(trainer):
        raise ValueError("detect_anomaly=True does not work with sharded parameters: set it to false")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if any(kind.__name__ in _WEIGHT_CALLBACKS for kind in type(callback).__mro__):
            raise ValueError(
                f"callback {type(callback).__name__} copies whole weights, which no rank has here: remove it"
            )
        if async_checkpoints and isinstance(callback, ModelCheckpoint) and callback.save_last == "link":
            raise ValueError(
                'save_last="link" of ModelCheckpoint would point to a checkpoint that async_checkpoints has not '
                "finished: set save_last: true, or async_checkpoints: false"
            )
    if layer_sync is not None:
        raise ValueError("sync_batchnorm=True is not supported by hybrid_sharded: set it to false")


def check_precision(plugin: Precision) -> None:
    """Refuses precision plugins that do not go together with fused updates or FSDP2.

    Raises:
        ValueError: Naming the plugin and the fix.
    """
    if type(plugin) is MixedPrecision and plugin.precision != "bf16-mixed":
        raise ValueError(
            f"precision={plugin.precision} scales the loss, and the tables are updated before it is unscaled: use "
            "bf16-mixed or 32-true"
        )
    if type(plugin) not in (Precision, MixedPrecision):
        raise ValueError(
            f"precision plugin {type(plugin).__name__} ({plugin.precision}) is not supported: use 32-true, "
            "bf16-mixed, or 32-true with param_dtype: bfloat16"
        )
