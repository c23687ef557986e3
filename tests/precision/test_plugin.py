"""The plugin under a Trainer: training, checkpoints, resume across recipes, the command line, two processes."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy

from lightning_gem.cli import main
from lightning_gem.precision import MXFP8Precision, dispatch, high_precision, plugin, unconvert
from lightning_gem.precision.convert import Converted
from tests.helpers import ToyData
from tests.precision_helpers import make_module, make_trainer


@pytest.fixture
def say_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_announced", set())


def test_trains_as_bf16_does(tmp_path: Path, say_it_again: None) -> None:
    results = {}
    for name, precision in (("bf16", MixedPrecision("bf16-mixed", "cpu")), ("mxfp8", MXFP8Precision())):
        seed_everything(0)
        data = ToyData(num_rows=1024, batch_size=64)
        module = make_module(data)
        trainer = make_trainer(tmp_path, precision, max_steps=-1, max_epochs=1, limit_val_batches=None)
        trainer.fit(module, data)
        results[name] = trainer.callback_metrics["val/click/ne"].item()
        trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
    assert results["bf16"] < 0.9
    assert results["mxfp8"] == pytest.approx(results["bf16"], abs=0.02)
    low, high = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("mxfp8", "bf16"))
    assert list(low["state_dict"]) == list(high["state_dict"])
    assert all(value.dtype == high["state_dict"][name].dtype for name, value in low["state_dict"].items())
    assert low["MXFP8Precision"]["recipe"] == "mxfp8"
    assert len(low["MXFP8Precision"]["converted"]) > 10
    plain = make_module(data)
    plain.configure_model()
    plain.load_state_dict(low["state_dict"])
    assert not any(isinstance(m, Converted) for m in plain.modules())


def test_says_once_that_it_is_numerics_only(
    tmp_path: Path, say_it_again: None, recwarn: pytest.WarningsRecorder
) -> None:
    data = ToyData()
    with pytest.warns(UserWarning, match="numerics only"):
        make_trainer(tmp_path, MXFP8Precision()).fit(make_module(data), data)
    recwarn.clear()
    make_trainer(tmp_path, MXFP8Precision()).fit(make_module(data), data)
    assert not [warning for warning in recwarn if "numerics only" in str(warning.message)]


def test_native_on_demand(tmp_path: Path) -> None:
    data = ToyData()
    trainer = make_trainer(tmp_path, MXFP8Precision(require_native=True))
    with pytest.raises(ValueError, match=r"needs a GPU.*network\.\S+ is on cpu: set require_native"):
        trainer.fit(make_module(data), data)


def test_nothing_to_gather_is_an_error(tmp_path: Path) -> None:
    data = ToyData()
    trainer = make_trainer(tmp_path, MXFP8Precision("mxfp8_compact", low_precision_all_gather=True))
    with pytest.raises(ValueError, match="shard the model with FSDP2"):
        trainer.fit(make_module(data), data)


def test_resume_across_recipes(tmp_path: Path) -> None:
    data, path = ToyData(), tmp_path / "two.ckpt"
    module = make_module(data)
    trainer = make_trainer(tmp_path, MXFP8Precision())
    trainer.fit(module, data)
    trainer.save_checkpoint(path)
    for precision, message in (
        (MXFP8Precision("mxfp8_compact"), "trained with recipe 'mxfp8', this run goes on with 'mxfp8_compact'"),
        (MXFP8Precision(keep_last_layers=1), "other modules in low precision"),
    ):
        trainer = make_trainer(tmp_path, precision, max_steps=4)
        with pytest.warns(UserWarning, match=message):
            trainer.fit(make_module(data), data, ckpt_path=path, weights_only=True)
        assert trainer.global_step == 4
    trainer = make_trainer(tmp_path, MixedPrecision("bf16-mixed", "cpu"), max_steps=4)
    trainer.fit(make_module(data), data, ckpt_path=path, weights_only=True)
    assert trainer.global_step == 4


def test_same_run_resumes_to_the_bit(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    def run(steps: int, ckpt_path: str | None) -> dict[str, torch.Tensor]:
        seed_everything(0)
        data = ToyData()
        saving = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=2, save_top_k=0)
        trainer = make_trainer(
            tmp_path, MXFP8Precision(), max_steps=steps, callbacks=[saving], enable_checkpointing=True
        )
        module = make_module(data)
        trainer.fit(module, data, ckpt_path=ckpt_path)
        return {name: value.clone() for name, value in module.state_dict().items()}

    whole = run(4, None)
    (tmp_path / "last.ckpt").unlink()
    run(2, None)
    resumed = run(4, str(tmp_path / "last.ckpt"))
    assert not [w for w in recwarn if "checkpoint was trained" in str(w.message)]
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name


def test_arguments_reach_the_scope() -> None:
    precision = MXFP8Precision(
        "mxfp8_compact", ["a"], ["b"], ["C"], ["D"], 1, "blocks", True, high_precision_weight_gradient=True
    )
    scope = precision.scope
    assert (scope.include, scope.exclude, scope.include_types, scope.exclude_types) == (("a",), ("b",), ("C",), ("D",))
    assert (scope.keep_last_layers, scope.layers, scope.pad) == (1, "blocks", True)
    assert precision.recipe.compact
    assert precision.recipe.high_precision_weight_gradient
    with pytest.raises(ValueError, match="'fp8' is unknown"):
        MXFP8Precision("fp8")
    with pytest.raises(ValueError, match="'bf16' or 'mxfp8'"):
        MXFP8Precision(attention="fp4")  # type: ignore[arg-type]


def test_auto_measures_once_and_resumes_with_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is faster on a CPU: bf16, to the bit; a table of a checkpoint is taken as it is."""
    calls: list[Any] = []

    def measure(widths: Any, device: torch.device) -> dispatch.Table:
        calls.append(sorted(set(widths)))
        return {"16384x32->32": "bf16"}

    monkeypatch.setattr(dispatch, "measure", measure)
    states = {}
    for name, precision in (("bf16", MixedPrecision("bf16-mixed", "cpu")), ("auto", MXFP8Precision("auto"))):
        seed_everything(0)
        data = ToyData()
        module = make_module(data)
        trainer = make_trainer(tmp_path, precision)
        trainer.fit(module, data)
        states[name] = module.state_dict()
        trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
    assert all(torch.equal(value, states["auto"][name]) for name, value in states["bf16"].items())
    assert len(calls) == 1
    assert (32, 32) in calls[0]
    saved = torch.load(tmp_path / "auto.ckpt", weights_only=True)["MXFP8Precision"]
    assert saved["table"] == {"16384x32->32": "bf16"} == dispatch.table()
    dispatch.use({})
    trainer = make_trainer(tmp_path, MXFP8Precision("auto"), max_steps=3)
    trainer.fit(make_module(data), data, ckpt_path=tmp_path / "auto.ckpt", weights_only=True)
    assert dispatch.table() == saved["table"]
    assert len(calls) == 1
    dispatch.use({})


