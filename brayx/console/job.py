"""Opens the console of a job from this process; the console runs in another (`brayx.console.serve`).

Imports neither FastAPI nor the page. Knows nothing of what the console shows.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from brayx.actor.live import silent
from brayx.actor.live_ticks import LiveTicks
from brayx.console.port import ConsolePort
from brayx.errors import ConfigError, JobNotRunning, StartupError
from brayx.gamecore.auth import Keys
from brayx.jobs.progress import error_lines
from brayx.league.files import levels_file
from brayx.ports import is_loopback
from brayx.recording.drawing import Drawing

if TYPE_CHECKING:
    from brayx.jobs.config import JobConfig
    from brayx.jobs.result import Ending
    from brayx.metrics.numbers import LocalNumbers
    from brayx.model.following import AliasFollower

_OPEN_S = 5.0
"""The doors open before the console, by less than this."""
_SHOWN_S = {"finished": 20.0, "failed": 20.0, "interrupted": 1.0}
"""Time for open pages to show how the training has ended; after Ctrl-C there is little."""
MODULE = "brayx.console.serve"
"""Module of the console's process."""


class Live(Protocol):
    """A job's running sessions; see `brayx.actor.live.LiveTable`."""

    def sessions(self) -> list[dict[str, Any]]:
        """A row for each."""

    def ticks(self, session: str, after: int) -> LiveTicks:
        """The newest ticks of one."""

    def end(self, session: str) -> None:
        """Ends one."""


@dataclass
class ConsoleJob:
    """The job's answers to the console: the verbs of `brayx.console.source.Source.ask`, called from a thread.

    Attributes:
        facts: values of `brayx.console.overview.JobDocument`; ``sessions`` may be left out, with ``silent``.
        live: the job's sessions; None: it has no door.
        set_share: sets a canary's share; None: no alias is followed.
        can_stop: whether the console may interrupt the job.
        finish: ends the training, and registers its best version; None: the job trains nothing.
        ending: how the training ends; None: the job trains nothing.
    """

    facts: Callable[[], dict[str, Any]]
    live: Live | None = None
    set_share: Callable[[str, float], None] | None = None
    can_stop: bool = False
    finish: Callable[[], None] | None = None
    ending: Ending | None = None
    began: float = field(default_factory=time.monotonic)

    def answer(self, verb: str, *arguments: Any) -> Any:
        """Answers a request."""
        if verb == "job":
            return self._job()
        if verb == "ending":
            return self._end()
        if verb == "shown" and self.ending is not None:
            return self.ending.shown.set()
        if verb == "stop" and self.can_stop:
            os.kill(os.getpid(), signal.SIGINT)  # what Ctrl-C does: the trial can be resumed
            return None
        if verb == "finish" and self.finish is not None:
            return self.finish()
        if verb == "set_share":
            if self.set_share is None:
                raise ConfigError("this job serves no model by an alias, so none has a canary")
            return self.set_share(*arguments)
        if verb in ("sessions", "ticks", "end"):
            if self.live is None:
                raise ConfigError("this job has no actor, so there are no sessions")
            if self.ending is not None and self.ending.facts:
                raise JobNotRunning("the job has ended, and its sessions with it")
            return getattr(self.live, verb)(*arguments)
        raise ConfigError(f"this job does not support {verb}")

    def _job(self) -> dict[str, Any]:
        up_s = time.monotonic() - self.began
        kept, end = {} if self.ending is None else self.ending.facts, self._end()
        can_stop = self.can_stop and end is None
        now = {"up_s": up_s, "began_s": time.time() - up_s - _OPEN_S, "can_stop": can_stop, "command": _command()}
        facts = {"running": True, **now, **(kept or self.facts()), "end": end}
        if self.live is not None and "sessions" not in facts:
            rows = self.live.sessions()
            facts |= {"sessions": len(rows), "silent": silent(rows)}
        return facts

    def _end(self) -> dict[str, str] | None:
        """How the training has ended: values of `brayx.console.overview.EndDocument`; None: it has not."""
        end = self.ending
        return {"state": end.state, "text": end.text} if end is not None and end.state else None

    def show_end(self) -> None:
        """Waits until the console's pages show how the training has ended."""
        if self.ending is not None and self.ending.state:
            self.ending.shown.wait(_SHOWN_S[self.ending.state])


def _command() -> str:
    """The command line that started this job; empty: another program did."""
    program = Path(sys.argv[0])
    is_ours = program.name == "brayx" or program.parts[-2:] == ("brayx", "__main__.py")
    return shlex.join(["brayx", *sys.argv[1:]]) if is_ours else ""


def served_facts(status: Mapping[str, Any], follower: AliasFollower | None, numbers: LocalNumbers) -> dict[str, Any]:
    """What a console shows of a served actor in this process, besides its sessions.

    Args:
        status: values of the actor's status page.
        follower: its canaries; None: it follows no alias.
        numbers: its metrics.
    """
    canaries = {} if follower is None else follower.shares()
    finite = {name: value for name, value in numbers.newest().items() if np.isfinite(value)}
    return {**status, "canaries": canaries, "numbers": finite, "notes": numbers.notes()}


