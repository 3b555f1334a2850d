"""What a console shows: a tracking store, a folder of recordings and, through a channel, a running job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from brayx.children import Channel, RequestFailed
from brayx.errors import BrayxError, DeadlineExceeded, JobNotRunning

_ANSWER_S = 10.0


@dataclass(frozen=True)
class Source:
    """What a console shows.

    Attributes:
        uri: tracking URI.
        project: the job's project; empty: there is no job, and all projects are shown.
        recordings: folder of recordings; empty: there is none.
        board: the job's board, arguments of `brayx.console.games.HumanGames`; None: it has none.
        render: the job's render, arguments of `brayx.recording.drawing.Drawing`; None: it has none.
        drawn_board: module, function and folder of the job's function that draws a board; None: it has none.
        trust: which code may run to compare versions, see `brayx.jobs.stored_models.stored_model`.
        channel: to the job, which answers (`brayx.console.job.ConsoleJob`); None: there is no job.
    """

    uri: str
    project: str = ""
    recordings: str = ""
    board: Mapping[str, Any] | None = None
    render: tuple[str, str, str] | None = None
    drawn_board: tuple[str, str, str] | None = None
    trust: bool | str = False
    channel: Channel | None = None

    def ask(self, verb: str, *arguments: Any) -> Any:
        """The job's answer.

        Raises:
            JobNotRunning: there is no job, or it has ended.
            DeadlineExceeded: the job does not answer in time.
            BrayxError: the job refused the request.
        """
        if self.channel is None:
            raise JobNotRunning("there is no job behind this console: it shows a tracking store")
        try:
            return self.channel.ask(verb, *arguments, timeout_s=_ANSWER_S)
        except EOFError:
            raise JobNotRunning("the job has ended") from None
        except TimeoutError:
            raise DeadlineExceeded(f"the job gave no answer to {verb!r} for {_ANSWER_S:g} s") from None
        except RequestFailed as error:
            raise BrayxError(f"{verb}: the job {error}") from None

    def job(self) -> dict[str, Any]:
        """What the job reports of itself; empty: there is no job."""
        return {} if self.channel is None else self.ask("job")
