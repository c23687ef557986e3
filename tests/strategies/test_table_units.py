"""Parts of the tables' machinery that need no processes: joined batches, reading ahead, configuration."""

from typing import Any

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_gem.strategies import TableConfig
from lightning_gem.strategies.batches import Filler
from lightning_gem.strategies.pipeline import Ahead, LookAhead, find_features, without_ahead
from lightning_gem.strategies.table_copies import TorchRecCopies
from lightning_gem.strategies.table_updates import _Batch, join_batches


def test_joined_batches_are_one_batch_of_all_samples() -> None:
    # Two features; the first batch has 2 samples, the second 1.
    first = _Batch(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 2, 2, 3]), None, torch.tensor([[1.0], [2.0]]))
    second = _Batch(torch.tensor([4, 5]), torch.tensor([0, 1, 2]), None, torch.tensor([[3.0]]))
    joined = join_batches([first, second], 2, pooled=True)
    assert joined.indices.tolist() == [1, 2, 4, 3, 5]
    assert joined.offsets.tolist() == [0, 2, 2, 3, 3, 4, 5]
    assert joined.gradient.flatten().tolist() == [1, 2, 3]
    assert joined.weights is None


def test_joined_sequences_keep_gradients_beside_their_ids() -> None:
    batches = []
    for ids, offsets in (([1, 2, 3], [0, 2, 3]), ([4, 5], [0, 0, 2])):
        indices = torch.tensor(ids)
        batches.append(_Batch(indices, torch.tensor(offsets), indices / 10, indices[:, None] * 1.0))
    joined = join_batches(batches, 2, pooled=False)
    assert joined.indices.tolist() == [1, 2, 3, 4, 5]
    assert joined.offsets.tolist() == [0, 2, 2, 3, 5]
    torch.testing.assert_close(joined.gradient.flatten(), joined.indices * 1.0)
    torch.testing.assert_close(joined.weights, joined.indices / 10)


class Counted:
    """A loader with a position."""

    def __init__(self, fails_at: int = -1) -> None:
        self.read = 0
        self.fails_at = fails_at

    def __iter__(self) -> Any:
        for i in range(3):
            if i == self.fails_at:
                raise OSError("no file")
            self.read = i + 1
            yield i

    def state_dict(self) -> int:
        """Batches that were read."""
        return self.read

    def load_state_dict(self, state: int) -> None:
        """Nothing here needs it."""


def test_reading_ahead_does_not_move_the_position() -> None:
    loader = Counted()
    ahead = LookAhead(loader, lambda: True, loader)
    seen = [(entry.batch, entry.following and entry.following.batch, ahead.state_dict()) for entry in ahead]
    assert seen == [(0, 1, 1), (1, 2, 2), (2, None, 3)]


def test_loader_that_counts_is_told_of_the_batch_ahead() -> None:
    loader: Any = Counted()
    loader.pending = lambda: 0
    ahead = LookAhead(loader, lambda: True, loader)
    assert [loader.read - loader.pending() for _ in ahead] == [1, 2, 3]


def test_an_error_of_the_loader_comes_in_its_own_step() -> None:
    loader = Counted(fails_at=2)
    seen = []
    with pytest.raises(OSError, match="no file"):  # noqa: PT012
        for entry in LookAhead(loader, lambda: True, loader):
            seen.append(entry.batch)
    assert seen == [0, 1]


def test_without_the_pipeline_batches_pass() -> None:
    assert list(LookAhead(Counted(), lambda: False, None)) == [0, 1, 2]


def test_features_are_found_anywhere_in_a_batch() -> None:
    features = KeyedJaggedTensor(["a"], torch.tensor([1]), lengths=torch.tensor([1]))
    batch = {"x": [torch.zeros(1), (features,)], "y": Filler(features)}
    places = [place for place, found in find_features(batch) if found is features]
    assert places == [(("key", "x"), ("key", 1), ("key", 0)), (("key", "y"), ("attribute", "batch"))]
    assert without_ahead({"a": [Ahead(1)], "b": 2}) == {"a": [1], "b": 2}


def test_two_forwards_of_a_torchrec_lookup_before_one_backward_are_refused() -> None:
    class Lookup(torch.nn.Module):
        weights_sharded = False

        def forward(self, ids: int) -> int:
            self.weights_sharded = self.training
            return ids

    lookup = Lookup()
    TorchRecCopies([lookup], None)  # type: ignore[arg-type]
    lookup.eval()
    lookup(1)
    lookup.train()
    lookup(1)
    with pytest.raises(RuntimeError, match="set tables.copies to sharded"):
        lookup(1)


def test_settings_of_copies() -> None:
    assert TableConfig(square_scale="auto").scale_of_squares(4) == 0.25
    assert TableConfig(square_scale=0.1).scale_of_squares(4) == 0.1
    with pytest.raises(ValueError, match="cannot be float8 on the CPU"):
        TableConfig(forward_communication="float8").codecs(torch.device("cpu"))
    assert TableConfig().codecs(torch.device("cpu")) is None
