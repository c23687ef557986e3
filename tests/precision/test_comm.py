"""MXFP8 on the wire and in what autograd saves, FSDP2 with converted layers: one process, and two with gloo."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchrec.distributed.comm_ops import alltoall_pooled
from torchrec.distributed.types import NoOpQuantizedCommCodec, QuantizedCommCodec, QuantizedCommCodecs

from lightning_gem.precision import convert
from lightning_gem.precision.activations import compressed_activations
from lightning_gem.precision.comm import MXFP8Codec, all_gather_rows, all_to_all_rows, pack, packed_size, unpack
from lightning_gem.precision.fsdp import quantize_all_gather
from lightning_gem.precision.mx import mx_dequantize, mx_quantize


def low(x: torch.Tensor) -> torch.Tensor:
    return mx_dequantize(mx_quantize(x.detach()), x.dtype)


@pytest.mark.parametrize("shape", [(5, 64), (3, 40), (0, 32), (2, 3, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pack(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    buffer = pack(x)
    assert buffer.dtype == torch.uint8
    assert buffer.shape == (*shape[:-1], packed_size(shape[-1]))
    assert torch.equal(unpack(buffer, shape[-1], dtype), low(x))
    with pytest.raises(ValueError, match="does not hold"):
        unpack(buffer, shape[-1] + 32)


def test_codec() -> None:
    codec, x = MXFP8Codec(), torch.randn(6, 64)
    assert {name for name in dir(QuantizedCommCodec) if not name.startswith("_")} <= set(dir(codec))
    encoded = codec.encode(x)
    assert (encoded.dtype, encoded.numel()) == (codec.quantized_dtype, codec.calc_quantized_size(x.numel()))
    assert torch.equal(codec.decode(encoded).view(6, 64), low(x))
    # Cut anywhere between blocks.
    parts = encoded.split([codec.calc_quantized_size(n) for n in (32, 160, 192)])
    assert torch.equal(torch.cat([codec.decode(part) for part in parts]).view(6, 64), low(x))
    assert codec.padded_size(x[:, :40], [40, 64], 0, context := codec.create_context()) == (64, 24)
    assert context.padded_dim_sum_per_rank == [64, 64]
    with pytest.raises(ValueError, match="multiples of 32"):
        codec.calc_quantized_size(33)


def test_compressed_activations() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64), nn.LayerNorm(64))
    x, target = torch.randn(512, 64), torch.randn(512, 64)
    plain = torch.autograd.grad((net(x) * target).sum(), list(net.parameters()))
    saved: list[int] = []
    with compressed_activations(net, 1):
        out = net(x)
    (out * target).sum().backward()
    assert torch.equal(out, net(x))
    for exact, parameter in zip(plain, net.parameters(), strict=True):
        error = (parameter.grad - exact).norm() / exact.norm()
        assert 0 <= error < 0.06
    assert not torch.equal(net[0].weight.grad, plain[0])
    # The first product alone: its input as MXFP8, its weight as it is.
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
        net[0](x)
    assert x.nbytes in saved
    leaf = torch.randn(4, 64, requires_grad=True)
    with compressed_activations(nn.Identity(), 1):
        product = leaf * x[:4]
    product.sum().backward()
    assert torch.equal(leaf.grad, low(x[:4]))
    with compressed_activations(nn.Identity(), 1000):
        product = leaf * x[:4]
    leaf.grad = None
    product.sum().backward()
    assert torch.equal(leaf.grad, x[:4])


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64), nn.Linear(64, 32))


def train(rank: int, low_gather: bool) -> tuple[list[torch.Tensor], list[str]]:
    """Two steps of FSDP2; gradients and weights, whole, and what is gathered as MXFP8."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    net = make_net()
    convert(net, "mxfp8_compact")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    names = quantize_all_gather(net) if low_gather else []
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    results = []
    for step in range(2):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        net(x).float().square().sum().backward()
        results += [parameter.grad.full_tensor() for parameter in net.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    results += [parameter.full_tensor().detach() for parameter in net.parameters()]
    return results, names


def shard(recipe: str, convert_first: bool) -> dict[str, torch.Tensor]:
    """Whole gradients of a model that was sharded before or after its conversion."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    net = make_net()
    if convert_first:
        convert(net, recipe)
    fully_shard(net[0], mesh=mesh)  # a linear layer by itself, and the rest with the root
    fully_shard(net, mesh=mesh)
    if not convert_first:
        convert(net, recipe)
    # Both ranks have the same rows: the mean is the gradient.
    net(rows()).square().sum().backward()
    return {name: parameter.grad.full_tensor() for name, parameter in net.named_parameters()}


def rows() -> torch.Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(1))


def check_sharding(recipe: str, convert_first: bool) -> None:
    sharded = shard(recipe, convert_first)
    net = make_net()
    convert(net, recipe)
    net(rows()).square().sum().backward()
    assert list(sharded) == [name for name, _ in net.named_parameters()]
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(sharded[name], parameter.grad, rtol=1e-5, atol=1e-5)


def work(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    everything = [torch.randn(6, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    x = everything[rank].clone().requires_grad_()
    # Rank 0 sends 1 and 5 rows, rank 1 sends 4 and 2.
    sends = [[1, 5], [4, 2]]
    receives = [sends[source][rank] for source in range(2)]
    expected = torch.cat([low(everything[s]).split(sends[s])[rank] for s in range(2)])
    for low_gradient in (False, True):
        x.grad = None
        out = all_to_all_rows(x, receives, sends[rank], low_precision_gradient=low_gradient)
        assert torch.equal(out, expected)
        out.backward(out.detach())
        assert torch.equal(x.grad, low(x))  # what was sent comes back, and quantising it again changes nothing
    x.grad = None
    gathered = all_gather_rows(x)
    assert torch.equal(gathered, torch.cat([low(t) for t in everything]))
    (gathered * (rank + 1)).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0))

    # TorchRec pads the widths of a rank on the way out only.
    for widths, backward in (([64, 32], MXFP8Codec()), ([64, 40], NoOpQuantizedCommCodec())):
        codecs: Any = QuantizedCommCodecs(forward=MXFP8Codec(), backward=backward)  # type: ignore[arg-type]
        whole = [torch.randn(6, w, generator=torch.Generator().manual_seed(7 + r)) for r, w in enumerate(widths)]
        pooled = whole[rank].clone().requires_grad_()
        out = alltoall_pooled(pooled, [2, 4], widths, codecs=codecs).wait()
        own = slice(0, 2) if rank == 0 else slice(2, 6)
        assert torch.equal(out, torch.cat([low(w)[own] for w in whole], 1))
        out.sum().backward()
        assert pooled.grad[0, 0] > 0
        assert torch.equal(pooled.grad, torch.full_like(pooled, pooled.grad[0, 0].item()))

    check_sharding("mxfp8", False)
    check_sharding("mxfp8_compact", True)
    check_sharding("fp8_rowwise", False)
    plain, _ = train(rank, False)
    quantised, names = train(rank, True)
    assert names == ["0.weight", "2.weight"]  # the last has 16 rows a rank
    for a, b in zip(plain, quantised, strict=True):
        assert torch.equal(a, b)
    dist.destroy_process_group()


def test_two_processes(tmp_path: Path) -> None:
    mp.start_processes(work, (str(tmp_path),), nprocs=2, start_method="forkserver")


def test_nothing_to_gather() -> None:
    net: Any = make_net()
    convert(net, "mxfp8")
    with pytest.raises(ValueError, match="mxfp8_compact"):
        quantize_all_gather(net)
