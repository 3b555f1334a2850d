"""The options of Bray that a job may have, as tables, and their translation before the job is validated.

An option that means the same is renamed; any other is refused, and the error says what to write instead. Knows nothing
of the options' effects. Bray is github.com/onlyrobot/bray; `docs/from-bray.md` has the whole map.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from brayx.algorithms.build import OURS
from brayx.jobs.document import Loc

Known = Mapping[str, AbstractSet[str]]
"""Names of our options by kind of component; "": at the top of the file."""
DEFAULT = object()
"""Value in `Same.values`: the option keeps its default."""
_REFUSED = object()


class Same(NamedTuple):
    """An option of Bray that has another name here, or other values.

    Attributes:
        path: dotted path of our option in the component.
        values: our values by Bray's, where they differ.
        only: the only values that Bray's option has.
    """

    path: str
    values: Mapping[Any, Any] = {}
    only: bool = False


_ONLY_TRAINING = Same("kind", {"train": DEFAULT, True: DEFAULT, None: DEFAULT}, only=True)
_OWN_ACTOR = "an actor is made of `agents`; one of your own class is served as deployments/echo.py serves its"
_ENABLE = "components are used where they are needed: actors to train and to serve, the others to train"

GAMES_KEPT = (
    "a `kind: recording` component keeps games: `recording.every`, and `recording.frames` with the name of a "
    "`kind: render` that draws them"
)

OPTIONS: dict[str, dict[str, Same | str]] = {
    "": {
        "dump_state": "games are kept by a `kind: recording` component",
    },
    "model": {
        "use_onnx": Same(
            "engine", {None: "torch", "train": "onnx", "infer": "onnx-frozen", "quantize": "int8"}, only=True
        ),
        "num_workers": Same("num_workers", {0: DEFAULT}),
        "local_mode": Same("placement", {True: "local", False: "remote"}, only=True),
        "checkpoint_interval": "`trainer.checkpoint_interval_s` (seconds) or `trainer.checkpoint_interval` (updates)",
        "checkpoint": "a trial of the same name resumes from its newest checkpoint; serving takes the pool's champion",
        "override_model": "`brayx train --new` starts a new trial",
        "tensorboard_graph": "`tracking.tensorboard: true` at the top of the file",
        "tensorboard_step": "`trainer.x_axis`",
    },
    "buffer": {
        "sources": "each source names its buffer: `source.buffer`",
        "enable": _ONLY_TRAINING,
    },
    "source": {
        "epoch": Same("epochs"),
        "num_workers": Same("num_workers", {None: DEFAULT}),
        "enable": _ONLY_TRAINING,
    },
    "agent": {},
    "actor": {
        "use_tcp": "every actor answers HTTP, WebSocket and TCP: `tcp_port` is the TCP one",
        "use_gateway": "any replica takes any session's request and passes it on: nothing to choose",
        "episode_save_interval": GAMES_KEPT,
        "module": _OWN_ACTOR,
        "class": _OWN_ACTOR,
        "enable": _ENABLE,
    },
    "render": {},
    "trainer": {
        "enable": _ONLY_TRAINING,
        "use_gpu": Same("use_gpu", {None: DEFAULT}),
        "num_workers": Same("num_workers", {None: DEFAULT}),
        "cpus_per_worker": Same("cpus_per_worker", {None: DEFAULT}),
        "learning_rate": Same("learning_rate", {None: 5e-4}),
        "clip_grad_max_norm": Same("algorithm.max_grad_norm"),
        "batch_size": "a learner batch is the buffer's: `buffer.batch_size` columns of `buffer.unroll_length`",
        "buffer_weights": Same("weights"),
        "prefetch_size": Same("prefetch"),
        "max_reuse": "`buffer.max_reuse`",
        "eval": "`trainer.eval_buffers`, `trainer.eval_interval` and `trainer.eval_batches`",
        "module": "`trainer.algorithm` names what learns, or your own `module`; `trainer.hooks` adds to it",
        "class": "`trainer.algorithm` names what learns, or your own `module`; `trainer.hooks` adds to it",
        "optimizer_step_interval": "`trainer.algorithm` splits a large minibatch itself: `accumulate`",
        "batch_kind": "columns of fragments are stacked by the buffer; nothing to choose",
    },
}
"""Our option, or advice what to write instead, by kind of component ("": the top of the file) and Bray's name."""

OTHER_UNITS: dict[str, dict[str, str]] = {
    "trainer": {
        "num_steps": "counts transitions here, and updates in Bray: write updates x `buffer.batch_size` x "
        "`buffer.unroll_length`",
    },
    "buffer": {
        "batch_size": "counts columns of `unroll_length` transitions here, and items in Bray: write as many items / "
        "`buffer.unroll_length`",
    },
}
"""Options that Bray has too, but with another unit, by kind and name."""

MESSAGES = ("tick_input_proto", "tick_output_proto")
"""Options of an actor that Bray's files may have next to any ``serialize``; only ``proto`` uses them."""


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
        if isinstance(target, dict) and any(option.inner and option.name == target.get("name") for option in OURS):
            target = target.setdefault("reinforcement", {})
    if not isinstance(target, dict):
        return f"is here {option.path}: write `{parents[-1]}` as {{name: ..., {last}: ...}}, it is {target!r}"
    if last in target:
        return f"is Bray's name of {option.path}, which is given too"
    target[last] = value
    return None
