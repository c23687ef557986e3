"""Sets the paper's preset up on meta tensors as one rank of many; run by test_dry_run.py."""

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_gem.cli import GEMCLI
from lightning_gem.strategies import HybridShardedStrategy
from lightning_gem.strategies.mesh import build_meshes, resolve_axes


class DryRun(HybridShardedStrategy):
    """The fake process group cannot move objects."""

    local_rank = 0

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns the object."""
        return obj


def main(world: int, rank: int) -> None:
    """Prints what the rank holds, as JSON."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    module: Any = GEMCLI(args=["--config", "configs/paper.yaml", "--trainer.logger=false"], run=False).model
    with torch.device("meta"):
        module.configure_model()
    total = sum(parameter.numel() for parameter in module.parameters())
    strategy = DryRun(host_size=8, wrap_min_parameters=10**7)
    strategy.parallel_devices = [torch.device("meta")]
    strategy.meshes = build_meshes(resolve_axes(world, 8, 1024, shard=512, expert=8, table=256), "cpu")
    strategy._shard(module)
    layout = strategy.layout_report(samples=1024, ids_per_feature=20).as_dict()
    parameters = [parameter for parameter in module.parameters() if isinstance(parameter, DTensor)]
    report = {
        "total": total,
        "dense": sum(parameter.numel() for parameter in parameters),
        "local": sum(parameter.to_local().numel() for parameter in parameters),
        "layout": layout,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
