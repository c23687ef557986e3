"""GEM: event sequences and non-sequence features, interleaved attention and cross-feature learning, experts.

An open reconstruction from public descriptions of Meta's GEM, Kunlun (arXiv 2602.10016), InterFormer (arXiv
2411.09852) and Wukong (arXiv 2403.02545).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from lightning_gem.data.batch import EventSequence, RecBatch
from lightning_gem.data.schema import Schema
from lightning_gem.models.config import GEMConfig
from lightning_gem.models.embeddings import event_embeddings, request_embeddings
from lightning_gem.models.functional import log_age
from lightning_gem.models.heads import TaskHeads
from lightning_gem.models.layer import GEMLayer, SequenceGeometry
from lightning_gem.models.rotary import rotary_angles
from lightning_gem.models.tokenizers import EventTokenizer, FeatureTokenizer

NUM_TIME_FEATURES = 2


class GEM(nn.Module):
    """The network: a batch in, one logit per task out.

    Args:
        schema: Features and tasks.
        config: Sizes and switches.

    Raises:
        ValueError: If the configuration does not fit the schema; the message names the field.
    """

    def __init__(self, schema: Schema, config: GEMConfig | None = None) -> None:
        super().__init__()
        config = config or GEMConfig()
        sequences = [] if config.sequence_mode == "none" else schema.sequences
        names = [sequence.name for sequence in sequences]
        config.check([sequence.name for sequence in schema.sequences])
        if not schema.sparse and not schema.dense:
            raise ValueError("schema.sparse and schema.dense are both empty: the request needs at least one feature")
        self.config = config
        self.keys = {sequence.name: sequence.keys for sequence in sequences}

        self.request_embeddings = request_embeddings(schema, config.embedding_init)
        self.event_embeddings = event_embeddings(schema, config.embedding_init) if names else nn.ModuleList()
        self.feature_tokenizer = FeatureTokenizer(
            {feature.name: feature.embedding_dim for feature in schema.sparse},
            len(schema.dense),
            config.num_dense_tokens,
            config.width,
            config.activation,
        )
        time_features = NUM_TIME_FEATURES if config.time_features else 0
        self.event_tokenizers = nn.ModuleList(
            EventTokenizer(
                sum(feature.embedding_dim for feature in sequence.features) + len(sequence.floats) + time_features,
                config.tower(sequence.name).width,
                config.activation,
                config.event_gate,
            )
            for sequence in sequences
        )
        self.dropout = nn.Dropout(config.dropout)
        num_tokens = [self.feature_tokenizer.num_tokens] + [config.num_expert_outputs] * config.num_layers
        self.layers = nn.ModuleList(GEMLayer(config, names, i, num_tokens[i]) for i in range(config.num_layers))
        self.heads = TaskHeads(
            num_tokens[-1] * config.width,
            config.head_hidden,
            config.task_hidden,
            len(schema.tasks),
            schema.num_domains,
            config.dropout,
        )
        self.wide: nn.Linear | None = None
        if config.wide:
            num_wide = sum(feature.embedding_dim for feature in schema.sparse) + len(schema.dense)
            self.wide = nn.Linear(num_wide, len(schema.tasks), bias=False)

    def forward(self, batch: RecBatch) -> Tensor:
        """Returns logits ``(B, num_tasks)``."""
        embedded = None if self.request_embeddings is None else self.request_embeddings(batch.sparse)
        x = self.dropout(self.feature_tokenizer(embedded, batch.dense))
        tokens, geometry = self._embed_events(batch)
        summaries: dict[str, Tensor] = {}
        poolings: dict[str, nn.Module] = {}
        layers: Iterable[Any] = self.layers
        for i, layer in enumerate(layers):
            for name, tower in zip(layer.sequences, layer.towers, strict=True):
                poolings[name] = tower.pooling or poolings[name]
            refresh = {name: pooling for name, pooling in poolings.items() if self.config.refreshes(name, i)}
            x, tokens, summaries = layer(x, tokens, summaries, geometry, refresh)
        logits = self.heads(x, batch.domain)
        if self.wide is not None:
            parts = [] if embedded is None else [embedded.values()]
            inputs = torch.cat([*parts, batch.dense], dim=1)
            logits = logits + self.wide(inputs.to(self.wide.weight.dtype))
        return logits

    def _embed_events(self, batch: RecBatch) -> tuple[dict[str, Tensor], dict[str, SequenceGeometry]]:
        """Event tokens and geometry of every sequence."""
        tokens: dict[str, Tensor] = {}
        geometry: dict[str, SequenceGeometry] = {}
        if not self.keys:
            return tokens, geometry
        ids = KeyedJaggedTensor.concat([batch.sequences[name].ids for name in self.keys])
        embedded: dict[str, JaggedTensor] = {}
        for collection in self.event_embeddings:
            embedded.update(collection(ids))
        for tokenizer, (name, keys) in zip(self.event_tokenizers, self.keys.items(), strict=True):
            sequence = batch.sequences[name]
            row = self._row_of_event(sequence)
            age = log_age(sequence.timestamps, batch.request_timestamps[row], self.config.time_scale)
            inputs = [*(embedded[key].values() for key in keys), sequence.floats]
            if self.config.time_features:
                inputs += [age[:, None], self._log_gap(sequence, row)[:, None]]
            tokens[name] = self.dropout(tokenizer(torch.cat(inputs, dim=1)))
            position = sequence.cu_seqlens[1:][row] - 1 - torch.arange(len(row), device=row.device)
            tower = self.config.tower(name)
            geometry[name] = SequenceGeometry(
                sequence.cu_seqlens, sequence.max_seqlen, rotary_angles(position, age, tower.width // tower.num_heads)
            )
        return tokens, geometry

    @staticmethod
    def _row_of_event(sequence: EventSequence) -> Tensor:
        """Row of the batch that each event belongs to, ``(N,)``."""
        lengths = sequence.cu_seqlens.diff()
        rows = torch.arange(len(lengths), device=lengths.device)
        return torch.repeat_interleave(rows, lengths, output_size=len(sequence.timestamps))

    def _log_gap(self, sequence: EventSequence, row: Tensor) -> Tensor:
        """``log(1 + gap / time_scale)`` to the event before, 0 for the first of a sequence."""
        times = sequence.timestamps
        is_first = sequence.cu_seqlens[row] == torch.arange(len(times), device=times.device)
        before = torch.where(is_first, times, times.roll(1))
        return log_age(before, times, self.config.time_scale)
