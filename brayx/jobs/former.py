"""Options of a job that earlier versions had. Recorded jobs and older files may still name them.

A trial records its job with every option, so an option at its former default is removed without a word. Any other value
is refused, and the error says what to write instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from brayx.jobs.bray import Known, components
from brayx.jobs.document import Loc, short


class Former(NamedTuple):
    """A former option.

    Attributes:
        default: the value that has no effect.
        instead: what to write instead of another one.
    """

    default: Any
    instead: str


_HOUR = "failures count for an hour; `max_failures` says how many are too many"
_TRACE = "V-trace is the paper's; `clip_rho` and `clip_pg_rho` bound its weights, and a module of your own may do more"

FORMER: dict[str, dict[str, Former]] = {
    "model": {"buckets": Former([], "a negative `max_batch_size` pads every call to that size")},
    "buffer": {
        "max_pending": Former(1024, "a process queues 1,024 fragments; `size` says how many the buffer keeps"),
        "error_buffer": Former(None, "the deviation is twice the least that cannot deadlock"),
    },
    "rollout": {
        "scale_actions": Former(True, "for a policy that acts in the environment's own units, wrap the environment"),
        "failure_window_s": Former(3600.0, _HOUR),
    },
    "actor": {
        "max_connections": Former(8192, "a port takes 8,192 connections; `actors_per_worker` limits the sessions"),
        "key_window_s": Former(300.0, "a signed request's time may be off by 300 s: set the clocks"),
    },
    "trainer": {
        "failure_window_s": Former(3600.0, _HOUR),
        "algorithm.clip_c": Former(1.0, _TRACE),
        "algorithm.vtrace_lambda": Former(1.0, _TRACE),
        "algorithm.reinforcement.clip_c": Former(1.0, _TRACE),
        "algorithm.reinforcement.vtrace_lambda": Former(1.0, _TRACE),
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
    for loc, kind, component in list(components(values, known)):
        for path, former in FORMER.get(kind, {}).items():
            *parents, name = path.split(".")
            for place, options in _reached(component, parents):
                # An algorithm of the user's may have an option of this name.
                if name not in options or (options.get("module") is not None and "algorithm" in place):
                    continue
                value = options.pop(name)
                if value != former.default:
                    yield (
                        (*loc, *place, name),
                        f"is {short(value)}, but this version has no such option (it was {short(former.default)} by "
                        f"default): {former.instead}",
                    )


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
