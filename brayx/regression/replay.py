"""`brayx replay`: what another version of a model would have done in recorded sessions, as a table, JSON and a plot.

Knows nothing of games: `brayx.regression.resimulate` plays them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from brayx.actor.contracts import behaviour_of
from brayx.errors import BadBody, BadRecording, ConfigError
from brayx.jobs.contracts import parse_contract
from brayx.jobs.recorded import recorded_contract
from brayx.jobs.stored_models import StoredModel, stored_model
from brayx.recording.comparison import Comparison, NotCompared, compare
from brayx.recording.config import is_named, pattern_hint
from brayx.recording.differences import TOLERANCE
from brayx.recording.reader import Recording
from brayx.recording.trials import open as open_recordings
from brayx.recording.version import Version
from brayx.regression.game import whole_sessions
from brayx.strict_json import parse_json
from brayx.tables import aligned
from brayx.tracking import tracking_uri

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHOWN = 40
"""Maximum sessions in the printed table."""


@dataclass(frozen=True)
class ReplaySummary:
    """The comparison of one session, or of several together, in numbers.

    Attributes:
        ticks: number of ticks.
        equal: number of ticks with equal actions.
        first: number of the first tick with another action; None: there is none, or there are several sessions.
        left_out: number of ticks that could not be compared, and are not among ``ticks``.
        kl, kl_max: mean and maximum KL divergence in nats; None: not known.
        value: mean absolute difference of the values; None: not known.
        exact: whether the divergences are exact; else they are estimated.
    """

    ticks: int
    equal: int
    first: int | None
    left_out: int
    kl: float | None
    kl_max: float | None
    value: float | None
    exact: bool

    @staticmethod
    def of(comparisons: Sequence[Comparison]) -> ReplaySummary:
        """The numbers of several sessions together; every tick has the same weight."""
        kl = _known([comparison.kl for comparison in comparisons])
        value = np.abs(_known([comparison.value for comparison in comparisons]))
        return ReplaySummary(
            sum(map(len, comparisons)),
            sum(int(comparison.equal.sum()) for comparison in comparisons),
            comparisons[0].first if len(comparisons) == 1 else None,
            sum(comparison.left_out for comparison in comparisons),
            float(kl.mean()) if len(kl) else None,
            float(kl.max()) if len(kl) else None,
            float(value.mean()) if len(value) else None,
            all(comparison.exact for comparison in comparisons),
        )

    @property
    def agreement(self) -> float | None:
        """Share of ticks with equal actions; None: there are no ticks."""
        return self.equal / self.ticks if self.ticks else None

    def as_dict(self) -> dict[str, Any]:
        """The numbers as JSON values: ``ticks``, ``left_out``, ``agreement``, ``kl``, ``kl_max``, ``kl_exact`` and
        ``value``."""
        return {
            "ticks": self.ticks,
            "left_out": self.left_out,
            "agreement": self.agreement,
            "kl": self.kl,
            "kl_max": self.kl_max,
            "kl_exact": self.exact,
            "value": self.value,
        }


@dataclass(frozen=True)
class Replay:
    """A version compared with recorded sessions.

    Attributes:
        model: the version.
        reference: the version it is compared with; empty: with the recording.
        compared: the sessions, in the order of the recordings.
        failed: the sessions that could not be compared.
        unreadable: number of files that cannot be read.
        others: number of sessions of other behaviours than the version's, which were not compared.
    """

    model: str
    reference: str
    compared: Sequence[Comparison]
    failed: Sequence[NotCompared] = ()
    unreadable: int = 0
    others: int = 0

    @property
    def total(self) -> ReplaySummary:
        """The numbers of all sessions together."""
        return ReplaySummary.of(self.compared)

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON values.

        Returns:
            ``model``; ``reference`` or null; ``recordings``, with ``session``, ``recording`` (its id), ``first`` (the
            number of the first tick with another action, or null) and the numbers of `ReplaySummary.as_dict`;
            ``total``, the same numbers; ``failed``, with ``session``, ``recording`` and ``error``; number of
            ``unreadable`` files; number of ``other_behaviours``' sessions.
        """
        rows = []
        for comparison in self.compared:
            row = ReplaySummary.of([comparison])
            rows.append(
                {"session": comparison.session, "recording": comparison.episode, "first": row.first, **row.as_dict()}
            )
        failed = [
            {"session": failure.session, "recording": failure.episode, "error": failure.error.message}
            for failure in self.failed
        ]
        return {
            "model": self.model,
            "reference": self.reference or None,
            "recordings": rows,
            "total": self.total.as_dict(),
            "failed": failed,
            "unreadable": self.unreadable,
            "other_behaviours": self.others,
        }

    def __str__(self) -> str:
        return self.text()

    def text(self, most: int = _SHOWN) -> str:
        """A table of at most ``most`` sessions, those with the fewest equal actions, and of all together."""
        title = f"{self.model} against {self.reference or 'the recording'}"
        rows: list[tuple[str, ...]] = [
            ("session", "ticks", "equal actions", "first other", "KL, nats", "highest KL", "value, |difference|")
        ]
        worst = sorted(self.compared, key=lambda comparison: float(comparison.equal.mean()) if len(comparison) else 1.0)
        shown = {comparison.episode for comparison in worst[:most]}
        rows += [
            _row(comparison.session, ReplaySummary.of([comparison]))
            for comparison in self.compared
            if comparison.episode in shown
        ]
        if len(self.compared) != 1:
            rows.append(_row("in all", self.total))
        lines = [title, *aligned(rows)]
        if len(self.compared) > most:
            lines.append(
                f"only the {most} sessions with the fewest equal actions are shown; `brayx replay --json` has all"
            )
        if self.total.kl is None and self.compared:
            lines.append("KL is not known: the recordings have neither the policy's outputs nor log-probabilities")
        elif not self.total.exact:
            lines.append("KL is estimated from the log-probabilities of the recorded actions")
        if self.total.left_out:
            lines.append(f"{self.total.left_out} ticks were left out: the recording lacks their observation or action")
        lines += [f"{failure.session} was not compared: {failure.error.message}" for failure in self.failed[:most]]
        if len(self.failed) > most:
            lines.append(f"{len(self.failed) - most} more were not compared")
        if self.others:
            lines.append(f"{self.others} sessions of other behaviours were left out")
        if self.unreadable:
            lines.append(f"{self.unreadable} files cannot be read")
        return "\n".join(lines)


