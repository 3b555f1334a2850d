"""Declares every metric with its name, unit and kind; the labels that split one; and how its numbers are written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Literal, NamedTuple

from brayx.errors import ConfigError
from brayx.names import escape_of, shortened


class Kind(StrEnum):
    """How samples of a metric combine."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    LAST = "last"
    PERCENTILE = "percentile"
    """Percentiles of values above zero: ``.p50`` and ``.p99``."""
    HISTOGRAM = "histogram"
    """Distribution of any values: `QUANTILES`, ``.mean``, ``.min`` and ``.max``; `Recorder.histograms` has the bars."""
    SHAPE = "shape"
    """The newest distribution as `Bars`, see `Recorder.add_shapes`; it has no numbers. Only of brayx's own metrics."""


class Bars(NamedTuple):
    """A distribution.

    Attributes:
        edges: ``[n + 1]``, ascending.
        counts: ``[n]``: samples between two edges.
    """

    edges: tuple[float, ...]
    counts: tuple[float, ...]

    @property
    def middles(self) -> list[float]:
        """``[n]``: the middle between each two edges."""
        return [(low + high) / 2 for low, high in pairwise(self.edges)]


@dataclass(frozen=True)
class Metric:
    """The declaration of a metric."""

    name: str
    unit: str
    kind: Kind
    help: str


XAxis = Literal["env_steps", "updates", "seconds"]
"""X axis of metrics: transitions that reached replay, learner batches learned from, or time."""

