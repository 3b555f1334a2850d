"""A designer's limits on actions, from an actor's options, a start and a tick, and what a policy does under them.

The policy under limits chooses among what is left. Its log-probability is that of the choices and numbers that it made:
what is forced has probability 1, whose logarithm, 0, adds nothing. Knows nothing of models and sessions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from brayx.actions import MASKED
from brayx.errors import BadBody, BadLimits, ConfigError
from brayx.gamecore.contract import ActionPart, Contract
from brayx.gamecore.contract_actions import scaled
from brayx.gamecore.contract_bodies import ContractBodies
from brayx.gamecore.contract_ticks import Tick
from brayx.spaces import MASK

_OF_NUMBERS = ("mean", "log_std", "tanh_mean", "tanh_log_std", "sde_std")
"""Outputs of a model whose last axis is that of the continuous actions' numbers."""


def limits_for(contract: Contract, limits: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """An actor's options ``forbidden`` and ``forced``, for the actions that a contract has; without empty ones."""
    names = {part.name for part in contract.actions}
    known = {group: {name: value[name] for name in value if name in names} for group, value in limits.items()}
    return {group: value for group, value in known.items() if value}


class HasLimits(Protocol):
    """A `Tick`, or `ActionLimits`."""

    forbidden: dict[str, tuple[int, ...]]
    forced: dict[str, Any]


class ActionLimits:
    """Choices that an agent may not take, and actions that it must.

    Args:
        contract: the game's.
        forbidden, forced: as in `brayx.gamecore.contract_ticks.Tick`.
        options: the options of the job that set them, by the name that an error has: ``forbidden.dash``.

    Raises:
        BadLimits: no choice is left.
    """

    def __init__(
        self,
        contract: Contract,
        forbidden: Mapping[str, tuple[int, ...]],
        forced: Mapping[str, Any],
        options: Mapping[str, str] = {},
    ) -> None:
        self.forbidden, self.forced = dict(forbidden), dict(forced)
        self._contract, self._options = contract, options
        self._allowed = [self._choices(part) for part in contract.discrete] if forbidden or forced else []
        self._numbers = {part.name: forced[part.name] for part in contract.continuous if part.name in forced}
        if not self._numbers:
            return
        columns = [np.full(len(contract.discrete), np.nan)]  # NaN: the policy's own
        for part in contract.continuous:
            is_forced = part.name in forced
            columns.append(scaled(part, forced[part.name]) if is_forced else np.full(part.size, np.nan))
        self._columns = np.concatenate(columns).astype(np.float32)
        self._own = np.flatnonzero(np.isnan(self._columns))

    @classmethod
    def of(cls, contract: Contract, document: Mapping[str, Any]) -> ActionLimits:
        """The limits in ``forbidden`` and ``forced`` of a start.

        Raises:
            BadBody: one does not fit the contract.
        """
        if not document.get("forbidden") and not document.get("forced"):
            return cls(contract, {}, {})
        return cls(contract, *ContractBodies(contract).limits(document))

    @classmethod
    def of_job(
        cls, contract: Contract, limits: Mapping[str, Mapping[str, Any]], *, learns: bool, actor: str = "actor"
    ) -> ActionLimits:
        """The limits that a job has for every session of a contract: those of the actions that the contract has.

        Args:
            contract: a behaviour's, or that of one of its games.
            limits: the actor's options ``forbidden`` and ``forced``.
            learns: the model learns, so that it must see them in its mask.
            actor: the component that has the options.

        Raises:
            ConfigError: one does not fit the contract; names the option.
        """
        own = limits_for(contract, limits)
        try:
            of_job = cls.of(contract, own)
            if learns:
                of_job.check_learnable()
        except BadBody as error:
            raise ConfigError(f"{actor}.{error.message}", key=f"{actor}.{error.details['field']}") from None
        names = [f"{group}.{name}" for group in own for name in own[group]]
        return cls(contract, of_job.forbidden, of_job.forced, {name: f"{actor}.{name}" for name in names})

    def with_more(self, more: HasLimits) -> ActionLimits:
        """These limits and those of a start or a tick, whose forced actions come first.

        Raises:
            BadLimits: no choice is left.
        """
        if not more.forbidden and not more.forced:
            return self
        forbidden = {
            name: (*self.forbidden.get(name, ()), *more.forbidden.get(name, ()))
            for name in (*self.forbidden, *more.forbidden)
        }
        given = {*(f"forbidden.{name}" for name in more.forbidden), *(f"forced.{name}" for name in more.forced)}
        options = {name: option for name, option in self._options.items() if name not in given}
        return ActionLimits(self._contract, forbidden, {**self.forced, **more.forced}, options)

    def observed(self, tick: Tick) -> dict[str, np.ndarray]:
        """The observations of a tick, for a model that learns: the limits are in its mask, so that it knows which
        actions it had.

        Raises:
            BadLimits: an action with limits has no mask; or no choice is left.
        """
        if not self.forbidden and not self.forced:
            return tick.obs
        self.check_learnable()
        mask, acting = tick.obs[MASK] * np.concatenate(self._allowed), tick.acting
        choosing = mask if acting is None else mask[acting]
        first = 0
        for part in self._contract.discrete:
            self._check(part.name, bool(choosing[..., first : first + part.size].any(-1).all()))
            first += part.size
        return {**tick.obs, MASK: mask}

    def check_learnable(self) -> None:
        """Refuses limits that a model which learns could not see in its mask.

        Raises:
            BadLimits: an action with limits has no mask.
        """
        for part in self._contract.actions:
            for group, limits in (("forbidden", self.forbidden), ("forced", self.forced)):
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
        """The policy of a served model without the choices that are not allowed, and without the numbers that are
        forced; `played` adds these to its action.

        Raises:
            BadLimits: no choice is left.
        """
        if not self._allowed and not self._numbers:
            return policy
        limited = dict(policy)
        if self._numbers:
            first = len(self._contract.discrete)
            own = self._own[first:] - first
            limited |= {name: policy[name][..., own] for name in _OF_NUMBERS if name in policy}
        if self._allowed:
            logits = policy["logits"]
            heads = logits if isinstance(logits, tuple) else (logits,)
            masked = []
            for part, head, allowed in zip(self._contract.discrete, heads, self._allowed, strict=True):
                masked.append(np.where(allowed, head, np.float32(MASKED)))
                self._check(part.name, bool((masked[-1].max(-1) > MASKED / 2).all()))
            limited["logits"] = tuple(masked) if isinstance(logits, tuple) else masked[0]
        return limited

    def played(self, action: np.ndarray) -> np.ndarray:
        """The action that is played, and so recorded: that of the limited policy, ``[..., H + D]``, with the numbers
        that are forced."""
        if not self._numbers:
            return action
        whole = np.tile(self._columns, (*action.shape[:-1], 1))
        whole[..., self._own] = action
        return whole

    def replied(self, named: dict[str, Any]) -> dict[str, Any]:
        """A reply with the very numbers that are forced.

        The float32 numbers of the policy's scale do not hold them all: bounds of 0 and 1 take 0.1 to 0.09999999.
        """
        if not self._numbers:
            return named
        return named | {name: np.broadcast_to(forced, np.shape(named[name])) for name, forced in self._numbers.items()}

    def _choices(self, part: ActionPart) -> np.ndarray:
        """uint8 ``[size]``: 1 for a choice that is allowed."""
        allowed = np.ones(part.size, np.uint8)
        if part.name in self.forced:
            allowed[:] = 0
            allowed[self.forced[part.name]] = 1
        else:
            allowed[list(self.forbidden.get(part.name, ()))] = 0
        if not allowed.any():
            limit = self._named(f"forbidden.{part.name}")
            raise BadLimits(f"{limit} leaves no choice, expected at least one", field=limit)
        return allowed

    def _check(self, name: str, is_left: bool) -> None:
        """Refuses limits of an action that leave no choice of those in the mask."""
        if not is_left:
            limit = self._named(f"{'forced' if name in self.forced else 'forbidden'}.{name}")
            raise BadLimits(f"{limit} and mask leave no choice, expected at least one", field=limit)

    def _named(self, limit: str) -> str:
        """The name of a limit for errors: of one that the job has set, its option."""
        return self._options.get(limit, limit)
