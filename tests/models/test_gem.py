"""The network: jagged equals one by one, every parameter learns, switches do what they say."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from lightning_gem.data import EventSequence, RecBatch
from lightning_gem.models import GEM, ExpertsConfig, GEMConfig, SequenceConfig
from lightning_gem.optimizers import dense_parameters
from tests.helpers import make_batch, make_rows, make_schema

LENGTHS = {"views": [5, 0, 40, 7, 1], "clicks": [0, 0, 3, 20, 1]}
VARIANTS = {
    "default": GEMConfig(),
    "one_way": GEMConfig(sequence_mode="one_way"),
    "none": GEMConfig(sequence_mode="none"),
    "no_skip": GEMConfig(computation_skip=False),
    "pma": GEMConfig(pooling="pma"),
    "linear": GEMConfig(personalization="linear"),
    "kunlun_order": GEMConfig(pool_before_pffn=True),
    "odd_kunlun_order": GEMConfig(pool_before_pffn=True, num_layers=3),
    "ensemble": GEMConfig(experts=ExpertsConfig(mode="ensemble", num_experts=3)),
    "full": GEMConfig(default_sequence=SequenceConfig(attention="full")),
    "window": GEMConfig(default_sequence=SequenceConfig(attention="window", window=3), rotate_values=True),
    "block": GEMConfig(default_sequence=SequenceConfig(attention="block", window=4)),
    "personalised": GEMConfig(
        num_layers=4,
        sequences={
            "views": SequenceConfig(width=16, num_heads=4, num_seeds=6, num_tokens=2, num_layers=1),
            "clicks": SequenceConfig(width=8, num_heads=1, num_seeds=4, num_tokens=2, num_layers=2),
        },
    ),
    "wide": GEMConfig(wide=True),
    "gate_and_task_heads": GEMConfig(event_gate=True, task_hidden=[16], time_features=False, num_dense_tokens=2),
}


def build(config: GEMConfig, **schema: int) -> GEM:
    torch.manual_seed(0)
    return GEM(make_schema(**schema), config).eval()


@pytest.mark.parametrize("name", VARIANTS)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    network = build(VARIANTS[name])
    batch = make_batch(make_schema(), LENGTHS)
    network(batch).square().sum().backward()
    silent = [name for name, p in network.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not silent


@pytest.mark.parametrize("name", VARIANTS)
def test_a_batch_equals_its_requests_one_by_one(name: str) -> None:
    schema, network = make_schema(), build(VARIANTS[name])
    rows = make_rows(schema, LENGTHS)
    with torch.no_grad():
        together = network(rows.to_batch())
        alone = torch.cat([network(rows.take(np.array([i])).to_batch()) for i in range(len(rows))])
        order = np.array([3, 1, 4, 0, 2])
        permuted = network(rows.take(order).to_batch())
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(permuted, together[order], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_all_sequences_empty(name: str) -> None:
    logits = build(VARIANTS[name])(make_batch(make_schema(), {"views": [0, 0], "clicks": [0, 0]}))
    assert logits.isfinite().all()


def test_a_batch_of_one_without_features_in_bags() -> None:
    schema = make_schema()
    rows = make_rows(schema, {"views": [2], "clicks": [0]})
    for bag in rows.sparse.values():
        bag.lengths = np.zeros(1, dtype=np.int64)
    assert build(GEMConfig())(rows.to_batch()).shape == (1, 2)


@pytest.mark.parametrize(("mode", "sees"), [("two_way", True), ("one_way", True), ("none", False)])
def test_which_modes_see_the_history(mode: str, sees: bool) -> None:
    network = build(GEMConfig(sequence_mode=mode))
    batch = make_batch(make_schema(), LENGTHS)
    base = network(batch)
    other = batch.sequences["views"]
    ids = other.ids.values().clone()
    ids[: len(ids) // 2] = (ids[: len(ids) // 2] + 1) % 30
    changed = dataclasses.replace(other, ids=type(other.ids)(other.ids.keys(), ids, lengths=other.ids.lengths()))
    moved = network(dataclasses.replace(batch, sequences={**batch.sequences, "views": changed}))
    assert torch.equal(base, moved) != sees


@pytest.mark.parametrize(("mode", "conditioned"), [("two_way", True), ("one_way", False)])
def test_only_two_way_lets_the_context_into_the_sequences(mode: str, conditioned: bool) -> None:
    network = build(GEMConfig(sequence_mode=mode))
    batch = make_batch(make_schema(), LENGTHS)
    summaries = []
    network.layers[0].register_forward_hook(lambda module, args, out: summaries.append(out[2]["views"]))
    network(batch)
    network(dataclasses.replace(batch, dense=batch.dense + 1))
    assert torch.equal(*summaries) != conditioned


def test_recency_matters() -> None:
    network = build(GEMConfig())
    batch = make_batch(make_schema(), LENGTHS)
    later = dataclasses.replace(batch, request_timestamps=batch.request_timestamps + 7 * 86400)
    assert not torch.equal(network(batch), network(later))


def test_surfaces_have_their_own_heads() -> None:
    network = build(GEMConfig(), num_domains=3)
    batch = make_batch(make_schema(num_domains=3), LENGTHS)
    one = network(dataclasses.replace(batch, domain=torch.zeros_like(batch.domain)))
    two = network(dataclasses.replace(batch, domain=torch.ones_like(batch.domain)))
    assert torch.equal(one, two)
    nn.init.normal_(network.heads.domain.weight)
    one = network(dataclasses.replace(batch, domain=torch.zeros_like(batch.domain)))
    two = network(dataclasses.replace(batch, domain=torch.ones_like(batch.domain)))
    assert not torch.allclose(one, two)


def test_bfloat16_weights_and_autocast() -> None:
    batch = make_batch(make_schema(), LENGTHS)
    network = build(GEMConfig())
    reference = network(batch)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = network(batch)
    torch.testing.assert_close(mixed.float(), reference, rtol=0.1, atol=0.1)
    pure = network.to(torch.bfloat16)(batch)
    torch.testing.assert_close(pure.float(), reference, rtol=0.1, atol=0.1)


def test_a_schema_with_only_dense_or_only_sparse_features() -> None:
    for sizes in ({"num_sparse": 0}, {"num_dense": 0}):
        schema = make_schema(**sizes)
        assert GEM(schema)(make_batch(schema, LENGTHS)).shape == (5, 2)
    with pytest.raises(ValueError, match=r"schema.sparse and schema.dense are both empty"):
        GEM(make_schema(num_sparse=0, num_dense=0))


def test_names_of_module_methods_are_fine_as_names_of_features() -> None:
    schema = make_schema()
    for feature, name in zip(schema.sparse, ["items", "keys", "forward", "a.b"], strict=True):
        feature.name = name
    schema.sequences[1].name = "train"
    assert len(dense_parameters(GEM(schema))) > 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GEMConfig(sequences={"vews": SequenceConfig()}), "config.sequences names 'vews'"),
        (GEMConfig(num_context_tokens=7), "make num_context_tokens 8"),
        (GEMConfig(default_sequence=SequenceConfig(width=30)), "multiple of 4"),
        (GEMConfig(num_layers=0), "config.num_layers must be positive"),
        (GEMConfig(experts=ExpertsConfig(depth=1)), "config.experts.depth"),
    ],
)
def test_configurations_that_do_not_fit(config: GEMConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GEM(make_schema(), config)


def test_the_batch_moves_and_keeps_its_lengths_on_the_cpu() -> None:
    batch = make_batch(make_schema(), LENGTHS)
    moved = batch.to("meta")
    assert isinstance(moved, RecBatch)
    assert moved.dense.is_meta
    sequence = moved.sequences["views"]
    assert isinstance(sequence, EventSequence)
    assert sequence.timestamps.is_meta
    assert sequence.ids.values().is_meta
    assert not sequence.lengths_cpu.is_meta
    assert sequence.max_seqlen == 40
