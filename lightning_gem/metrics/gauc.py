"""Area under the ROC curve, user by user."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics.utilities.data import dim_zero_cat

from lightning_gem.metrics.base import RecMetric, accumulator_dtype, check_shape, read_examples

_COLUMNS = ("users", "logits", "classes")
_MAX_PIECES = 256


def hash_users(users: Tensor) -> Tensor:
    """Mixes int64 ids: a bijection of int64 (the finalizer of SplitMix64), so users never collide."""
    mixed = users.long()
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed = (mixed ^ _shift_right(mixed, shift)) * factor
    return mixed ^ _shift_right(mixed, 31)


def _shift_right(number: Tensor, bits: int) -> Tensor:
    return (number >> bits) & ((1 << (64 - bits)) - 1)


def grouped_auc(groups: Tensor, logits: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """Mean of the exact AUC of every group, weighted by the group's weight.

    Args:
        groups: Group of each example, integers.
        logits: Score of each example.
        positive: Weight of each example as a positive.
        negative: Weight of each example as a negative.

    Returns:
        ``sum_g W_g AUC_g / sum_g W_g`` over the groups with both classes; NaN if there is none.
    """
    order = logits.argsort()
    order = order[groups[order].argsort(stable=True)]
    groups, logits, positive, negative = groups[order], logits[order], positive[order], negative[order]

    first_of_group = torch.ones_like(groups, dtype=torch.bool)
    first_of_group[1:] = groups[1:] != groups[:-1]
    first_of_tie = first_of_group.clone()
    first_of_tie[1:] |= logits[1:] != logits[:-1]

    tie = first_of_tie.cumsum(0) - 1
    positive, negative = (_sum_by(tie, first_of_tie, column) for column in (positive, negative))

    first_of_group = first_of_group[first_of_tie]
    group = first_of_group.cumsum(0) - 1
    below = negative.cumsum(0) - negative
    below = below - below[first_of_group][group]
    wins = _sum_by(group, first_of_group, positive * (below + negative / 2))
    positive, negative = (_sum_by(group, first_of_group, column) for column in (positive, negative))

    both = (positive > 0) & (negative > 0)
    auc = wins[both] / (positive[both] * negative[both])
    weight = (positive + negative)[both]
    return (weight * auc).sum() / weight.sum()


def _sum_by(index: Tensor, firsts: Tensor, column: Tensor) -> Tensor:
    return column.new_zeros(int(firsts.sum())).index_add(0, index, column)


class GAUC(RecMetric):
    """Group AUC: the mean over users of their own AUC, weighted by their impressions.

    ``GAUC = sum_u W_u AUC_u / sum_u W_u``, where ``W_u`` is the weight of the user's examples (their number, without
    weights) and ``AUC_u`` the exact AUC among them, ties counting one half. Users whose labels are all 0 or all 1 have
    no AUC and are left out. The value is NaN if no user is left.

    Examples have to be kept until ``compute``: at most ``max_samples`` labelled ones, of which each rank has an equal
    share. The value is exact while no rank exceeds its share. Beyond it users are sampled by a hash of their id, the
    same on every rank: of a kept user all examples are kept, of the others none. That is a uniform sample of users, and
    the value an estimate without favour to recent or active users; to sample examples instead would thin the users
    out, and leave out those that become one-class. A user who alone exceeds the share of a rank is left out.

    An example takes 20 bytes. Up to twice its share and one batch wait on a rank, so that sorting them out is rare;
    ``compute`` gathers ``max_samples`` on every rank.

    Logits and weights are kept as float32. Unlike for the other metrics of this package, an update synchronises with
    the host now and then.

    Source: Zhou et al., "Deep Interest Network for Click-Through Rate Prediction", KDD 2018, section on metrics.

    Args:
        max_samples: Largest number of labelled examples to be kept, over all ranks.
        **kwargs: Those of ``torchmetrics.Metric``.

    Raises:
        ValueError: ``max_samples`` is not positive.
    """

    higher_is_better = True
    full_state_update = True  # for `forward`: merging a batch into the rows would pass by their limit
    users: list[Tensor] | Tensor
    logits: list[Tensor] | Tensor
    classes: list[Tensor] | Tensor
    hash_limit: Tensor

    def __init__(self, max_samples: int = 1_000_000, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if max_samples < 1:
            raise ValueError(f"`max_samples` is {max_samples}: pass a number of at least 1.")
        self.max_samples = max_samples
        for name in _COLUMNS:
            self.add_state(name, [], dist_reduce_fx="cat")
        # users whose hash lies above are not kept; on the CPU even if the model is being built on the meta device
        limit = torch.tensor(torch.iinfo(torch.int64).max, device="cpu")
        self.add_state("hash_limit", limit, dist_reduce_fx="min")

    def update(self, logits: Tensor, labels: Tensor, users: Tensor, weights: Tensor | None = None) -> None:
        """Adds a batch.

        Args:
            logits: Logits of one task.
            labels: Labels in [0, 1], of the same shape; NaN = missing.
            users: Integer id of the user of each example, of the same shape.
            weights: Weights, of the same shape; 0 = missing.

        Raises:
            ValueError: ``users`` are not integers, or shapes differ.
        """
        check_shape("users", users, logits)
        if users.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
            raise ValueError(f"`users` has dtype {users.dtype}: pass integer ids (hash other keys to int64 first).")
        logits, labels, weights = read_examples(logits, labels, weights)
        classes = torch.stack([weights * labels, weights * (1 - labels)], dim=1)
        if len(self.users) >= _MAX_PIECES or sum(len(piece) for piece in self.users) > 2 * self._max_rows():
            self._compact()
        for name, piece in zip(_COLUMNS, (hash_users(users.reshape(-1)), logits.float(), classes.float()), strict=True):
            getattr(self, name).append(piece)

    def compute(self) -> Tensor:
        """The group AUC, a scalar."""
        users, logits, classes = self._rows()
        # ranks may have come to different limits; the lowest one holds for the examples of all
        kept = users <= self.hash_limit
        positive, negative = classes[kept].to(accumulator_dtype(classes.device)).unbind(1)
        gauc = grouped_auc(users[kept], logits[kept], positive, negative)
        return torch.where(logits.isnan().any(), torch.nan, gauc)

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """Synchronises over ranks, as in ``torchmetrics.Metric``."""
        # also leaves one tensor per column on a rank without data: torchmetrics 1.0.3 skips the gather of an empty
        # list, and the other ranks would wait for ever
        self._compact()
        super().sync(*args, **kwargs)

    def _rows(self) -> tuple[Tensor, Tensor, Tensor]:
        if len(self.users) == 0:
            empty = torch.empty(0, dtype=torch.float32, device=self.device)
            return empty.long(), empty, empty.reshape(0, 2)
        return dim_zero_cat(self.users), dim_zero_cat(self.logits), dim_zero_cat(self.classes)

    def _max_rows(self) -> int:
        world_size = dist.get_world_size(self.process_group) if dist.is_available() and dist.is_initialized() else 1
        return max(1, self.max_samples // world_size)

    def _compact(self) -> None:
        """Drops the examples that do not count, and users until the rest fits."""
        users, logits, classes = self._rows()
        kept = (classes != 0).any(1) & (users <= self.hash_limit)
        users, logits, classes = users[kept], logits[kept], classes[kept]
        if len(users) > self._max_rows():
            self.hash_limit = users.sort().values[self._max_rows()] - 1
            kept = users <= self.hash_limit
            users, logits, classes = users[kept], logits[kept], classes[kept]
        self.users, self.logits, self.classes = [users], [logits], [classes]
