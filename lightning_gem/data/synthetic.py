"""Endless synthetic ads with a planted signal whose best attainable NE is known.

Every row is a pure function of (seed, split, row): nothing is stored, any size costs nothing, and rows do not depend on
chunks, ranks or workers. The labels follow from *recent events of the candidate's category*: which of the many categories
matters, how a user's segment values each action and how strongly the candidate's format responds is known only from the
request, so a summary of the history made without the request cannot hold the answer (see :class:`World`).
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lightning_gem.data.module import RecDataModule
from lightning_gem.data.rows import Bags, Events, Floats, Ints, Rows
from lightning_gem.data.schema import DenseFeature, Schema, Sequence, SparseFeature, Task

Keys = npt.NDArray[np.uint64]
Doubles = npt.NDArray[np.float64]

SPLITS = ("train", "val", "test")
NUM_SEGMENTS = 8
NUM_FORMATS = 4
NUM_ACTIONS = 4
NUM_INTERESTS = 2
NUM_BRANDS = 16
DAY = 86_400
FIRST_REQUEST = 1_700_000_000

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


@dataclass
class SyntheticSequence:
    """Shape of one event history.

    Args:
        name: Name of the sequence.
        max_len: Longest history.
        num_features: Categorical features per event: the event's category, the user's action, then background ids.
        num_embeddings: Table rows of each background feature.
        embedding_dim: Width of the tables.
        num_floats: Numeric background features per event.
    """

    name: str
    max_len: int = 24
    num_features: int = 3
    num_embeddings: int = 1000
    embedding_dim: int = 16
    num_floats: int = 0


@dataclass
class SyntheticShape:
    """Everything that decides the rows; see :class:`SyntheticAds` for the meaning of the fields."""

    sequences: list[SyntheticSequence]
    num_tasks: int
    num_sparse: int
    num_dense: int
    num_embeddings: int
    num_categories: int
    num_domains: int
    empty: float
    seed: int


@dataclass
class BestNE:
    """Normalized entropies of one task on one split; no model can be better but by luck.

    Attributes:
        expected: Of the true probabilities, in expectation over the labels.
        realised: Of the true probabilities on the labels that were drawn.
        without_sequences: Of the best prediction from the request alone, in expectation.
    """

    expected: float
    realised: float
    without_sequences: float


def _mix(x: Keys) -> Keys:
    """Finaliser of SplitMix64: consecutive inputs become independent 64-bit values."""
    x = x ^ (x >> 30)
    x *= 0xBF58476D1CE4E5B9
    x ^= x >> 27
    x *= 0x94D049BB133111EB
    x ^= x >> 31
    return x


def _hash(key: Keys, *parts: npt.NDArray[np.generic] | int) -> Keys:
    for part in parts:
        step = (part + 1) * _GOLDEN & _MASK if isinstance(part, int) else (part.astype(np.uint64) + 1) * _GOLDEN
        key = _mix(key + step)
    return key


def _uniform(key: Keys) -> Doubles:
    """Uniform in [0, 1)."""
    return (key >> 11) * 2.0**-53


def _zipf(uniform: Doubles, size: int) -> Ints:
    """Log-uniform ranks in [0, size): ``P(k) ~ 1 / (k + 1)``, in closed form for any size."""
    return np.minimum(np.exp(uniform * np.log(size + 1.0)).astype(np.int64), size) - 1


def _centred(uniform: Doubles) -> Doubles:
    """Mean 0 and variance 1."""
    return np.sqrt(12.0) * (uniform - 0.5)


@dataclass
class History:
    lengths: Ints
    row: Ints
    age: Ints
    category: Ints
    brand: Ints
    action: Ints
    key: Keys


class World:
    """What users and ads are like, and the true click and conversion probabilities."""

    focus = 0.85
    vmean = 0.0
    by_brand = 1.0
    median = 0.4
    sigma = 0.8
    memory = 2 * DAY
    shrinkage = 0.3
    base = 0.8
    gain = 2.4
    id_scale = 0.25
    static_scale = 0.4

    def __init__(self, shape: SyntheticShape) -> None:
        self.shape = shape
        rng = np.random.default_rng((shape.seed, 77))
        tasks, segments = shape.num_tasks, NUM_SEGMENTS
        base = np.linspace(1, -1, NUM_ACTIONS)
        base = base / base.std()
        own = rng.standard_normal((tasks, segments, NUM_ACTIONS))
        own -= own.mean(-1, keepdims=True)
        own /= own.std(-1, keepdims=True)
        values = self.base * base + np.sqrt(1 - self.base**2) * own
        self.values = values / values.std(-1, keepdims=True) + self.vmean
        self.gains = self.gain * np.linspace(0.6, 1.4, NUM_FORMATS)[None].repeat(tasks, 0)
        self.by_category = self.static_scale * rng.standard_normal((tasks, shape.num_categories))
        self.by_pair = self.static_scale * rng.standard_normal((tasks, segments, NUM_FORMATS))
        self.by_domain = 0.3 * rng.standard_normal((tasks, shape.num_domains)) * (shape.num_domains > 1)
        self.bias = np.full(tasks, -1.0)

    def request(self, key: Keys) -> dict[str, npt.NDArray]:
        shape = self.shape
        user = _zipf(_uniform(_hash(key, 0)), shape.num_embeddings)
        user_key = _hash(user.astype(np.uint64), shape.seed)
        interests = [
            np.stack([_zipf(_uniform(_hash(user_key, 1 + i, k)), size) for i in range(NUM_INTERESTS)], axis=1)
            for k, size in enumerate((shape.num_categories, NUM_BRANDS))
        ]
        segment = (_hash(user_key, 0) % NUM_SEGMENTS).astype(np.int64)
        category = self.pick(_hash(key, 1), interests[0], np.arange(len(key)), shape.num_categories)
        brand = self.pick(_hash(key, 7), interests[1], np.arange(len(key)), NUM_BRANDS)
        fmt = (_hash(key, 2) % NUM_FORMATS).astype(np.int64)
        item = _zipf(_uniform(_hash(key, 3)), shape.num_embeddings)
        out = dict(user=user, segment=segment, category=category, brand=brand, format=fmt, item=item)
        for i in range(6, shape.num_sparse):
            out[f"id_{i}"] = _zipf(_uniform(_hash(key, 100 + i)), shape.num_embeddings)
        domain = (_hash(key, 4) % shape.num_domains).astype(np.int64)
        dense = (
            np.stack([_centred(_uniform(_hash(key, 10_000 + i))) for i in range(shape.num_dense)], axis=1)
            if shape.num_dense
            else np.zeros((len(key), 0))
        )
        return dict(sparse=out, interests=interests, domain=domain, dense=dense)

    def pick(self, key: Keys, interests: Ints, row: Ints, size: int) -> Ints:
        u = _uniform(key)
        index = np.minimum((u / self.focus * NUM_INTERESTS).astype(np.int64), NUM_INTERESTS - 1)
        return np.where(u < self.focus, interests[row, index], _zipf(_uniform(_hash(key, 0)), size))

    def history(self, s: int, key: Keys, interests: Ints, draw: int = 0) -> History:
        seq = self.shape.sequences[s]
        key = _hash(key, 50, s, draw)
        u, v = _uniform(_hash(key, 0)), _uniform(_hash(key, 1))
        normal = np.sqrt(-2 * np.log1p(-u)) * np.cos(2 * np.pi * v)
        lengths = np.minimum(1 + self.median * seq.max_len * np.exp(self.sigma * normal), seq.max_len).astype(np.int64)
        lengths[_uniform(_hash(key, 2)) < self.shape.empty] = 0
        row = np.repeat(np.arange(len(key)), lengths)
        ends = np.cumsum(lengths)
        recency = ends[row] - 1 - np.arange(len(row))
        event = _hash(key[row], recency)
        g = _uniform(_hash(event, 0))
        long = g < 0.3
        gap = np.where(long, -np.log1p(-g / 0.3 * long) * 0.75 * DAY, -np.log1p(-(g - 0.3) / 0.7 * ~long) * 120).astype(
            np.int64
        )
        gap += 1
        total = np.cumsum(gap)
        age = np.append(total, 0)[ends[row] - 1] - total + gap
        category = self.pick(_hash(event, 1), interests[0], row, self.shape.num_categories)
        brand = self.pick(_hash(event, 3), interests[1], row, NUM_BRANDS)
        action = (_hash(event, 2) >> 62).astype(np.int64)
        return History(lengths, row, age, category, brand, action, event)

    def logits(self, req, histories: list[History]) -> Doubles:
        sp = req["sparse"]
        out = np.empty((len(sp["user"]), self.shape.num_tasks))
        user_key, item_key = (_hash(sp[n].astype(np.uint64), self.shape.seed, n == "item") for n in ("user", "item"))
        for t in range(self.shape.num_tasks):
            logit = self.bias[t] + self.by_category[t, sp["category"]] + self.by_pair[t, sp["segment"], sp["format"]]
            logit += self.by_domain[t, req["domain"]]
            logit += self.id_scale * (
                _centred(_uniform(_hash(user_key, 900 + t))) + _centred(_uniform(_hash(item_key, 900 + t)))
            )
            h = histories[min(t, len(histories) - 1)]
            same = h.category == sp["category"][h.row]
            if h is histories[0] and self.by_brand:
                same &= h.brand == sp["brand"][h.row]
            match = np.flatnonzero(same)
            row = h.row[match]
            w = np.exp(-h.age[match] / self.memory)
            v = self.values[t, sp["segment"][row], h.action[match]]
            n = len(logit)
            ev = np.bincount(row, w * v, n) / (self.shrinkage + np.bincount(row, w, n))
            out[:, t] = logit + self.gains[t, sp["format"]] * ev
        return out
