"""GEMModule under a Trainer: learning, schedules, resume, checkpoints of other schemas, non-finite losses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from lightning_gem.data import RecBatch
from lightning_gem.models import GEM, GEMConfig, GEMModule
from lightning_gem.optimizers import TABLES, table_parameters
from tests.helpers import ToyData, make_batch


def make_module(data: ToyData, **arguments: Any) -> GEMModule:
    defaults: dict[str, Any] = {
        "network": lambda schema: GEM(schema, GEMConfig(width=16, dropout=0.1)),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        "warmup_steps": 3,
        "table_warmup_steps": 5,
        "table_lr": 0.05,
    }
    return GEMModule(data.schema, **{**defaults, **arguments})


def make_trainer(folder: Path, **arguments: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        "default_root_dir": folder,
    }
    return Trainer(**{**defaults, **arguments})


class Recorder(Callback):
    """Rows, learning rates and metrics of every step."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []
        self.rates: list[tuple[float, float]] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: RecBatch, batch_idx: int) -> None:
        self.rows.append(batch.row.tolist())
        groups = trainer.optimizers[0].param_groups
        table = next(iter(table_parameters(pl_module.network).values()))
        assert groups[-1]["name"] == TABLES
        self.rates.append((groups[0]["lr"], groups[-1]["lr"]))
        trainer.optimizers[0].zero_grad()
        assert table._in_backward_optimizers[0].param_groups[0]["lr"] == groups[-1]["lr"]


def test_it_learns_and_logs_every_metric(tmp_path: Path) -> None:
    seed_everything(0)
    data = ToyData(num_rows=2048, batch_size=64)
    trainer = make_trainer(tmp_path, max_epochs=1, gradient_clip_val=1.0)
    module = make_module(data)
    trainer.fit(module, data)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    assert metrics["val/click/ne"] < 0.75
    assert metrics["val/click/auc"] > 0.8
    assert {
        f"val/{task}/{key}" for task in ("click", "conversion") for key in ("ne", "auc", "gauc", "calibration")
    } < set(metrics)
    assert metrics["val/ne"] == pytest.approx((metrics["val/click/ne"] + metrics["val/conversion/ne"]) / 2)
    assert {"train/loss", "train/click/ne", "train/click/window_ne", "train/click/calibration"} < set(metrics)
    (tested,) = trainer.test(module, data, verbose=False)
    assert tested["test/click/ne"] < 0.75


def test_warm_up_of_both_learning_rates(tmp_path: Path) -> None:
    data, recorder = ToyData(), Recorder()
    trainer = make_trainer(tmp_path, max_epochs=1, callbacks=[recorder], limit_val_batches=0)
    trainer.fit(make_module(data), data)
    dense, tables = zip(*recorder.rates, strict=True)
    assert dense == pytest.approx([3e-3 * f for f in (1 / 3, 2 / 3, 1, 1, 1, 1)])
    assert tables == pytest.approx([0.05 * f for f in (0.2, 0.4, 0.6, 0.8, 1, 1)])


def test_tables_are_updated_inside_backward() -> None:
    data = ToyData()
    module = make_module(data)
    module.configure_model()
    module.trainer = make_trainer(Path("."), max_steps=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(module.trainer), "estimated_stepping_batches", 10)
        optimizer = module.configure_optimizers()["optimizer"]
    tables = table_parameters(module.network)
    before = {name: table.detach().clone() for name, table in tables.items()}
    optimizer.zero_grad()
    module(make_batch(data.schema, {"views": [3, 4], "clicks": [1, 0]})).sum().backward()
    assert all(table.grad is None for table in tables.values())
    # Every event table was looked up; a request feature may be empty in a batch of two.
    changed = {name for name, table in tables.items() if not torch.equal(table, before[name])}
    assert {name for name in tables if "event_embeddings" in name} <= changed


@pytest.mark.parametrize("stop_at", [2, 6, 9])
def test_resume_is_bit_equal(tmp_path: Path, stop_at: int) -> None:
    """Also in the middle of an epoch (6 steps each), and with dropout."""

    def run(steps: int, ckpt_path: str | None) -> tuple[dict[str, Tensor], list[list[int]]]:
        seed_everything(3)
        data, recorder = ToyData(), Recorder()
        checkpoint = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=stop_at, save_top_k=0)
        trainer = make_trainer(
            tmp_path, max_steps=steps, max_epochs=-1, enable_checkpointing=True, callbacks=[recorder, checkpoint]
        )
        module = make_module(data, network=lambda schema: GEM(schema, GEMConfig(width=16)), decay="none")
        trainer.fit(module, data, ckpt_path=ckpt_path)
        return {name: value.clone() for name, value in module.state_dict().items()}, recorder.rows

    whole, whole_rows = run(14, None)
    (tmp_path / "last.ckpt").unlink()
    _, first_rows = run(stop_at, None)
    resumed, second_rows = run(14, str(tmp_path / "last.ckpt"))
    assert first_rows + second_rows == whole_rows
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name


