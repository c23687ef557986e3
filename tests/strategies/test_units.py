"""What needs no processes: placement, units, batches, registration, private names."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import StrategyRegistry
from torch import nn
from torch.distributed.tensor import Shard
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_gem.models import GEM, GEMConfig
from lightning_gem.strategies import HybridShardedStrategy, TableConfig, compat
from lightning_gem.strategies.batches import num_samples
from lightning_gem.strategies.dense import (
    check_parameters,
    choose_dimension,
    choose_units,
    large_embeddings,
    wrap_by_class,
)
from lightning_gem.strategies.embeddings import find_collections
from lightning_gem.strategies.experts import check_experts, find_experts
from lightning_gem.strategies.table_plan import place_tables
from tests.helpers import make_batch, make_schema

PACKAGE = Path(compat.__file__).parent


def _wrapped() -> nn.Module:
    """A wrapper without the processes that it wants."""
    module = nn.Linear(1, 1)
    module.__class__ = type("DDP", (nn.parallel.DistributedDataParallel,), {})
    return module


def test_large_tables_are_split_and_the_rest_is_balanced() -> None:
    tables = {"huge": (1000, 8), "a": (100, 8), "b": (90, 8), "c": (20, 8)}
    placed = place_tables(tables, dict.fromkeys(tables, "auto"), 2)
    assert placed == {
        "huge": ("row_wise", [0, 1]),
        "a": ("table_wise", [0]),
        "b": ("table_wise", [1]),
        "c": ("table_wise", [1]),
    }
    assert place_tables(tables, dict.fromkeys(tables, "auto"), 1)["huge"] == ("table_wise", [0])
    assert place_tables({"wide": (5, 24)}, {"wide": "column_wise"}, 4) == {"wide": ("column_wise", [0, 1, 2])}


@pytest.mark.parametrize(("shape", "kind"), [((3, 8), "row_wise"), ((9, 6), "column_wise")])
def test_tables_that_cannot_be_split(shape: tuple[int, int], kind: str) -> None:
    with pytest.raises(ValueError, match=r"table 't' has \d .* give it sharding:"):
        place_tables({"t": shape}, {"t": kind}, 4)  # type: ignore[dict-item]


def test_units_of_gem_are_what_its_modules_declare() -> None:
    network = GEM(make_schema(), GEMConfig(width=16))
    units = choose_units(network, None, 10**9)
    assert "layers.0" in units
    assert "layers.0.towers.0.pooling" in units
    assert units.index("layers.0.towers.0.pooling") < units.index("layers.0")


def test_default_units_never_hold_a_torchrec_module() -> None:
    tables = EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=9, feature_names=["f"])]
    )
    model = nn.ModuleDict({"sparse": nn.ModuleDict({"ebc": tables, "mlp": nn.Linear(9, 9)}), "top": nn.Linear(9, 9)})
    model["sparse"].__class__ = type("Sparse", (nn.ModuleDict,), {})
    root = nn.Sequential(model, nn.MultiheadAttention(8, 2))
    units = choose_units(root, None, 50)
    assert units == ["0.sparse.mlp", "0.top", "1"]  # the attention's own linear layer is not called, hence no unit
    assert choose_units(root, wrap_by_class(["torch.nn.modules.linear.Linear"]), 0) == ["0.sparse.mlp", "0.top"]


def test_plain_embeddings() -> None:
    network = GEM(make_schema(num_domains=3), GEMConfig(width=16))
    assert [name for name, _ in large_embeddings(network, 1)] == ["heads.domain"]  # not the tables
    check_parameters(network, [])
    with pytest.raises(ValueError, match="0 has sparse gradients, which FSDP2 cannot reduce"):
        check_parameters(nn.Sequential(nn.Embedding(9, 9, sparse=True)), [])
    with pytest.raises(TypeError, match="wrapped in DDP"):
        check_parameters(nn.Sequential(_wrapped()), [])


def test_dimension_to_split() -> None:
    def choose(*shape: int) -> Any:
        return choose_dimension(nn.Parameter(torch.empty(shape)), 8)

    assert choose(9, 8) is None  # rows, though they do not divide
    assert choose(1, 9, 16) == Shard(2)
    assert choose(1, 9) is None
    assert choose() is None


def test_experts_of_gem_follow_the_protocol() -> None:
    experts = find_experts(GEM(make_schema(), GEMConfig(width=16)))
    assert list(experts) == ["layers.0.experts", "layers.1.experts"]
    check_experts("e", experts["layers.0.experts"], 2)
    with pytest.raises(ValueError, match="expert=4 does not divide the 2 experts of e"):
        check_experts("e", experts["layers.0.experts"], 4)
    experts["layers.0.experts"].extra = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match=r"e.extra has shape \(3,\): the first dimension"):
        check_experts("e", experts["layers.0.experts"], 2)


def test_collections_are_found_by_exact_type() -> None:
    assert [name.split(".")[0] for name in find_collections(GEM(make_schema(), GEMConfig(width=16)))] == [
        "request_embeddings",
        "event_embeddings",
    ]


def test_samples_of_batches() -> None:
    ids = KeyedJaggedTensor(["f", "g"], torch.arange(3), lengths=torch.tensor([1, 0, 2, 0]))
    assert num_samples(ids) == 2
    assert num_samples({"name": "x", "ids": ids}) == 2
    assert num_samples([torch.zeros(5, 2), torch.zeros(5)]) == 5
    assert num_samples(make_batch(make_schema(), {"views": [1, 0, 2], "clicks": [0, 0, 1]})) == 3
    assert num_samples("text") is None


def test_registration_is_idempotent() -> None:
    code = (
        "import lightning_gem.strategies as s, importlib; importlib.reload(s);"
        "from lightning.pytorch import Trainer; print(type(Trainer(strategy='hybrid_sharded', accelerator='cpu',"
        "devices=1, logger=False).strategy).__name__)"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "HybridShardedStrategy"
    assert "hybrid_sharded" in StrategyRegistry


def test_every_argument_goes_through_yaml(tmp_path: Path) -> None:
    arguments = {
        "replicate": 2,
        "shard": "auto",
        "wrap": ["GEMLayer"],
        "tables": {"sharding": "row_wise", "per_table": {"t": "table_wise"}, "lr": 0.1},
    }
    strategy = {"class_path": "lightning_gem.strategies.HybridShardedStrategy", "init_args": arguments}
    config = {"trainer": {"accelerator": "cpu", "devices": 1, "logger": False, "strategy": strategy}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    model = "lightning.pytorch.demos.boring_classes.BoringModel"
    cli = LightningCLI(args=["--config", str(tmp_path / "config.yaml"), "--model", model], run=False)
    made = cli.trainer.strategy
    assert isinstance(made, HybridShardedStrategy)
    assert made.sizes["replicate"] == 2
    assert made.table_config == TableConfig(sharding="row_wise", per_table={"t": "table_wise"}, lr=0.1)


@pytest.mark.parametrize("page", ["README.md", "docs/strategy.md"])
def test_documented_yaml(page: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (PACKAGE.parents[1] / page).read_text(), flags=re.DOTALL)
    config = yaml.safe_load(next(block for block in blocks if "HybridShardedStrategy" in block))
    config["trainer"].update(accelerator="cpu", logger=False)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    model = "lightning.pytorch.demos.boring_classes.BoringModel"
    cli = LightningCLI(args=["--config", str(tmp_path / "config.yaml"), "--model", model], run=False)
    assert isinstance(cli.trainer.strategy, HybridShardedStrategy)


def test_private_names_are_confined_to_compat() -> None:
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if path.name == "compat.py" or not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            private = [name for name in names if name.startswith("_")]
            assert not private, f"{path.name}: {node.module} {private}"
