"""What a console shows: a tracking store, a folder of recordings and, through a link, a running job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from brayx.console.link import Link
from brayx.errors import JobNotRunning


@dataclass(frozen=True)
class Source:
    """What a console shows.

    Attributes:
        uri: tracking URI.
        project: the job's project; empty: there is no job, and all projects are shown.
        recordings: folder of recordings; empty: there is none.
        link: link to the job; None: there is no job.
        board: the job's board, arguments of `brayx.console.games.Games`; None: it has none.
        trust: which code may run to compare versions, see `brayx.jobs.stored_models.stored_model`.
    """

    uri: str
    project: str = ""
    recordings: str = ""
    link: Link | None = None
    board: Mapping[str, Any] | None = None
    trust: bool | str = False

    def ask(self, verb: str, *arguments: Any) -> Any:
        """The job's answer; errors as `Link.ask`.

        Raises:
            JobNotRunning: there is no job.
        """
        if self.link is None:
            raise JobNotRunning("there is no job behind this console: it shows a tracking store")
        return self.link.ask(verb, *arguments)

    def job(self) -> dict[str, Any]:
        """What the job reports of itself; empty: there is no job."""
        return {} if self.link is None else self.ask("job")
