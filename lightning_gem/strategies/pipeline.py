"""The next batch on its way while this one is computed: its copy to the device, and the exchange of its ids.

A collection in TorchRec's form works in three parts: ids go to the ranks that have their rows, rows are looked up,
embeddings go back. The first part needs no weights, so it may run a step ahead and changes no number. Which features of
a batch a collection takes is learned by watching the first step: where they are one object with a part of the batch,
those of the next batch are sent off before the forward of this one. A collection whose input is computed from the batch
inside of the step is left as it is.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_gem.strategies.batches import Filler
from lightning_gem.strategies.compat import version_of

Place = tuple[Any, ...]


class Ahead:
    """A batch, and the one after it.

    Attributes:
        batch: As the loader gave it.
        moved: The batch on its device, once it is there.
        following: The next one, None at the end.
    """

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self.moved: Any = None
        self.following: Ahead | None = None

    @property
    def is_filler(self) -> bool:
        """Whether the batch only stands in for one."""
        return isinstance(self.batch, Filler)


class LookAhead:
    """Reads one batch ahead of the trainer. Everything else is the loader's.

    Args:
        loader: What to read.
        is_on: Asked at the start of every epoch; without it, batches pass as they are.
        counted: The loader that counts what was read, if it has to know that a batch more was.
    """

    def __init__(self, loader: Any, is_on: Callable[[], bool], counted: Any) -> None:
        self.loader = loader
        self.is_on = is_on
        self.num_ahead = 0
        self._state: Any = None
        if callable(getattr(counted, "pending", None)):
            pending = counted.pending
            counted.pending = lambda: pending() + self.num_ahead
            self._counts_itself = True
        else:
            self._counts_itself = False

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while it is copied
            raise AttributeError(name)
        value = getattr(self.loader, name)
        if name == "state_dict" and not self._counts_itself and self.num_ahead:
            return lambda: self._state
        return value

    def __iter__(self) -> Iterator[Any]:
        self.num_ahead = 0
        if not self.is_on():
            yield from self.loader
            return
        iterator = iter(self.loader)
        current = next(iterator, None)
        ahead = None if current is None else Ahead(current)
        while ahead is not None:
            failure: Exception | None = None
            if not self._counts_itself and hasattr(self.loader, "state_dict"):
                self._state = self.loader.state_dict()
            try:
                batch = next(iterator, None)
            except Exception as error:  # it belongs to the next step
                batch, failure = None, error
            ahead.following = None if batch is None else Ahead(batch)
            self.num_ahead = int(batch is not None)
            yield ahead
            if failure is not None:
                raise failure
            ahead = ahead.following


def without_ahead(batch: Any) -> Any:
    """A batch of several loaders, each of which was read ahead, as if none were."""
    if isinstance(batch, dict):
        return {key: without_ahead(part) for key, part in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(without_ahead(part) for part in batch)
    return batch.batch if isinstance(batch, Ahead) else batch


def find_features(batch: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Every KeyedJaggedTensor of a batch, and the keys and attributes that lead to it."""
    if isinstance(batch, KeyedJaggedTensor):
        yield place, batch
        return
    for step, part in _parts(batch):
        yield from find_features(part, (*place, step))


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from ((("key", key), part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((("key", i), part) for i, part in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((("attribute", field.name), getattr(value, field.name)) for field in dataclasses.fields(value))


def _look_up(batch: Any, place: Place) -> Any:
    for kind, key in place:
        batch = getattr(batch, key) if kind == "attribute" else batch[key]
    return batch


def _record_stream(value: Any, stream: Any) -> None:
    """Tells the allocator that tensors made on another stream are used on this one."""
    if hasattr(value, "record_stream"):
        value.record_stream(stream)
    else:
        for _, part in _parts(value):
            _record_stream(part, stream)


@dataclasses.dataclass
class _Sent:
    """Features of the next batch on their way to the ranks that look them up."""

    features: KeyedJaggedTensor
    version: int
    context: Any
    awaitable: Any
    is_under_way: bool = False


class Pipeline:
    """Copies and sends the next batch beside the step of this one.

    Args:
        move: Brings a batch to the device.
        device: The device.
    """

    def __init__(self, move: Callable[[Any], Any], device: torch.device) -> None:
        self.move = move
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.collections: dict[str, Any] = {}
        self.current: Ahead | None = None
        self.places: dict[str, list[Place]] = {}
        self.sent: dict[str, list[_Sent]] = {}
        self._seen: dict[int, Place] = {}
        self._watching = False

    def attach(self, collections: dict[str, nn.Module]) -> None:
        """Lets the forward of sharded collections use what was sent ahead."""
        for path, collection in collections.items():
            if path not in self.collections:
                self.collections[path] = collection
                collection.forward = self._forward(path, collection, collection.forward)

    def take(self, ahead: Ahead) -> Any:
        """The batch on its device."""
        if ahead.moved is None:
            ahead.moved = self.move(ahead.batch.batch if ahead.is_filler else ahead.batch)
        elif self.stream is not None:
            now = torch.cuda.current_stream()
            now.wait_stream(self.stream)
            _record_stream(ahead.moved, now)
        self.current = ahead
        return ahead.moved

    @contextmanager
    def around_forward(self) -> Iterator[None]:
        """Around the forward of a step: sends the next batch, the sizes before and the ids after it."""
        self._before_forward()
        yield
        self._after_forward()

    def _before_forward(self) -> None:
        current = self.current
        if current is None:
            return
        self._watching = True
        self._seen = {id(features): place for place, features in find_features(current.moved)}
        following = current.following
        if following is None:
            return
        if self.stream is not None:
            # Nothing of this step is read beside it, but memory of the last step's batch may be used again.
            self.stream.wait_stream(torch.cuda.current_stream())
        with self._beside():
            following.moved = self.move(following.batch.batch if following.is_filler else following.batch)
            fresh: dict[str, list[_Sent]] = {}
            for path, places in self.places.items():
                fresh[path] = [self._send(self.collections[path], _look_up(following.moved, place)) for place in places]
        # What this step is to use comes first.
        for path, entries in fresh.items():
            self.sent.setdefault(path, []).extend(entries)

    def _send(self, collection: Any, features: KeyedJaggedTensor) -> _Sent:
        context = collection.create_context()
        awaitable = collection.input_dist(context, features)
        return _Sent(features, version_of(features.values()), context, awaitable)

    def _after_forward(self) -> None:
        self._watching = False
        self._seen = {}
        current = self.current
        following = None if current is None else current.following
        with self._beside():
            for entries in self.sent.values():
                for entry in entries:
                    if not entry.is_under_way:
                        entry.awaitable, entry.is_under_way = entry.awaitable.wait(), True
        coming = {id(features) for _, features in find_features(following.moved)} if following is not None else set()
        for path, entries in self.sent.items():
            stale = [entry for entry in entries if id(entry.features) not in coming]
            if stale:  # the step did not use them after all
                for entry in stale:
                    entry.awaitable.wait()
                self.places.pop(path, None)
            self.sent[path] = [entry for entry in entries if id(entry.features) in coming]

    def _beside(self) -> AbstractContextManager[Any]:
        if self.stream is None:
            return nullcontext()
        return torch.cuda.stream(self.stream)

    def drain(self) -> None:
        """Ends what is under way for a batch that will not be used."""
        for entries in self.sent.values():
            for entry in entries:
                ids = entry.awaitable.wait()
                if not entry.is_under_way:
                    ids.wait()
        self.sent = {}
        self.current = None

    def _forward(self, path: str, collection: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(features: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._watching or args or kwargs:
                return plain(features, *args, **kwargs)
            entries = self.sent.get(path, [])
            entry = next((entry for entry in entries if entry.features is features), None)
            if entry is None:
                place = self._seen.get(id(features))
                known = self.places.setdefault(path, [])
                if place is not None and place not in known:
                    known.append(place)
                return plain(features)
            entries.remove(entry)
            if version_of(features.values()) != entry.version:
                raise ValueError(
                    f"the ids of {path} were changed in place during the step, after they had been sent to the ranks "
                    "that look them up: change them before (in the loader or in on_after_batch_transfer), or set "
                    "pipeline: false"
                )
            with self._beside():
                ids = entry.awaitable.wait()
                ids = ids if entry.is_under_way else ids.wait()
            if self.stream is not None:
                now = torch.cuda.current_stream()
                now.wait_stream(self.stream)
                ids.record_stream(now)
                entry.context.record_stream(now)
            return collection.compute_and_output_dist(entry.context, ids)

        return forward
