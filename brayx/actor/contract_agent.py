"""`ContractAgent`: plays any game that says what it observes and what it can do.

It acts with any mixture of actions and masks, and feeds any algorithm that learns from its own play. One session may
have several agents, whose ticks have a row for each: arrays then have a leading axis, and all else is the same. Knows
nothing of encodings: ticks come decoded.
"""

from __future__ import annotations

import math
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import optree

from brayx.actor.agent import Agent, State, forward, pinned, push, record, services_in_use
from brayx.actor.decode import sample_action
from brayx.actor.groups import Groups
from brayx.actor.limits import ActionLimits
from brayx.actor.rows import RowMemory, forward_rows
from brayx.actor.trajectories import BROKEN_OFF, GOES_ON, TERMINATED, TRUNCATED, Piece, Rows, Trajectories, ends_of
from brayx.errors import BadBody
from brayx.gamecore.contract import Contract
from brayx.gamecore.contract_actions import named_actions, named_rows
from brayx.gamecore.contract_rows import MAX_ROWS
from brayx.gamecore.contract_ticks import Tick
from brayx.types import NOT_LEARNED, Forward, NestedArray, Step, flatten

_POLICY = ("logits", "mean", "log_std", "tanh_mean", "tanh_log_std", "latent", "sde_std")
"""Outputs of a model that decide an action."""


@dataclass
class _Episode:
    """The sums of an agent's episode so far; ``total`` is NaN if a part of it was lost.

    An episode with steps that do not train the model is not recorded: in self-play, others have played a part of it.
    """

    total: float = 0.0
    length: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    is_learned: bool = True


class ContractAgent(Agent):
    """Samples from the policy while training, takes the most probable action when serving.

    Options: ``model``, the model that it asks, and ``buffer``, which gets its fragments; None: none does.
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
        self.limits: ActionLimits = state.input["limits"]
        if self.explores:
            self.limits.check_learnable()
        self.rng = np.random.default_rng([config["seed"], *state.session.encode()])
        self._episodes: dict[int, _Episode] = {}
        self._trajectories = Trajectories()
        self._newest: State | None = None
        """The last state that was cut into fragments, with which the next episode begins."""
        self._memory = RowMemory()
        self._acting: set[int] = set()
        size = _group_size(self.model, config) if self.explores else 0
        self._groups = Groups(size) if size else None
        state.output["policy_version"] = pinned(self.model).version

    def reward(self, tick: Tick) -> float:
        """What the last action earned: the tick's reward, or its named rewards by their weights. Override it to shape
        the reward; it gets each row as a tick without rows."""
        return float(tick.reward)

    def model_input(self, obs: Mapping[str, np.ndarray]) -> NestedArray:
        """What the model takes of the observations of a tick, ``[...]`` or with rows ``[N, ...]``: all of them by name.
        Override it for a model that takes them in another form."""
        return obs

    async def on_tick(self, state: State) -> None:
        services = services_in_use()
        if services is not None and services.caught_up is not None:
            await services.caught_up()
        tick: Tick = state.input
        if self._groups is not None:
            self._groups.check(tick)
        limits = self.limits.with_more(tick)
        obs = limits.observed(tick) if self.explores else tick.obs
        result = await (
            forward(self.model, self.model_input(obs)) if tick.agents is None else self._forward_rows(tick, obs)
        )
        if result is None:  # all rows have ended
            return
        outputs, version = result
        policy = {name: outputs[name] for name in _POLICY if name in outputs}
        if not self.explores:
            policy = limits.limited(policy)
        action, log_prob = sample_action(policy, self.rng, greedy=not self.explores)
        action = limits.played(action)
        named = named_actions if tick.agents is None else named_rows
        state.output.update(limits.replied(named(self.contract, action)))
        # The state of a recurrent policy before the step.
        memory = flatten(outputs["state"], "state") if "state" in outputs else {}
        value = outputs.get("value")
        if tick.agents is not None:
            action, log_prob, version, memory, value = _spread((action, log_prob, version, memory, value), tick)
        if value is not None:
            state.value = np.asarray(value)
        state.step = Step(obs, action, log_prob, version, memory)

    async def _forward_rows(self, tick: Tick, obs: Mapping[str, np.ndarray]) -> Forward | None:
        """The outputs ``[N, ...]`` for the rows that go on, with the memory before them; None: there are none."""
        assert tick.agents is not None
        acting, agents = tick.acting, tick.agents.tolist()
        ended: list[int] = []
        if acting is not None:
            ended = tick.agents[tick.terminated | tick.truncated].tolist()
            agents = [agents[row] for row in acting.tolist()]
            obs = {name: leaf[acting] for name, leaf in obs.items()}
        going_on = self._acting.difference(ended).union(agents)
        if len(going_on) > MAX_ROWS:
            raise BadBody(f"agent has {len(going_on)} agents whose episodes have not ended", field="agent")
        self._memory.forget(ended)
        result = await forward_rows(self.model, agents, self.model_input(obs), self._memory) if agents else None
        self._acting = going_on
        return result

    async def on_episode(self, episode: list[State], done: bool) -> None:
        services = services_in_use()
        is_lost = services is not None and bool(services.outcome.lost)
        follows = episode[0] is self._newest
        if not follows:
            self._trajectories.forget()
            if self._groups is not None:
                self._groups.forget()
        self._newest = episode[-1]
        states = episode[1:] if follows else episode
        rows = self._rows(states, earned=states if follows else states[1:])
        if rows is None:
            return
        if self._groups is not None:
            rows = self._groups.seen(rows, [state.input for state in states])
        if is_lost and episode[0].input.agents is not None and services is not None:
            # The lost part may belong to any running episode, so these get no return; later ones do.
            services.outcome.lost = ""
            self._episodes = {agent: _Episode(math.nan) for agent in {*self._episodes, *rows.agent.tolist()}}
        pieces = [*self._trajectories.cut(rows, done=done)]
        fragments = [piece.fragment for piece in pieces if piece.fragment is not None]
        if fragments and self.buffer is not None:
            push(self.buffer, *fragments)  # in one call, which counts and looks for a batch once
        for piece in pieces:
            self._count(piece)

    def _rows(self, states: Sequence[State], earned: Sequence[State]) -> Rows | None:
        """The rows of states; None if there are none. Those of ``earned`` have what the actions before them earned."""
        if not states:
            return None
        has_rows = states[0].input.agents is not None
        example = next((vars(state)["step"] for state in states if "step" in vars(state)), None)
        blank = example or self._trajectories.example(has_rows)
        if blank is None:
            return None
        join: Callable[[Sequence[Any]], np.ndarray] = np.concatenate if has_rows else np.stack
        steps: list[Step] = []
        for state in states:
            step = vars(state).get("step")
            steps.append(step or _without_action(state.input, steps[-1] if steps else blank))
        ticks: list[Tick] = [state.input for state in states]
        rewards = [self._rewards(state.input) for state in earned]
        if len(rewards) < len(states):
            rewards.insert(0, np.zeros(np.shape(ticks[0].reward)))
        self._record_info([state.input for state in earned])
        agents = [np.int64(0) if tick.agents is None else tick.agents for tick in ticks]
        return Rows(
            join(agents),
            join([ends_of(state.input, BROKEN_OFF if state.kind == "stop" else GOES_ON) for state in states]),
            {name: join([step.obs[name] for step in steps]) for name in blank.obs},
            join([step.action for step in steps]),
            join([step.log_prob for step in steps]).astype(np.float32),
            join([step.policy_version for step in steps]).astype(np.int64),
            {name: join([step.extras[name] for step in steps]) for name in blank.extras},
            join(rewards),
            {name: join([tick.rewards[name] for tick in ticks]) for name in self.contract.rewards},
        )

    def _rewards(self, tick: Tick) -> Any:
        """The reward, ``[N]`` with rows."""
        if tick.agents is None:
            return self.reward(tick)
        if type(self).reward is ContractAgent.reward:
            return tick.reward
        return np.array([self.reward(tick.row(row)) for row in range(len(tick.agents))])

    def _record_info(self, ticks: Iterable[Tick]) -> None:
        for tick in ticks:
            for info in tick.info if isinstance(tick.info, list) else (tick.info,):
                for name, value in info.items():
                    # No float holds a larger whole number.
                    if isinstance(value, int | float) and abs(value) <= sys.float_info.max:
                        record("info", value, label=name)

    def _count(self, piece: Piece) -> None:
        """Adds a piece to its agent's episode, and records the sums of one that the game ended."""
        episode = self._episodes.setdefault(piece.agent, _Episode())
        if piece.fragment is not None:
            episode.total += piece.reward
            episode.length += len(piece.fragment)
            episode.is_learned &= bool(piece.fragment.policy_version.min() != NOT_LEARNED)
            for name, value in piece.parts.items():
                episode.parts[name] = episode.parts.get(name, 0.0) + value
        if piece.end == GOES_ON:
            return
        del self._episodes[piece.agent]
        # One that was broken off says nothing about the policy.
        if piece.end in (TERMINATED, TRUNCATED) and episode.length and not math.isnan(episode.total):
            if not episode.is_learned:
                services = services_in_use()
                assert services is not None
                services.outcome.result = episode.total  # the session has had a return all the same
                return
            record("episode_return", episode.total)
            record("episode_length", episode.length)
            for name, value in episode.parts.items():
                record("reward_sum", value, label=name)

    def snapshot(self) -> bytes:
        return pickle.dumps((self.rng.bit_generator.state, self._episodes, self._memory, self._acting))

    def restore(self, snapshot: bytes) -> None:
        self.rng.bit_generator.state, self._episodes, self._memory, self._acting = pickle.loads(snapshot)


