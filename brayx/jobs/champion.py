"""The results of a finished training in MLflow: a registered version, the champion, a curve.

Loads no torch, so that MLflow's process can run it. Knows nothing of jobs.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from brayx.errors import ModelNotFound
from brayx.jobs.contracts import BEHAVIOUR_TAG, CONTRACT_TAG, plain_name
from brayx.metrics import BEST_METRIC, ERROR_OF_BEST, GAMES_OF_BEST, games_text, significant
from brayx.metrics.charts import CHARTS, RETURN_CHART
from brayx.metrics.totals import GAMES
from brayx.tracking import Checkpoint, PoolEntry, Trial, aliased, find, register
from brayx.tracking.mlflow_page import NOTE_TAG
from brayx.tracking.registry import STEP_TAG
from brayx.tracking.tensorboard import log_onnx

if TYPE_CHECKING:
    from brayx.engines.base import ModelSpec

CURVE_FILE = "curve.png"
RATING_ENV_TAG = "rating_env"
"""Tag of a version that was evaluated: the environment of its rating."""
ENV_OPTIONS_TAG = "env_options"
"""Tag of a version: the keyword arguments of the environment that it was trained in."""


def drawn_curve(trial: Trial, title: str, target: float | None, x_axis: str) -> list[tuple[int, float]]:
    """Draws the trial's curve into its artifacts, if it has points; returns them."""
    from brayx.jobs.evaluate import draw_curve

    curve = trial.history(RETURN_CHART)
    if curve:
        trial.log_figure(draw_curve(curve, title=title, target=target, x_axis=x_axis), CURVE_FILE)
    return curve


def best_of(trial: Trial) -> tuple[Checkpoint, Path] | None:
    """The checkpoint with the highest return, and its folder."""
    best = trial.best_checkpoint(BEST_METRIC)
    return None if best is None else (best, trial.local(best))


