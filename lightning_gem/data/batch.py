"""The one batch type that readers produce and models consume."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

Movable = TypeVar("Movable", Tensor, KeyedJaggedTensor)


@dataclass
class EventSequence:
    """One kind of event history for a batch of ``B`` requests with ``N`` events in all; nothing is padded.

    Attributes:
        ids: Categorical features; every key has the same lengths.
        floats: Numeric features, float32 ``(N, num_floats)``.
        timestamps: Event times in seconds, int64 ``(N,)``, ascending within a request.
        cu_seqlens: Boundaries of the requests, int32 ``(B + 1,)``.
        lengths_cpu: Events per request, int32 ``(B,)``, always on the CPU: tile scheduling and FLOP counting read it
            without synchronising the device.
    """

    ids: KeyedJaggedTensor
    floats: Tensor
    timestamps: Tensor
    cu_seqlens: Tensor
    lengths_cpu: Tensor

    @property
    def max_seqlen(self) -> int:
        """Longest history of the batch, known without a device synchronisation."""
        return int(self.lengths_cpu.max()) if self.lengths_cpu.numel() else 0

    def _map(self, function: Callable[[Any], Any], lengths: Callable[[Tensor], Tensor]) -> "EventSequence":
        return EventSequence(
            ids=function(self.ids),
            floats=function(self.floats),
            timestamps=function(self.timestamps),
            cu_seqlens=function(self.cu_seqlens),
            lengths_cpu=lengths(self.lengths_cpu),
        )


@dataclass
class RecBatch:
    """A batch of ``B`` requests.

    Attributes:
        dense: Numeric features, float32 ``(B, num_dense)``.
        sparse: Categorical features of the request, several ids per key allowed; None when the schema has none.
        sequences: Event histories by name.
        request_timestamps: Request times in seconds, int64 ``(B,)``.
        domain: Surface of each request, int64 ``(B,)``.
        labels: 0 or 1, float32 ``(B, num_tasks)``; NaN where the label is missing.
        weights: Sample weights, float32 ``(B, num_tasks)``; 0 where the label does not count.
        user: User keys, int64 ``(B,)``, for metrics per user.
        row: Position of each request in its source, int64 ``(B,)``: unique within a split.
    """

    dense: Tensor
    sparse: KeyedJaggedTensor | None
    sequences: dict[str, EventSequence]
    request_timestamps: Tensor
    domain: Tensor
    labels: Tensor
    weights: Tensor
    user: Tensor
    row: Tensor

    def __len__(self) -> int:
        return self.dense.shape[0]

    def _map(self, function: Callable[[Any], Any], lengths: Callable[[Tensor], Tensor]) -> "RecBatch":
        return RecBatch(
            dense=function(self.dense),
            sparse=None if self.sparse is None else function(self.sparse),
            sequences={name: sequence._map(function, lengths) for name, sequence in self.sequences.items()},
            request_timestamps=function(self.request_timestamps),
            domain=function(self.domain),
            labels=function(self.labels),
            weights=function(self.weights),
            user=function(self.user),
            row=function(self.row),
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "RecBatch":
        """Moves everything to ``device`` but ``lengths_cpu``, which stays on the CPU by contract."""
        target = torch.device(device)
        return self._map(lambda value: value.to(target, non_blocking=non_blocking), lambda lengths: lengths)

    def pin_memory(self) -> "RecBatch":
        """Copies everything to page-locked memory."""
        return self._map(lambda value: value.pin_memory(), lambda lengths: lengths.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Tells the caching allocator that ``stream`` uses the tensors."""

        def record(value: Movable) -> Movable:
            value.record_stream(stream)
            return value

        self._map(record, lambda lengths: lengths)
