"""Compares the clients' reports and the replicas' records with the kills and their times.

A kill explains a session's fate only if it hit the process that ran the session at that time. Knows neither clients nor
services.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.chaos.ledger import Event, pid_of

SETTLE_S = 10.0
"""A stopped session has notified its actor after this long at the latest."""


@dataclass
class Interruption:
    """An error that a client got because the replica of its session has ended, or is ending.

    Attributes:
        reason: reason of a loss.
        run: the run of the session that sent the last reply.
    """

    session: str
    at: float
    code: str
    reason: str
    run: str


@dataclass
class Game:
    """Sessions of one game that were started at the same time.

    Attributes:
        at: when the last of them was answered.
        runs: where they started.
    """

    name: str
    at: float
    runs: list[str]


@dataclass
class Records:
    """The observations of all players.

    Attributes:
        wrong: violations.
        interruptions: reported losses and resumptions, to compare with the kills.
        stopped: times at which sessions were stopped, with or without a reply.
        doubtful: sessions without an answer to their start, which may not exist.
        games: games with all sessions started.
        counts: counts of events, for display.
    """

    wrong: list[str] = field(default_factory=list)
    interruptions: list[Interruption] = field(default_factory=list)
    stopped: dict[str, float] = field(default_factory=dict)
    doubtful: set[str] = field(default_factory=set)
    games: list[Game] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def check_interruptions(
    records: Records, seen: list[Event], killed: Mapping[int, float], hurt: Mapping[int, float]
) -> list[str]:
    """Losses and resumptions without an explanation.

    The replica that ran the session must have been killed between the session's start there and the report. A kill
    explains one report per session. No kill explains the loss of a session that has continued elsewhere since. If a
    session was drained, its last replica must have been shutting down in order, and have notified the actor.

    Args:
        records: the players' records.
        seen: the replicas' records, by time.
        killed: time of the kill, by process.
        hurt: time from which a replica was being killed, or being shut down in order.
    """
    drained = {event.run for event in seen if event.what == "end" and event.reason == "drained"}
    of_session: dict[str, list[Event]] = defaultdict(list)
    for event in seen:
        if event.what == "begin":
            of_session[event.session].append(event)
    wrong, explained = [], set()
    for error in sorted(records.interruptions, key=lambda error: error.at):
        known = [event for event in of_session[error.session] if event.at <= error.at]
        if not known:
            wrong.append(f"{error} came, but no replica ever ran it")
            continue
        last = known[-1]
        if error.reason == "drained":
            if last.run not in drained or not hurt.get(pid_of(last.run), error.at) < error.at:
                wrong.append(f"{error} came, but the replica of {last.run} was not being ended")
            continue
        since = [event.run for event in known].index(error.run) if error.run in {e.run for e in known} else 0
        # A lost session ended in its last replica; a resumed one left any of its replicas since its last reply.
        may_explain = [last] if error.code == "session_lost" else known[since:]
        for event in may_explain:
            killed_at = killed.get(pid_of(event.run))
            if killed_at is not None and event.at <= killed_at <= error.at and event.run not in explained:
                explained.add(event.run)
                break
        else:
            wrong.append(f"{error} came, but none of its runs {[e.run for e in may_explain]} was killed before")
    return wrong


def check_games(records: Records, hurt: Mapping[int, float]) -> list[str]:
    """Games whose sessions started on several replicas although none of these was being killed or ended."""
    wrong = []
    for game in records.games:
        pids = {pid_of(run) for run in game.runs}
        if len(pids) > 1 and all(hurt.get(pid, game.at) >= game.at for pid in pids):
            wrong.append(f"game {game.name} started in two halves: {game.runs}")
    return wrong


def check_ends(records: Records, seen: list[Event], killed: Mapping[int, float]) -> tuple[list[str], Counter[str]]:
    """Sessions without exactly one reason, and how many ended with which.

    A run may be without an end if it went on elsewhere, or if its replica was killed while it ran: not if it had been
    stopped `SETTLE_S` before.
    """
    begun = {event.run: event for event in seen if event.what == "begin"}
    continued = {event.before for event in begun.values()}
    ends: dict[str, list[Event]] = defaultdict(list)
    reasons: dict[str, list[str]] = defaultdict(list)
    for event in seen:
        if event.what == "end":
            ends[event.run].append(event)
            reasons[event.session].append(event.reason)

    def died_with(run: str) -> bool:
        killed_at = killed.get(pid_of(run))
        return killed_at is not None and killed_at < records.stopped.get(begun[run].session, killed_at) + SETTLE_S

    wrong = []
    for run, event in begun.items():
        ended = [end.reason for end in ends[run]]
        if len(ended) > 1:
            wrong.append(f"run {run} of session {event.session} ended with {ended}")
        if not ended and run not in continued and event.session not in records.doubtful and not died_with(run):
            wrong.append(f"run {run} of session {event.session} never ended")
    for session, ended in reasons.items():
        if len(ended) != 1:
            wrong.append(f"session {session} ended with {ended}")
    last = {event.session: run for run, event in begun.items()}
    wrong += [
        f"session {session} was stopped, and ended with {reasons.get(session)}"
        for session in records.stopped
        if reasons.get(session) != ["stop"] and (reasons.get(session) or not died_with(last[session]))
    ]
    wrong += [
        f"session {error.session} was reported lost with its owner, and ended with {reasons[error.session]}"
        for error in records.interruptions
        if error.reason == "owner_died" and reasons.get(error.session, ["stop"]) != ["stop"]
    ]
    return wrong, Counter(ended[0] for ended in reasons.values())
