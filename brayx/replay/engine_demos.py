"""Reads the demonstrations that game engines record: ML-Agents' ``.demo``, and the JSON of Godot's add-on godot_rl.

The add-on writes a list of episodes, ``[observations, actions]``, with one observation more than actions. It has only
the observation ``obs``, and all actions of a step in one list, without names or kinds. So the job's contract says how
to read it, while a ``.demo`` has its own. Knows nothing of buffers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from brayx.actions import ActionSpec
from brayx.bridges.unity_demo import UnityDemo
from brayx.errors import BadBody, ConfigError
from brayx.gamecore.contract import Contract
from brayx.gamecore.contract_actions import policy_action
from brayx.gamecore.contract_ticks import TickValues
from brayx.replay.steps import ActionsOf
from brayx.types import Fragment, stack

_OBS = "obs"
"""The only observation that godot_rl records."""


@dataclass(frozen=True)
class EngineDemos:
    """A reader of an engine's files, as `brayx.replay.files.FormatReader`.

    Attributes:
        engine: whose files.
        contract: the job's; None: it has none.
    """

    engine: Literal["unity", "godot"]
    contract: Contract | None = None

    def episodes(self, file: Path, fields: Mapping[str, str]) -> Iterator[Fragment]:
        """As `brayx.replay.files.FormatReader`."""
        read = _unity if self.engine == "unity" else _godot
        return read(file, TickValues(self._contract(file)))

    def blank(self, file: Path, fields: Mapping[str, str]) -> tuple[Fragment | None, set[str]]:
        """As `brayx.replay.files.FormatReader`; reads the first episode."""
        names = {"obs", "action", "terminated", *(["reward"] if self.engine == "unity" else [])}
        first = next(self.episodes(file, fields), None)
        return None if first is None else first.after(len(first) - 1), names

    def declared(self, file: Path, fields: Mapping[str, str]) -> tuple[ActionsOf | None, ActionSpec | None]:
        """As `brayx.replay.files.FormatReader`: the contract makes a policy's actions of the game's."""
        return "policy", None

    def _contract(self, file: Path) -> Contract:
        """The contract by which a file is read.

        Raises:
            ConfigError: there is none, or the file's does not fit the job's.
        """
        if self.engine == "godot":
            return _godots(file, self.contract)
        contract = UnityDemo(file).behaviour.contract
        differences = contract.differences(self.contract) if self.contract is not None else []
        if differences:
            raise ConfigError(
                f"{file}: it does not fit the job's contract: {'; '.join(differences)}", path=str(file), key="contract"
            )
        return contract


@dataclass
class _Episode:
    """Collects the steps of an episode."""

    values: TickValues
    obs: list[dict[str, np.ndarray]] = field(default_factory=list)
    actions: list[np.ndarray] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    def observe(self, obs: Mapping[str, Any], mask: Any = None, reward: float = 0.0) -> None:
        """Adds an observation, and the reward of the action before it."""
        arrays = self.values.model_arrays(self.values.read_observations(obs), self.values.read_mask(mask))
        if self.obs:
            self.rewards.append(reward)
        self.obs.append(arrays)

    def act(self, actions: Mapping[str, Any]) -> None:
        """Adds the actions chosen for the last observation."""
        read = {name: values.read(actions[name]) for name, values in self.values.actions.items()}
        self.actions.append(policy_action(self.values.contract, read))

    def fragment(self, *, terminated: bool) -> Fragment:
        """The episode, without a last action whose result is not known."""
        count = len(self.rewards)
        return Fragment(
            obs=stack(self.obs),
            action=np.stack(self.actions[:count]),
            log_prob=np.zeros(count, np.float32),
            reward=np.asarray(self.rewards, np.float32),
            terminated=terminated,
            truncated=not terminated,
            policy_version=np.zeros(count, np.int64),
        )


def _unity(file: Path, values: TickValues) -> Iterator[Fragment]:
    """The episodes of a ``.demo``; a step has the reward of the action before it."""
    episode = _Episode(values)
    for number, (step, actions) in enumerate(UnityDemo(file).steps()):
        try:
            episode.observe(step.obs or {}, step.mask, step.reward)
            if step.ended is None:
                episode.act(actions)
        except BadBody as error:
            raise ConfigError(f"{file}: step {number} (the first is 0): {error.message}", path=str(file)) from None
        if step.ended is None:
            continue
        if episode.rewards:
            yield episode.fragment(terminated=step.ended == "terminated")
        episode = _Episode(values)
    if episode.rewards:
        yield episode.fragment(terminated=False)


def _godots(file: Path, contract: Contract | None) -> Contract:
    """The contract of a game whose demonstrations godot_rl can record."""
    if contract is None:
        raise ConfigError(
            f"{file}: godot_rl's demonstrations do not say what their numbers are: expected a job with a contract "
            "(`contract: FILE`)",
            path=str(file),
            key="contract",
        )
    names = [spec.name for spec in contract.observations]
    if names != [_OBS]:
        raise ConfigError(
            f"{file}: godot_rl records the observation {_OBS!r} alone, and the contract has {', '.join(names)}",
            path=str(file),
            key="contract",
        )
    return contract


def _godot(file: Path, values: TickValues) -> Iterator[Fragment]:
    """The episodes of the add-on's file, which has no rewards: they are 0."""
    try:
        document = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", path=str(file)) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: it is no JSON: {error}", path=str(file)) from None
    if not isinstance(document, list):
        raise ConfigError(f"{file}: expected a list of episodes, as godot_rl records them", path=str(file))
    for number, pair in enumerate(document):
        place = f"{file}: episode {number} (the first is 0)"
        is_pair = isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, list) for part in pair)
        if not is_pair or len(pair[0]) != len(pair[1]) + 1:
            got = f"{len(pair[0])} observations and {len(pair[1])} actions" if is_pair else "something else"
            raise ConfigError(
                f"{place} has {got}, expected [observations, actions] with one observation more than actions",
                path=str(file),
            )
        episode = _Episode(values)
        for step, obs in enumerate(pair[0]):
            try:
                episode.observe({_OBS: obs})
                if step < len(pair[1]):
                    episode.act(_named(values.contract, pair[1][step]))
            except BadBody as error:
                raise ConfigError(f"{place}, step {step}: {error.message}", path=str(file)) from None
        if episode.rewards:
            yield episode.fragment(terminated=True)


def _named(contract: Contract, numbers: Any) -> dict[str, Any]:
    """The actions of a step by name: one number for a choice, as many as it has for a continuous action."""
    count = sum(part.size if part.kind == "continuous" else 1 for part in contract.actions)
    if not isinstance(numbers, list) or len(numbers) != count:
        got = f"{len(numbers)} numbers" if isinstance(numbers, list) else f"{numbers!r:.40}"
        raise BadBody(f"action is {got}, expected {count} numbers", field="action")
    named: dict[str, Any] = {}
    first = 0
    for part in contract.actions:
        if part.kind == "continuous":
            named[part.name] = numbers[first : first + part.size]
            first += part.size
            continue
        value = numbers[first]  # some versions of Godot write 4.0
        named[part.name] = int(value) if isinstance(value, float) and value.is_integer() else value
        first += 1
    return named
