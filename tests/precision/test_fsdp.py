"""FSDP2 over two processes: sharded before or after the conversion, the gradients of one process."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_gem.precision import convert


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32))


def inputs() -> torch.Tensor:
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(1))


def run(rank: int, folder: str, recipe: str, convert_first: bool) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    net = make_net()
    if convert_first:
        convert(net, recipe)
    fully_shard(net[0], mesh=mesh)  # a linear layer by itself, and the rest with the root
    fully_shard(net, mesh=mesh)
    if not convert_first:
        convert(net, recipe)
    net(inputs()).square().sum().backward()  # both ranks have the same rows: the mean is the gradient
    full = {name: parameter.grad.full_tensor() for name, parameter in net.named_parameters()}
    if rank == 0:
        torch.save(full, f"{folder}/gradients.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize(("recipe", "convert_first"), [("mxfp8", False), ("mxfp8_compact", True)])
def test_gradients_equal_one_process(tmp_path: Path, recipe: str, convert_first: bool) -> None:
    mp.start_processes(run, (str(tmp_path), recipe, convert_first), nprocs=2, start_method="forkserver")
    net = make_net()
    convert(net, recipe)
    net(inputs()).square().sum().backward()
    sharded = torch.load(tmp_path / "gradients.pt")
    assert list(sharded) == [name for name, _ in net.named_parameters()]
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(sharded[name], parameter.grad, rtol=1e-5, atol=1e-5)