def replay_recording(
    recording: str,
    *models: str,
    tracking: str | None = None,
    session: str = "",
    job: str | None = None,
    component: str | None = None,
    trust: bool = False,
    tolerance: float = TOLERANCE,
    on_session: Callable[[int], None] = lambda number: None,
) -> Replay:
    """Feeds the observations of recordings to a version of a model, and compares it with what was recorded.

    Args:
        recording: a folder of recordings, or one of its files, or a trial's, as for `brayx.recording.open`.
        *models: ``models:/NAME/VERSION``, ``models:/NAME@ALIAS`` or the folder of a checkpoint. Given two versions, the
            second is compared with the first instead of with the recording.
        tracking: MLflow's URI, or the path of its sqlite file.
        session: only the sessions with this id, which may have ``*``, or of this game; empty: all.
        job: YAML of the job that made the models; None: the jobs in their checkpoints.
        trust: run the code that the checkpoints name. Otherwise only versions in a database of this machine run code.
        component: name of the model component; None: as for `brayx.jobs.stored_models.StoredModel.build`.
        tolerance: maximum difference of continuous actions that count as equal.
        on_session: called after each session with the number of sessions so far.

    Raises:
        BadRecording: there is no recording, or no such session, or none of the version's behaviour.
        BrayxError: no session can be compared; this is the first one's error.
        ConfigError: a reference or the job cannot be used.
        ModelNotFound: the registry has no such model.
        ModelError: a model cannot be built.
        TrackingError: MLflow failed.
    """
    if not 1 <= len(models) <= 2:
        raise ConfigError(f"{len(models)} models are given, expected one version, or two to compare")
    uri = tracking_uri(tracking)
    episodes, unreadable = recorded(recording, session, uri)
    *reference, version = [version_of(model, uri, job=job, component=component, trust=trust) for model in models]
    played = [episode for episode in episodes if plays(version, episode)]
    if not played:
        raise BadRecording(
            f"{recording} has {len(episodes)} sessions, none of behaviour {version.behaviour!r}", file=recording
        )
    compared: list[Comparison] = []
    failed: list[NotCompared] = []
    for number, result in enumerate(compare(played, version, *reference, tolerance=tolerance), start=1):
        if isinstance(result, Comparison):
            compared.append(result)
        else:
            failed.append(result)
        on_session(number)
    if failed and not compared:
        first = failed[0]
        raise type(first.error)(f"session {first.session!r}: {first.error.message}", **first.error.details)
    others = len(episodes) - len(played)
    return Replay(version.label, reference[0].label if reference else "", compared, failed, unreadable, others)


def plays(version: Version, episode: Recording) -> bool:
    """Whether a recorded session is of the behaviour that a version plays, as far as that is known."""
    if not version.behaviour:
        return True
    try:
        start: Any = parse_json(episode.start.encode(errors="surrogateescape")) if episode.start else {}
    except BadBody:
        return True
    named = isinstance(start, Mapping) and ("behaviour" in start or isinstance(start.get("contract"), int))
    return not named or behaviour_of(start, {}) == version.behaviour


