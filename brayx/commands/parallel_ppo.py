"""PPO as two classes: `ParallelPPO` trains in this process, `DistributedPPO` with workers on Ray.

Their arguments become options of `brayx ppo`, which checks them and trains. Knows nothing of how PPO learns.
"""

from __future__ import annotations

import threading
from dataclasses import KW_ONLY, asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from brayx.commands.ppo import chosen_options, configs, train
from brayx.errors import ConfigError
from brayx.rollout.envs import check_env

if TYPE_CHECKING:
    from brayx.local.train import LocalTrainResult

_NAMES = {
    "env_name": "env", "num_steps": "unroll_length", "mini_batch_size": "minibatch_size", "lr": "learning_rate",
    "log_dir": "tracking",
}  # fmt: skip
"""Arguments that have another name as options of `brayx ppo`."""


@dataclass
class _PPO:
    """The arguments that both classes take.

    Attributes:
        env_name: Gymnasium id.
        epochs: passes over a batch.
        mini_batch_size: transitions in a minibatch.
        lr, gamma, gae_lambda, clip_param, value_coef, entropy_coef, max_grad_norm: options of PPO.
        seed: seed of all random numbers.
        device: device that learns: ``cpu`` or ``cuda``.
        log_dir: folder of MLflow's database; None: the current one.
    """

    env_name: str
    _: KW_ONLY
    epochs: int = 10
    mini_batch_size: int = 64
    lr: float = 3e-4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_param: float = 0.2
    value_coef: float = 0.5
    entropy_coef: float = 0.01
    max_grad_norm: float = 0.5
    seed: int = 0
    device: Literal["cpu", "cuda"] = "cpu"
    log_dir: str | None = None

    def __post_init__(self) -> None:
        check_env(self.env_name)
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"device is {self.device!r}, expected cpu or cuda", key="device")
        configs(self.options, lambda name: next((ours for ours, theirs in _NAMES.items() if theirs == name), name))

    @property
    def options(self) -> dict[str, Any]:
        """Options of `brayx ppo` by their names in Python."""
        return chosen_options({_NAMES.get(name, name): value for name, value in asdict(self).items()})

    def train(
        self, total_timesteps: int = 1_000_000, log_interval: int = 10, save_interval: int = 50
    ) -> LocalTrainResult:
        """Trains, with progress on standard error. An interrupted trial of this environment and seed is resumed.

        Args:
            total_timesteps: env steps.
            log_interval: updates between two lines of progress.
            save_interval: updates between two checkpoints.

        Raises:
            ConfigError: the options do not fit each other or the environment.
            BrayxError: the training failed.
        """
        if log_interval < 1:
            raise ConfigError(f"log_interval is {log_interval}, expected 1 or more", key="log_interval")
        length = {"num_steps": total_timesteps, "log_interval": log_interval, "checkpoint_interval": save_interval}
        return train({**self.options, **length}, threading.Event())[0]


@dataclass
class ParallelPPO(_PPO):
    """PPO in this process: ``ParallelPPO("CartPole-v1", num_envs=8).train(total_timesteps=100_000)``.

    Attributes:
        num_envs: environments, stepped together.
        num_steps: steps of each environment in a batch.
    """

    _: KW_ONLY
    num_envs: int = 8
    num_steps: int = 2048

    @property
    def options(self) -> dict[str, Any]:
        """As `_PPO.options`."""
        return {**super().options, "distributed": False, "num_workers": 1}


@dataclass
class DistributedPPO(_PPO):
    """PPO with rollout workers on Ray, which starts here unless ``address`` names a cluster.

    Attributes:
        num_workers: rollout workers, a process each.
        num_envs: environments of a worker.
        steps_per_worker: transitions that a worker adds to a batch, a multiple of ``num_envs``.
        sync_mode: ``blocking``: workers collect with the newest weights, and wait for the next ones. ``non_blocking``:
            they collect all the time.
        buffer_size: transitions that may wait for the learner; None: two batches.
        address: Ray cluster to join; empty: start one; None: train in this process.
    """

    _: KW_ONLY
    num_workers: int = 4
    num_envs: int = 8
    steps_per_worker: int = 512
    sync_mode: Literal["blocking", "non_blocking"] = "blocking"
    buffer_size: int | None = None
    address: str | None = ""

    @property
    def options(self) -> dict[str, Any]:
        """As `_PPO.options`."""
        if self.num_envs < 1 or self.steps_per_worker < 1 or self.steps_per_worker % self.num_envs:
            raise ConfigError(
                f"steps_per_worker is {self.steps_per_worker}, expected a multiple of num_envs, {self.num_envs}",
                key="steps_per_worker",
            )
        if self.sync_mode not in ("blocking", "non_blocking"):
            raise ConfigError(f"sync_mode is {self.sync_mode!r}, expected blocking or non_blocking", key="sync_mode")
        same = {name: value for name, value in super().options.items() if name not in ("steps_per_worker", "sync_mode")}
        return {
            **same,
            "distributed": True,
            "unroll_length": self.steps_per_worker // self.num_envs,
            "blocking": self.sync_mode == "blocking",
        }
