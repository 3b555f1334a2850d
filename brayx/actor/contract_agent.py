"""`ContractAgent`: plays any game that says what it observes and what it can do.

It acts with any mixture of actions and masks, and feeds any algorithm that learns from its own play. Knows nothing of
encodings: ticks come decoded.
"""

from __future__ import annotations

import pickle
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from brayx.actions import MASKED
from brayx.actor.agent import Agent, State, forward, pinned, push, record
from brayx.actor.decode import sample_action
from brayx.errors import BadBody, BadLimits
from brayx.gamecore.contract import ActionPart, Contract
from brayx.gamecore.contract_actions import named_actions
from brayx.gamecore.contract_bodies import ContractBodies
from brayx.gamecore.contract_ticks import Tick
from brayx.spaces import MASK
from brayx.types import Fragment, Step, flatten

_POLICY = ("logits", "mean", "log_std", "tanh_mean", "tanh_log_std", "latent", "sde_std")
"""Outputs of a model that decide an action."""


class ContractAgent(Agent):
    """Samples from the policy while training, takes the most probable action when serving.

    Options: ``model``, the model that it asks, and ``buffer``, which gets its fragments.
    """

    def __init__(self, name: str, config: Mapping[str, Any], state: State) -> None:
        super().__init__(name, config, state)
        options = config[name]["options"]
        self.model = options.get("model", "model")
        self.buffer = options.get("buffer", "buffer")
        self.explores = config["mode"] == "train"
        if state.input is None:
            raise BadBody("a game with a contract has sessions, not stateless calls: send a start with its contract")
        self.contract: Contract = state.input["contract"]
        self.limits = ActionLimits(self.contract, *ContractBodies(self.contract).limits(state.input))
        if self.explores:
            self.limits.check_learnable()
        self.rng = np.random.default_rng([config["seed"], *state.session.encode()])
        self.total_reward = 0.0
        self.length = 0
        self.parts: Counter[str] = Counter()
        state.output["policy_version"] = pinned(self.model).version

    def reward(self, tick: Tick) -> float:
        """What the last action earned: the tick's reward, or its named rewards by their weights. Override it to shape
        the reward."""
        return float(tick.reward)

    async def on_tick(self, state: State) -> None:
        tick: Tick = state.input
        limits = self.limits.with_tick(tick)
        obs = limits.observed(tick.obs) if self.explores else tick.obs
        outputs, version = await forward(self.model, obs)
        policy = {name: outputs[name] for name in _POLICY if name in outputs}
        if not self.explores:
            policy = limits.limited(policy)
        action, log_prob = sample_action(policy, self.rng, greedy=not self.explores)
        state.value = np.asarray(outputs["value"])
        # The state of a recurrent policy before the step.
        memory = flatten(outputs["state"], "state") if "state" in outputs else {}
        state.step = Step(obs, action, log_prob, version, memory)
        state.output.update({**self.named(action), **limits.numbers})

    def named(self, action: np.ndarray) -> dict[str, Any]:
        """The policy's action as the game's, by name: choices from their starts, numbers within their bounds."""
        return named_actions(self.contract, action)

    async def on_episode(self, episode: list[State], done: bool) -> None:
        last, ticks = episode[-1], [state.input for state in episode[1:]]
        steps = [state.step for state in episode[:-1]]
        rewards = [self.reward(tick) for tick in ticks]
        stopped = last.kind == "stop"
        terminated = stopped and last.input.terminated
        if steps:
            last_obs = (last.input.obs or steps[-1].obs) if stopped else last.step.obs
            truncated = done and not terminated
            push(self.buffer, Fragment.from_steps(steps, rewards, last_obs, terminated=terminated, truncated=truncated))
        self.total_reward += sum(rewards)
        self.length += len(steps)
        for tick in ticks:
            self.parts.update(tick.rewards)
            for name, value in tick.info.items():
                if isinstance(value, int | float) and abs(value) <= sys.float_info.max:  # no float holds a larger int
                    record("info", value, label=name)
        if terminated or (stopped and last.input.truncated):  # a game that was broken off says nothing about the policy
            record("episode_return", self.total_reward)
            record("episode_length", self.length)
            for name, value in self.parts.items():
                record("reward_sum", value, label=name)

    def snapshot(self) -> bytes:
        return pickle.dumps((self.rng.bit_generator.state, self.total_reward, self.length, self.parts))

    def restore(self, snapshot: bytes) -> None:
        self.rng.bit_generator.state, self.total_reward, self.length, self.parts = pickle.loads(snapshot)


