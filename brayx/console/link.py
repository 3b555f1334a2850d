"""The console's requests to the job that it shows. Knows nothing of what is asked."""

from __future__ import annotations

from typing import Any

from brayx.children import Channel, RequestFailed
from brayx.errors import BrayxError, DeadlineExceeded, JobNotRunning

_ANSWER_S = 10.0


class Link:
    """Asks the job. Thread safe.

    Args:
        job: the channel to the job, which serves it.
    """

    def __init__(self, job: Channel) -> None:
        self._job = job

    def ask(self, verb: str, *arguments: Any) -> Any:
        """The job's answer.

        Raises:
            JobNotRunning: the job has ended.
            DeadlineExceeded: the job does not answer in time.
            BrayxError: the job refused the request.
        """
        try:
            return self._job.ask(verb, *arguments, timeout_s=_ANSWER_S)
        except EOFError:
            raise JobNotRunning("the job has ended") from None
        except TimeoutError:
            raise DeadlineExceeded(f"the job gave no answer to {verb!r} for {_ANSWER_S:g} s") from None
        except RequestFailed as error:
            raise BrayxError(f"{verb}: the job {error}") from None
