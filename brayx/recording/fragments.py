"""Converts recorded sessions to fragments: where each field of a step comes from, and where sessions are cut.

A field comes from an array that the agents set, or from the JSON of bodies: ``input/KEY`` of the game's, ``output/KEY``
of the reply. A tick's body has the result of the previous action, so a reward is read one tick later. The last reward
is in the body of the stop, and so is ``terminated``. Knows nothing of buffers or models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from brayx.errors import BadRecording
from brayx.recording.columns import NOT_APPLIED, TickColumns, texts
from brayx.recording.gather import AS_FRAMES
from brayx.replay.steps import BLOCK_ROWS
from brayx.types import Fragment, unflatten

if TYPE_CHECKING:
    from brayx.recording.reader import Recording

INPUT, OUTPUT = "input/", "output/"
_STANDARD = ("obs", "action", "reward", "terminated", "log_prob", "policy_version")


@dataclass(frozen=True)
class Fields:
    """Where the fields of a step come from: an array's name, ``input/KEY`` or ``output/KEY``.

    Attributes:
        obs: origins of the observation's leaves, by path: ``obs`` or ``obs/...``.
        action: origin of the action.
        reward: origin of the reward; empty: there is none, and it counts as 0.
        terminated: key in the stop's body.
        log_prob, policy_version: their origins; empty: there is none, and it counts as 0.
        extras: origins of the other fields, by name.
    """

    obs: dict[str, str]
    action: str
    reward: str
    terminated: str
    log_prob: str
    policy_version: str
    extras: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Names of the fields that have an origin."""
        has = {"reward": self.reward, "log_prob": self.log_prob, "policy_version": self.policy_version}
        return [*self.obs, "action", "terminated", *(name for name, origin in has.items() if origin), *self.extras]

    @property
    def arrays(self) -> list[str]:
        """Names of the arrays to read."""
        origins = (*self.obs.values(), self.action, self.reward, self.log_prob, self.policy_version)
        every = dict.fromkeys((*origins, *self.extras.values()))
        return [origin for origin in every if origin and not origin.startswith((INPUT, OUTPUT))]

    @property
    def obs_is_input(self) -> bool:
        """Whether all observations come from the input. Then the stop's body may have the last one."""
        return all(origin.startswith(INPUT) for origin in self.obs.values())


def fields_of(episode: Recording, named: Mapping[str, str]) -> Fields:
    """Where the fields of a step come from in an episode, and in others like it.

    By default each field comes from the array of its name. If there is no array ``reward``, the reward is the inputs'
    key ``reward``. The recurrent state ``state/...`` becomes extras; other arrays do so only if they are named.

    Args:
        episode: the episode.
        named: origins by the field's name, where they differ from the default.

    Raises:
        BadRecording: there is no observation or no action.
    """
    has = episode.some_columns
    obs = {name: name for name in has if name == "obs" or name.startswith("obs/")}
    observed = {name: origin for name, origin in named.items() if name == "obs" or name.startswith("obs/")}
    framed = [name for name, why in episode.left_out.items() if why == AS_FRAMES and name.partition("/")[0] == "obs"]
    if framed and not observed:
        raise BadRecording(
            f"session {episode.session!r} has {framed[0]!r} only as frames, which are not exact: record it without the "
            "option `frames`, or name other arrays of the observation in `fields`",
            column=framed[0],
        )
    obs = observed or obs
    action = named.get("action", "action" if "action" in has else "")
    for name, mapped in (("obs", obs), ("action", action)):
        if not mapped:
            raise BadRecording(
                f"session {episode.session!r} has no {name}; it has the arrays {', '.join(has) or 'none'}. The option "
                f"`fields` names another array, or a key of the game's bodies: {{{name}: input/KEY}}",
                column=name,
            )
    reward = named.get("reward", "reward" if "reward" in has else "")
    if not reward and _has_reward(episode):
        reward = f"{INPUT}reward"
    # The recorded probability is that of the agent's own action.
    log_prob = named.get("log_prob", "log_prob" if "log_prob" in has and action == "action" else "")
    extras = {name: name for name in has if name.startswith("state/")}
    extras |= {name: origin for name, origin in named.items() if name not in _STANDARD and name not in observed}
    version = named.get("policy_version", "policy_version" if "policy_version" in has else "")
    return Fields(obs, action, reward, named.get("terminated", f"{INPUT}terminated"), log_prob, version, extras)


def fragments(episode: Recording, fields: Fields, most: int | None = BLOCK_ROWS) -> Iterator[Fragment]:
    """The fragments of an episode.

    An episode is cut where ticks are missing and where the client did not get the agent's action. A cut fragment is
    truncated. So is the end of a session that was not terminated; its last action is left out unless the observation
    after it is known. An action with unknown reward is left out, too.

    Args:
        episode: a recorded session.
        fields: where the fields come from.
        most: maximum transitions of a fragment; a longer one continues in the next. None: no limit.

    Raises:
        BadRecording: a file is broken, or a tick lacks a field.
    """
    spans = episode.spans(fields.arrays)
    if not spans:
        missing = sorted(set(fields.arrays).difference(episode.some_columns))
        why = f"has no array {missing[0]!r}" if missing else "has no tick with all arrays"
        raise BadRecording(f"session {episode.session!r} {why}", columns=fields.arrays)
    for first, end in spans:
        tick = first
        while tick < end:
            rows = episode.read(tick, end - tick if most is None else min(end - tick, most + 1), fields.arrays)
            run = _run_length(rows)
            if not run:
                tick += 1
                continue
            whole = run == len(rows.number)
            if whole and tick + run < end:  # too long for one fragment
                steps, is_end = run - 1, False
            else:
                last = whole and tick + run == len(episode)
                steps, is_end = _steps(episode, fields, rows, run, last), True
            if steps:
                yield _fragment(episode, fields, rows, steps, is_end)
            tick += run if is_end else steps


