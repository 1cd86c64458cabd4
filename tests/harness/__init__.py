"""What the tests stand on: worker processes that are started once, and comparison with plain torch.

run(world, function, *args)                 one case on ranks 0..world-1, one result a rank
assert_same_training(build, batches, ...)   a sharded training equals the plain one
tests.harness.models                        toy models and their batches
"""

from tests.harness.pool import Failure, Hang, RankDied, RankError, run, shutdown
from tests.harness.training import SameTraining, TrainingMismatch, assert_same_training

__all__ = [
    "Failure",
    "Hang",
    "RankDied",
    "RankError",
    "SameTraining",
    "TrainingMismatch",
    "assert_same_training",
    "run",
    "shutdown",
]
