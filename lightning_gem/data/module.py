"""What all data modules share: splits as row sources, loaders for the ranks of the trainer."""

from collections.abc import Callable
from typing import Any

import pyarrow as pa
from lightning.pytorch import LightningDataModule

from lightning_gem.data.fitting import Fitted
from lightning_gem.data.rows import Ints
from lightning_gem.data.schema import Schema
from lightning_gem.data.stream import BatchStream, RowSource, StreamLoader


class RecDataModule(LightningDataModule):
    """Base of the data modules: subclasses fill ``sources`` in ``setup``.

    Args:
        schema: Features, labels and keys of the data.
        batch_size: Rows per batch and rank.
        num_workers: Worker processes per loader; 0 reads in the training process.
        shuffle_rows: Rows of the shuffle window of the training split.
        seed: Seed of the shuffles.

    Attributes:
        sources: Row sources by split: ``train``, ``val``, ``test``, ``predict``. A missing ``predict`` falls back to
            ``test``. Without ``val``, fit skips validation.
        fitted: Vocabularies and statistics of the training split, where the encodings need them.
    """

    def __init__(
        self, schema: Schema, batch_size: int, num_workers: int = 0, shuffle_rows: int = 65536, seed: int = 0
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"batch_size must be positive, not {batch_size}")
        self.schema = schema
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.shuffle_rows = shuffle_rows
        self.seed = seed
        self.sources: dict[str, RowSource] = {}
        self.fitted: Fitted | None = None
        self._train_loader: StreamLoader | None = None
        self._train_position: dict[str, Any] | None = None

    def _loader(self, split: str, shuffle: bool = False) -> StreamLoader:
        if split not in self.sources:
            there = f"there are {', '.join(sorted(self.sources))}" if self.sources else "none is open yet"
            raise ValueError(f"{type(self).__name__} has no {split!r} split ({there}): {self._how_to_give(split)}")
        ranks = {"num_replicas": 1, "rank": 0}
        if self.trainer is not None:
            ranks = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or ranks
        stream = BatchStream(
            self.sources[split],
            self.batch_size,
            rank=ranks["rank"],
            world_size=ranks["num_replicas"],
            shuffle_rows=self.shuffle_rows if shuffle else 0,
            seed=self.seed,
        )
        on_gpu = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return StreamLoader(stream, self.num_workers, pin_memory=on_gpu)

    def _how_to_give(self, split: str) -> str:
        """What to do about a missing split."""
        return f"set up a stage that reads it, or fill sources[{split!r}] in setup()"

    def original_columns(self, split: str, columns: list[str]) -> Callable[[Ints], pa.Table]:
        """Gives a function that reads columns of the input for some values of ``RecBatch.row``.

        Args:
            split: The split.
            columns: Columns of the files, whether or not the schema uses them.

        Raises:
            ValueError: If a column is missing, or this data module has no files.
        """
        raise ValueError(f"{type(self).__name__} cannot give columns of its input: leave predictions.columns empty")

    def train_dataloader(self) -> StreamLoader:
        """Batches of the training split, shuffled, from the position of the checkpoint on."""
        # The first batches are to be the same in every epoch if the trainer is to overfit them.
        overfit = getattr(self.trainer, "overfit_batches", 0) > 0
        self._train_loader = self._loader("train", shuffle=not overfit)
        self._train_loader.pending = self._pending
        if self._train_position is not None:
            self._train_loader.load_state_dict(self._train_position)
            self._train_position = None
        return self._train_loader

    def _pending(self) -> int:
        """Batches that an interrupted step had taken but not finished."""
        if self.trainer is None:
            return 0
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
        return progress.ready - progress.processed

    def val_dataloader(self) -> StreamLoader | list[StreamLoader]:
        """Batches of the validation split, in order."""
        if "val" not in self.sources and self.trainer is not None and self.trainer.state.fn == "fit":
            return []
        return self._loader("val")

    def test_dataloader(self) -> StreamLoader:
        """Batches of the test split, in order."""
        return self._loader("test")

    def predict_dataloader(self) -> StreamLoader:
        """Batches to predict, in order."""
        return self._loader("predict" if "predict" in self.sources else "test")

    def state_dict(self) -> dict[str, Any]:
        """Position in the training split, and what identifies its vocabularies and statistics.

        Lightning saves the position of loaders too, but restores it only if nothing asked for the number of training
        batches before (``trainer.estimated_stepping_batches`` in ``configure_optimizers`` does).
        """
        state: dict[str, Any] = {}
        if self._train_loader is not None:
            state["train_loader"] = self._train_loader.state_dict()
        if self.fitted is not None:
            state["fitted"] = self.fitted.digest()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the position for the training loader.

        Raises:
            ValueError: If vocabularies or statistics differ, so that the ids of the checkpoint would mean other things.
        """
        if self.trainer is None or self.trainer.state.fn == "fit":
            self._train_position = state_dict.get("train_loader")
        if self.fitted is not None and state_dict.get("fitted", self.fitted.digest()) != self.fitted.digest():
            raise ValueError(
                "the checkpoint was trained with other vocabularies or statistics than those of this training "
                "split: give "
                "the files, joins and split that it was trained on"
            )
