"""HybridShardedStrategy on one GPU over NCCL: tables, checkpoints and collectives that the CPU suite cannot run.

``pytest -m gpu tests/strategies/test_strategy_gpu.py``; wants a process of its own, which NCCL's settings outlive.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_gem.strategies import HybridShardedStrategy, TableConfig
from lightning_gem.strategies.checkpoint import full_state_dict
from lightning_gem.strategies.collectives import (
    NCCLWindows,
    SymmetricAllGather,
    SymmetricReduceScatter,
    install,
    offered,
    prepare,
)
from lightning_gem.strategies.export import export
from lightning_gem.strategies.safetensors import map_tensors
from tests.distributed.foreign import ClickData, LitDLRM

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """One rank over NCCL, with the zero-CTA policy asked for before its communicator exists."""
    offer = offered(DEVICE, "nccl")
    print(offer)
    prepare(offer.means)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29411", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl", device_id=DEVICE)
    yield
    dist.destroy_process_group()


def test_symmetric_buffers_gather_and_reduce() -> None:
    if offered(DEVICE, "nccl").means != "symmetric":
        pytest.skip(offered(DEVICE, "nccl").reason)
    memory, world = NCCLWindows(), dist.group.WORLD
    gather, reduce = SymmetricAllGather(memory), SymmetricReduceScatter(memory)
    for size in (1 << 10, 1 << 20, 1 << 10):
        out = gather.allocate((size,), dtype=torch.bfloat16, device=DEVICE)
        out.copy_(torch.randn(size, device=DEVICE))
        expected = out.clone()
        gather(out, out, world)
        assert torch.equal(out, expected)
        source, target = (reduce.allocate((size,), dtype=torch.float32, device=DEVICE) for _ in range(2))
        source.copy_(torch.randn(size, device=DEVICE))
        reduce(target, source, world, dist.ReduceOp.SUM)
        assert torch.equal(target, source)


@pytest.mark.parametrize("means", ["symmetric", "registered", "plain"])
def test_units_train_the_same(means: Any) -> None:
    if means == "symmetric" and offered(DEVICE, "nccl").means != "symmetric":
        pytest.skip(offered(DEVICE, "nccl").reason)
    mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("shard",))

    def train(how: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(3)]).to(DEVICE)
        units = [fully_shard(layer, mesh=mesh) for layer in net] + [fully_shard(net, mesh=mesh)]
        install(units, [2] * len(units), how)  # one rank, as if it were two
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(5):
            torch.manual_seed(step)
            net(torch.randn(64, 256, device=DEVICE)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.full_tensor().clone() for parameter in net.parameters()]

    for one, other in zip(train(means), train("plain"), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


class _Weights(Callback):
    """Whole weights at the end."""

    weights: dict[str, torch.Tensor]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gathers them."""
        self.weights = full_state_dict(pl_module, getattr(trainer.strategy, "tables", None))


def _fit(
    folder: Path, ckpt_path: Path | None = None, device: str = "gpu", **options: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    callbacks: list[Callback] = [_Weights()]
    strategy: Any = "auto"
    if device == "gpu":
        strategy = HybridShardedStrategy(tables=TableConfig(optimizer="sgd"), timeout_seconds=60, **options)
        if ckpt_path is None:
            callbacks.append(ModelCheckpoint(folder / "saves", filename="{step}", every_n_train_steps=5, save_top_k=-1))
    seed_everything(0, verbose=False)
    model = LitDLRM()
    run = Trainer(
        accelerator=device,
        devices=1,
        strategy=strategy,
        max_epochs=1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=len(callbacks) > 1,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    run.fit(model, ClickData(), ckpt_path=str(ckpt_path) if ckpt_path is not None else None)
    assert isinstance(callbacks[0], _Weights)
    return model.losses, callbacks[0].weights


def test_training_saving_and_resuming(tmp_path: Path) -> None:
    losses, weights = _fit(tmp_path, async_checkpoints=True, sm_free_collectives="auto")
    expected, _ = _fit(tmp_path, device="cpu")
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0, atol=1e-4)
    saves = tmp_path / "saves"
    assert not (saves / ".saving").exists()
    # The loader has neither a position nor a length, so it starts over.
    rest, _ = _fit(tmp_path, ckpt_path=saves / "step=10.ckpt")
    assert len(rest) == 20
    assert rest[0] < losses[0]
    export(saves / "step=20.ckpt", tmp_path / "all.safetensors")
    for name, value in map_tensors(tmp_path / "all.safetensors").items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=0)
