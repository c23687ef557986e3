"""FLOPs of steps: formulas against counters, and the peaks that they are compared with."""

import numpy as np
import pytest
import torch
from helpers import make_batch, make_schema
from torch.utils.flop_counter import FlopCounterMode
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_gem.efficiency import FlopCounter, find_peak, measure_peak
from lightning_gem.efficiency.counting import shape_class
from lightning_gem.models import GEM, Ensemble
from lightning_gem.models.config import GEMConfig
from lightning_gem.models.flops import forward_flops, step_work, training_flops, work_formula, work_formulas

CONFIGS = [
    GEMConfig(),
    GEMConfig(pooling="pma", computation_skip=False),
    GEMConfig(personalization="linear", event_gate=True, task_hidden=[16], num_dense_tokens=2),
    GEMConfig(sequence_mode="one_way", refresh_last=False),
    GEMConfig(sequence_mode="none"),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_the_formula_of_a_run_is_that_of_every_batch(config):
    schema, random = make_schema(), np.random.default_rng(0)
    formula = work_formula(schema, config)
    for batch_size in (0, 1, 5):
        lengths = {name: random.integers(0, 40, batch_size) for name in ("views", "clicks")}
        forward = forward_flops(schema, config, lengths, batch_size)
        expected = [training_flops(forward), training_flops(forward, attention_factor=3)]
        assert formula(lengths, batch_size).tolist() == expected


@pytest.mark.parametrize("lengths", [{"views": [16, 3, 0, 9], "clicks": [1, 5, 16, 2]}, {"views": [4], "clicks": [0]}])
def test_a_real_step_counts_the_same(lengths):
    """Forward and backward, jagged; only the gradient of the numeric inputs, which nobody needs, is missing."""
    schema = make_schema()
    network, batch = GEM(schema, GEMConfig()), make_batch(schema, lengths)
    with FlopCounterMode(display=False) as counter:
        network(batch).sum().backward()
    formulas = work_formulas(network, schema)
    assert formulas is not None
    work = step_work(formulas, batch)
    assert counter.get_total_flops() == pytest.approx(work.flops, rel=1e-3)
    assert work.samples == len(batch)
    assert work.tokens == sum(map(sum, lengths.values()))
    assert work.padded_tokens == sum(len(values) * max(values) for values in lengths.values())


def test_ensembles_count_every_copy_and_other_networks_none():
    schema = make_schema()
    batch = make_batch(schema, {"views": [3], "clicks": [2]})
    one, three = (work_formulas(network, schema) for network in (GEM(schema), Ensemble(schema, size=3)))
    assert one is not None
    assert three is not None
    assert step_work(three, batch).flops == 3 * step_work(one, batch).flops
    assert work_formulas(torch.nn.Linear(2, 2), schema) is None


def test_the_counter_counts_every_class_of_shapes_once():
    counter, layer = FlopCounter(), torch.nn.Linear(8, 4)

    def step(rows):
        batch = (torch.ones(rows, 8), torch.zeros(rows))
        counter.start(batch)
        layer(batch[0]).sum().backward()
        return counter.stop()

    assert step(16) == (2 * 2 * 16 * 8 * 4, True)  # no gradient of the input
    assert step(16) == (2 * 2 * 16 * 8 * 4, False)
    assert step(64) == (2 * 2 * 64 * 8 * 4, True)
    counter.start((torch.ones(32, 8),))
    counter.stop()
    counter.stop()
    assert len(counter.known) == 3


def test_classes_see_jagged_values_and_round_sizes():
    def batch(events):
        ids = KeyedJaggedTensor.from_lengths_sync(["a"], torch.zeros(events).long(), torch.tensor([events]))
        return {"ids": ids, "x": [torch.zeros(3, 2)]}

    assert shape_class(batch(100)) == shape_class(batch(120))  # both between 96 and 128
    assert shape_class(batch(100)) != shape_class(batch(140))
    assert shape_class(batch(0)) != shape_class(batch(1))


@pytest.mark.parametrize(
    ("device", "bf16"),
    [
        ("NVIDIA H200", 989.5),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA B300 SXM6 AC", 2250.0),
        ("NVIDIA L40S", 362.0),
        ("AMD Instinct MI300X", 1307.4),
        ("AMD Instinct MI350X", 2300.0),
    ],
)
def test_peaks_by_the_names_of_drivers(device, bf16):
    peak = find_peak(device)
    assert peak is not None
    assert peak.bf16 == bf16
    assert peak.fp8 is None or peak.fp8 == pytest.approx(2 * bf16, rel=0.02)
    assert peak.source


@pytest.mark.parametrize("device", ["NVIDIA L4", "NVIDIA H20", "NVIDIA A10", "NVIDIA GeForce RTX 4090", "cpu", ""])
def test_unknown_devices_have_no_peak(device):
    assert find_peak(device) is None


def test_measured_peak():
    peak = measure_peak(torch.device("cpu"), size=64, seconds=0.0)
    assert peak.bf16 > 0
    assert "measured" in peak.source
