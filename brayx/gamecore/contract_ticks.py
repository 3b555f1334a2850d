"""`Tick`, and `TickValues`, which checks the parts of one against a contract.

Knows how the parts look as JSON values, and nothing of the bytes of a body (`brayx.gamecore.contract_bodies`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from brayx.errors import BadBody
from brayx.gamecore.contract import Contract
from brayx.gamecore.contract_values import ActionValues, ObservationValues
from brayx.gamecore.fields import array_of, check_names, number_field
from brayx.spaces import MASK


@dataclass(slots=True)
class Tick:
    """The body of a tick or a stop; of a session with several agents with a row for each of them.

    Attributes:
        obs: the observations as a model gets them, shaped like `Contract.example`; empty in a stop that left them out.
            With rows ``[N, ...]``.
        reward: since the tick before: the game's number, or the weighted sum of the named rewards. With rows ``[N]``.
        rewards: the named rewards as the game gave them; empty if the contract names none. With rows ``[N]`` each.
        terminated, truncated: how the game ended; both false in a tick. With rows ``[N]``: how an agent's episode did.
        info: the game's own values, not for the model. With rows also a list, with an object for each.
        forbidden: choices of discrete actions that are not allowed now, counted from 0, by action.
        forced: actions that are given now, by name: a choice counted from 0, or a float32 array in the game's bounds.
        result: of the seat in a league, unchecked; None: the game gave none.
        agents: numbers of the rows' agents, ``[N]`` int64; None: there are no rows.
        groups: numbers of these agents' groups, ``[N]`` int64, 0 for none; None: there are none.
        acting: indices of the rows that want an action, those that have not ended; None: all of them, or no rows.
    """

    obs: dict[str, np.ndarray]
    reward: Any = 0.0
    rewards: dict[str, Any] = field(default_factory=dict)
    terminated: Any = False
    truncated: Any = False
    info: Any = field(default_factory=dict)
    forbidden: dict[str, tuple[int, ...]] = field(default_factory=dict)
    forced: dict[str, Any] = field(default_factory=dict)
    result: Any = None
    agents: np.ndarray | None = None
    groups: np.ndarray | None = None
    acting: np.ndarray | None = None

    def row(self, index: int) -> Tick:
        """One row, as a tick without rows."""
        info = self.info[index] if isinstance(self.info, list) else self.info
        return Tick(
            {name: array[index] for name, array in self.obs.items()},
            float(self.reward[index]),
            {name: float(values[index]) for name, values in self.rewards.items()},
            bool(self.terminated[index]),
            bool(self.truncated[index]),
            info,
            self.forbidden,
            self.forced,
        )


class TickValues:
    """Reads the parts of a tick. Each method raises `BadBody`, which names the field and the index.

    Attributes:
        observations, actions: what reads one, by name, in the contract's order.
        masks: by action that has a mask, its place in the action mask.
        no_reward: the value of a reward that is left out.
    """

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self.observations = {spec.name: ObservationValues(spec) for spec in contract.observations}
        self.actions = {part.name: ActionValues(part) for part in contract.actions}
        self.no_reward: Any = {} if contract.rewards else 0.0
        self.masks: dict[str, slice] = {}
        first = 0
        for part in contract.discrete:
            if part.mask:
                self.masks[part.name] = slice(first, first + part.size)
            first += part.size
        self._all_allowed = np.ones(first, np.uint8)

    def read_observations(self, value: Any) -> dict[str, np.ndarray]:
        """The arrays of all observations, in the contract's order and the game's dtypes.

        ``value`` has the observations by name; or is the only observation itself.
        """
        value = self.observations_by_name(value)
        arrays = {}
        for name, values in self.observations.items():
            observation = value.get(name)
            if observation is None:
                raise BadBody(f"{values.place} is missing, expected {values.expected}", field=values.place)
            arrays[name] = values.read(observation)
        return arrays

    def observations_by_name(self, value: Any) -> Mapping[str, Any]:
        """Observations by name, not yet read. A value that is no object is the only observation."""
        if not isinstance(value, Mapping):
            if value is None or len(self.observations) > 1:
                got = "missing" if value is None else f"{value!r:.80}"
                raise BadBody(f"obs is {got}, expected an object with {', '.join(self.observations)}", field="obs")
            return dict.fromkeys(self.observations, value)
        return check_names(value, self.observations, "obs.")

    def model_arrays(self, arrays: Mapping[str, np.ndarray], mask: np.ndarray | None) -> dict[str, np.ndarray]:
        """What the model gets of `read_observations` and `read_mask`."""
        obs = {name: self.observations[name].model_array(array) for name, array in arrays.items()}
        if self.contract.has_mask:
            obs[MASK] = self._all_allowed.copy() if mask is None else mask
        return obs

    def read_mask(self, value: Any) -> np.ndarray | None:
        """The mask of all choices, uint8; None if there is none.

        ``value`` has rows of 1 and 0 by action; or is the row of the only action that has a mask. All choices of other
        actions are allowed.
        """
        if value is None:
            return None
        allowed = self._all_allowed.copy()
        for name, row in self.masks_by_name(value).items():
            choices, place = self.masks[name], f"mask.{name}"
            array = np.frombuffer(row, np.uint8) if isinstance(row, bytes) else array_of(row, place, np.uint8)
            size = choices.stop - choices.start
            if array.shape != (size,):
                raise BadBody(f"{place} has shape {list(array.shape)}, expected [{size}]", field=place)
            if array.max() > 1:
                index = int(array.argmax())
                raise BadBody(f"{place}[{index}] is {array[index]}, expected 0 or 1", field=f"{place}[{index}]")
            if not array.any():
                raise BadBody(f"{place} allows no choice, expected at least one", field=place)
            allowed[choices] = array
        return allowed

    def masks_by_name(self, value: Any) -> Mapping[str, Any]:
        """Masks by action, not yet read. A value that is no object is the only mask."""
        if not self.masks:
            raise BadBody("mask is given, but no action of the contract has one", field="mask")
        if not isinstance(value, Mapping):
            if len(self.masks) > 1:
                raise BadBody(f"mask is {value!r:.80}, expected an object with {', '.join(self.masks)}", field="mask")
            return dict.fromkeys(self.masks, value)
        return check_names(value, self.masks, "mask.")

    def read_reward(self, value: Any) -> tuple[float, dict[str, float]]:
        """The reward, and the named ones; those that are missing are 0. See `no_reward`."""
        weights = self.contract.rewards
        if not weights:
            return number_field({"reward": self.given_reward(value)}, "reward"), {}
        value = self.rewards_by_name(value)
        rewards = {}
        for name in weights:
            place = f"reward.{name}"
            rewards[name] = number_field({place: value.get(name, 0.0)}, place)
        return sum(weight * rewards[name] for name, weight in weights.items()), rewards

    def rewards_by_name(self, value: Any) -> Mapping[str, Any]:
        """Rewards by the contract's names, not yet read; those that are missing are 0."""
        weights = self.contract.rewards
        if not isinstance(self.given_reward(value), Mapping):
            raise BadBody(f"reward is {value!r:.80}, expected an object with {', '.join(weights)}", field="reward")
        return check_names(value, weights, "reward.")

    @staticmethod
    def given_reward(value: Any) -> Any:
        """A reward that is not null."""
        if value is None:
            raise BadBody("reward is null, as some languages write NaN; expected a finite number", field="reward")
        return value

    def read_extras(self, tick: Tick, document: Mapping[str, Any]) -> None:
        """Sets the optional parts of a tick."""
        if "info" in document:
            tick.info = dict(_object("info", document["info"]))
        if "forbidden" in document:
            tick.forbidden = self.read_forbidden(document["forbidden"])
        if "forced" in document:
            tick.forced = self.read_forced(document["forced"])
        tick.result = document.get("result")

    def read_forbidden(self, value: Any) -> dict[str, tuple[int, ...]]:
        """`Tick.forbidden` of lists of choices in the game's numbers."""
        forbidden = {}
        for name, choices in self._by_action("forbidden", value).items():
            part, place = self.actions[name].part, f"forbidden.{name}"
            if part.kind != "discrete" or not isinstance(choices, list | tuple):
                expected = "a list of choices of a discrete action"
                raise BadBody(f"{place} is {choices!r:.80}, expected {expected}", field=place)
            numbers = {self.actions[name].read(choice, place) - part.start for choice in choices}
            if len(numbers) == part.size:
                raise BadBody(f"{place} leaves no choice, expected at least one", field=place)
            forbidden[name] = tuple(sorted(numbers))
        return forbidden

    def read_forced(self, value: Any) -> dict[str, Any]:
        """`Tick.forced` of actions in the game's numbers."""
        forced = {}
        for name, action in self._by_action("forced", value).items():
            given = self.actions[name].read(action, f"forced.{name}")
            forced[name] = given - self.actions[name].part.start if isinstance(given, int) else given
        return forced

    def _by_action(self, group: str, value: Any) -> Mapping[str, Any]:
        return check_names(_object(group, value), self.actions, f"{group}.")


def _object(name: str, value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BadBody(f"{name} is {value!r:.80}, expected an object", field=name)
    return value