def with_refusals(facts: Mapping[str, Any], errors: Sequence[str] = ()) -> dict[str, Any]:
    """Facts as from `served_facts`, in which the newest refusal or error of each kind stands in place of the notes.

    Args:
        facts: the facts.
        errors: further lines of errors.
    """
    shown = ("agent_errors.", "requests_refused.")
    lost = {name: count for name, count in facts["numbers"].items() if name.startswith(shown)}
    others = {name: value for name, value in facts.items() if name != "notes"}
    return {**others, "errors": [*error_lines(lost, facts["notes"]), *errors]}


def console_keys(job: JobConfig) -> str:
    """Path of the console's keys; empty: it has none.

    Raises:
        ConfigError: other machines can reach the console, and it has no keys; or they cannot be used.
    """
    file = "" if job.console_keys_file is None else str(Path(job.files_folder, job.console_keys_file))
    if file:
        Keys.load(file)
    elif job.console_port is not None and not is_loopback(job.console_host):
        raise ConfigError(
            f"console_host is {job.console_host}, which other machines reach, and console_keys_file is not set: make a "
            "key with `brayx keys new --scope control` and name its file",
            key="console_keys_file",
        )
    return file


@contextlib.contextmanager
def open_console(job: JobConfig, uri: str, parts: ConsoleJob, say: Callable[[str], None]) -> Iterator[str]:
    """The console of a job, until the context's end; gives its URL. A job runs on without a console that cannot open,
    and gives an empty one.

    Args:
        job: the job.
        uri: its tracking URI.
        parts: the parts that answer its calls.
        say: called with the console's URL, or with why there is none.

    Raises:
        ConfigError: as `console_keys`.
    """
    console = None if job.console_port is None else _opened(job, words_of(job, uri), parts, say)
    with contextlib.nullcontext() if console is None else contextlib.closing(console):
        try:
            yield "" if console is None else console.url
        finally:
            if console is not None and console.is_visited:
                parts.show_end()


def _opened(
    job: JobConfig, words: tuple[str, ...], parts: ConsoleJob, say: Callable[[str], None]
) -> ConsolePort | None:
    """Opens the console's port, or a free one if it is taken; None: neither can be opened."""
    port, failure = job.console_port or 0, ""
    try:
        try:
            console = ConsolePort(job.console_host, port, MODULE, words, parts.answer)
        except StartupError as error:
            if not port:
                raise
            failure = f"{error.message}; "
            console = ConsolePort(job.console_host, 0, MODULE, words, parts.answer)
    except StartupError as error:
        say(f"there is no console: {error.message}")
        return None
    say(f"{failure}the console is {console.url}")
    return console


@contextlib.contextmanager
def console_of_training(
    job: JobConfig,
    uri: str,
    facts: Callable[[], dict[str, Any]],
    live: contextlib.AbstractContextManager[Live | None],
    say: Callable[[str], None],
    finish: Callable[[], None],
    ending: Ending,
) -> Iterator[str]:
    """The console of a training, which it may stop if it runs in the main thread; gives its URL, as `open_console`.

    Args:
        facts, finish, ending: as for `ConsoleJob`.
        live: gives the running sessions while the console is open.
        job, uri, say: as for `open_console`.
    """
    from brayx.tracking import tracking_uri

    with live as sessions:
        can_stop = threading.current_thread() is threading.main_thread()
        parts = ConsoleJob(facts, sessions, can_stop=can_stop, finish=finish, ending=ending)
        with open_console(job, uri, parts, say) as url:
            try:
                yield url
            except KeyboardInterrupt:  # before MLflow had started, so there is no trial to show
                url = ""
                raise
            finally:
                if url:
                    tracking = "" if uri == tracking_uri(None) else ", with this tracking store,"
                    say(f"the console closes; `brayx console`{tracking} shows this trial")


def words_of(job: JobConfig, uri: str) -> tuple[str, ...]:
    """Arguments of the console's process; errors as `console_keys`."""
    renders, boards = job.renders.values(), job.boards.values()
    shown = {
        "uri": uri,
        "project": job.project,
        "recordings": "" if job.recording is None else job.recording.absolute().folder,
        "board": _board(job),
        "render": job.drawing or next((Drawing(part.module, part.func, job.folder) for part in renders), None),
        "drawn_board": next(((part.module, part.draw, job.folder) for part in boards if part.draw), None),
        "trust": job.folder,
    }
    return json.dumps(shown), console_keys(job)


def _board(job: JobConfig) -> dict[str, Any] | None:
    """How a human plays the job's game in the page: arguments of `brayx.console.games.HumanGames`; None: not at all."""
    if not job.boards or not job.actors:
        return None
    from brayx.jobs.config import pool_name  # loads torch, which a replica may not need

    board, actor = next(iter(job.boards.values())), next(iter(job.actors.values()))
    league = next(iter(job.leagues.values()), None)
    return {
        "module": board.module,
        "func": board.func,
        "folder": job.folder,
        "keys_file": actor.keys_file,
        "think_s": actor.idle_timeout_s,
        "model": "" if league is None else pool_name(job, league.model),
        "levels": "" if league is None else str(levels_file(job.folder, league)),
    }
