"""`EnvAgent`: serves a model that learned from an environment in Python, by the contract of the environment's spaces.

`brayx.jobs.env_door` makes the contract and the agent's options.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from brayx.actor.agent import State
from brayx.actor.contract_agent import ContractAgent
from brayx.spaces import MASK
from brayx.types import NestedArray


class EnvAgent(ContractAgent):
    """A `ContractAgent` whose model takes observations as the environment gives them.

    Option ``obs``: see `env_observation`.
    """

    def __init__(self, name: str, config: Mapping[str, Any], state: State) -> None:
        super().__init__(name, config, state)
        self._places: Mapping[str, Mapping[str, Any]] = config[name]["options"]["obs"]

    def model_input(self, obs: Mapping[str, np.ndarray]) -> NestedArray:
        """See `ContractAgent.model_input`."""
        return env_observation(obs, self._places)


def env_observation(obs: Mapping[str, np.ndarray], places: Mapping[str, Mapping[str, Any]]) -> NestedArray:
    """The environment's observation of those of a contract.

    Args:
        obs: by name, ``[...]`` or with rows ``[N, ...]``.
        places: by name of an observation its ``path`` in the environment's, its ``shape`` there, its ``rank`` in the
            contract, and the ``start`` of its categories.
    """
    nested: Any = {}
    for name, place in places.items():
        array = obs[name]
        rows = array.shape[: array.ndim - place["rank"]]
        array = array.reshape((*rows, *place["shape"])) + array.dtype.type(place["start"])
        if not place["path"]:
            return array
        *outer, last = place["path"]
        inner = nested
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = array
    if MASK in obs:
        nested[MASK] = obs[MASK]
    return nested
