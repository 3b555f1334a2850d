"""The numbers of a trial that MLflow shows, and their names, by group.

MLflow's page and the console's group metrics by the part before the ``/``. MLflow's slows down past a hundred charts,
so this module adds up the labels of brayx's sums; the screen and a trial's `NUMBERS_FILE` keep the labels apart. A job
adds charts: means and last values have one for each label (brayx labels only ``rollout_workers``, by rollout), metrics
of the algorithm that are not in `CHARTS` are ``learner/NAME``, results of evaluation are ``eval/NAME``, and an
application's own metrics have a chart for each label. Knows nothing of recorders or writers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from brayx.metrics import METRICS, Kind
from brayx.metrics.totals import (
    FAILED_IN_WINDOW,
    FAILED_S,
    FRAGMENTS_IN_WINDOW,
    GAMES,
    GAMES_IN_WINDOW,
    LOST_IN_WINDOW,
    OVERLOADED_IN_WINDOW,
    QUIET_S,
    RETURN_ERROR,
    SECONDS,
)

_CHARTS: Mapping[str, Mapping[str, str]] = {
    "return": {
        "episode_return.last100": "last_100_games",
        "episode_return": "mean",
        GAMES_IN_WINDOW: "window_games",
        RETURN_ERROR: "standard_error",
    },
    "session": {
        GAMES: "games",
        "games_failed": "failed_games",
        "episode_length.last100": "game_length",
        "sessions_started": "started",
        "sessions_ended": "ended",
        "agent_errors": "agent_errors",
    },
    "tick": {
        "ticks": "count",
        "ticks_per_s": "per_s",
        "tick_seconds.p50": "seconds_p50",
        "tick_seconds.p99": "seconds_p99",
        "ticks_fallen_back": "fallen_back",
        "requests_refused": "refused",
        "forward_batch_size": "forward_batch_size",
    },
    "replay": {
        "env_steps": "env_steps",
        "env_steps_per_s": "env_steps_per_s",
        "fragments_pushed": "fragments",
        "fragments_dropped": "fragments_lost",
        "replay_dropped": "dropped",
        "replay_batches": "batches",
    },
    "rollout": {
        "rollout_workers": "workers",
        "rollout_workers_lost": "workers_lost",
    },
    "learner": {
        "updates": "updates",
        SECONDS: "seconds",
        "policy_version": "policy_version",
        "lag_versions": "lag_versions",
        "update_seconds.p50": "update_seconds_p50",
        "learner_wait_fraction": "wait_fraction",
        "loss": "loss",
        "policy_loss": "policy_loss",
        "value_loss": "value_loss",
        "entropy": "entropy",
        "approx_kl": "approx_kl",
        "clip_fraction": "clip_fraction",
        "explained_variance": "explained_variance",
        "grad_norm": "grad_norm",
        "learning_rate": "learning_rate",
        "checkpoints_failed": "checkpoints_failed",
        "ranks_failed": "ranks_failed",
    },
    "league": {
        "league_games": "games",
        "league_games_per_s": "games_per_s",
        "league_points": "points",
        "league_win_rate": "win_rate",
        "league_pool": "pool",
        "league_champion": "champion",
    },
}
"""Name in its group of each number of `brayx.metrics.totals.Totals` that MLflow shows, by group."""
CHARTS: Mapping[str, str] = {
    name: f"{group}/{chart}" for group, charts in _CHARTS.items() for name, chart in charts.items()
}
"""MLflow's name of each number that it shows."""
GROUPS: Mapping[str, str] = {
    "return": "Return",
    "learner": "Learner",
    "replay": "Replay",
    "session": "Games and sessions",
    "tick": "Ticks",
    "rollout": "Rollouts",
    "league": "League",
    "eval": "Evaluation",
    "game": "The game's own",
}
"""Title of each group of brayx, in the order of the console's page. An application may add groups."""
SERVING_CHARTS: Mapping[str, str] = {
    "episode_return": CHARTS["episode_return"],
    "return_error": CHARTS[RETURN_ERROR],
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
_NOT_SHOWN = (FAILED_IN_WINDOW, FRAGMENTS_IN_WINDOW, LOST_IN_WINDOW, OVERLOADED_IN_WINDOW, QUIET_S, FAILED_S)
_TAKEN = frozenset(CHARTS.values())
_SUMS = frozenset(name for name in CHARTS if name in METRICS and METRICS[name].kind is Kind.SUM)


def grouped(charts: Collection[str]) -> dict[str, list[str]]:
    """MLflow's names by group: brayx's groups and charts in their order, then others by name.

    Args:
        charts: MLflow's names; one without a group is in the group ``""``.
    """
    groups: dict[str, list[str]] = {}
    declared = [chart for chart in CHARTS.values() if chart in charts]
    for chart in (*declared, *sorted({*charts} - {*declared})):
        groups.setdefault(chart.rpartition("/")[0].partition("/")[0], []).append(chart)
    return {group: groups[group] for group in (*GROUPS, *sorted({*groups} - {*GROUPS})) if group in groups}


def charted(fresh: Mapping[str, float], totals: Mapping[str, float], own: Collection[str]) -> dict[str, float]:
    """Selects the numbers that MLflow gets, under MLflow's names.

    These are numbers of `CHARTS`, means and last values of them with a label, and every metric that
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
            shown[CHARTS[base]] = sum(total for label, total in totals.items() if label.partition(".")[0] == base)
        elif name in CHARTS:
            shown[CHARTS[name]] = value
        elif base in CHARTS and METRICS[base].kind in (Kind.MEAN, Kind.LAST):  # with a label: of a component
            shown[f"{CHARTS[base]}{name.removeprefix(base)}"] = value
        elif base not in METRICS and name not in _NOT_SHOWN:
            shown[_own(name, own)] = value
    return shown


def sums_of(shown: Mapping[str, float], own: Collection[str]) -> dict[str, float]:
    """The initial sums of a resumed trial, by the names of `Totals`.

    Args:
        shown: the last value of each of its metrics in MLflow.
        own: names of the application's own metrics that are sums.
    """
    name_of = {CHARTS[name]: name for name in (*_SUMS, GAMES, SECONDS)}
    moved = {name.partition(".")[0].removeprefix(_OWN * 2) for name in shown if name.startswith(_OWN * 2)}
    charts = {_own(name, {*own, *moved}): name for name in own}
    sums = {name_of[name]: value for name, value in shown.items() if name in name_of}
    for name, value in shown.items():
        base, dot, label = name.partition(".")
        if base in charts:
            sums[f"{charts[base]}{dot}{label}"] = value
    return sums


def _own(name: str, own: Collection[str]) -> str:
    """The chart of an application's own metric: ``game/NAME`` if it has no group, or if its name is another's chart."""
    base = name.partition(".")[0]
    is_taken = base in _TAKEN or (base.startswith(_OWN) and base.removeprefix(_OWN) in own)
    return name if "/" in name and not is_taken else f"{_OWN}{name}"
