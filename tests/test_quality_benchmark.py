"""The quality benchmark: recipes have targets for their tasks, forgetting forgets, means and files are right."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from benchmarks import quality
from tests.helpers import make_batch, make_schema

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", quality.RECIPES)
def test_targets_and_columns_fit_the_recipe(name: str) -> None:
    config = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
    recipe, schema = quality.RECIPES[name], config["data"]["init_args"]["schema"]
    assert set(recipe.targets) == {task["name"] for task in schema["tasks"]}
    assert set(recipe.new_user) <= {feature["name"] for feature in schema.get("dense", [])}
    fills = {feature["name"]: feature.get("fill") for feature in schema.get("dense", [])}
    for feature, value in recipe.new_user.items():
        assert value == pytest.approx(torch.log1p(torch.tensor(float(fills[feature]))).item(), rel=1e-5)


def test_without_history_nothing_of_the_users_past_is_left() -> None:
    config = yaml.safe_load((ROOT / "configs" / "kuairand_counters.yaml").read_text())
    before = yaml.safe_dump(config)
    data = quality.without_history(config, quality.RECIPES["kuairand_counters"])["data"]["init_args"]
    assert data["counters"]
    assert not any("user_id" in counter["by"] for counter in data["counters"])
    assert "gap" not in [feature["name"] for feature in data["schema"]["dense"]]
    assert "user_id" in [feature["name"] for feature in data["schema"]["sparse"]]
    assert yaml.safe_dump(config) == before


def test_forget() -> None:
    schema = make_schema()
    batch = make_batch(schema, {"views": [5, 0, 3], "clicks": [1, 2, 0]})
    forgotten = quality.forget(batch, {1: 7.0})
    assert forgotten.dense[:, 1].tolist() == [7.0] * 3
    assert torch.equal(forgotten.dense[:, 0], batch.dense[:, 0])
    for name, sequence in forgotten.sequences.items():
        assert sequence.ids.keys() == batch.sequences[name].ids.keys()
        assert sequence.ids.lengths().tolist() == [0] * 3 * len(sequence.ids.keys())
        assert sequence.max_seqlen == 0
        assert len(sequence.timestamps) == 0
    assert batch.sequences["views"].lengths_cpu.tolist() == [5, 0, 3]


def test_seeds_are_averaged() -> None:
    labels = np.array([0, 1, 0, 1], dtype=np.float32)
    runs = [("GEM", 1, [0, 3, 1, 0.5]), ("GEM", 2, [0, 1, 0, 1]), ("other", 1, [0, 0, 0, 0])]
    rows = [
        {
            "recipe": "criteo",
            "task": "click",
            "model": model,
            "seed": seed,
            "outputs": quality.Outputs(np.array(logits, dtype=np.float32), labels, None),
        }
        for model, seed, logits in runs
    ]
    (average,) = quality.average_seeds(rows)
    assert average["model"] == "GEM, logits of 2 seeds averaged"
    assert average["auc"] == 1
    losses = np.log1p(np.exp([0, -2, 0.5, -0.75]))
    assert average["log_loss"] == pytest.approx(losses.mean(), rel=1e-5)
    assert "gauc" not in average
    assert not any("outputs" in row for row in rows)


def test_mean_and_spread(tmp_path: Path) -> None:
    rows = [
        {"recipe": "criteo", "task": "click", "model": "GEM", "seed": seed, "auc": auc, "ne": 0.9}
        for seed, auc in ((1, 0.70), (2, 0.72))
    ]
    (mean,) = quality.summarise(rows)
    assert mean["auc"] == pytest.approx(0.71)
    assert mean["auc_sd"] == pytest.approx(0.0141421, rel=1e-4)
    assert "gauc" not in mean
    quality.print_tables([mean])
    quality.write([*rows, mean], tmp_path / "out.csv", "test")
    with (tmp_path / "out.csv").open() as file:
        written = list(csv.DictReader(file))
    assert [row["seed"] for row in written] == ["1", "2", "mean of 2"]
    assert written[0]["device"] == "test"