def _run_length(rows: TickColumns) -> int:
    """Number of leading ticks without a gap whose actions reached the game."""
    number, events = rows.number, rows.event
    for index, event in enumerate(events):
        if any(name in event for name in NOT_APPLIED):
            return index
        if index and ("skipped" in event or number[index] != number[index - 1] + 1):
            return index
    return len(events)


def _steps(episode: Recording, fields: Fields, rows: TickColumns, run: int, last: bool) -> int:
    """Number of transitions in the last ``run`` ticks of a fragment; ``last``: they also end the session."""
    stop = _document(rows.stop[run - 1]) if last else None
    if stop is None:
        return run - 1
    seen = fields.obs_is_input and all(_get(stop, origin) is not None for origin in fields.obs.values())
    rewarded = not fields.reward or (fields.reward.startswith(INPUT) and _get(stop, fields.reward) is not None)
    return run if rewarded and (seen or _get(stop, fields.terminated)) else run - 1


def _fragment(episode: Recording, fields: Fields, rows: TickColumns, steps: int, is_end: bool) -> Fragment:
    values = _Values(episode, rows, steps)
    terminated = is_end and steps == values.ticks and bool(_get(values.stop, fields.terminated))
    obs = {name: values.observed(origin) for name, origin in fields.obs.items()}
    number = np.zeros(steps, np.float32)
    return Fragment(
        obs=obs["obs"] if "obs" in obs else unflatten(obs, "obs"),
        action=values.at_ticks(fields.action)[:steps],
        reward=values.results(fields.reward).astype(np.float32) if fields.reward else number,
        terminated=terminated,
        truncated=is_end and not terminated,
        log_prob=values.at_ticks(fields.log_prob)[:steps].astype(np.float32) if fields.log_prob else number,
        policy_version=values.at_ticks(fields.policy_version)[:steps].astype(np.int64)
        if fields.policy_version
        else np.zeros(steps, np.int64),
        extras={name: values.at_ticks(origin)[:steps] for name, origin in fields.extras.items()},
    )


class _Values:
    """Values of the ticks of one fragment: its ``steps`` ticks, and the tick after them if there is one."""

    def __init__(self, episode: Recording, rows: TickColumns, steps: int) -> None:
        self._episode = episode
        self._rows = rows
        self.steps = steps
        self.ticks = min(steps + 1, len(rows.number))
        self.stop = _document(rows.stop[self.ticks - 1]) if self.ticks == steps else None
        self._documents: dict[str, list[Any]] = {}

    def at_ticks(self, origin: str) -> np.ndarray:
        """``[ticks, ...]``, the value at each tick."""
        if not origin.startswith((INPUT, OUTPUT)):
            return self._rows.arrays[origin][: self.ticks]
        return self._stacked([_get(document, origin) for document in self._parsed(origin)[: self.ticks]], origin)

    def observed(self, origin: str) -> np.ndarray:
        """``[steps + 1, ...]``; the last one may come from the stop's body, or repeat the one before."""
        array = self.at_ticks(origin)
        if self.ticks > self.steps:
            return array
        last = _get(self.stop, origin) if origin.startswith(INPUT) else None
        final = array[-1:] if last is None else self._stacked([last], origin).astype(array.dtype)
        if final.shape[1:] != array.shape[1:]:
            raise self._error(origin, "its value in the stop's body has another shape")
        return np.concatenate([array, final])

    def results(self, origin: str) -> np.ndarray:
        """``[steps]`` numbers, each read one tick later, where the result of an action is."""
        if not origin.startswith((INPUT, OUTPUT)):
            array = self._rows.arrays[origin][1 : self.steps + 1]
        else:
            documents = self._parsed(origin)[1 : self.steps + 1]
            documents = documents if self.ticks > self.steps else [*documents, self.stop]
            array = self._stacked([_get(document, origin) for document in documents], origin)
        if array.ndim != 1:
            raise self._error(origin, f"expected a number, got an array of shape {array.shape[1:]}")
        return array

    def _parsed(self, origin: str) -> list[Any]:
        name = origin.partition("/")[0]
        if name not in self._documents:
            self._documents[name] = [_document(body) for body in texts(getattr(self._rows, name))]
        return self._documents[name]

    def _stacked(self, values: Sequence[Any], origin: str) -> np.ndarray:
        try:
            array = np.array(values)
        except (ValueError, OverflowError):
            raise self._error(origin, "its shape varies") from None
        if array.dtype.kind not in "biuf":
            raise self._error(origin, "not every tick has it as numbers")
        return array.astype(np.float32) if array.dtype.kind == "f" else array

    def _error(self, origin: str, why: str) -> BadRecording:
        return BadRecording(f"session {self._episode.session!r}: {origin}: {why}", column=origin)


def _document(body: bytes) -> Any:
    """A body as JSON; None: it is not JSON."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _get(document: Any, origin: str) -> Any:
    """The value at the path ``input/KEY/KEY``; None: there is none."""
    for key in origin.split("/")[1:]:
        if not isinstance(document, dict):
            return None
        document = document.get(key)
    return document


def _has_reward(episode: Recording) -> bool:
    """Whether the inputs have a number ``reward``, which the first tick may lack."""
    rows = episode.read(0, 2, [])
    bodies = [*texts(rows.input)[1:], rows.stop[-1] if rows.stop else b""]
    return any(isinstance(_get(_document(body), f"{INPUT}reward"), int | float) for body in bodies)
