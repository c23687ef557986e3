"""Presets against the sizes of the specification: parameters exactly, FLOPs on the same lengths."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lightning_gem.cli import GEMCLI
from lightning_gem.data import Schema
from lightning_gem.models import GEM, GEMConfig
from lightning_gem.models.flops import forward_flops, training_flops
from lightning_gem.optimizers import dense_parameters, table_parameters
from tests.helpers import make_batch, make_schema

CONFIGS = Path(__file__).parents[2] / "configs"
BATCH = 64

# Parameters, forward FLOPs by part, and training FLOPs (GEMM 3x with attention 3.5x, and all 3x) of the
# specification's own calculator, for 64 requests with 1 + 7919 i mod max_len events. It counts neither the biases of
# the heads, nor the events' two time features, nor the pooling that follows the last self-attention.
PARTS = (
    "feature_tokenizer",
    "event_tokenizer",
    "context",
    "feed_forward_projections",
    "feed_forward_attention",
    "pooling_projections",
    "pooling_attention",
    "pooling_compression",
    "experts",
    "self_attention_projections",
    "self_attention",
    "heads",
)
EXPECTED: dict[str, tuple[int, tuple[int, ...], float, float]] = {
    "tiny": (
        61088,
        (786432, 6119424, 4849664, 4194304, 1310720, 7372800,
         1310720, 2621440, 3407872, 10485760, 2184192, 1056768),
        139503104.0,
        137100288.0,
    ),
    "small": (
        79994624,
        (83886080, 6490161152, 4781506560, 5368709120, 3344957440, 15164506112,
         3211788288, 2986344448, 9370075136, 25694306304, 3107938304, 1090584576),
        246916632576.0,
        242084290560.0,
    ),
    "base_1b": (
        1028490240,
        (2147483648, 141027180544, 78383153152, 103079215104, 120829509632, 474593886208,
         108833800192, 105226698752, 123547418624, 870670401536, 62634131456, 8657174528),
        6745038880768.0,
        6598890160128.0,
    ),
    "paper": (
        5189570560,
        (8388608000, 767876399104, 90462748672, 274877906944, 587068342272, 2369479770112,
         818560368640, 313532612608, 622233387008, 4442338361344, 290671558656, 34629222400),
        32708507992064.0,
        31860357857280.0,
    ),
}  # fmt: skip


def load(name: str) -> tuple[Schema, GEMConfig]:
    """Schema and network configuration of a preset."""
    cli = GEMCLI(["--config", str(CONFIGS / f"{name}.yaml"), "--trainer.logger=false"], run=False)
    with torch.device("meta"):
        return cli.datamodule.schema, cli.model.make_network(cli.datamodule.schema).config


@pytest.fixture(scope="module", params=EXPECTED)
def preset(request: pytest.FixtureRequest) -> tuple[str, Schema, GEMConfig]:
    return request.param, *load(request.param)


def lengths_of(schema: Schema) -> dict[str, Any]:
    return {sequence.name: 1 + np.arange(BATCH) * 7919 % sequence.max_len for sequence in schema.sequences}


def test_parameters(preset: tuple[str, Schema, GEMConfig]) -> None:
    """Built on the meta device: seconds and no memory, whatever the size."""
    name, schema, config = preset
    with torch.device("meta"):
        network = GEM(schema, config)
    assert all(parameter.is_meta for parameter in network.parameters())
    dense = sum(parameter.numel() for parameter in dense_parameters(network))
    # Two tasks' heads are one matrix in the specification; biases and time features are the only surplus.
    biases = sum(p.numel() for name, p in network.named_parameters() if name.endswith("bias"))
    time_features = sum(2 * config.tower(sequence.name).width for sequence in schema.sequences)
    assert dense - biases - time_features == EXPECTED[name][0]
    assert dense == pytest.approx(EXPECTED[name][0], rel=0.01)
    assert len(table_parameters(network)) == len(schema.request_tables) + len(schema.event_tables)


def test_flops_match_the_specification(preset: tuple[str, Schema, GEMConfig]) -> None:
    name, schema, config = preset
    _, values, train, strict = EXPECTED[name]
    parts = dict(zip(PARTS, values, strict=True))
    lengths = lengths_of(schema)
    config = GEMConfig(**{**vars(config), "refresh_last": False})
    flops = forward_flops(schema, config, lengths, BATCH)
    assert set(flops) == set(parts)
    for part, value in flops.items():
        assert value == pytest.approx(parts[part], rel=0.05 if part == "event_tokenizer" else 1e-9), part
    assert training_flops(flops) == pytest.approx(train, rel=0.01)
    assert training_flops(flops, attention_factor=3) == pytest.approx(strict, rel=0.01)


def test_the_last_pooling_is_the_only_other_difference(preset: tuple[str, Schema, GEMConfig]) -> None:
    name, schema, config = preset
    assert config.refresh_last
    parts = dict(zip(PARTS, EXPECTED[name][1], strict=True))
    lengths = lengths_of(schema)
    with_refresh = forward_flops(schema, config, lengths, BATCH)
    poolings = sum(config.is_pooling_layer(layer) for layer in range(config.num_layers))
    for part, value in with_refresh.items():
        factor = (poolings + 1) / poolings if part.startswith("pooling") else 1.0
        assert value == pytest.approx(parts[part] * factor, rel=0.05)


@pytest.mark.parametrize(
    "config",
    [
        GEMConfig(),
        GEMConfig(pooling="pma", computation_skip=False),
        GEMConfig(personalization="linear", event_gate=True, task_hidden=[16], num_dense_tokens=2),
        GEMConfig(sequence_mode="one_way", refresh_last=False),
        GEMConfig(sequence_mode="none"),
    ],
)
def test_formulas_equal_the_flop_counter(config: GEMConfig) -> None:
    """Where all sequences are as long as each other nothing is padded, so torch's own counter sees the real "
    "products."""
    schema = make_schema()
    lengths = {"views": [16] * 4, "clicks": [16] * 4}
    network = GEM(schema, config)
    batch = make_batch(schema, lengths)
    # The counter has no formula for the fused attention of CPUs.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        network(batch)
    arrays = {name: np.array(values) for name, values in lengths.items()}
    flops = forward_flops(schema, config, arrays, 4)
    # The generated matrix is applied as attention to unit vectors: one more product than the formula counts.
    extra = flops.get("feed_forward", 0)
    assert counter.get_total_flops() == pytest.approx(sum(flops.values()) + extra, rel=1e-9)