def register_best(
    trial: Trial,
    best: Checkpoint,
    name: str,
    onnx: bytes | None,
    spec: ModelSpec | None,
    rating: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Registers a checkpoint; returns its version and a message for the user.

    The message has the checkpoint's env steps and return, and those of the last checkpoint if it is another. Its return
    becomes a point of the trial's curve, which otherwise has a point each second.

    Args:
        rating: tags by `brayx.jobs.rating.rating_tags` of its evaluation; None: it had none.
    """
    mean, games = significant(best.metrics[BEST_METRIC]), best.metrics.get(GAMES_OF_BEST, math.nan)
    played = f"mean return {mean} over {games_text(games)} after {best.env_steps:,} env steps"
    tags = {"return": mean, "return_games": f"{games:.0f}", "rating": mean, "env_steps": str(best.env_steps)}
    if ERROR_OF_BEST in best.metrics:
        tags["return_error"] = f"{best.metrics[ERROR_OF_BEST]:.4g}"
    if rating:
        tags |= rating
        played += f", {rating['rating']} over {games_text(float(rating['rating_games']))} of its evaluation"
    tags["project"] = trial.project
    tags |= {name: value for name, value in trial.tags().items() if name in (CONTRACT_TAG, BEHAVIOUR_TAG)}
    if options := _env_options(trial.params()):
        tags[ENV_OPTIONS_TAG] = options
    about = f"{played} of trial {trial.name!r} in project {trial.project!r}."
    champion = _champion(name, trial.uri)
    if champion and champion.run_id == trial.run_id and champion.tags.get(STEP_TAG) == str(best.step):
        champion = None  # registered again
    other = "" if champion is None else _other_game(champion.tags, tags)
    stays = "" if champion is None or other else _why_it_stays(champion.tags, tags)
    last = trial.checkpoints()[-1]
    if onnx is not None:
        log_onnx(trial, onnx)
    _mark(trial, best)
    # Register last, because that moves the alias: after an error there is no new champion.
    alias = None if stays else "champion"
    new = register(trial, best, name, alias=alias, tags=tags, onnx=onnx, spec=spec, description=about).version
    trial.set_tag(NOTE_TAG, f"{played}: {name} version {new}{'' if stays else ', champion'}")
    if last.step != best.step:
        has = significant(last.metrics[BEST_METRIC]) if BEST_METRIC in last.metrics else "too few games"
        played += f" (the best checkpoint; the last, after {last.env_steps:,}, has {has})"
    if champion is not None and stays:
        return new, (
            f"registered as {name} version {new}, {played}; "
            f"version {champion.version} with {_result(champion.tags, tags)} stays champion: {stays}\n"
            f"to make version {new} champion: {_promotion(name, new, trial.uri)}"
        )
    if champion is not None and other:
        played += (
            f"; version {champion.version}, the champion before, has {other}, so returns do not compare: "
            "to keep a champion of each, add --set project=NAME"
        )
    elif champion is not None:
        played += f"; it replaces version {champion.version} with {_result(champion.tags, tags)}"
    return new, f"champion: {name} version {new}, {played}"


def _env_options(params: Mapping[str, str]) -> str:
    """The keyword arguments of a trial's environment, as text; empty: it has none."""
    named = {name.partition("env_options.")[2]: value for name, value in params.items() if "env_options." in name}
    return ", ".join(f"{name}={value}" for name, value in sorted(named.items()))


def _other_game(champion: Mapping[str, str], tags: Mapping[str, str]) -> str:
    """Why the returns in two versions' tags do not compare; empty: they do."""
    if champion.get(CONTRACT_TAG) != tags.get(CONTRACT_TAG):
        return "another contract"
    before, now = (version.get(ENV_OPTIONS_TAG, "") for version in (champion, tags))
    return "" if before == now else f"other env_options ({before or 'none'} instead of {now or 'none'})"


def _measure(tags: Mapping[str, str], rival: Mapping[str, str]) -> str:
    """The tag that compares two versions: their evaluations, if both have one in the same environment; else their
    returns over the last games of their training."""
    env = tags.get(RATING_ENV_TAG)
    return "rating" if env is not None and rival.get(RATING_ENV_TAG) == env else "return"


def _result(tags: Mapping[str, str], rival: Mapping[str, str]) -> str:
    """What a version is compared by with a rival, as text."""
    measure = _measure(tags, rival)
    mean, games = _number(tags, measure), _number(tags, f"{measure}_games")
    over = "" if math.isnan(games) else f" over {games_text(games)}{' of its evaluation' * (measure == 'rating')}"
    return "an unknown return" if math.isnan(mean) else f"{tags[measure]}{over}"


def _why_it_stays(champion: Mapping[str, str], new: Mapping[str, str]) -> str:
    """Why a champion stays: it is better, or the 95 % intervals overlap; empty: the new version is better, or the
    champion's result is not known. Without both errors no difference counts as chance."""
    lead, error = lead_of(champion, new)
    if is_chance(lead, error):
        return "the difference is within chance"
    return "it is better" if lead > 0 else ""


def lead_of(tags: Mapping[str, str], rival: Mapping[str, str]) -> tuple[float, float]:
    """How much higher a version's result is than a rival's, and the error of that: the sum of both standard errors, see
    `is_chance`. NaN: not known, or the versions are of other games.

    Args:
        tags, rival: their tags.
    """
    if _other_game(rival, tags):
        return math.nan, math.nan
    measure = _measure(tags, rival)
    lead = _number(tags, measure) - _number(rival, measure)  # both rounded, so the same does not lose against itself
    return lead, _number(tags, f"{measure}_error") + _number(rival, f"{measure}_error")


def is_chance(lead: float, error: float) -> bool:
    """Whether a lead as from `lead_of` may be chance: the 95 % intervals of both results overlap."""
    return abs(lead) <= 1.96 * error


def _mark(trial: Trial, best: Checkpoint) -> None:
    """Adds a checkpoint's return to the trial's curve, at its place on the curve's x axis."""
    points = trial.history(CHARTS["env_steps"])
    if points and points[-1][1] >= best.env_steps:
        x = np.interp(best.env_steps, [steps for _, steps in points], [x for x, _ in points])
        trial.log_metrics({RETURN_CHART: best.metrics[BEST_METRIC]}, round(x), best.saved_at_s)


def without_champion(trial: Trial, target_games: int | None) -> str:
    """Why a trial has no champion, and what to do.

    Args:
        target_games: `TrainerConfig.target_games`; None: not known.
    """
    games, failed = (trial.metrics().get(CHARTS[name], 0) for name in (GAMES, "games_failed"))
    if not games and not failed:
        return "no champion: no game ended; set a time limit (`env_options.max_episode_steps`), or one in your game"
    wanted = "" if target_games is None else f" of {target_games}"
    return (
        f"no champion: too few games with a return had ended when a checkpoint was saved ({games:,.0f}{wanted}); "
        "fewer `target_games`, or more steps, give one"
    )


def register_trial(
    trial: Trial, name: str, spec: ModelSpec | None, rating: Mapping[str, str] | None = None
) -> tuple[int | None, str]:
    """As `register_best`, of the trial's best checkpoint, without an ONNX file; no version if there is none."""
    best = trial.best_checkpoint(BEST_METRIC)
    if best is None:
        return None, without_champion(trial, None)
    return register_best(trial, best, name, None, spec, rating)


def behaviour_pool(trial: Trial, several: bool) -> str:
    """Name under which a trial's behaviour is registered: the project's, followed by the behaviour's if the project has
    learned several. If another project has that name, as project `a-b` has that of behaviour `b` of project `a`, two
    dashes join them.

    Args:
        trial: the trial.
        several: whether its job has learned several.
    """
    project, behaviour = trial.project, plain_name(trial.tags().get(BEHAVIOUR_TAG, ""))
    names = [f"{project}-{behaviour}", f"{project}--{behaviour}"]
    champions_of = {name: _champion(name, trial.uri) for name in [project, *names]}
    free = [name for name, entry in champions_of.items() if entry is None or _is_of(entry, project)]
    has_learned_it = any(name in free and champions_of[name] is not None for name in names)
    if project in free and not (several or has_learned_it):
        return project
    return next((name for name in names if name in free), names[-1])


def _is_of(entry: PoolEntry, project: str) -> bool:
    """Whether a version belongs to a project; versions from before 0.2 have no such tag, and count."""
    return entry.tags.get("project", project) == project


def champions(project: str, uri: str) -> dict[str, PoolEntry]:
    """The champions of a project that has learned several behaviours, by behaviour; empty if it has not.

    Raises:
        TrackingError: the registry could not be read.
    """
    by_behaviour = {
        entry.tags[BEHAVIOUR_TAG]: entry
        for entry in aliased(f"{project}-", "champion", uri)
        if BEHAVIOUR_TAG in entry.tags and entry.tags.get("project") == project
    }
    alone = _champion(project, uri) if by_behaviour else None
    if (
        alone is not None and _is_of(alone, project) and BEHAVIOUR_TAG in alone.tags
    ):  # of an earlier training with one behaviour
        by_behaviour.setdefault(alone.tags[BEHAVIOUR_TAG], alone)
    return by_behaviour


def _champion(name: str, uri: str) -> PoolEntry | None:
    try:
        return find(f"models:/{name}@champion", uri)
    except ModelNotFound:
        return None


def _number(tags: Mapping[str, str], name: str) -> float:
    """A number in a version's tags; NaN if it cannot be read, so that every comparison is false."""
    try:
        return float(tags[name])
    except (KeyError, ValueError):
        return float("nan")


def _promotion(name: str, version: int, uri: str) -> str:
    """The command line that promotes a version, from any folder."""
    return shlex.join(["brayx", "promote", f"models:/{name}/{version}", "--tracking", uri])
