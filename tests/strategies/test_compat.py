"""Every private name of torch, torchrec and lightning that the strategy uses, in the versions that are installed."""

import inspect
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Trainer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torchrec.distributed import batched_embedding_kernel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_gem.strategies import compat


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _tables() -> EmbeddingBagCollection:
    config = EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=9, feature_names=["f"])
    return EmbeddingBagCollection(tables=[config])


def resume_end(folder: Path) -> None:
    from lightning.pytorch.trainer.connectors import checkpoint_connector

    assert f'"{compat.RESUME_END}"' in inspect.getsource(checkpoint_connector)


def launcher(folder: Path) -> None:
    made = compat.SubprocessScriptLauncher(LightningEnvironment(), 2, 1)
    assert not made.is_interactive_compatible
    made.kill(signal.SIGTERM)


def gather(folder: Path) -> None:
    out = torch.zeros(2)
    compat.all_gather_single(out, torch.ones(2))
    assert out.tolist() == [1, 1]


def scatter(folder: Path) -> None:
    out = torch.zeros(2)
    compat.reduce_scatter_single(out, torch.ones(2))
    assert out.tolist() == [1, 1]


def in_backward(folder: Path) -> None:
    tables = _tables()
    compat.apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.1})
    (parameter,) = tables.parameters()
    assert [type(optimizer) for optimizer in compat.in_backward_optimizers(parameter)] == [RowWiseAdagrad]
    assert compat.in_backward_optimizers(nn.Parameter(torch.zeros(1))) == []


def backend(folder: Path) -> None:
    assert compat.default_process_group_backend(torch.device("cpu")) == "gloo"
    assert compat.default_process_group_backend(torch.device("cuda")) == "nccl"


def store(folder: Path) -> None:
    compat.default_store().set("key", "value")
    assert compat.default_store().get("key") == b"value"


def anomaly(folder: Path) -> None:
    arguments = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    assert compat.detects_anomaly(Trainer(detect_anomaly=True, **arguments))
    assert not compat.detects_anomaly(Trainer(**arguments))


def initialized(folder: Path) -> None:
    assert compat.distributed_is_initialized()
    compat.init_process_group(LightningEnvironment(), "gloo")  # does nothing where there is one


def exchange(folder: Path) -> None:
    for name in ("a", "b"):
        (folder / name).mkdir()
        (folder / name / name).touch()
    assert compat.exchange_names(folder / "a", folder / "b")
    assert (folder / "a" / "b").exists()
    assert not compat.exchange_names(folder / "a", folder / "missing")


def placement(folder: Path) -> None:
    there = compat.move_placement(compat.remote_device("rank:0/cpu"), 3, torch.device("cpu"))
    assert compat.placement_rank(there) == 3
    assert there.device() == torch.device("cpu")


def to_device(folder: Path) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    compat.optimizers_to_device([optimizer], torch.device("cpu"))


def reduced(folder: Path) -> None:
    assert compat.reduce_over_ranks(torch.tensor(2.0), reduce_op="mean").item() == 2


def reparametrized(folder: Path) -> None:
    layer = nn.Linear(2, 2, bias=False)
    with compat.reparametrize(layer, {"weight": torch.zeros(2, 2)}):
        assert layer(torch.ones(1, 2)).abs().sum() == 0
    assert isinstance(layer.weight, nn.Parameter)


def seeded(folder: Path) -> None:
    compat.reset_seed()


def lookups(folder: Path) -> None:
    plan = construct_module_sharding_plan(
        _tables(), {"t": table_wise(rank=0)}, local_size=1, world_size=1, device_type="cpu"
    )
    module = nn.ModuleDict({"tables": _tables()})
    environment = ShardingEnv.from_process_group(dist.group.WORLD)
    compat.shard_modules(module, env=environment, device=torch.device("cpu"), plan=ShardingPlan({"tables": plan}))
    found = compat.table_lookups(module["tables"])
    assert len(found) == 1
    assert not compat.is_resharded(found[0])
    compat.gather_fully_sharded(found[0])
    kernels = [kind for kind in vars(batched_embedding_kernel).values() if hasattr(kind, "_all_gather_table_weights")]
    assert any("weights_sharded" in inspect.getsource(kind) for kind in kernels)


def versions(folder: Path) -> None:
    tensor = torch.zeros(1)
    before = compat.version_of(tensor)
    tensor.add_(1)
    assert compat.version_of(tensor) == before + 1


def sharded(folder: Path) -> None:
    assert {"module", "env", "device", "plan", "sharders"} <= set(inspect.signature(compat.shard_modules).parameters)


def memory(folder: Path) -> None:
    assert compat.symmetric_memory() is not None
    assert compat.process_group_allocates()


def unflattened(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("world",))
    assert compat.unflatten_mesh(mesh, (1, 1), ("a", "b")).mesh_dim_names == ("a", "b")


CHECKS: dict[str, Callable[[Path], None]] = {
    "RESUME_END": resume_end,
    "SubprocessScriptLauncher": launcher,
    "all_gather_single": gather,
    "apply_optimizer_in_backward": in_backward,
    "default_process_group_backend": backend,
    "default_store": store,
    "detects_anomaly": anomaly,
    "distributed_is_initialized": initialized,
    "exchange_names": exchange,
    "in_backward_optimizers": in_backward,
    "gather_fully_sharded": lookups,
    "init_process_group": initialized,
    "is_resharded": lookups,
    "move_placement": placement,
    "optimizers_to_device": to_device,
    "placement_rank": placement,
    "process_group_allocates": memory,
    "reduce_over_ranks": reduced,
    "reduce_scatter_single": scatter,
    "remote_device": placement,
    "reparametrize": reparametrized,
    "reset_seed": seeded,
    "shard_modules": sharded,
    "symmetric_memory": memory,
    "table_lookups": lookups,
    "unflatten_mesh": unflattened,
    "version_of": versions,
}


@pytest.mark.parametrize("name", compat.__all__)
def test_private_name(name: str, tmp_path: Path) -> None:
    CHECKS[name](tmp_path)
