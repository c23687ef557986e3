"""Endless synthetic ads with a planted signal whose best attainable normalized entropy is known.

Every row is a pure function of (seed, split, row): nothing is stored, any size costs nothing, and rows depend neither
on chunks nor on ranks or workers. The labels follow from recent events *of the candidate's category*, valued by the
action that the user took then, by the user's segment and by the candidate's format: which events count is known only
from the request, so a summary of the history made without the request must keep everything to keep the answer.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from lightning.pytorch.utilities import rank_zero_info

from lightning_gem.data.module import RecDataModule
from lightning_gem.data.rows import Bags, Events, Floats, Ints, Rows
from lightning_gem.data.schema import DenseFeature, Schema, Sequence, SparseFeature, Task

Keys = npt.NDArray[np.uint64]
Doubles = npt.NDArray[np.float64]

SPLITS = ("train", "val", "test")
REQUEST_FEATURES = ("user", "segment", "category", "format", "item")
EVENT_FEATURES = ("category", "action")
NUM_SEGMENTS = 8
NUM_FORMATS = 4
NUM_ACTIONS = 4
NUM_INTERESTS = 4
DAY = 86_400
FIRST_REQUEST = 1_700_000_000
MAX_CHUNKS = 256
EVENTS_AT_ONCE = 1 << 17


@dataclass
class SyntheticSequence:
    """Shape of one event history.

    Args:
        max_len: Longest history.
        num_features: Categorical features per event: the category, the action, then background ids.
        num_floats: Numeric background features per event.
        name: Name of the sequence; ``sequence_<i>`` when not given.
    """

    max_len: int = 24
    num_features: int = 3
    num_floats: int = 0
    name: str | None = None


@dataclass
class BestNE:
    """Normalized entropies of one task on one split that no model can beat but by luck.

    Attributes:
        expected: Of the true probabilities, in expectation over the labels.
        realised: Of the true probabilities, on the labels that were drawn.
        without_sequences: Of the best prediction from the request alone, in expectation.
    """

    expected: float
    realised: float
    without_sequences: float


@dataclass
class _Requests:
    key: Keys
    ids: dict[str, Ints]
    interests: Ints
    domain: Ints
    dense: Doubles


@dataclass
class _History:
    lengths: Ints
    row: Ints
    age: Ints
    category: Ints
    action: Ints
    key: Keys


class SyntheticAds(RecDataModule):
    """Ads clicks (``click``) and conversions on clicks (``conversion``) from a world whose probabilities are known.

    Ids are Zipf distributed, histories heavy-tailed with empty ones among them, events come in bursts.

    Args:
        num_train: Training rows; any number, nothing is materialised.
        num_val: Validation rows.
        num_test: Test rows.
        batch_size: Rows per batch and rank.
        num_workers: Worker processes per loader.
        seed: Seed of the world and of the shuffles.
        sequences: Shapes of the histories. Clicks follow from the first, conversions from the second if there is one,
            the others are background.
        num_sparse: Categorical request features: user, segment, category, format, item, then background ids.
        num_dense: Numeric background features of the request.
        num_tasks: Tasks; beyond click and conversion they are more outcomes of the first history.
        num_embeddings: Rows of the tables of ids.
        embedding_dim: Width of the tables of the request.
        event_embedding_dim: Width of the tables of the events; ``embedding_dim`` when not given.
        num_categories: Categories of events and candidates.
        num_domains: Surfaces.
        empty: Share of the histories without any event.
    """

    def __init__(
        self,
        num_train: int = 200_000,
        num_val: int = 20_000,
        num_test: int = 20_000,
        batch_size: int = 256,
        num_workers: int = 0,
        seed: int = 0,
        sequences: list[SyntheticSequence] | None = None,
        num_sparse: int = 12,
        num_dense: int = 0,
        num_tasks: int = 2,
        num_embeddings: int = 1000,
        embedding_dim: int = 16,
        event_embedding_dim: int | None = None,
        num_categories: int = 8,
        num_domains: int = 1,
        empty: float = 0.05,
    ) -> None:
        if sequences is None:
            sequences = [SyntheticSequence(24, 3, name="views"), SyntheticSequence(12, 2, name="clicks")]
        if num_sparse < len(REQUEST_FEATURES) or num_tasks < 1 or not sequences:
            raise ValueError(
                f"the planted signal needs num_sparse >= {len(REQUEST_FEATURES)} (not {num_sparse}), num_tasks >= 1 "
                f"(not {num_tasks}) and at least one sequence (not {len(sequences)})"
            )
        if any(sequence.num_features < len(EVENT_FEATURES) for sequence in sequences):
            raise ValueError(f"every sequence needs num_features >= {len(EVENT_FEATURES)}: category and action")
        self.num_rows = dict(zip(SPLITS, (num_train, num_val, num_test), strict=True))
        sizes = {"segment": NUM_SEGMENTS, "category": num_categories, "format": NUM_FORMATS, "action": NUM_ACTIONS}

        def feature(name: str, dim: int) -> SparseFeature:
            return SparseFeature(name, sizes.get(name, num_embeddings), dim, encoding="index")

        names = [*REQUEST_FEATURES, *(f"id_{i}" for i in range(num_sparse - len(REQUEST_FEATURES)))]
        schema = Schema(
            tasks=[Task("click"), Task("conversion", given="click"), *(Task(f"task_{i}") for i in range(2, num_tasks))][
                :num_tasks
            ],
            sparse=[feature(name, embedding_dim) for name in names],
            dense=[DenseFeature(f"dense_{i}") for i in range(num_dense)],
            sequences=[
                Sequence(
                    shape.name or f"sequence_{i}",
                    [
                        feature(name, event_embedding_dim or embedding_dim)
                        for name in (*EVENT_FEATURES, *(f"id_{j}" for j in range(shape.num_features - 2)))
                    ],
                    [DenseFeature(f"float_{j}") for j in range(shape.num_floats)],
                    max_len=shape.max_len,
                )
                for i, shape in enumerate(sequences)
            ],
            timestamp="time",
            user="user",
            domain="domain" if num_domains > 1 else None,
            num_domains=num_domains,
        )
        # Rows are independent draws: shuffling them would only cost memory.
        super().__init__(schema, batch_size, num_workers, shuffle_rows=0, seed=seed)
        self.world = World(schema, sequences, empty, seed)

    def setup(self, stage: str) -> None:
        """Makes the splits; instantaneous for any size."""
        for split, num_rows in self.num_rows.items():
            self.sources[split] = SyntheticSource(self.world, SPLITS.index(split), num_rows)
        if stage == "fit" and self.num_rows["val"]:
            best = self.best_ne("val", max_rows=min(2000, self.world.rows_with(1 << 22)), num_draws=1)
            rank_zero_info(
                "The best possible NE is " + ", ".join(f"{value.expected:.3f} ({task})" for task, value in best.items())
            )

    def best_ne(self, split: str = "val", max_rows: int = 20_000, num_draws: int = 32) -> dict[str, BestNE]:
        """What the best model would reach, by task.

        Args:
            split: The split.
            max_rows: Rows to compute it on, from the split's start.
            num_draws: Histories drawn per request for the value without sequences; few make it too high.
        """
        num_rows = min(self.num_rows[split], max_rows)
        requests = self.world.requests(SPLITS.index(split), 0, num_rows)
        # No outcome follows from other sequences than the first two.
        p = self.world.probabilities(requests, self.world.histories(requests, num_sequences=2))
        labels, weights = self.world.labels(requests, p)
        draws = [
            self.world.probabilities(requests, self.world.histories(requests, d + 1, num_sequences=2))
            for d in range(num_draws)
        ]
        result = {}
        for i, task in enumerate(self.schema.tasks):
            # In expectation, a conversion counts with the probability of its click.
            weight = p[:, 0] if task.given else np.ones(num_rows)
            given = weights[:, i] > 0
            draw_weights = [draw[:, 0] if task.given else np.ones(num_rows) for draw in draws]
            blind = np.average([draw[:, i] for draw in draws], axis=0, weights=draw_weights)
            result[task.name] = BestNE(
                expected=_normalized_entropy(p[:, i], p[:, i], weight),
                realised=_normalized_entropy(p[given, i], labels[given, i], np.ones(given.sum())),
                without_sequences=_normalized_entropy(blind, p[:, i], weight),
            )
        return result


class World:
    """What users and ads are like, and the true probabilities of every task."""

    focus = 0.85  # share of events and candidates that lie within the user's interests
    memory = 2 * DAY  # over which an event loses its weight
    shrinkage = 0.3  # weight of no event at all
    gain = 3.0
    bias = -3.0
    id_scale = 0.25
    static_scale = 0.4

    def __init__(self, schema: Schema, shapes: list[SyntheticSequence], empty: float, seed: int) -> None:
        self.schema = schema
        self.shapes = shapes
        self.empty = empty
        self.seed = seed
        sizes = {feature.name: feature.num_embeddings for feature in schema.sparse}
        self.num_categories, self.num_ids = sizes["category"], sizes["user"]
        rng = np.random.default_rng((seed, 77))
        num_tasks = len(schema.tasks)
        # An action is worth much the same to all segments, and something of its own to each; 1 on average.
        common = np.linspace(1, -1, NUM_ACTIONS) / np.linspace(1, -1, NUM_ACTIONS).std()
        own = rng.standard_normal((num_tasks, NUM_SEGMENTS, NUM_ACTIONS))
        own = (own - own.mean(-1, keepdims=True)) / own.std(-1, keepdims=True)
        values = 0.8 * common + 0.6 * own
        self.values = values / values.std(-1, keepdims=True) + 1
        self.gains = self.gain * np.linspace(0.6, 1.4, NUM_FORMATS)
        self.by_category = self.static_scale * rng.standard_normal((num_tasks, self.num_categories))
        self.by_pair = self.static_scale * rng.standard_normal((num_tasks, NUM_SEGMENTS, NUM_FORMATS))
        self.by_domain = 0.3 * rng.standard_normal((num_tasks, schema.num_domains))

    def requests(self, split: int, start: int, stop: int) -> _Requests:
        """The request side of rows ``start`` to ``stop``."""
        key = _hash(np.arange(start, stop, dtype=np.uint64), self.seed, split)
        user = _zipf(_uniform(_hash(key, 0)), self.num_ids)
        user_key = _hash(user.astype(np.uint64), self.seed, 1)
        interests = np.stack(
            [_zipf(_uniform(_hash(user_key, 2 + i)), self.num_categories) for i in range(NUM_INTERESTS)], axis=1
        )
        ids = {
            "user": user,
            "segment": (_hash(user_key, 0) % NUM_SEGMENTS).astype(np.int64),
            "category": self._category(_hash(key, 1), interests),
            "format": (_hash(key, 2) % NUM_FORMATS).astype(np.int64),
            "item": _zipf(_uniform(_hash(key, 3)), self.num_ids),
        }
        for i, feature in enumerate(self.schema.sparse[len(REQUEST_FEATURES) :]):
            ids[feature.name] = _zipf(_uniform(_hash(key, 100 + i)), self.num_ids)
        dense = np.empty((len(key), len(self.schema.dense)))
        for i in range(dense.shape[1]):
            dense[:, i] = _centred(_uniform(_hash(key, 10_000 + i)))
        domain = (_hash(key, 4) % self.schema.num_domains).astype(np.int64)
        return _Requests(key, ids, interests, domain, dense)

    def _category(self, key: Keys, interests: Ints) -> Ints:
        """One of the user's interests, or any category."""
        uniform = _uniform(key)
        index = np.minimum((uniform / self.focus * NUM_INTERESTS).astype(np.int64), NUM_INTERESTS - 1)
        anything = _zipf(_uniform(_hash(key, 0)), self.num_categories)
        return np.where(uniform < self.focus, interests[np.arange(len(key)), index], anything)

    def rows_with(self, num_events: int) -> int:
        """How many rows have about as many events, at half the longest histories."""
        return max(1, 2 * num_events // sum(shape.max_len for shape in self.shapes))

    def histories(self, requests: _Requests, draw: int = 0, num_sequences: int | None = None) -> list[_History]:
        """Events of the first sequences, or of all; other draws give other histories of the same users."""
        shapes = self.shapes[:num_sequences]
        return [self._history(requests, i, shape.max_len, draw) for i, shape in enumerate(shapes)]

    def _history(self, requests: _Requests, index: int, max_len: int, draw: int) -> _History:
        key = _hash(requests.key, 50, index, draw)
        normal = np.sqrt(-2 * np.log1p(-_uniform(_hash(key, 0)))) * np.cos(2 * np.pi * _uniform(_hash(key, 1)))
        lengths = np.minimum(1 + 0.4 * max_len * np.exp(0.8 * normal), max_len).astype(np.int64)
        lengths[_uniform(_hash(key, 2)) < self.empty] = 0
        row = np.repeat(np.arange(len(key)), lengths)
        ends = np.cumsum(lengths)
        event = _hash(key[row], ends[row] - 1 - np.arange(len(row)))
        # Bursts: most gaps are minutes, three in ten are a good part of a day.
        kind, size = _uniform(_hash(event, 0)), -np.log1p(-_uniform(_hash(event, 3)))
        gap = 1 + (size * np.where(kind < 0.3, 0.75 * DAY, 120)).astype(np.int64)
        total = np.cumsum(gap)
        age = total[ends[row] - 1] - total + gap
        category = self._category(_hash(event, 1), requests.interests[row])
        return _History(lengths, row, age, category, (_hash(event, 2) >> 62).astype(np.int64), event)

    def probabilities(self, requests: _Requests, histories: list[_History]) -> Doubles:
        """True probability of every task (of a conversion: given the click), ``(num_rows, num_tasks)``."""
        ids, num_rows = requests.ids, len(requests.key)
        segment, fmt = ids["segment"], ids["format"]
        logits = np.empty((num_rows, len(self.schema.tasks)))
        for t in range(logits.shape[1]):
            history = histories[1 if t == 1 and len(histories) > 1 else 0]
            match = np.flatnonzero(history.category == ids["category"][history.row])
            row = history.row[match]
            weight = np.exp(-history.age[match] / self.memory)
            value = weight * self.values[t, segment[row], history.action[match]]
            mean = np.bincount(row, value, num_rows) / (self.shrinkage + np.bincount(row, weight, num_rows))
            logits[:, t] = self.bias + self.gains[fmt] * mean
            logits[:, t] += self.by_category[t, ids["category"]] + self.by_pair[t, segment, fmt]
            logits[:, t] += self.by_domain[t, requests.domain] if self.schema.num_domains > 1 else 0
            for i, name in enumerate(("user", "item")):
                effect = _uniform(_hash(ids[name].astype(np.uint64), self.seed, 900 + t, i))
                logits[:, t] += self.id_scale * _centred(effect)
        return 1 / (1 + np.exp(-logits))

    def labels(self, requests: _Requests, probabilities: Doubles) -> tuple[Floats, Floats]:
        """Labels and weights, ``(num_rows, num_tasks)``; what is given a click is missing without one."""
        labels = np.empty(probabilities.shape, dtype=np.float32)
        weights = np.ones(probabilities.shape, dtype=np.float32)
        for t, task in enumerate(self.schema.tasks):
            labels[:, t] = _uniform(_hash(requests.key, 5_000 + t)) < probabilities[:, t]
            if task.given:
                labels[labels[:, 0] == 0, t] = np.nan
                weights[:, t] = labels[:, 0]
        return labels, weights


class SyntheticSource:
    """Rows of one split, made when they are read."""

    def __init__(self, world: World, split: int, num_rows: int) -> None:
        self.world = world
        self.split = split
        chunks = min(MAX_CHUNKS, num_rows)
        self.chunk_sizes = [num_rows * (i + 1) // chunks - num_rows * i // chunks for i in range(chunks)]

    def read(self, chunk: int, start: int, stop: int) -> Rows:
        """Makes rows ``start`` to ``stop`` of a chunk, or as many of the first as have some 100,000 events."""
        world = self.world
        stop = min(stop, start + world.rows_with(EVENTS_AT_ONCE))
        first = sum(self.chunk_sizes[:chunk])
        requests = world.requests(self.split, first + start, first + stop)
        histories = world.histories(requests)
        labels, weights = world.labels(requests, world.probabilities(requests, histories))
        now = FIRST_REQUEST + (_uniform(_hash(requests.key, 6)) * 30 * DAY).astype(np.int64)
        return Rows(
            dense=requests.dense.astype(np.float32),
            sparse={feature.name: Bags.single(requests.ids[feature.name]) for feature in world.schema.sparse},
            sequences={
                sequence.name: self._events(sequence, history, now)
                for sequence, history in zip(world.schema.sequences, histories, strict=True)
            },
            sequence_keys={sequence.name: sequence.keys for sequence in world.schema.sequences},
            request_timestamps=now,
            domain=requests.domain,
            labels=labels,
            weights=weights,
            user=requests.ids["user"],
            row=np.arange(first + start, first + stop),
        )

    @staticmethod
    def _events(sequence: Sequence, history: _History, now: Ints) -> Events:
        background = [
            _zipf(_uniform(_hash(history.key, 200 + i)), feature.num_embeddings)
            for i, feature in enumerate(sequence.features[len(EVENT_FEATURES) :])
        ]
        floats = np.empty((len(history.row), len(sequence.floats)), dtype=np.float32)
        for i in range(floats.shape[1]):
            floats[:, i] = _centred(_uniform(_hash(history.key, 300 + i)))
        return Events(
            ids=np.stack([history.category, history.action, *background]),
            floats=floats,
            timestamps=now[history.row] - history.age,
            starts=np.cumsum(history.lengths) - history.lengths,
            lengths=history.lengths,
        )


def _normalized_entropy(prediction: Doubles, probability: Doubles, weight: Doubles) -> float:
    mean = np.average(probability, weights=weight)
    loss = -np.average(probability * np.log(prediction) + (1 - probability) * np.log1p(-prediction), weights=weight)
    return float(loss / -(mean * np.log(mean) + (1 - mean) * np.log1p(-mean)))


def _hash(key: Keys, *parts: npt.NDArray[np.integer] | int) -> Keys:
    """Mixes counters into keys (the finaliser of SplitMix64): consecutive inputs become independent values."""
    for part in parts:
        # Arrays wrap around silently, scalars with a warning.
        step = np.atleast_1d(np.asarray(part)).astype(np.uint64)
        mixed: Keys = key + (step + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        key = mixed ^ (mixed >> np.uint64(31))
    return key


def _uniform(key: Keys) -> Doubles:
    """Uniform in [0, 1)."""
    return (key >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _zipf(uniform: Doubles, size: int) -> Ints:
    """Ranks in [0, size) with ``P(k)`` close to ``1 / (k + 1)``, in closed form for any size."""
    return np.minimum(np.exp(uniform * np.log(size + 1.0)).astype(np.int64), size) - 1


def _centred(uniform: Doubles) -> Doubles:
    """Mean 0 and variance 1."""
    return (uniform - 0.5) * 12.0**0.5