def recorded(recording: str, session: str = "", tracking: str | None = None) -> tuple[Sequence[Recording], int]:
    """Recorded sessions, joined by `whole_sessions`, and the number of files that cannot be read.

    Args:
        recording, tracking: as for `brayx.recording.open`.
        session: as for `replay_recording`.

    Raises:
        BadRecording: there are none.
    """
    recordings = open_recordings(recording, tracking=tracking)
    episodes: Sequence[Recording] = recordings
    if session:
        episodes = [episode for episode in recordings if is_named(episode.session, session)]
    if not len(episodes):
        why = next(iter(recordings.unreadable.values()), "")
        what = f"no session {session!r}{pattern_hint(session)}" if session else "no session"
        raise BadRecording(f"{recording} has {what}{f'; {why}' if why else ''}", file=recording)
    return whole_sessions(episodes), len(recordings.unreadable)


def version_of(
    reference: str, uri: str, *, job: str | None = None, component: str | None = None, trust: bool | str = False
) -> Version:
    """The version that a reference names; arguments and errors as for `replay_recording`, or `stored_model`."""
    with stored_model(reference, uri, trust) as stored:
        return built_version(stored, job, component)


def built_version(stored: StoredModel, job: str | None = None, component: str | None = None) -> Version:
    """The version that a stored model is; arguments and errors as for `StoredModel.build`."""
    contract = recorded_contract(stored.folder)
    behaviour = "" if contract is None else parse_contract(contract).behaviour
    return Version(stored.label, *stored.build(job, component), behaviour=behaviour)


def write_ticks(replay: Replay, file: Path) -> None:
    """Writes a CSV row for each tick: session, tick, equal, kl and value.

    Raises:
        ConfigError: the file cannot be written.
    """
    with _writing(file):
        for number, comparison in enumerate(replay.compared):
            comparison.frame().to_csv(file, index=False, header=not number, mode="a" if number else "w")


def write_plot(replay: Replay, file: Path) -> None:
    """Writes the figure of `draw` to a PNG file.

    Raises:
        ConfigError: the file cannot be written.
    """
    with _writing(file):
        draw(replay).savefig(file, format="png")


def draw(replay: Replay) -> Figure:
    """Draws one session by tick: other actions, KL and values; or several sessions: equal actions and KL of each."""
    from brayx.figures import Figure

    figure = Figure(figsize=(9, 6), dpi=110, layout="constrained")
    title = f"{replay.model} against {replay.reference or 'the recording'}"
    if len(replay.compared) == 1:
        comparison = replay.compared[0]
        actions, kl, value = figure.subplots(3, 1, sharex=True, height_ratios=[1, 3, 3])
        actions.vlines(comparison.number[~comparison.equal], 0, 1, color="#d55e00", linewidth=0.8)
        actions.set_ylim(0, 1)
        actions.set_yticks([])
        actions.set_ylabel("other\naction")
        _line(kl, comparison.number, comparison.kl, "KL, nats" if comparison.exact else "KL, nats\n(estimated)")
        _line(value, comparison.number, comparison.value, "value,\ndifference")
        value.axhline(0, color="#666666", linewidth=0.8)
        value.set_xlabel("tick")
        drawn = [actions, kl, value]
        title = f"session {comparison.session}: {title}"
    else:
        rows = [ReplaySummary.of([comparison]) for comparison in replay.compared]
        equal, kl = figure.subplots(2, 1, sharex=True)
        places = np.arange(len(rows))
        _line(equal, places, np.array([_number(row.agreement) for row in rows]), "equal actions, share")
        equal.set_ylim(-0.02, 1.02)
        _line(kl, places, np.array([_number(row.kl) for row in rows]), "mean KL, nats")
        kl.set_xlabel("session, in the order of the recordings")
        drawn = [equal, kl]
    for axes in drawn:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    drawn[0].set_title(title, fontsize=10)
    return figure


def _line(axes: Any, x: np.ndarray, y: np.ndarray, label: str) -> None:
    axes.set_ylabel(label)
    if np.isfinite(y).any():
        axes.plot(x, y, color="#0072b2", linewidth=1.2, marker="." if len(x) < 100 else "")
    else:
        axes.text(0.5, 0.5, "not known", ha="center", va="center", transform=axes.transAxes, color="#666666")


def _row(name: str, row: ReplaySummary) -> tuple[str, ...]:
    share = "-" if row.agreement is None else f"{row.agreement:.4f}"
    numbers = ["-" if value is None else f"{value:.4g}" for value in (row.kl, row.kl_max, row.value)]
    return (name, str(row.ticks), share, "-" if row.first is None else str(row.first), *numbers)


def _known(arrays: Sequence[np.ndarray]) -> np.ndarray:
    joined: np.ndarray = np.concatenate([np.zeros(0), *arrays])
    known: np.ndarray = joined[~np.isnan(joined)]
    return known


def _number(value: float | None) -> float:
    return math.nan if value is None else value


@contextlib.contextmanager
def _writing(file: Path) -> Any:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror or error}", file=str(file)) from None