def test_low_precision_scores(tmp_path: Path) -> None:
    seed_everything(0)
    data = ToyData()
    module, precision = make_module(data), MXFP8Precision("fp8_rowwise", attention="mxfp8")
    trainer = make_trainer(tmp_path, precision)
    trainer.fit(module, data)
    assert math.isfinite(trainer.callback_metrics["train/loss"])
    attention = [name for name in precision.converted if type(module.get_submodule(name)).__name__ == "MXSeedPooling"]
    assert attention
    batch = next(iter(data.train_dataloader()))
    low = module(batch)
    with high_precision(module):
        high = module(batch)
    assert not torch.equal(low, high)
    unconvert(module)
    assert torch.equal(module(batch), high)


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments of the plugin override the recipe's file; a mistake in them names the layers there are."""
    monkeypatch.chdir(Path(__file__).parents[2])
    command = [
        *("fit", "--config", "configs/tiny_mxfp8.yaml", "--trainer.max_steps=2", "--trainer.limit_val_batches=0"),
        *("--trainer.logger=false", "--trainer.enable_progress_bar=false", f"--trainer.default_root_dir={tmp_path}"),
        *(f"--checkpoint.dirpath={tmp_path}", "--data.num_train=1024", "--data.num_workers=0"),
        "--trainer.plugins=lightning_gem.precision.MXFP8Precision",
    ]
    main([*command, "--trainer.plugins.recipe=mxfp8_compact", "--trainer.plugins.keep_last_layers=1"])
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["MXFP8Precision"]
    assert state["recipe"] == "mxfp8_compact"
    assert state["converted"]
    assert not [name for name in state["converted"] if "layers.1." in name]
    with pytest.raises(ValueError, match="include pattern 'atention' matches no linear layer"):
        main([*command, '--trainer.plugins.include=["atention"]'])


class Check(Callback):
    """Looks at the network where it trains, and saves it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert sum(isinstance(module, Converted) for module in pl_module.modules()) > 10
        loss = float(trainer.callback_metrics["train/loss"])
        assert math.isfinite(loss)
        gathered = trainer.strategy.all_gather(pl_module.network.layers[0].context.mix.detach())
        assert torch.equal(gathered[0], gathered[1])
        trainer.save_checkpoint(self.path)


def test_two_processes(tmp_path: Path) -> None:
    seed_everything(0)
    data = ToyData()
    path = tmp_path / "end.ckpt"
    strategy = DDPStrategy(start_method="forkserver")
    precision = MXFP8Precision("mxfp8_compact")
    trainer = make_trainer(tmp_path, precision, devices=2, strategy=strategy, callbacks=[Check(path)])
    trainer.fit(make_module(data), data)
    state = torch.load(path, weights_only=True)
    assert state["global_step"] == 2
    assert state["MXFP8Precision"]["recipe"] == "mxfp8_compact"
    plain = make_module(data)
    plain.configure_model()
    assert list(state["state_dict"]) == list(plain.state_dict())
