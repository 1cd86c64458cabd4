"""A strategy for `lightning.pytorch`: `Trainer(strategy="zeropage")` after `import zeropage.lightning`.

The rule: Lightning trains, zeropage shards. Loops, clipping, accumulation, precision and hooks are Lightning's own,
on parameters that are paged; so everything that works on plain parameters means the same here.
"""

from lightning.pytorch.strategies import StrategyRegistry

from zeropage.lightning.strategy import ZeropageStrategy

__all__ = ["ZeropageStrategy"]

if ZeropageStrategy.strategy_name not in StrategyRegistry:
    ZeropageStrategy.register_strategies(StrategyRegistry)
