"""Forward FLOPs of a GEM network from the lengths of a batch: real tokens and real pairs only.

Embedding lookups, norms, activations, rotations and softmax count zero by convention; a product of ``m x k`` by ``k x
n`` counts ``2 m k n``, attention ``4 width`` per pair of query and key.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import nn

from lightning_gem.data.batch import RecBatch
from lightning_gem.data.schema import Schema
from lightning_gem.efficiency.work import StepWork
from lightning_gem.kernels import pairs
from lightning_gem.models.config import GEMConfig, SequenceConfig
from lightning_gem.models.ensemble import Ensemble
from lightning_gem.models.gem import GEM, NUM_TIME_FEATURES

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
        flops["self_attention_projections"] = 8 * num_events * width**2
        flops[f"self_{ATTENTION}"] = 4 * width * int(_pair_count(tower)(lengths))
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


@dataclass(frozen=True)
class WorkFormula:
    """:func:`training_flops` as a sum over what varies, for every step of a run.

    All figures are pairs: FLOPs in torch's convention, and in the strict one.

    Attributes:
        per_step: Whatever the batch (2,).
        per_request: (2,).
        per_event: By sequence (2,).
        per_pair: By sequence, per visible pair of its self-attention (2,).
        pairs: By sequence, counts the visible pairs of lengths.
    """

    per_step: npt.NDArray[np.float64]
    per_request: npt.NDArray[np.float64]
    per_event: dict[str, npt.NDArray[np.float64]]
    per_pair: dict[str, npt.NDArray[np.float64]]
    pairs: dict[str, Callable[[npt.NDArray[np.integer]], int]]

    def __call__(self, lengths: Mapping[str, npt.NDArray[np.integer]], batch_size: int) -> npt.NDArray[np.float64]:
        """FLOPs of a training step, as by :func:`training_flops`."""
        flops = self.per_step + batch_size * self.per_request
        for name, count in self.pairs.items():
            flops = flops + int(lengths[name].sum()) * self.per_event[name]
            flops = flops + int(count(lengths[name])) * self.per_pair[name]
        return flops


def work_formula(schema: Schema, config: GEMConfig) -> WorkFormula:
    """The formula of a network, whose factors are those of :func:`forward_flops` for single requests and events."""
    names = [] if config.sequence_mode == "none" else [sequence.name for sequence in schema.sequences]

    def flops(batch_size: int, **lengths: int) -> npt.NDArray[np.float64]:
        arrays = {name: np.full(batch_size, lengths.get(name, 0)) for name in names}
        forward = forward_flops(schema, config, arrays, batch_size)
        return np.array([training_flops(forward), training_flops(forward, attention_factor=3)])

    per_step, request = flops(0), flops(1)
    per_event, per_pair, pair_counts = {}, {}, {}
    for name in names:
        pair_counts[name] = _pair_count(config.tower(name))
        one, two = (flops(1, **{name: events}) - request for events in (1, 2))
        surplus = int(pair_counts[name](np.array([2]))) - 2  # a single event sees itself: one pair
        per_pair[name] = (two - 2 * one) / surplus if surplus else np.zeros(2)
        per_event[name] = one - per_pair[name]
    return WorkFormula(per_step, request - per_step, per_event, per_pair, pair_counts)


def _pair_count(tower: SequenceConfig) -> Callable[[npt.NDArray[np.integer]], int]:
    if tower.attention == "full":
        return pairs.full_pairs
    count = pairs.window_pairs if tower.attention == "window" else pairs.block_pairs
    return lambda lengths: count(lengths, tower.window)


def step_work(formulas: list[WorkFormula], batch: RecBatch) -> StepWork:
    """Work of a training step, from lengths that are on the CPU.

    Args:
        formulas: Of the network, or of every copy of an ensemble.
        batch: Rows of this rank.
    """
    lengths = {name: sequence.lengths_cpu.numpy() for name, sequence in batch.sequences.items()}
    flops, strict_flops = np.sum([formula(lengths, len(batch)) for formula in formulas], axis=0)
    return StepWork(
        samples=len(batch),
        flops=float(flops),
        strict_flops=float(strict_flops),
        tokens=sum(int(values.sum()) for values in lengths.values()),
        padded_tokens=sum(len(values) * int(values.max(initial=0)) for values in lengths.values()),
    )


def work_formulas(network: nn.Module, schema: Schema) -> list[WorkFormula] | None:
    """Formulas of a :class:`GEM` or an :class:`Ensemble` of such; None for other networks."""
    copies = list(network.members) if isinstance(network, Ensemble) else [network]
    known = [copy for copy in copies if isinstance(copy, GEM)]
    return [work_formula(schema, copy.config) for copy in known] if len(known) == len(copies) else None
