"""Options of a job that earlier versions had. Recorded jobs and older files may still name them.

A trial records its job with every option, so an option at its former default is removed without a word. Any other value
is refused, and the error says what to write instead; but a recorded job cannot be changed, so it is only refused for an
option that decides how the model acts or learns.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from brayx.algorithms.build import OURS
from brayx.jobs.bray import GAMES_KEPT, Known, components
from brayx.jobs.document import Loc, short


class Former(NamedTuple):
    """A former option.

    Attributes:
        default: the value that has no effect.
        instead: what to write instead of another one.
        learning: whether it decides how a model acts or learns.
    """

    default: Any
    instead: str
    learning: bool = False


_HOUR = "failures count for an hour; `max_failures` says how many are too many"
_TRACE = "V-trace is the paper's; `clip_rho` and `clip_pg_rho` bound its weights, and a module of your own may do more"

FORMER: dict[str, dict[str, Former]] = {
    "model": {"buckets": Former([], "a negative `max_batch_size` pads every call to that size")},
    "buffer": {
        "max_pending": Former(1024, "a process queues 1,024 fragments; `size` says how many the buffer keeps"),
        "error_buffer": Former(None, "the deviation is twice the least that cannot deadlock"),
    },
    "rollout": {
        "scale_actions": Former(
            True, "for a policy that acts in the environment's own units, wrap the environment", learning=True
        ),
        "failure_window_s": Former(3600.0, _HOUR),
    },
    "actor": {
        "episode_save_interval": Former(None, GAMES_KEPT),
        "max_connections": Former(8192, "a port takes 8,192 connections; `actors_per_worker` limits the sessions"),
        "key_window_s": Former(300.0, "a signed request's time may be off by 300 s: set the clocks"),
    },
    "render": {"video": Former("gif", "it draws the frames of recordings, which are kept as videos")},
    "trainer": {
        "failure_window_s": Former(3600.0, _HOUR),
        "algorithm.clip_c": Former(1.0, _TRACE, learning=True),
        "algorithm.vtrace_lambda": Former(1.0, _TRACE, learning=True),
        "algorithm.reinforcement.clip_c": Former(1.0, _TRACE, learning=True),
        "algorithm.reinforcement.vtrace_lambda": Former(1.0, _TRACE, learning=True),
    },
    "league": {
        "recency": Former(0.99, "each further game of a pair weighs its earlier ones by 0.99"),
        "players.*.snapshot_min_steps": Former(50_000, "it is a quarter of `snapshot_every`"),
    },
}
"""Former options by kind of component and dotted path; ``*`` stands for any key."""


def remove_former(values: Mapping[str, Any], known: Known) -> Iterator[tuple[Loc, str]]:
    """Removes former options from a job; yields the place and the error of each that had another value.

    Args:
        values: values from the YAML file; changed in place.
        known: options by kind of component.
    """
    for loc, options, name, former in _named(values, known):
        value = options.pop(name)
        if value != former.default:
            yield (
                loc,
                f"is {short(value)}, but this version has no such option (it was {short(former.default)} by "
                f"default): {former.instead}",
            )


def forget_former(values: Mapping[str, Any], known: Known) -> None:
    """Removes the former options of a recorded job that do not decide how its model acts or learns, at any value.

    Args:
        values: values of the job; changed in place.
        known: options by kind of component.
    """
    for _, options, name, former in _named(values, known):
        if not former.learning:
            del options[name]


def options_without_former(options: Mapping[str, Any], algorithm: str) -> tuple[dict[str, Any], list[str]]:
    """The options of a `brayx.Trainer` without former ones, and an error for each of these that had another value.

    Args:
        options: options by name, of the training and of its algorithm.
        algorithm: name of the algorithm, or its module.
    """
    module = {} if any(config.name == algorithm for config in OURS) else {"module": algorithm}
    played = {name: value for name, value in options.items() if name in FORMER["rollout"]}
    learned = copy.deepcopy({name: value for name, value in options.items() if name not in played}) | module
    parts = {"rollout": {"kind": "rollout", **played}, "trainer": {"kind": "trainer", "algorithm": learned}}
    errors = [f"{loc[-1]} {error}" for loc, error in remove_former(parts, dict.fromkeys(parts, frozenset()))]
    return {name: value for name, value in learned.items() if name not in module}, errors


def _named(values: Mapping[str, Any], known: Known) -> Iterator[tuple[Loc, dict[str, Any], str, Former]]:
    """The former options that a job names: the place, the mapping that has it, its name there, and the option."""
    for loc, kind, component in list(components(values, known)):
        for path, former in FORMER.get(kind, {}).items():
            *parents, name = path.split(".")
            for place, options in _reached(component, parents):
                # An algorithm of the user's may have an option of this name.
                if name in options and (options.get("module") is None or "algorithm" not in place):
                    yield (*loc, *place, name), options, name, former


def _reached(options: Any, parents: list[str]) -> Iterator[tuple[Loc, dict[str, Any]]]:
    """The mappings at a path of keys, with their places."""
    if not isinstance(options, dict):
        return
    if not parents:
        yield (), options
        return
    first, *rest = parents
    for key in list(options) if first == "*" else [first]:
        for place, reached in _reached(options.get(key), rest):
            yield (key, *place), reached
