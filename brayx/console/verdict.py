"""Judges a job in a few words: is it learning, is it serving well, what goes wrong and what to do. Pure.

Knows nothing of MLflow or pages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import computed_field

from brayx.console.documents import Document, ResultDocument
from brayx.errors import BadBody
from brayx.jobs.progress import lost_of
from brayx.metrics.declarations import WINDOW_GAMES, significant
from brayx.metrics.totals import FAILED_S, GAMES, QUIET_S, RETURN_ERROR, points_of

_FAILING, _LOSING = 0.5, 0.05
"""Shares of lost games from which a job counts as failing, and as losing games."""
_BEGINS_S = 30.0
"""Time that the first games may take."""
_QUIET_S = 180.0
"""Time without env steps after which a training that has had some counts as failing or stalled: games may be long, and
games that crash are started again."""
_FAILED_S = 60.0
"""A service whose newest failed game is older than this no longer counts as losing games."""
_JUDGED_S = 120.0
"""A return that does not rise counts as stalled only after this time."""
_MANY_GAMES = 20
"""Games from which their mean return says something."""
_FEW_POINTS = 12
_RISE = 0.02
"""Least rise of a return that counts, as a share of the curve's range."""
_FLAT = 0.1
"""Greatest distance of a plateau's points from the curve's highest, as a share of its range."""
_SAME = 1e-3
"""Greatest standard error of returns that count as the same, as a share of the curve's range."""

State = Literal[
    "none",
    "starting",
    "learning",
    "unsure",
    "plateau",
    "stalled",
    "losing",
    "failing",
    "reached",
    "leading",
    "serving",
    "idle",
    "worse",
    "finished",
    "interrupted",
    "failed",
]
Curve = Sequence[tuple[float, float]]

CONTINUES = "Fix the code where the error points, and run the same command again: the training continues."
RESTARTS = "Fix the code where the error points, and start the service again."
PROCESS = "The game's process keeps ending: run its command by hand and read what it prints."
WATCH = "Watch the newest failed game under Recordings, and read the game's own log."
CONNECT = "Start a game that connects to one of the doors below."
REFUSED = "The game does not send what the job expects: mend the game. docs/protocol.md explains the error's code."
STALLED = "If the return can still rise, read docs/guide-not-learning.md. If not, stop the training."
FINISHED = (
    "If {value} is the most that this game gives, it is finished: stop the training. "
    "If not, read docs/guide-not-learning.md."
)
SILENT = (
    "{silent} more sessions have sent nothing for 10 s: does the game send stop at the end of each game? "
    "docs/protocol.md explains it."
)
ENDS = "End the canary on the page Models. New sessions then get the champion."
RESUME = "Resume with: {command}"
ADVICE = (RESUME, CONTINUES, RESTARTS, PROCESS, WATCH, CONNECT, REFUSED, STALLED, FINISHED, SILENT, ENDS)
LOST = "{lost} of the last {total} games failed."
UNHEARD = "The learner gets no env steps: {refused} requests were refused, most of them with the code {code}."
REFUSALS = "{refused} requests could not be read, and only {games} games have ended."
NO_GAME = "No game is playing, so there is nothing to learn from."
BEGINS = "The first games are being played."
NO_CURVE = "{games} games have ended, the last {window} with a mean return of {value}. There is no curve yet."
REACHED = "The return has reached its target."
AWAITS = "The return has reached its target; the training stops after {wanted} games ({games} so far)."
PLATEAU = "The return is {value}, about its highest, and has not risen for {steps} env steps."
LEVEL = "The return has not risen for {steps} env steps: it was {high} at {peak}, and is {value} now."
ROSE = "The return rose by {rise} in the last {steps} env steps."
STAYED = "The return has hardly changed in the last {steps} env steps."
FELL = "The return fell by {fall} in the last {steps} env steps."
LEADS = "{leader} has {points} points."
AHEAD = "{leader} has {points} points ({low} to {high}), {lead} more than {second}."
CLOSE = "{leader} has {points} points ({low} to {high}), {lead} more than {second}, which may be chance."
SERVES = "Players: {sessions}. {ticks_per_s} answers a second, half of them within {p50} ms, 99 % within {p99} ms."
IDLE = "No game is playing now."
WAITS = "Sessions that wait for their players: {silent}."
FEW = "Which is better shows when each has finished {games} games."
BETTER = "Version {canary} is better than version {champion}: its return is {difference} higher."
WORSE = "Version {canary} is worse than version {champion}: its return is {difference} lower."
UNMEASURED = "Which is better is not known: the results lack their standard error."
SAME = "No difference is shown: both have the same return."
UNSHOWN = "No difference is shown: it is {difference}, which takes about {games} games of each to show."
LAST = "Below are its last numbers."
NO_JOB = "No job is running here."
REASONS = (
    LOST,
    UNHEARD,
    REFUSALS,
    NO_GAME,
    BEGINS,
    NO_CURVE,
    REACHED,
    AWAITS,
    PLATEAU,
    LEVEL,
    ROSE,
    STAYED,
    FELL,
    LEADS,
    AHEAD,
    CLOSE,
    SERVES,
    IDLE,
    WAITS,
    FEW,
    UNMEASURED,
    BETTER,
    WORSE,
    SAME,
    UNSHOWN,
    LAST,
    NO_JOB,
)


