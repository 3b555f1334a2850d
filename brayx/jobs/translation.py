"""Translates the options of Bray in a job's values, by the tables of `brayx.jobs.bray`, before they are validated.

An option that means the same is renamed; any other is refused, and the error says what to write instead. Knows nothing
of the options' effects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from brayx.algorithms.build import OURS
from brayx.jobs.bray import DEFAULT, MESSAGES, OPTIONS, OTHER_UNITS, Same
from brayx.jobs.document import Loc

Known = Mapping[str, AbstractSet[str]]
"""Names of our options by kind of component; "": at the top of the file."""
_REFUSED = object()


def translate(values: dict[str, Any], known: Known) -> Iterator[tuple[Loc, str]]:
    """Renames Bray's options in a job; yields the place and the error of each that it refuses.

    Args:
        values: values from the YAML file; changed in place.
        known: options that stay unchanged if the table refuses them.
    """
    for loc, kind, part in list(components(values, known)):
        if kind == "actor" and part.get("serialize", "proto") != "proto":
            for name in MESSAGES:
                part.pop(name, None)
        for name, option in OPTIONS.get(kind, {}).items():
            if name not in part:
                continue
            value = option if isinstance(option, str) else _value(option, part[name])
            if not isinstance(option, str) and value is not _REFUSED:
                del part[name]
                if (error := _put(part, option, value)) is not None:
                    yield (*loc, name), error
            elif name not in known[kind]:
                given = part.pop(name)
                here = f"is an option of Bray; here {option}"
                yield (
                    (*loc, name),
                    here if isinstance(option, str) else f"is {given!r}, which Bray does not take either",
                )


def unit_notes(values: Mapping[str, Any], known: Known) -> list[tuple[Loc, str]]:
    """The place and the meaning of each option that has another unit in Bray, if the job has options of Bray.

    Arguments as for `translate`, which must not have changed the values yet.
    """
    parts = list(components(values, known))
    if not any(name in part and name not in known[kind] for _, kind, part in parts for name in OPTIONS.get(kind, {})):
        return []
    return [
        ((*loc, name), what)
        for loc, kind, part in parts
        for name, what in OTHER_UNITS.get(kind, {}).items()
        if name in part
    ]


def components(values: Mapping[str, Any], known: Known) -> Iterator[tuple[Loc, str, Any]]:
    """Place, kind and values of the top of a job, then of each component whose kind exists."""
    yield (), "", values
    for name, part in values.items():
        kind = part.get("kind") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind and kind in known:
            yield (name,), kind, part


def _value(option: Same, given: Any) -> Any:
    """Our value for one of Bray's; `_REFUSED` if Bray's option does not have it."""
    unlisted = _REFUSED if option.only else given
    return unlisted if isinstance(given, list | dict) else option.values.get(given, unlisted)


def _put(part: dict[str, Any], option: Same, value: Any) -> str | None:
    """Sets our option in a component; returns the error, None if there is none."""
    if value is DEFAULT:
        return None
    *parents, last = option.path.split(".")
    target: Any = part
    for key in parents:
        target = target.setdefault(key, {})
        # For an algorithm with another one inside, the option is the inner one's.
        if isinstance(target, dict) and any(each.inner and each.name == target.get("name") for each in OURS):
            target = target.setdefault("reinforcement", {})
    if not isinstance(target, dict):
        return f"is here {option.path}: write `{parents[-1]}` as {{name: ..., {last}: ...}}, it is {target!r}"
    if last in target:
        return f"is Bray's name of {option.path}, which is given too"
    target[last] = value
    return None
