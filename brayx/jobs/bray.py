"""The options of Bray that a job may have, as tables; `brayx.jobs.translation` applies them.

Bray is github.com/onlyrobot/bray; `docs/from-bray.md` has the whole map.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

DEFAULT = object()
"""Value in `Same.values`: the option keeps its default."""


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
        "override_model": "`brayx train --new` begins anew",
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
        "episode_save_interval": "a `kind: recording` component keeps games: `recording.every`, and `recording.frames` "
        "with the name of a `kind: render` that draws them",
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