class VerdictDocument(Document):
    """The verdict on a job."""

    state: State
    reason: str
    """The sentence of `text` before its words in braces, such as ``{steps}``, are replaced by `values`."""
    values: dict[str, float | str] = {}
    advice: str = ""
    """What to do; empty: nothing."""
    cause: str = ""
    """The newest error; empty: there is none."""
    share: float | None = None
    """Share of the training that is done, from 0 to 1; null: unknown."""
    left_s: float | None = None
    """Seconds until the training ends at the present rate; null: unknown."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def text(self) -> str:
        """The reason as a sentence."""
        numbers = {key: value for key, value in self.values.items() if not isinstance(value, str)}
        texts = {key: f"{n:,.0f}" if float(n).is_integer() else significant(n, 3) for key, n in numbers.items()}
        return self.reason.format(**self.values | texts)


def verdict_of_training(
    numbers: dict[str, float],
    errors: Sequence[str],
    curve: Curve,
    *,
    up_s: float,
    sessions: int,
    num_steps: int | None,
    target: float | None,
    target_games: int = _MANY_GAMES,
    league: bool = False,
) -> VerdictDocument:
    """The verdict on a training.

    Args:
        numbers, errors: as in `brayx.console.overview.JobDocument`.
        curve: ``(env steps, mean return)``, in order.
        up_s: seconds since it began.
        sessions: running sessions.
        num_steps: env steps at which it ends; None: unknown.
        target: return at which it ends; None: it has none.
        target_games: games that the return must be the mean of, see `brayx.trainer.config.TrainerConfig`.
        league: it trains a league.
    """
    steps, rate = numbers.get("env_steps", 0.0), numbers.get("env_steps_per_s", 0.0)
    share = min(steps / num_steps, 1.0) if num_steps else None
    left_s = max(num_steps - steps, 0.0) / rate if num_steps and rate else None
    lost = _lost(numbers, errors, CONTINUES)
    verdict = lost if lost is not None and lost.state == "failing" else None
    verdict = verdict or _unfed(numbers, errors, up_s, sessions) or _misread(numbers, errors) or lost
    verdict = verdict or (_leader(numbers) if league else _trend(numbers, curve, up_s, target, target_games))
    if verdict.state == "reached":  # it does not wait for its last env step
        return verdict
    return verdict.model_copy(update={"share": share, "left_s": left_s})


def verdict_of_end(
    state: Literal["finished", "interrupted", "failed"], text: str, command: str, share: float | None
) -> VerdictDocument:
    """The verdict on a training that has ended.

    Args:
        state, text: as in `brayx.console.overview.EndDocument`.
        command: the command that resumes it; empty: unknown.
        share: share of the training that is done.
    """
    if state == "failed":
        return VerdictDocument(state=state, reason=LAST, cause=text, share=share)
    if state == "finished":
        return VerdictDocument(state=state, reason="{text}", values={"text": text}, share=1.0)
    advice, values = RESUME if command else "", {"text": text, "command": command}
    return VerdictDocument(state=state, reason="{text}", values=values, advice=advice, share=share)


def verdict_of_service(
    numbers: dict[str, float], errors: Sequence[str], sessions: int, silent: int = 0
) -> VerdictDocument:
    """The verdict on a service.

    Args:
        numbers, errors, sessions: as for `verdict_of_training`.
        silent: sessions among them without a player.
    """
    lost = _lost(numbers, errors, RESTARTS) if numbers.get(FAILED_S, 0.0) < _FAILED_S else None
    if lost is not None:
        return lost
    # A few silent sessions are people who think.
    advice, many = (SILENT, {"silent": silent}) if silent > max(sessions / 2, 1) else ("", {})
    if silent >= sessions:
        return VerdictDocument(state="idle", reason=WAITS if silent else IDLE, values={"silent": silent}, advice=advice)
    milliseconds = {name: numbers.get(f"tick_seconds.{name}", math.nan) * 1e3 for name in ("p50", "p99")}
    if any(map(math.isnan, milliseconds.values())):
        return VerdictDocument(state="serving", reason=BEGINS, values=many, advice=advice)
    rate = round(numbers.get("ticks_per_s", 0.0))
    values = {"sessions": sessions - silent, "ticks_per_s": rate, **milliseconds, **many}
    return VerdictDocument(state="serving", reason=SERVES, values=values, advice=advice)


def verdict_of_canary(champion: int, canary: int, results: Mapping[int, ResultDocument]) -> VerdictDocument:
    """Whether a canary is better or worse than the champion, by the returns of their games in service.

    Args:
        champion, canary: their versions.
        results: of the versions that serve, as in `brayx.console.overview.ArmDocument`.
    """
    first, second = results.get(champion), results.get(canary)
    if first is None or second is None or min(first.games or 0.0, second.games or 0.0) < _MANY_GAMES:
        return VerdictDocument(state="unsure", reason=FEW, values={"games": _MANY_GAMES})
    errors = [math.nan if result.error is None else result.error for result in (first, second)]
    if any(map(math.isnan, errors)):
        return VerdictDocument(state="unsure", reason=UNMEASURED)
    difference = second.mean - first.mean
    values = {"champion": str(champion), "canary": str(canary), "difference": abs(difference)}
    if abs(difference) > 1.96 * math.hypot(*errors):
        if difference > 0.0:
            return VerdictDocument(state="serving", reason=BETTER, values=values)
        return VerdictDocument(state="worse", reason=WORSE, values=values, advice=ENDS)
    if not difference:
        return VerdictDocument(state="unsure", reason=SAME)
    # A game's variance is error² · games. With so many games each, the interval is as wide as the difference.
    variance = errors[0] ** 2 * (first.games or 0.0) + errors[1] ** 2 * (second.games or 0.0)
    values = {"difference": abs(difference), "games": math.ceil(1.96**2 * variance / difference**2)}
    return VerdictDocument(state="unsure", reason=UNSHOWN, values=values)


def _lost(numbers: dict[str, float], errors: Sequence[str], mend: str) -> VerdictDocument | None:
    """Games that fail; None: hardly any."""
    lost, total = next((lost, total) for what, lost, total in lost_of(numbers) if what == "games")
    share = lost / total if total else float(bool(numbers.get("gamecores_failed") and not numbers.get("games")))
    if share < _LOSING:
        return None
    hooks = [name.partition(".")[2] for name in numbers if name.startswith("agent_errors.")]
    raised = [line for line in errors if any(f" in {hook};" in line for hook in hooks)]
    are_games = bool(raised) and all(f": {BadBody.__name__}: " in line for line in raised)
    refused = "" if hooks and not are_games else next(iter(raised), _refusal(errors, BadBody.code))
    ended = PROCESS if numbers.get("gamecores_failed") else WATCH
    advice = REFUSED if refused else mend if hooks else ended
    values = {"lost": lost, "total": total}
    state: State = "failing" if share >= _FAILING else "losing"
    cause = refused or next(iter(errors), "")
    return VerdictDocument(state=state, reason=LOST, values=values, advice=advice, cause=cause)


def _refusal(errors: Sequence[str], code: str) -> str:
    """The error line with the newest refusal of a code; empty: there is none."""
    return next((line for line in errors if f"refused ({code});" in line), "")


def _unfed(numbers: dict[str, float], errors: Sequence[str], up_s: float, sessions: int) -> VerdictDocument | None:
    """A training that gets no env steps; None: it gets some."""
    has_played = bool(numbers.get("env_steps"))
    if up_s < _BEGINS_S or numbers.get("env_steps_per_s") or (sessions and has_played):
        return None
    if has_played and numbers.get(QUIET_S, up_s) < _QUIET_S:
        return None
    refusals = {
        name.partition(".")[2]: count for name, count in numbers.items() if name.startswith("requests_refused.")
    }
    if any(refusals.values()):
        most = max(refusals, key=lambda code: refusals[code])
        values: dict[str, float | str] = {"refused": sum(refusals.values()), "code": most}
        cause = _refusal(errors, most)
        return VerdictDocument(state="failing", reason=UNHEARD, values=values, advice=REFUSED, cause=cause)
    if sessions or numbers.get("rollout_workers"):
        return None
    return VerdictDocument(state="stalled", reason=NO_GAME, advice=CONNECT)


def _misread(numbers: dict[str, float], errors: Sequence[str]) -> VerdictDocument | None:
    """Games that send what is refused and go: neither games nor failed ones by the numbers; None: most end well."""
    refused, games = numbers.get(f"requests_refused.{BadBody.code}", 0.0), numbers.get("games_in_window", 0.0)
    # Refusals are of the whole run: once so many games have ended well, they are of long ago.
    if refused < _MANY_GAMES or refused <= games or games >= WINDOW_GAMES:
        return None
    cause = _refusal(errors, BadBody.code)
    values = {"refused": refused, "games": games}
    return VerdictDocument(state="failing", reason=REFUSALS, values=values, advice=REFUSED, cause=cause)


def _leader(numbers: dict[str, float]) -> VerdictDocument:
    """Who leads a league. Its mean return says nothing, since its players play each other."""
    points = points_of(numbers)
    if not points:
        return VerdictDocument(state="starting", reason=BEGINS)
    leader = max(points, key=lambda player: points[player])
    return VerdictDocument(state="leading", reason=LEADS, values={"leader": leader, "points": round(points[leader])})


def _trend(
    numbers: dict[str, float], curve: Curve, up_s: float, target: float | None, target_games: int
) -> VerdictDocument:
    mean = numbers.get("episode_return.last100", math.nan)
    games = numbers.get("games_in_window", 0.0)
    if target is not None and mean >= target and games >= _MANY_GAMES:
        return _reached(games, numbers.get(GAMES, games), target_games)
    if len(curve) < 2 or curve[0][0] == curve[-1][0]:
        if games < _MANY_GAMES or math.isnan(mean):
            return VerdictDocument(state="starting", reason=BEGINS)
        ended = {"games": numbers.get("games", games), "window": games}
        return VerdictDocument(state="unsure", reason=NO_CURVE, values={**ended, "value": mean})
    (first, _), (last, newest) = curve[0], curve[-1]
    early = [value for step, value in curve if step <= first + (last - first) * 2 / 3]
    late = [value for step, value in curve if step > first + (last - first) * 2 / 3]
    best, highest = max(early), max(*early, *late)
    least_rise = _RISE * (highest - min(*early, *late))
    is_level = len(curve) >= _FEW_POINTS and up_s >= _JUDGED_S and max(late) <= best + least_rise
    since, before = next(point for point in reversed(curve) if point[0] <= last - (last - first) / 10)
    has_stayed = abs(newest - before) <= least_rise
    peak, high = next(point for point in curve if point[1] >= highest - least_rise)
    values = {"steps": last - peak, "value": newest, "high": high, "peak": peak}
    is_same = has_stayed and _is_same(numbers, highest - min(*early, *late))
    if (is_level or is_same) and _is_plateau(numbers, newest, late, early, target):
        return VerdictDocument(state="plateau", reason=PLATEAU, values=values, advice=FINISHED)
    if is_level:
        return VerdictDocument(state="stalled", reason=LEVEL, values=values, advice=STALLED)
    values = {"rise": newest - before, "fall": before - newest, "steps": last - since}
    reason = STAYED if has_stayed else ROSE if newest > before else FELL
    return VerdictDocument(state="learning" if reason == ROSE else "unsure", reason=reason, values=values)


def _reached(window: float, games: float, target_games: int) -> VerdictDocument:
    """The verdict on a training whose return has reached the target: which games it still waits for.

    After a resume that is for as many games as the trial had before.

    Args:
        window: number of games that the return is the mean of.
        games: number of all games of the trial.
        target_games: as for `verdict_of_training`.
    """
    wanted = max(min(target_games, WINDOW_GAMES), min(games - window, WINDOW_GAMES))
    done, wanted = (games, target_games) if games < target_games else (window, wanted)
    if done >= wanted:
        return VerdictDocument(state="reached", reason=REACHED)
    return VerdictDocument(state="reached", reason=AWAITS, values={"wanted": wanted, "games": done})


def _is_plateau(
    numbers: dict[str, float], newest: float, late: list[float], early: list[float], target: float | None
) -> bool:
    """Whether a return that no longer rises has risen before and stays at its highest, so that it may be perfect."""
    highest = max(*early, *late)
    spread = highest - min(*early, *late)
    chance = 1.96 * numbers.get(RETURN_ERROR, 0.0)
    if not spread or newest < highest - max(_RISE * spread, chance):
        return False
    return _is_same(numbers, spread) or (target is None and min(late) >= highest - _FLAT * spread)


def _is_same(numbers: dict[str, float], spread: float) -> bool:
    """Whether the newest games all have the same return, measured by the curve's range."""
    is_full = numbers.get("games_in_window", 0.0) >= WINDOW_GAMES
    return is_full and numbers.get(RETURN_ERROR, math.inf) <= _SAME * spread
