"""An ensemble: every copy learns as it would alone, and their logits are averaged."""

import pytest
import torch
from torch import Tensor, nn

from lightning_gem.data.batch import RecBatch
from lightning_gem.data.schema import Schema
from lightning_gem.models import GEM, Ensemble, GEMModule
from tests.helpers import make_batch, make_schema


class Linear(nn.Module):
    """One logit per task from the numeric features."""

    def __init__(self, schema: Schema) -> None:
        super().__init__()
        self.map = nn.Linear(len(schema.dense), len(schema.tasks))

    def forward(self, batch: RecBatch) -> Tensor:
        return self.map(batch.dense)


def gradients(module: GEMModule, batch: RecBatch) -> list[Tensor]:
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    module.trainer = type("Trainer", (), {"log_every_n_steps": 10, "global_step": 0, "strategy": None})()  # type: ignore[assignment]
    module.training_step(batch, 0).backward()
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def test_mean_logits_and_own_gradients() -> None:
    schema = make_schema()
    batch = make_batch(schema, {"views": [5, 0, 3], "clicks": [1, 2, 0]})
    module = GEMModule(schema, network=lambda schema: Ensemble(schema, Linear, 3))
    module.configure_model()
    members = module.network.members  # type: ignore[union-attr]
    assert not torch.equal(members[0].map.weight, members[1].map.weight)
    expected = [member(batch) for member in members]
    module.eval()
    torch.testing.assert_close(module(batch), torch.stack(expected).mean(dim=0))
    module.train()
    torch.testing.assert_close(module(batch), torch.stack(expected))
    together = gradients(module, batch)
    for i, member in enumerate(members):
        alone = GEMModule(schema, network=lambda _: member)  # noqa: B023
        alone.configure_model()
        alone.zero_grad()
        for own, grad in zip(gradients(alone, batch), together[2 * i : 2 * i + 2], strict=True):
            torch.testing.assert_close(own, grad)


def test_of_gems() -> None:
    schema = make_schema()
    batch = make_batch(schema, {"views": [5, 0, 3], "clicks": [1, 2, 0]})
    ensemble = Ensemble(schema, size=2).eval()
    assert all(isinstance(member, GEM) for member in ensemble.members)
    assert ensemble(batch).shape == (3, len(schema.tasks))
    with pytest.raises(ValueError, match="must be positive, not 0"):
        Ensemble(schema, size=0)