def test_a_checkpoint_of_another_schema_names_the_difference(tmp_path: Path) -> None:
    data = ToyData()
    trainer = make_trainer(tmp_path, max_steps=1, limit_val_batches=0)
    trainer.fit(make_module(data), data)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    other = ToyData()
    other.schema.sparse[1].num_embeddings = 21
    with pytest.raises(ValueError, match=r"schema.sparse\[1\].num_embeddings was 20 and is now 21"):
        make_trainer(tmp_path, max_steps=2).fit(make_module(other), other, ckpt_path=str(tmp_path / "a.ckpt"))


def test_a_non_finite_loss_stops_before_any_weight_changes(tmp_path: Path) -> None:
    data = ToyData()
    module = make_module(data)
    module.configure_model()
    before = {name: value.clone() for name, value in module.network.state_dict().items()}
    module.network.register_forward_hook(lambda *args: args[-1] * float("nan"))
    with pytest.raises(FloatingPointError, match="no weight was changed"):
        make_trainer(tmp_path, max_steps=2).fit(module, data)
    assert all(torch.equal(value, before[name]) for name, value in module.network.state_dict().items())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_precisions(tmp_path: Path, precision: str) -> None:
    data = ToyData()
    module = make_module(data)
    trainer = make_trainer(tmp_path, max_epochs=1, precision=precision)
    trainer.fit(module, data)
    assert trainer.callback_metrics["val/click/ne"].isfinite()
    assert trainer.callback_metrics["train/loss"].dtype == torch.float32
    assert next(module.network.layers.parameters()).dtype == (
        torch.bfloat16 if precision == "bf16-true" else torch.float32
    )


def test_predictions_have_rows_probabilities_and_labels(tmp_path: Path) -> None:
    data = ToyData(num_domains=2)
    module = make_module(data, entire_space=True)
    outputs = make_trainer(tmp_path).predict(module, data)
    rows = torch.cat([output["row"] for output in outputs])
    assert rows.tolist() == list(range(96))
    assert set(outputs[0]) == {
        "row",
        "user",
        "time",
        "click_prediction",
        "click_label",
        "conversion_prediction",
        "conversion_label",
    }


def test_an_unknown_task_in_the_weights() -> None:
    with pytest.raises(ValueError, match="task_weights names 'buy'"):
        GEMModule(ToyData().schema, task_weights={"buy": 2.0})


def test_an_interrupted_step_is_taken_again(tmp_path: Path) -> None:
    """An exception between a batch and its update: the batch is the first of the resumed run."""

    class Stop(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: RecBatch, batch_idx: int) -> None:
            if trainer.global_step == 4:
                raise RuntimeError("stop")

    def run(extra: list[Callback], ckpt_path: str | None) -> list[list[int]]:
        seed_everything(3)
        data, recorder = ToyData(), Recorder()
        checkpoint = ModelCheckpoint(tmp_path, save_last=True, save_on_exception=True, save_top_k=0)
        trainer = make_trainer(
            tmp_path, max_epochs=2, enable_checkpointing=True, callbacks=[*extra, recorder, checkpoint]
        )
        trainer.fit(make_module(data), data, ckpt_path=ckpt_path)
        return recorder.rows

    whole = run([], None)
    (tmp_path / "last.ckpt").unlink()
    with pytest.raises(RuntimeError, match="stop"):
        run([Stop()], None)
    resumed = run([], str(tmp_path / "last.ckpt"))
    assert resumed == whole[4:]


def test_scaled_gradients_are_refused(tmp_path: Path) -> None:
    data = ToyData()
    scaled = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="use bf16-mixed"):
        make_trainer(tmp_path, max_steps=1, plugins=[scaled]).fit(make_module(data), data)


def test_tables_wait_for_the_whole_gradient_of_a_step(tmp_path: Path) -> None:
    data = ToyData(num_rows=64)
    trainer = make_trainer(tmp_path, max_epochs=1, accumulate_grad_batches=2, limit_val_batches=0)
    trainer.fit(make_module(data), data)
    steps = {state["step"].item() for table in trainer.optimizers[0].tables.values() for state in table.state.values()}
    assert trainer.global_step == 2
    assert steps == {2.0}
