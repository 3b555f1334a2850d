"""Nested arrays, and the records of acting and replay: `Step`, `Fragment` and `Columns`. NumPy and optree only.

A *nested array* is a NumPy array or any nesting of dicts, lists and tuples of them. `flatten` gives its leaves
stable path names (``obs/image``), which is how fragments look inside the replay stream. Shapes are written with
``T`` for time and ``B`` for batch; a leading ``T + 1`` includes the observation to bootstrap from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import optree

NestedArray: TypeAlias = Any
"""A NumPy array, or dicts, lists and tuples of nested arrays."""

Weights: TypeAlias = dict[str, np.ndarray]
"""Parameters and buffers of a model by their `state_dict` name."""

DEMONSTRATION = "demonstration"
"""Extra that marks a fragment for imitation, and so a key of its batches; its values do not matter."""

NOT_LEARNED = -1
"""Policy version of steps that do not train the model: a fragment that has one is dropped."""


def flatten(tree: NestedArray, prefix: str = "") -> dict[str, np.ndarray]:
    """Leaves of ``tree`` by path: ``flatten({"a": {"b": x}}, "obs")`` has ``obs/a/b``; a bare array has ``prefix``."""
    paths, leaves, _ = optree.tree_flatten_with_path(tree)
    return {
        "/".join([prefix, *map(str, path)] if prefix else map(str, path)): np.asarray(leaf)
        for path, leaf in zip(paths, leaves, strict=True)
    }


def unflatten(leaves: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves under ``prefix`` as dictionaries, as before `flatten`: ``obs/a/b`` becomes ``{"a": {"b": ...}}``."""
    start = f"{prefix}/" if prefix else ""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        if path.startswith(start):
            *above, last = path.removeprefix(start).split("/")
            inside = tree
            for part in above:
                inside = inside.setdefault(part, {})
            inside[last] = leaf
    return tree


def stack(trees: Sequence[NestedArray]) -> NestedArray:
    """Stacks equally shaped nested arrays along a new leading axis."""
    return optree.tree_map(lambda *leaves: np.stack([np.asarray(x) for x in leaves]), trees[0], *trees[1:])


class Forward(NamedTuple):
    """A model's result for one observation.

    Attributes:
        outputs: nested array, the module's outputs without a batch axis.
        policy_version: version of the weights that computed them.
    """

    outputs: NestedArray
    policy_version: int


class ModelHandle(Protocol):
    """The part of a model that an agent uses."""

    async def forward(self, *args: NestedArray, deadline_s: float | None = None) -> Forward:
        """Runs the model on one observation; returns the outputs and the policy version that computed them.

        ``deadline_s`` is the agent's deadline, if it is shorter than the model's own.
        """


class PinnedHandle(ModelHandle, Protocol):
    """A model at one policy version, which stays ready while this handle exists."""

    @property
    def version(self) -> int:
        """The version."""


@dataclass(frozen=True, slots=True)
class Step:
    """One tick of an agent: its observation, its action, and what the learner needs about both.

    Of several agents of one session (`brayx.actor.contract_agent`) all values have a leading axis, a row for each.

    Attributes:
        obs: nested array, one observation without batch axis.
        action: array, as decoded (``[]`` int64 for a discrete action).
        log_prob: number, joint log-probability of ``action`` under the policy that acted.
        policy_version: version of the weights that acted.
        extras: further arrays by name, without batch axis. A recurrent policy's state *before* the step belongs here,
            as ``flatten(outputs["state"], "state")``.
    """

    obs: NestedArray
    action: np.ndarray
    log_prob: Any
    policy_version: Any
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fragment:
    """A self-contained piece of one agent's trajectory: ``T`` transitions and the observation after them.

    Attributes:
        obs: nested array ``[T + 1, ...]``; the last one follows the last action. If ``terminated`` it is not used for
            bootstrapping and may repeat the one before.
        action: ``[T, ...]``.
        log_prob: ``[T]`` float32, at acting time.
        reward: ``[T]`` float32; ``reward[t]`` is the result of ``action[t]``.
        terminated: the environment ended after the last transition: no bootstrap.
        truncated: the trajectory was cut after the last transition for another reason (a time limit, a lost
            client): bootstrap from ``obs[T]``, end the trace. If neither, the next fragment continues from ``obs[T]``.
        policy_version: ``[T]`` int64.
        extras: further arrays ``[T, ...]`` by name, for algorithms that need them.
    """

    obs: NestedArray
    action: np.ndarray
    log_prob: np.ndarray
    reward: np.ndarray
    terminated: bool
    truncated: bool
    policy_version: np.ndarray
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        """Number of transitions, ``T``."""
        return len(self.reward)

    def after(self, steps: int) -> Fragment:
        """The fragment without its first ``steps`` transitions."""
        return replace(
            self,
            obs=optree.tree_map(lambda leaf: np.asarray(leaf)[steps:], self.obs),
            action=self.action[steps:],
            log_prob=self.log_prob[steps:],
            reward=self.reward[steps:],
            policy_version=self.policy_version[steps:],
            extras={name: extra[steps:] for name, extra in self.extras.items()},
        )

    @staticmethod
    def from_steps(
        steps: Sequence[Step],
        rewards: Sequence[float],
        last_obs: NestedArray,
        *,
        terminated: bool,
        truncated: bool,
    ) -> Fragment:
        """Joins ``T`` steps, their ``T`` rewards and the observation after the last step."""
        return Fragment(
            obs=stack([*(step.obs for step in steps), last_obs]),
            action=np.stack([np.asarray(step.action) for step in steps]),
            log_prob=np.asarray([step.log_prob for step in steps], np.float32),
            reward=np.asarray(rewards, np.float32),
            terminated=terminated,
            truncated=truncated,
            policy_version=np.asarray([step.policy_version for step in steps], np.int64),
            extras={name: np.stack([np.asarray(step.extras[name]) for step in steps]) for name in steps[0].extras},
        )


@dataclass(frozen=True, slots=True)
class Columns:
    """Pieces of many trajectories in the layout of a learner batch: the vectorised way into replay.

    The arrays must not be changed afterwards: a buffer may keep them without a copy.

    Attributes:
        arrays: ``[N, T + 1, ...]`` by key, for any number of columns ``N`` and the buffer's ``T``, with the keys and
            the meaning of a learner batch (`brayx.replay.packing`). ``mask`` is 0 at the last step of each column.
            Output of a Gymnasium vector environment fits directly: its autoreset row is a step with mask 0.
    """

    arrays: Mapping[str, np.ndarray]

    def __len__(self) -> int:
        """Number of transitions: steps with mask 1."""
        return int(np.count_nonzero(self.arrays.get("mask", ())))

    def after(self, columns: int) -> Columns:
        """The columns after the first ``columns``."""
        return Columns({key: array[columns:] for key, array in self.arrays.items()})
