"""`ParallelPPO` and `DistributedPPO`: PPO for an environment in Python, as two classes."""

from brayx.commands.parallel_ppo import DistributedPPO as DistributedPPO
from brayx.commands.parallel_ppo import ParallelPPO as ParallelPPO
