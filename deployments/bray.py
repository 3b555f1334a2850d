"""Options of Bray in a job: renamed if they mean the same, otherwise refused with the right option.

Bray is github.com/onlyrobot/bray; `docs/from-bray.md` has the whole map. Works on a component's values before they are
validated. Knows nothing of the options' effects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from brayx.algorithms.build import OURS

DEFAULT = object()
"""As one of `Same.values`: the option keeps its default."""
_REFUSED = object()


class Same(NamedTuple):
    """An option of Bray that has another name here, or other values.

    Attributes:
        path: of our option in the component, dotted.
        values: our values by Bray's, where they differ.
        only: Bray's option has no values but these.
    """

    path: str
    values: Mapping[Any, Any] = {}
    only: bool = False

    def of(self, given: Any) -> Any:
        """Our value for one of Bray's; `_REFUSED` if Bray's option does not have it."""
        unlisted = _REFUSED if self.only else given
        return unlisted if isinstance(given, list | dict) else self.values.get(given, unlisted)


_ONLY_TRAINING = Same("kind", {"train": DEFAULT, True: DEFAULT, None: DEFAULT}, only=True)
_OWN_ACTOR = "an actor is made of `agents`; one of your own class is served as deployments/echo.py serves its"
_ENABLE = "components are used where they are needed: actors to train and to serve, the others to train"

OPTIONS: dict[str, dict[str, Same | str]] = {
    "": {
        "dump_state": "games are kept by a `kind: render` component and `actor.episode_save_interval`",
    },
    "model": {
        "use_onnx": Same(
            "engine", {None: "torch", "train": "onnx", "infer": "onnx-frozen", "quantize": "int8"}, only=True
        ),
        "num_workers": Same("num_workers", {0: DEFAULT}),
        "local_mode": Same("placement", {True: "local", False: "remote"}, only=True),
        "checkpoint_interval": "`trainer.checkpoint_interval_s` (seconds) or `trainer.checkpoint_interval` (updates)",
        "checkpoint": "a trial of the same name resumes from its newest checkpoint; serving takes the pool's champion",
        "override_model": "`brayx train --new` begins anew",
        "tensorboard_graph": "`mlflow ui` shows trials, `brayx export` makes the ONNX file for a viewer",
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
"""By kind of component ("": the top of the file) and Bray's name: our option, or what to write instead."""


OTHERWISE: dict[str, dict[str, str]] = {
    "trainer": {
        "num_steps": "counts transitions here, and updates in Bray: write updates x `buffer.batch_size` x "
        "`buffer.unroll_length`",
    },
    "buffer": {
        "batch_size": "counts columns of `unroll_length` transitions here, and items in Bray: write as many items / "
        "`buffer.unroll_length`",
    },
}
"""By kind and name: options of both Bray and brayx with numbers in different units."""
_MESSAGES = ("tick_input_proto", "tick_output_proto")


def otherwise(kind: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """``(key, meaning in brayx)`` for each option of a component that has another unit in Bray."""
    yield from ((name, what) for name, what in OTHERWISE.get(kind, {}).items() if name in values)


def of_bray(kind: str, values: Mapping[str, Any], known: set[str]) -> bool:
    """Whether a component has options that only Bray has; arguments as of `translate`."""
    return any(name in values and name not in known for name in OPTIONS.get(kind, {}))


def translate(kind: str, values: dict[str, Any], known: set[str]) -> Iterator[tuple[str, str]]:
    """Renames Bray's options in ``values``; yields ``(key, error)`` for each that it refuses.

    Args:
        kind: kind of the component; "": the top of the file.
        values: values from the YAML file; changed in place.
        known: names of the kind's own options, which stay unchanged if the table refuses them.
    """
    if kind == "actor" and values.get("serialize", "proto") != "proto":
        for name in _MESSAGES:  # Bray's files may name messages next to any format
            values.pop(name, None)
    for name, option in OPTIONS.get(kind, {}).items():
        if name not in values:
            continue
        given = values[name]
        value = option if isinstance(option, str) else option.of(given)
        if isinstance(option, str) or value is _REFUSED:
            if name not in known:
                del values[name]
                here = f"is an option of Bray; here {option}"
                yield name, here if isinstance(option, str) else f"is {given!r}, which Bray does not take either"
            continue
        del values[name]
        if value is DEFAULT:
            continue
        *parents, last = option.path.split(".")
        target = _part(values, parents)
        if not isinstance(target, dict):
            yield name, f"is here {option.path}: write `{parents[-1]}` as {{name: ..., {last}: ...}}, it is {target!r}"
        elif last in target:
            yield name, f"is Bray's name of {option.path}, which is given too"
        else:
            target[last] = value


def _part(values: dict[str, Any], path: list[str]) -> Any:
    """The values at a path; for an algorithm with another one inside, those of the inner one."""
    found: Any = values
    for key in path:
        found = found.setdefault(key, {})
        if isinstance(found, dict) and any(each.inner and each.name == found.get("name") for each in OURS):
            found = found.setdefault("reinforcement", {})
    return found
