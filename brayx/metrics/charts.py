"""The numbers of a trial that MLflow shows, and their names: at most forty that all jobs share, and what a job adds.

MLflow groups metrics by the part before the ``/``, and slows down past a hundred charts. So this module adds up the
labels of brayx's sums; the screen and a trial's `NUMBERS_FILE` have them one by one. What depends on the job is not
bounded here: means and last values have a chart for each label (brayx labels only ``rollout_workers``, by rollout),
metrics of the algorithm that are not in `CHARTS` are ``learner/NAME``, results of evaluation are ``eval/NAME``, and an
application's own metrics have a chart for each label. Knows nothing of recorders or writers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from brayx.metrics import METRICS, Kind
from brayx.metrics.totals import (
    FAILED_IN_WINDOW,
    FRAGMENTS_IN_WINDOW,
    GAMES,
    GAMES_IN_WINDOW,
    LOST_IN_WINDOW,
    OVERLOADED_IN_WINDOW,
    SECONDS,
)

CHARTS: Mapping[str, str] = {
    "episode_return.last100": "return/last_100_games",
    "episode_return": "return/mean",
    GAMES_IN_WINDOW: "return/window_games",
    GAMES: "session/games",
    "games_failed": "session/failed_games",
    "episode_length.last100": "session/game_length",
    "sessions_started": "session/started",
    "sessions_ended": "session/ended",
    "agent_errors": "session/agent_errors",
    "ticks": "tick/count",
    "ticks_per_s": "tick/per_s",
    "tick_seconds.p50": "tick/seconds_p50",
    "tick_seconds.p99": "tick/seconds_p99",
    "ticks_fallen_back": "tick/fallen_back",
    "requests_refused": "tick/refused",
    "forward_batch_size": "tick/forward_batch_size",
    "env_steps": "replay/env_steps",
    "env_steps_per_s": "replay/env_steps_per_s",
    "fragments_pushed": "replay/fragments",
    "fragments_dropped": "replay/fragments_lost",
    "replay_dropped": "replay/dropped",
    "replay_batches": "replay/batches",
    "rollout_workers": "rollout/workers",
    "rollout_workers_lost": "rollout/workers_lost",
    "updates": "learner/updates",
    SECONDS: "learner/seconds",
    "policy_version": "learner/policy_version",
    "lag_versions": "learner/lag_versions",
    "update_seconds.p50": "learner/update_seconds_p50",
    "learner_wait_fraction": "learner/wait_fraction",
    "loss": "learner/loss",
    "policy_loss": "learner/policy_loss",
    "value_loss": "learner/value_loss",
    "entropy": "learner/entropy",
    "approx_kl": "learner/approx_kl",
    "clip_fraction": "learner/clip_fraction",
    "explained_variance": "learner/explained_variance",
    "grad_norm": "learner/grad_norm",
    "learning_rate": "learner/learning_rate",
    "checkpoints_failed": "learner/checkpoints_failed",
}
"""MLflow's name of each number of `brayx.metrics.totals.Totals` that MLflow shows."""
LEAGUE_CHARTS: Mapping[str, str] = {
    "league_games": "league/games",
    "league_games_per_s": "league/games_per_s",
    "league_points": "league/points",
    "league_pool": "league/pool",
    "league_champion": "league/champion",
}
"""What a job with a league adds to `CHARTS`."""
SERVING_CHARTS: Mapping[str, str] = {
    "episode_return": CHARTS["episode_return"],
    GAMES: CHARTS[GAMES],
    "sessions": "session/sessions",
    "errors": "session/errors",
    "ticks": CHARTS["ticks"],
    "refusals": CHARTS["requests_refused"],
}
"""The same for the results of a served version, see `brayx.model.arms.Results`."""
RETURN_CHART = CHARTS["episode_return.last100"]
"""The curve that a trial is judged by."""
NUMBERS_FILE = "numbers.json"
"""Artifact with every number, by its own name and label, whether MLflow shows it or not; seconds old at most."""

_OWN = "game/"
_NOT_SHOWN = (FAILED_IN_WINDOW, FRAGMENTS_IN_WINDOW, LOST_IN_WINDOW, OVERLOADED_IN_WINDOW)
_ALL = {**CHARTS, **LEAGUE_CHARTS}
_TAKEN = frozenset(_ALL.values())
_SUMS = frozenset(name for name in _ALL if name in METRICS and METRICS[name].kind is Kind.SUM)


def charted(fresh: Mapping[str, float], totals: Mapping[str, float], own: Collection[str]) -> dict[str, float]:
    """Selects the numbers that MLflow gets, under MLflow's names.

    These are numbers of `CHARTS` and `LEAGUE_CHARTS`, means and last values of them with a label, and every metric that
    is not declared in `METRICS`. An application's own metric without a group goes to the group ``game``.

    Args:
        fresh: numbers from `Totals.take_interval`.
        totals: every sum so far, from `Totals.sums`; MLflow shows a sum over all its labels.
        own: names of the application's own metrics, from `Totals.own`.
    """
    shown: dict[str, float] = {}
    for name, value in fresh.items():
        base = name.partition(".")[0]
        if base in _SUMS:
            shown[_ALL[base]] = sum(total for each, total in totals.items() if each.partition(".")[0] == base)
        elif name in _ALL:
            shown[_ALL[name]] = value
        elif base in _ALL and METRICS[base].kind in (Kind.MEAN, Kind.LAST):  # with a label: of a component
            shown[f"{_ALL[base]}{name.removeprefix(base)}"] = value
        elif base not in METRICS and name not in _NOT_SHOWN:
            shown[_own(name, own)] = value
    return shown


def sums_of(shown: Mapping[str, float], own: Collection[str]) -> dict[str, float]:
    """The initial sums of a resumed trial, by the names of `Totals`.

    Args:
        shown: the last value of each of its metrics in MLflow.
        own: names of the application's own metrics that are sums.
    """
    known = {_ALL[name]: name for name in (*_SUMS, GAMES, SECONDS)}
    moved = {name.partition(".")[0].removeprefix(_OWN * 2) for name in shown if name.startswith(_OWN * 2)}
    charts = {_own(name, {*own, *moved}): name for name in own}
    found = {known[name]: value for name, value in shown.items() if name in known}
    for name, value in shown.items():
        base, dot, label = name.partition(".")
        if base in charts:
            found[f"{charts[base]}{dot}{label}"] = value
    return found


def _own(name: str, own: Collection[str]) -> str:
    """The chart of an application's own metric: ``game/NAME`` if it has no group, or if its name is another's chart."""
    base = name.partition(".")[0]
    taken = base in _TAKEN or (base.startswith(_OWN) and base.removeprefix(_OWN) in own)
    return name if "/" in name and not taken else f"{_OWN}{name}"
