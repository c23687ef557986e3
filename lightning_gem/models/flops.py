"""Forward FLOPs of a GEM network from the lengths of a batch: real tokens and real pairs only.

Embedding lookups, norms, activations, rotations and softmax count zero by convention; a product of ``m x k`` by ``k x
n`` counts ``2 m k n``, attention ``4 width`` per pair of query and key.
"""

from collections import Counter
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from lightning_gem.data.schema import Schema
from lightning_gem.kernels import pairs
from lightning_gem.models.config import GEMConfig
from lightning_gem.models.gem import NUM_TIME_FEATURES

ATTENTION = "attention"


def forward_flops(
    schema: Schema, config: GEMConfig, lengths: Mapping[str, npt.NDArray[np.integer]], batch_size: int
) -> dict[str, int]:
    """FLOPs of one forward pass by part of the network; the parts whose name ends in ``attention`` are attention.

    Args:
        schema: Features and tasks.
        config: The network.
        lengths: Events per request of every sequence, each of ``batch_size`` entries.
        batch_size: Requests.
    """
    flops: Counter[str] = Counter()
    width, context = config.width, config.num_context_tokens
    sequences = [] if config.sequence_mode == "none" else schema.sequences
    names = [sequence.name for sequence in sequences]
    num_events = {name: int(np.sum(lengths[name])) for name in names}

    flops["feature_tokenizer"] = 2 * batch_size * width * sum(feature.embedding_dim for feature in schema.sparse)
    num_tokens = len(schema.sparse)
    if schema.dense:
        num_tokens += config.num_dense_tokens
        flops["feature_tokenizer"] += 2 * batch_size * width * (len(schema.dense) + config.num_dense_tokens * width)
    for sequence in sequences:
        inputs = sum(feature.embedding_dim for feature in sequence.features) + len(sequence.floats)
        inputs += NUM_TIME_FEATURES if config.time_features else 0
        tower_width = config.tower(sequence.name).width
        gate = inputs * inputs if config.event_gate else 0
        flops["event_tokenizer"] += 2 * num_events[sequence.name] * (gate + inputs * tower_width + tower_width**2)

    for layer in range(config.num_layers):
        flops["context"] += 2 * batch_size * (num_tokens * context * width + 2 * context * width**2)
        for name in names:
            if layer < config.depth(name):
                flops.update(_tower_flops(config, name, layer, lengths[name], batch_size))
        flops["experts"] += _expert_flops(config, names, batch_size)
        num_tokens = config.num_expert_outputs
    flops["heads"] = _head_flops(config, num_tokens * width, len(schema.tasks), batch_size)
    if config.wide:
        num_wide = sum(feature.embedding_dim for feature in schema.sparse) + len(schema.dense)
        flops["heads"] += 2 * batch_size * num_wide * len(schema.tasks)
    return dict(flops)


def training_flops(forward: Mapping[str, int], attention_factor: float = 3.5) -> float:
    """FLOPs of a training step: GEMMs three times the forward; recomputation never counts.

    Args:
        forward: What :func:`forward_flops` returned.
        attention_factor: 3.5 where the backward's recomputation of the scores counts, as in torch's FLOP counter; 3 in
            the strict convention.
    """
    attention = sum(value for name, value in forward.items() if name.endswith(ATTENTION))
    return 3 * (sum(forward.values()) - attention) + attention_factor * attention


def _tower_flops(
    config: GEMConfig, name: str, layer: int, lengths: npt.NDArray[np.integer], batch_size: int
) -> Counter[str]:
    flops: Counter[str] = Counter()
    tower, context = config.tower(name), config.num_context_tokens
    width, num_events = tower.width, int(np.sum(lengths))
    num_poolings = int(config.is_pooling_layer(layer)) + int(config.refreshes(name, layer))
    if config.is_pooling_layer(layer):
        if config.personalization == "linear" and config.sequence_mode == "two_way":
            matrix = context * config.width * width + width * context * width
            flops["feed_forward_projections"] = 2 * batch_size * matrix
            flops["feed_forward"] = 2 * num_events * width**2
        else:
            if config.sequence_mode == "two_way":
                flops["feed_forward_projections"] = 2 * batch_size * context * 2 * config.width * width
            flops[f"feed_forward_{ATTENTION}"] = 4 * width * context * num_events
    for _ in range(num_poolings):
        seeds = tower.num_seeds if config.pooling == "hsp" else tower.num_tokens
        flops["pooling_projections"] += (
            4 * num_events * width**2 + 2 * batch_size * seeds * width**2 + 2 * seeds * width**2
        )
        flops[f"pooling_{ATTENTION}"] += 4 * width * seeds * num_events
        if config.pooling == "hsp":
            terms = seeds * width + width * config.width
            flops["pooling_compression"] += 2 * batch_size * config.kronecker_rank * tower.num_tokens * terms
        else:
            flops["pooling_compression"] += 2 * batch_size * tower.num_tokens * width * config.width
    if config.is_attention_layer(layer):
        count = {
            "full": pairs.full_pairs,
            "window": lambda values: pairs.window_pairs(values, tower.window),
            "block": lambda values: pairs.block_pairs(values, tower.window),
        }[tower.attention]
        flops["self_attention_projections"] = 8 * num_events * width**2
        flops[f"self_{ATTENTION}"] = 4 * width * int(count(lengths))
    return flops


def _expert_flops(config: GEMConfig, names: list[str], batch_size: int) -> int:
    experts, width = config.experts, config.width
    num_tokens = config.num_interaction_tokens(names)
    if experts.mode == "partition":
        num_tokens //= experts.num_experts
    sizes = [num_tokens * experts.rank, *[experts.hidden] * (experts.depth - 1), experts.num_fm_tokens * width]
    mlp = sum(fan_in * fan_out for fan_in, fan_out in zip(sizes[:-1], sizes[1:], strict=True))
    num_out = experts.num_fm_tokens + experts.num_linear_tokens
    linear = (experts.num_linear_tokens + num_out) * num_tokens * width
    return 2 * batch_size * experts.num_experts * (2 * num_tokens * width * experts.rank + mlp + linear)


def _head_flops(config: GEMConfig, in_features: int, num_tasks: int, batch_size: int) -> int:
    shared = [in_features, *config.head_hidden]
    task = [shared[-1], *config.task_hidden, 1]
    products = sum(a * b for a, b in zip(shared[:-1], shared[1:], strict=True))
    products += num_tasks * sum(a * b for a, b in zip(task[:-1], task[1:], strict=True))
    return 2 * batch_size * products
