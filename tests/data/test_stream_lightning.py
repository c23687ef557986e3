"""Resume of the data position with Lightning's own checkpoints."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_gem.data import RecBatch, RecDataModule, Schema, Task
from tests.data.stream_helpers import CountingSource

BATCHES = 5


class Data(RecDataModule):
    def __init__(self, num_workers: int = 0, val: bool = False, **kwargs: Any) -> None:
        super().__init__(Schema([Task("y")]), batch_size=4, num_workers=num_workers, shuffle_rows=8, **kwargs)
        self.val = val

    def setup(self, stage: str | None = None) -> None:
        self.sources["train"] = CountingSource([7, 1, 0, 12])
        if self.val:
            self.sources["val"] = CountingSource([3, 4])


class Recorder(pl.LightningModule):
    """Notes the rows of every step; its weight depends on their order."""

    def __init__(self, ask_for_steps: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.ask_for_steps = ask_for_steps
        self.seen: list[list[int]] = []

    def training_step(self, batch: RecBatch) -> torch.Tensor:
        self.seen.append(batch.row.tolist())
        return (self.weight - batch.dense[:, 0].mean()) ** 2

    def validation_step(self, batch: RecBatch) -> None:
        assert batch.row[0] in (0, 3)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.ask_for_steps:
            # Builds the training loader before the checkpoint is read.
            assert self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), lr=0.01)


def run(folder: Path, ckpt: Path | None = None, data: Data | None = None, **kwargs: Any) -> Recorder:
    model = Recorder(kwargs.pop("ask_for_steps", False))
    options: dict[str, Any] = {"max_epochs": 3, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        default_root_dir=folder, accelerator="cpu", devices=1, logger=False, **{**options, "callbacks": [], **kwargs}
    )
    trainer.fit(model, data or Data(), ckpt_path=ckpt)
    return model


def every_step() -> ModelCheckpoint:
    return ModelCheckpoint(filename="{step}", every_n_train_steps=1, save_top_k=-1)


def checkpoints(folder: Path) -> dict[int, Path]:
    files = folder.rglob("*.ckpt")
    return {int(file.stem.split("=")[1]): file for file in files if file.stem.startswith("step=")}


@pytest.mark.parametrize("limit", [None, 3])
@pytest.mark.parametrize("ask_for_steps", [False, True])
def test_resume_from_every_step(tmp_path: Path, limit: int | None, ask_for_steps: bool) -> None:
    whole = run(tmp_path, limit_train_batches=limit, callbacks=[every_step()], ask_for_steps=ask_for_steps)
    assert len(whole.seen) == 3 * (limit or BATCHES)
    files = checkpoints(tmp_path)
    assert sorted(files) == list(range(1, len(whole.seen) + 1))
    for step, file in files.items():
        if step == len(whole.seen):
            continue
        resumed = run(tmp_path, file, limit_train_batches=limit, ask_for_steps=ask_for_steps)
        assert resumed.seen == whole.seen[step:], step
        assert resumed.weight == whole.weight


def test_epochs_are_whole_and_differ(tmp_path: Path) -> None:
    seen = run(tmp_path).seen
    epochs = [seen[i : i + BATCHES] for i in range(0, 15, BATCHES)]
    assert all(sorted(row for batch in epoch for row in batch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_resume_with_workers_and_validation(tmp_path: Path) -> None:
    options = {"val_check_interval": 2, "num_sanity_val_steps": 1, "max_epochs": 2}
    whole = run(tmp_path, data=Data(2, val=True), callbacks=[every_step()], **options)
    for step in (3, 5, 8):
        resumed = run(tmp_path, checkpoints(tmp_path)[step], data=Data(2, val=True), **options)
        assert resumed.seen == whole.seen[step:]


def test_resume_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    keep = ModelCheckpoint(filename="epoch={epoch}", auto_insert_metric_name=False, save_top_k=-1, monitor=None)
    keep._save_on_train_epoch_end = True
    whole = run(tmp_path, callbacks=[keep])
    files = sorted(tmp_path.rglob("epoch=*.ckpt"))
    assert len(files) == 3
    assert run(tmp_path, files[0]).seen == whole.seen[BATCHES:]
    # The number of workers is free to change there.
    resumed = run(tmp_path, files[1], data=Data(num_workers=1))
    assert sorted(row for batch in resumed.seen for row in batch) == list(range(20))


def test_max_steps_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    whole = run(tmp_path, max_epochs=-1, max_steps=12)
    first = run(tmp_path, max_epochs=-1, max_steps=7, callbacks=[every_step()])
    assert first.seen == whole.seen[:7]
    resumed = run(tmp_path, checkpoints(tmp_path)[7], max_epochs=-1, max_steps=12)
    assert resumed.seen == whole.seen[7:]


def test_changed_layout_is_an_error_in_the_middle_of_an_epoch_only(tmp_path: Path) -> None:
    run(tmp_path, max_epochs=1, callbacks=[every_step()])
    files = checkpoints(tmp_path)
    with pytest.raises(ValueError, match="middle of an epoch with num_workers=0, now it is 1"):
        run(tmp_path, files[2], data=Data(num_workers=1))
    assert len(run(tmp_path, files[5], data=Data(num_workers=1), max_epochs=2).seen) == BATCHES


def test_overfit_batches_repeats_the_same_batches(tmp_path: Path) -> None:
    seen = run(tmp_path, overfit_batches=2).seen
    assert len(seen) == 6
    assert seen[:2] == seen[2:4] == seen[4:]


def test_a_position_is_for_fit_only(tmp_path: Path) -> None:
    whole = run(tmp_path, max_epochs=1, data=Data(val=True), callbacks=[every_step()])
    data = Data(val=True)
    trainer = pl.Trainer(
        default_root_dir=tmp_path, accelerator="cpu", logger=False, max_epochs=1, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    model = Recorder()
    trainer.validate(model, data, ckpt_path=checkpoints(tmp_path)[3])
    trainer.fit(model, data)
    assert model.seen == whole.seen
