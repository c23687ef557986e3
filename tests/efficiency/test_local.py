"""Layers alone: FLOPs as in the whole, nothing changed by looking, and a ratio whose parts add up."""

import json

import pytest
import torch
from helpers import make_batch, make_schema
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from lightning_gem.callbacks import EfficiencyMonitor, LocalMFUProfiler
from lightning_gem.callbacks.local_mfu import explain, table
from lightning_gem.efficiency import Peak, local_mfu, profile_layers
from lightning_gem.efficiency.local import layers_of
from lightning_gem.models import GEM

PEAK = Peak("test", 1.0, None, "test")


def test_the_layers_of_gem_have_the_flops_of_a_step():
    schema = make_schema()
    network = GEM(schema).train()
    batch = make_batch(schema, {"views": [16, 3, 0, 9], "clicks": [1, 5, 16, 2]})
    before = {name: value.clone() for name, value in network.state_dict().items()}
    random = torch.random.get_rng_state()
    layers = profile_layers(network, lambda: network(batch), PEAK, repetitions=1)
    assert torch.equal(random, torch.random.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters())
    with FlopCounterMode(display=False) as counter:
        network(batch).sum().backward()
    assert sum(layer.flops for layer in layers) == counter.get_total_flops()
    assert {"feature_tokenizer", "event_tokenizers.0", "layers.1", "heads"} <= {layer.name for layer in layers}
    seconds, flops = sum(layer.seconds for layer in layers), sum(layer.flops for layer in layers)
    assert local_mfu(layers, PEAK) == pytest.approx(flops / seconds / 1e12)
    rows = table([vars(layer) for layer in layers])
    assert len(rows) == len(layers) + 1
    assert [float(row[1]) for row in rows[1:]] == sorted((float(row[1]) for row in rows[1:]), reverse=True)


def test_wrappers_and_lists_are_opened():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.metric = nn.Identity()
            self.network = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.ModuleList([nn.Linear(1, 1)])})

    assert [name for name, _ in layers_of(Wrapper())] == ["metric", "network.a", "network.b.0"]


def test_buffers_stay_and_errors_leave_no_hooks():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    profile_layers(model, lambda: model(torch.randn(5, 3)), repetitions=2)
    assert model[1].num_batches_tracked == 0
    assert model[1].running_mean.tolist() == [0.0] * 3
    with pytest.raises(ZeroDivisionError):
        profile_layers(model, lambda: 1 / 0)
    assert not model[0]._forward_pre_hooks


def test_the_ratio_and_what_was_lost_add_up_to_one():
    found = explain(0.4, {"mfu": 0.2, "data_wait": 0.1, "imbalance": 1.25})
    assert found["scaling_ratio"] == pytest.approx(0.5)
    assert found["lost_to_imbalance"] == pytest.approx(0.9 * 0.2)
    lost = sum(value for name, value in found.items() if name.startswith("lost_to"))
    assert found["scaling_ratio"] + lost == pytest.approx(1.0)


class Foreign(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch):
        return self.network(batch)

    def training_step(self, batch, batch_idx):
        return self(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def test_a_run_ends_in_a_report(tmp_path, capsys):
    trainer = Trainer(
        accelerator="cpu", logger=False, max_epochs=1, log_every_n_steps=2, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=tmp_path,
        callbacks=[EfficiencyMonitor(1.0), LocalMFUProfiler(1.0, repetitions=1)],
    )  # fmt: skip
    trainer.fit(Foreign(), DataLoader(torch.randn(16, 8), batch_size=4))
    report = json.loads((tmp_path / "local_mfu.json").read_text())
    assert [layer["name"] for layer in report["layers"]] == ["network.0", "network.1", "network.2"]
    assert report["layers"][0]["flops"] == 2 * 2 * 4 * 8 * 16  # nobody needs the gradient of the input
    assert report["layers"][2]["flops"] == 3 * 2 * 4 * 16
    assert report["scaling_ratio"] == pytest.approx(report["e2e_mfu"] / report["local_mfu"])
    assert "scaling ratio" in capsys.readouterr().out
