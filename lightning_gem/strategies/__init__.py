"""Sharding of dense parameters, experts and embedding tables in one Lightning strategy.

Importing this package registers ``hybrid_sharded``, so that ``strategy: hybrid_sharded`` works too; the class path
``lightning_gem.strategies.HybridShardedStrategy`` works from any LightningCLI.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_gem.strategies.hybrid import HybridShardedStrategy
from lightning_gem.strategies.table_plan import TableConfig

__all__ = ["HybridShardedStrategy", "TableConfig"]

if HybridShardedStrategy.strategy_name not in StrategyRegistry:
    StrategyRegistry.register(
        HybridShardedStrategy.strategy_name,
        HybridShardedStrategy,
        description="FSDP2, expert parallelism and TorchRec tables over one set of ranks",
    )