QUANTILES: Mapping[str, float] = {"p05": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95}
"""Quantiles of a `Kind.HISTOGRAM`, written in addition to its mean, minimum and maximum."""
WINDOWED = ("episode_return", "episode_length")
"""Metrics with a second mean over the last games, ``NAME.last100``; their samples are kept one by one."""
WINDOW_GAMES = 100
"""Maximum number of those games."""
BEST_METRIC = "episode_return"
"""Name of a checkpoint's mean return."""
GAMES_OF_BEST = "games"
"""Name of the number of games in that mean."""
ERROR_OF_BEST = "error"
"""Name of the standard error of that mean."""
STEPS_OF_CHECKPOINT = "env_steps"
"""Name of the env steps that had been played when a checkpoint was saved."""

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("ticks", "ticks", Kind.SUM, "ticks answered"),
        Metric("tick_seconds", "s", Kind.PERCENTILE, "from the request at the replica to its reply"),
        Metric("tick_wait_seconds", "s", Kind.PERCENTILE, "until the session takes the request, of one tick in eight"),
        Metric("sessions_started", "sessions", Kind.SUM, "sessions started by their clients; not those resumed"),
        Metric(
            "sessions_ended", "sessions", Kind.SUM, "sessions ended, by reason; moved: continues at another replica"
        ),
        Metric("sessions_active", "sessions", Kind.LAST, "sessions running now"),
        Metric("sessions_resumed", "sessions", Kind.SUM, "sessions taken over from another replica's snapshot"),
        Metric("snapshots_failed", "snapshots", Kind.SUM, "snapshots of sessions that could not be taken or kept"),
        Metric("ticks_forwarded", "ticks", Kind.SUM, "requests that the owner's replica answered for another"),
        Metric("forwarded_seconds", "s", Kind.PERCENTILE, "time from forwarding a request to its reply"),
        Metric("ticks_fallen_back", "ticks", Kind.SUM, "ticks past their deadline, answered by the fallback, by which"),
        Metric("ticks_skipped", "ticks", Kind.SUM, "of these, ticks that an agent too far behind skipped"),
        Metric("ticks_repeated", "ticks", Kind.SUM, "numbered ticks that came again and got the kept reply"),
        Metric("requests_refused", "requests", Kind.SUM, "requests answered with a typed error, by its code"),
        Metric("episode_return", "reward", Kind.MEAN, "undiscounted return of a finished game"),
        Metric("episode_length", "ticks", Kind.MEAN, "ticks of a finished game"),
        Metric("games_failed", "games", Kind.SUM, "games that an error ended or left without a return, by its place"),
        Metric("games_without_return", "games", Kind.SUM, "games that stopped without a recorded return"),
        Metric("gamecores_failed", "processes", Kind.SUM, "game processes of the job that ended in failure"),
        Metric("recordings", "sessions", Kind.SUM, "recorded sessions, by reason"),
        Metric("recording_lost", "ticks", Kind.SUM, "ticks that could not be recorded, by reason"),
        Metric("recording_frames_lost", "frames", Kind.SUM, "frames that their ticks lack, by reason"),
        Metric("arm_sessions", "sessions", Kind.SUM, "sessions begun, by model, arm and version"),
        Metric("arm_ticks", "ticks", Kind.SUM, "ticks answered, by model, arm and version"),
        Metric("arm_seconds", "s", Kind.PERCENTILE, "time of a tick, one in eight, by model, arm and version"),
        Metric("arm_return", "reward", Kind.MEAN, "return of a finished game, by model, arm and version"),
        Metric("arm_return_squared", "reward^2", Kind.SUM, "its square, from which its standard error follows"),
        Metric("arm_refusals", "forwards", Kind.SUM, "forwards answered with a typed error, by model, arm and version"),
        Metric("arm_errors", "sessions", Kind.SUM, "sessions that an error ended, by model, arm and version"),
        Metric("forward_batch_size", "observations", Kind.MEAN, "observations in one engine call"),
        Metric("forward_seconds", "s", Kind.PERCENTILE, "one engine call"),
        Metric("forward_wait_seconds", "s", Kind.PERCENTILE, "time a forward waited for its batch at the engine"),
        Metric("model_call_size", "observations", Kind.MEAN, "observations in one call to a model deployment"),
        Metric("model_call_seconds", "s", Kind.PERCENTILE, "one call to a model deployment, with its queue there"),
        Metric("model_call_wait_seconds", "s", Kind.PERCENTILE, "time a forward waited for its call to a deployment"),
        Metric("fragments_pushed", "fragments", Kind.SUM, "fragments that reached the replay buffer"),
        Metric("agent_errors", "errors", Kind.SUM, "exceptions raised in hooks of agents, by hook"),
        Metric("fragments_dropped", "fragments", Kind.SUM, "fragments that errors or load took, by reason"),
        Metric("env_steps", "steps", Kind.SUM, "transitions that reached the replay buffer"),
        Metric("replay_dropped", "transitions", Kind.SUM, "transitions dropped in the buffer or before it, by reason"),
        Metric("eval_dropped", "transitions", Kind.SUM, "transitions that evaluation buffers dropped, by reason"),
        Metric("replay_reused", "batches", Kind.SUM, "batches the learner got again because there was no other"),
        Metric("replay_restarts", "shards", Kind.SUM, "buffer shards that died and restarted empty"),
        Metric("replay_batches", "batches", Kind.LAST, "learner batches waiting in the buffer"),
        Metric("rollout_wait_seconds", "s", Kind.PERCENTILE, "a rollout worker's wait before a fragment"),
        Metric(
            "rollout_waits_overdue", "waits", Kind.SUM, "waits of rollout workers for weights or room that timed out"
        ),
        Metric("rollout_workers", "workers", Kind.LAST, "target number of rollout workers, by component"),
        Metric("rollout_workers_lost", "workers", Kind.SUM, "rollout workers that ended unexpectedly, by reason"),
        Metric(
            "rollout_steps_lost", "transitions", Kind.SUM, "transitions lost with rollout workers, at most, by reason"
        ),
        Metric("learner_wait_fraction", "1", Kind.MEAN, "share of an update's time spent waiting for its batch"),
        Metric("learner_idle_fraction", "1", Kind.MEAN, "share of the time without learning while a batch was ready"),
        Metric("evaluate_seconds", "s", Kind.PERCENTILE, "one evaluation of the model that learns"),
        Metric("ranks_failed", "ranks", Kind.SUM, "ranks of the learner that died or raised"),
        Metric("update_seconds", "s", Kind.PERCENTILE, "one learner batch, all its epochs"),
        Metric("updates", "batches", Kind.SUM, "learner batches learned from"),
        Metric("seconds", "s", Kind.MAX, "time in the learner's loop, without starts and interruptions"),
        Metric("policy_version", "versions", Kind.LAST, "newest published weights"),
        Metric("acting_version", "versions", Kind.LAST, "weights that a replica acts with, by model"),
        Metric("lag_versions", "versions", Kind.MEAN, "policy versions published between acting and learning"),
        Metric("loss", "1", Kind.MEAN, "total loss"),
        Metric("policy_loss", "1", Kind.MEAN, "surrogate loss"),
        Metric("value_loss", "1", Kind.MEAN, "half the squared error of the value"),
        Metric("entropy", "nats", Kind.MEAN, "entropy of the policy"),
        Metric("approx_kl", "nats", Kind.MEAN, "how far an update moves the policy: k3 estimate of the KL divergence"),
        Metric("clip_fraction", "1", Kind.MEAN, "share of ratios outside the clip range"),
        Metric("explained_variance", "1", Kind.MEAN, "1 - Var(target - value) / Var(target)"),
        Metric("epochs", "1", Kind.MEAN, "passes over a learner batch"),
        Metric("grad_norm", "1", Kind.MEAN, "gradient norm before clipping"),
        Metric("checkpoints_failed", "checkpoints", Kind.SUM, "checkpoints that could not be saved in their turn"),
        Metric("metrics_dropped", "samples", Kind.SUM, "samples dropped because there were too many metric names"),
        Metric("labels_folded", "samples", Kind.SUM, "samples put under `other`: their metric had too many labels"),
        Metric("actions", "1", Kind.SHAPE, "actions of a learner batch, by their component"),
        Metric("advantages", "1", Kind.SHAPE, "advantages of a learner batch, before they are normalised"),
        Metric("weights", "1", Kind.SHAPE, "weights of the model that learns, by parameter"),
        Metric("learning_rate", "1", Kind.LAST, "of the last optimiser step"),
        Metric("league_games", "games", Kind.SUM, "games of a league that have ended, by outcome"),
        Metric("league_games_per_s", "games/s", Kind.MEAN, "rate of these games"),
        Metric("league_points", "points", Kind.LAST, "rating of a league's player or script, by name"),
        Metric("league_win_rate", "1", Kind.MEAN, "games that self-play's learner wins, a draw as a half, by opponent"),
        Metric(
            "self_play_without_results",
            "processes",
            Kind.SUM,
            "processes in which no game of teams counts",
        ),
        Metric("self_play_teams", "1", Kind.LAST, "1 for each team that games on a cluster have named, by team"),
        Metric("league_pool", "snapshots", Kind.LAST, "snapshots of a league that can be drawn"),
        Metric("league_champion", "versions", Kind.LAST, "registered version of a league's champion"),
    )
}


