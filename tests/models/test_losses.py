"""Losses against probabilities written out."""

import math

import pytest
import torch

from lightning_gem.data import Task
from lightning_gem.models.losses import task_losses
from lightning_gem.models.schedules import warmup_then_decay

TASKS = [Task("click"), Task("buy", given="click")]
NAN = math.nan


def test_weighted_mean_over_the_labels_that_are_there() -> None:
    logits = torch.tensor([[0.3, 1.0], [-2.0, 0.5], [1.0, -1.0]])
    labels = torch.tensor([[1.0, 1.0], [0.0, NAN], [NAN, 0.0]])
    weights = torch.tensor([[2.0, 1.0], [1.0, 1.0], [5.0, 3.0]])
    p = torch.sigmoid(logits.double())
    click = (-2 * p[0, 0].log() - (1 - p[1, 0]).log()) / 3
    buy = (-p[0, 1].log() - 3 * (1 - p[2, 1]).log()) / 4
    losses = task_losses(logits, labels, weights, TASKS, entire_space=False)
    torch.testing.assert_close(losses.double(), torch.stack([click, buy]), rtol=1e-5, atol=1e-6)


def test_entire_space_multiplies_probabilities() -> None:
    logits = torch.tensor([[0.3, 1.0], [-2.0, 0.5], [1.0, -1.0]])
    labels = torch.tensor([[1.0, 1.0], [0.0, NAN], [1.0, 0.0]])
    weights = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    p = torch.sigmoid(logits.double())
    both = p[:, 0] * p[:, 1]
    expected = -(both[0].log() + (1 - both[1]).log() + (1 - both[2]).log()) / 3
    losses = task_losses(logits, labels, weights, TASKS, entire_space=True)
    torch.testing.assert_close(losses[1].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("logit", [-80.0, -20.0, 20.0, 80.0])
def test_entire_space_is_stable_at_the_ends(logit: float) -> None:
    logits = torch.full((1, 2), logit, requires_grad=True)
    for label in (0.0, 1.0):
        losses = task_losses(logits, torch.tensor([[1.0, label]]), torch.ones(1, 2), TASKS, entire_space=True)
        (gradient,) = torch.autograd.grad(losses.sum(), logits)
        assert losses.isfinite().all()
        assert gradient.isfinite().all()


def test_no_label_at_all_is_a_zero_loss_with_zero_gradient() -> None:
    logits = torch.randn(3, 2, requires_grad=True)
    losses = task_losses(logits, torch.full((3, 2), NAN), torch.ones(3, 2), TASKS, entire_space=True)
    losses.sum().backward()
    assert losses.tolist() == [0, 0]
    assert logits.grad.abs().sum() == 0


def test_low_precision_logits_give_a_float32_loss() -> None:
    losses = task_losses(torch.zeros(2, 2, dtype=torch.bfloat16), torch.ones(2, 2), torch.ones(2, 2), TASKS, False)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, torch.full((2,), math.log(2)))


def test_schedule() -> None:
    factor = warmup_then_decay(4, "linear", 12)
    assert [factor(step) for step in (0, 1, 3, 4, 8, 12, 20)] == [0.25, 0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    assert warmup_then_decay(0, "cosine", 10)(5) == pytest.approx(0.5)
    assert warmup_then_decay(0, "none", 10)(9) == 1.0
    assert warmup_then_decay(2, "linear", math.inf)(50) == 1.0
