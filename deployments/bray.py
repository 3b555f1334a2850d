"""Options that users of Bray write: taken where they mean the same, refused with the name that is right here otherwise.

Bray is github.com/onlyrobot/bray; `docs/from-bray.md` has the whole map. Works on a component's values before they are
validated. Knows nothing of what the options do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from brayx.algorithms.build import OURS


@dataclass(frozen=True)
class Same:
    """An option that is here under another name, or whose values are written otherwise.

    Attributes:
        path: where it goes in the component.
        value: from Bray's value to the one here; raises KeyError or TypeError for what Bray does not take either.
            Gives `DEFAULT` to leave the option at its default here.
    """

    path: tuple[str, ...]
    value: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Instead:
    """An option that means something that is done otherwise here.

    Attributes:
        how: what to write, for the error.
    """

    how: str


DEFAULT = object()
"""From a `Same.value`: the option is not set."""


def _null_is_default(value: Any) -> Any:
    return DEFAULT if value is None else value


def _one_of(**values: Any) -> Callable[[Any], Any]:
    return lambda value: values[str(value).lower() if isinstance(value, bool) or value is None else value]


_ONLY_TRAINING = Same(("kind",), lambda value: {"train": DEFAULT, True: DEFAULT, None: DEFAULT}[value])
_OWN_ACTOR = "an actor is made of `agents`; one of your own class is served as deployments/echo.py serves its"
_ENABLE = "components are used where they are needed: actors to train and to serve, the others to train"

OPTIONS: dict[str, dict[str, Same | Instead]] = {
    "": {
        "dump_state": Instead("games are kept by a `kind: render` component and `actor.episode_save_interval`"),
    },
    "model": {
        "use_onnx": Same(("engine",), _one_of(none="torch", train="onnx", infer="onnx-frozen", quantize="int8")),
        "num_workers": Same(("num_workers",), lambda value: DEFAULT if value == 0 else value),
        "local_mode": Same(("placement",), _one_of(true="local", false="remote")),
        "checkpoint_interval": Instead(
            "`trainer.checkpoint_interval_s`, in seconds, or `trainer.checkpoint_interval`, in updates"
        ),
        "checkpoint": Instead(
            "a trial of the same name is resumed from its newest checkpoint; to serve, the pool's champion is taken"
        ),
        "override_model": Instead("`brayx train --new` begins anew"),
        "tensorboard_graph": Instead("`mlflow ui` shows trials, `brayx export` makes the ONNX file for a viewer"),
        "tensorboard_step": Instead("`trainer.x_axis`"),
    },
    "buffer": {
        "sources": Instead("each source names its buffer: `source.buffer`"),
        "enable": _ONLY_TRAINING,
    },
    "source": {
        "epoch": Same(("epochs",)),
        "num_workers": Same(("num_workers",), _null_is_default),
        "enable": _ONLY_TRAINING,
    },
    "agent": {},
    "actor": {
        "use_tcp": Instead("every actor answers HTTP, WebSocket and TCP: `tcp_port` is the TCP one"),
        "use_gateway": Instead("any replica takes any session's request and passes it on: nothing to choose"),
        "module": Instead(_OWN_ACTOR),
        "class": Instead(_OWN_ACTOR),
        "enable": Instead(_ENABLE),
    },
    "render": {},
    "trainer": {
        "enable": _ONLY_TRAINING,
        "use_gpu": Same(("use_gpu",), _null_is_default),
        "num_workers": Same(("num_workers",), _null_is_default),
        "cpus_per_worker": Same(("cpus_per_worker",), _null_is_default),
        "learning_rate": Same(("learning_rate",), lambda value: 5e-4 if value is None else value),
        "clip_grad_max_norm": Same(("algorithm", "max_grad_norm")),
        "batch_size": Instead("a learner batch is the buffer's: `buffer.batch_size` columns of `buffer.unroll_length`"),
        "buffer_weights": Same(("weights",)),
        "prefetch_size": Same(("prefetch",)),
        "max_reuse": Instead("`buffer.max_reuse`"),
        "eval": Instead("`trainer.eval_buffers`, `trainer.eval_interval` and `trainer.eval_batches`"),
        "module": Instead("`trainer.algorithm` names what learns, or your own `module`; `trainer.hooks` adds to it"),
        "class": Instead("`trainer.algorithm` names what learns, or your own `module`; `trainer.hooks` adds to it"),
        "optimizer_step_interval": Instead("`trainer.algorithm` splits a large minibatch itself: `accumulate`"),
        "batch_kind": Instead("columns of fragments are stacked by the buffer; nothing to choose"),
    },
}
"""By kind of component ("": the top of the file) and Bray's name, which may be a name here too."""


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
"""By kind and name, here and in Bray: numbers that mean something else here, for who writes Bray's other options."""
_MESSAGES = ("tick_input_proto", "tick_output_proto")


def otherwise(kind: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """``(key, what it means)`` for each option of a component that Bray takes for something else."""
    yield from ((name, what) for name, what in OTHERWISE.get(kind, {}).items() if name in values)


def of_bray(kind: str, values: Mapping[str, Any], known: set[str]) -> bool:
    """Whether a component has options that only Bray has; arguments as of `translate`."""
    return any(name in values and name not in known for name in OPTIONS.get(kind, {}))


def _gradients_of(algorithm: Any) -> Any:
    """Where an algorithm has the options of its gradients: perhaps in those of an algorithm inside it."""
    if isinstance(algorithm, dict) and any(each.inner and each.name == algorithm.get("name") for each in OURS):
        return algorithm.setdefault("reinforcement", {})
    return algorithm


def translate(kind: str, values: dict[str, Any], known: set[str]) -> Iterator[tuple[str, str]]:
    """Renames Bray's options in ``values``; gives ``(key, what is wrong)`` for each that cannot be taken.

    Args:
        kind: of the component; "": the top of the file.
        values: as the YAML has them; changed in place.
        known: names of the options that the kind has here.
    """
    if kind == "actor" and values.get("serialize", "proto") != "proto":
        for name in _MESSAGES:  # Bray's own files have them beside any format
            values.pop(name, None)
    for name, option in OPTIONS.get(kind, {}).items():
        if name not in values:
            continue
        if isinstance(option, Instead):
            if name not in known:
                del values[name]
                yield name, f"is an option of Bray; here {option.how}"
            continue
        try:
            value = option.value(values[name])
        except (KeyError, TypeError):
            if name not in known:
                yield name, f"is {values.pop(name)!r}, which Bray has no meaning for either"
            continue
        path = ".".join(option.path)
        del values[name]
        if value is DEFAULT:
            continue
        *parents, last = option.path
        target: Any = values
        for parent in parents:
            target = target.setdefault(parent, {})
            target = _gradients_of(target) if parent == "algorithm" else target
        if not isinstance(target, dict):
            yield name, f"is here {path}: write `{parents[-1]}` as {{name: ..., {last}: ...}}, it is {target!r}"
        elif last in target:
            yield name, f"is Bray's name of {path}, which is given too"
        else:
            target[last] = value