class ActionLimits:
    """A designer's limits: choices that the agent may not take, and actions that it must.

    Args:
        contract: the game's.
        forbidden, forced: as in `brayx.gamecore.contract_ticks.Tick`.

    Attributes:
        numbers: the continuous actions that are forced, by name.
    """

    def __init__(self, contract: Contract, forbidden: Mapping[str, tuple[int, ...]], forced: Mapping[str, Any]) -> None:
        self._contract, self._forbidden, self._forced = contract, forbidden, forced
        self.numbers = {part.name: forced[part.name] for part in contract.continuous if part.name in forced}
        self._allowed = [self._choices(part) for part in contract.discrete] if forbidden or forced else []

    def with_tick(self, tick: Tick) -> ActionLimits:
        """These limits and those of a tick, whose forced actions come first."""
        if not tick.forbidden and not tick.forced:
            return self
        forbidden = {
            name: (*self._forbidden.get(name, ()), *tick.forbidden.get(name, ()))
            for name in (*self._forbidden, *tick.forbidden)
        }
        return ActionLimits(self._contract, forbidden, {**self._forced, **tick.forced})

    def observed(self, obs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The observation of a model that learns: the limits are in its mask, so that it knows which actions it had.

        Raises:
            BadLimits: an action with limits has no mask; or no choice is left.
        """
        if not self._forbidden and not self._forced:
            return obs
        self.check_learnable()
        mask = obs[MASK] * np.concatenate(self._allowed)
        first = 0
        for part, allowed in zip(self._contract.discrete, self._allowed, strict=True):
            self._check(part.name, allowed, bool(mask[first : first + part.size].any()))
            first += part.size
        return {**obs, MASK: mask}

    def check_learnable(self) -> None:
        """Refuses limits that a model which learns could not see in its mask.

        Raises:
            BadLimits: an action with limits has no mask.
        """
        for part in self._contract.actions:
            for group, limits in (("forbidden", self._forbidden), ("forced", self._forced)):
                if part.name not in limits or part.mask:
                    continue
                raise BadLimits(
                    f"{group}.{part.name} limits an action while the model learns: "
                    + (
                        "numbers can be forced only while a model is served"
                        if part.kind == "continuous"
                        else 'expected "mask": true for it in the contract, or a served model'
                    ),
                    field=f"{group}.{part.name}",
                )

    def limited(self, policy: dict[str, Any]) -> dict[str, Any]:
        """The policy of a served model without the choices that are not allowed.

        Raises:
            BadLimits: no choice is left.
        """
        if not self._allowed:
            return policy
        logits = policy["logits"]
        heads = logits if isinstance(logits, tuple) else (logits,)
        limited = []
        for part, head, allowed in zip(self._contract.discrete, heads, self._allowed, strict=True):
            limited.append(np.where(allowed, head, np.float32(MASKED)))
            self._check(part.name, allowed, bool(limited[-1].max() > MASKED / 2))
        return {**policy, "logits": tuple(limited) if isinstance(logits, tuple) else limited[0]}

    def _choices(self, part: ActionPart) -> np.ndarray:
        """uint8 ``[size]``: 1 for a choice that is allowed."""
        if part.name in self._forced:
            allowed = np.zeros(part.size, np.uint8)
            allowed[self._forced[part.name]] = 1
            return allowed
        allowed = np.ones(part.size, np.uint8)
        allowed[list(self._forbidden.get(part.name, ()))] = 0
        return allowed

    def _check(self, name: str, allowed: np.ndarray, is_left: bool) -> None:
        """Refuses limits of an action that leave no choice; ``allowed`` has those of the limits alone."""
        if not is_left:
            limit = f"{'forced' if name in self._forced else 'forbidden'}.{name}"
            given = f"{limit} and mask leave" if allowed.any() else f"{limit} leaves"
            raise BadLimits(f"{given} no choice, expected at least one", field=limit)


def with_reward(agent: type[ContractAgent], function: Callable[[Tick], float]) -> type[ContractAgent]:
    """The agent class whose `ContractAgent.reward` is a function of the tick, as ``actor.reward`` names one."""
    return type(agent.__name__, (agent,), {"reward": lambda self, tick: float(function(tick))})
