"""CartPole-v1 that records the time of its first action: ``brayx gamecore gym benchmarks.stamped:CartPole-stamped``.

The time goes to the file named by the environment variable `FILE`, unless another game was first. After that the
wrapper costs nothing: steps go to the game itself.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import gymnasium
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

ENV_ID = "benchmarks.stamped:CartPole-stamped"
FILE = "BRAYX_BENCH_FIRST_TICK"


class _Stamped(gymnasium.Wrapper[Any, Any, Any, Any]):
    def step(self, action: Any) -> Any:
        with contextlib.suppress(FileExistsError), open(os.environ[FILE], "x") as file:
            file.write(repr(time.time()))
        self.step = self.env.step  # type: ignore[method-assign]
        return self.env.step(action)


def _make(**options: Any) -> _Stamped:
    return _Stamped(CartPoleEnv(**options))


gymnasium.register(ENV_ID.partition(":")[2], entry_point=_make, max_episode_steps=500)