def _group_size(model: str, config: Mapping[str, Any]) -> int:
    """How many members of a group the value function of a model's trainer sees; 0: it sees no groups."""
    for part in config.values():
        if isinstance(part, Mapping) and part.get("kind") == "trainer" and part["model"] == model:
            return int(part["algorithm"].get("group_size", 0))
    return 0


def _without_action(tick: Tick, before: Step) -> Step:
    """The step of a stop, or of a tick whose rows have all ended: as ``before``, but with the tick's number of rows."""
    if tick.agents is None:
        return replace(before, obs=tick.obs or before.obs)
    count = len(tick.agents)
    action, extras = np.asarray(before.action), before.extras
    return Step(
        tick.obs,
        np.zeros((count, *action.shape[1:]), action.dtype),
        np.zeros(count),
        np.zeros(count, np.int64),
        {name: np.zeros((count, *leaf.shape[1:]), leaf.dtype) for name, leaf in extras.items()},
    )


def _spread(values: Any, tick: Tick) -> Any:
    """Extends arrays of the rows that go on to all rows, with zeros for those that have ended."""
    acting = tick.acting
    if acting is None:
        return values
    assert tick.agents is not None
    count = len(tick.agents)

    def of_all(leaf: np.ndarray) -> np.ndarray:
        array = np.zeros((count, *leaf.shape[1:]), leaf.dtype)
        array[acting] = leaf
        return array

    return optree.tree_map(of_all, values)


def with_reward(agent: type[ContractAgent], function: Callable[[Tick], float]) -> type[ContractAgent]:
    """The agent class whose `ContractAgent.reward` is a function of the tick, as ``actor.reward`` names one."""
    return type(agent.__name__, (agent,), {"reward": lambda self, tick: float(function(tick))})