OVERLOADED = "overloaded"
"""Label of ``games_failed`` and ``fragments_dropped``: a model was full or late. That shows load, and is no error."""
DROPPED = "metrics_dropped"
"""Counts samples of names past a bound."""
FOLDED = "labels_folded"
"""Counts samples of labels past a bound."""
OTHER = "other"
"""The label of samples whose own label had no room."""
MAX_LABELS = 64
"""Labels that a metric may have; further ones are `OTHER`."""
MAX_NOTE = 500
"""Longest note kept, in characters; the rest is cut."""

_MAX_WORD = 64
_name_of_label, _value_of_label = escape_of(r"[^\w-]"), escape_of(r"[^\w. -]")


def label_of(labels: Mapping[str, object]) -> str:
    """Joins several labels into the one label of a sample: ``{"side": "left", "hero": 3}`` is ``hero:3.side:left``.

    The labels are sorted by name, so their order does not matter. Characters other than letters, digits, ``-`` and
    ``_`` are escaped (``_u0025_`` is a per cent sign), so different labels stay different; values may also have ``.``
    and spaces.
    """
    return ".".join(
        f"{shortened(_name_of_label(name), _MAX_WORD)}:{shortened(_value_of_label(str(value)), _MAX_WORD)}"
        for name, value in sorted(labels.items())
    )


def kind_of(kind: Kind | str) -> Kind:
    """The kind of that name.

    Raises:
        ConfigError: there is none.
    """
    kinds = [other for other in Kind if other is not Kind.SHAPE]
    if kind not in kinds:
        raise ConfigError(f"kind is {kind!r}, expected one of {', '.join(kinds)}", key="kind")
    return Kind(kind)


def significant(value: float, digits: int = 4) -> str:
    """A number with ``digits`` significant digits and never an exponent: ``0.8123``, ``21.5``, ``-1204``. Below 1e-12,
    sums differ by rounding only: it counts as 0."""
    if not math.isfinite(value):
        return f"{value:g}"
    if abs(value) < 1e-12:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


def games_text(count: float) -> str:
    """A number of games: ``1 game``, ``20 games``."""
    return f"{count:.0f} {'game' if count == 1 else 'games'}"
