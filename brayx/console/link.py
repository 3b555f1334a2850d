"""Both ends of the link by which the console's process, a child of the job's, sends requests to the job.

Requests and answers are pickles over the child's pipes. The job answers one request after the other. Knows nothing of
what is asked.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import IO, Any

from brayx.errors import BrayxError, DeadlineExceeded, JobNotRunning
from brayx.logs import limited

logger = limited(__name__)

_ANSWER_S = 10.0


class Link:
    """The child's end of the link. Thread safe.

    Args:
        requests, answers: the pipes to and from the job.
        on_end: called once, in a thread, when the job has ended or closed its end.
    """

    def __init__(self, requests: IO[bytes], answers: IO[bytes], on_end: Callable[[], None]) -> None:
        self._requests, self._answers, self._on_end = requests, answers, on_end
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._read, name="brayx-console-link", daemon=True)
        self._thread.start()

    def ask(self, verb: str, *arguments: Any) -> Any:
        """The job's answer.

        Raises:
            JobNotRunning: the job has ended.
            DeadlineExceeded: the job does not answer in time.
            BrayxError: the job refused the request.
        """
        number, answer = next(self._numbers), Future[Any]()
        request = pickle.dumps((number, verb, arguments))
        try:
            with self._lock:
                self._waiting[number] = answer
                self._requests.write(request)
                self._requests.flush()
            return answer.result(_ANSWER_S)
        except OSError:
            raise JobNotRunning("the job has ended") from None
        except TimeoutError:
            raise DeadlineExceeded(f"the job gave no answer to {verb!r} for {_ANSWER_S:g} s") from None
        finally:
            self._waiting.pop(number, None)

    def _read(self) -> None:
        while True:
            try:
                number, answer, error = pickle.load(self._answers)
            except Exception:  # of a pipe that was cut or closed, pickle raises almost any
                break
            waiting = self._waiting.get(number)
            if waiting is None:
                continue  # `ask` no longer waits for it
            if error is None:
                waiting.set_result(answer)
            else:
                waiting.set_exception(error)
        for left in list(self._waiting.values()):
            left.set_exception(JobNotRunning("the job has ended"))
        self._on_end()


def answer_requests(requests: IO[bytes], answers: IO[bytes], answer: Callable[..., Any]) -> None:
    """The job's end of the link: answers requests until the child has ended.

    Args:
        requests, answers: the pipes from and to the child.
        answer: called with a verb and its arguments; an error that it raises is sent to the child.
    """
    with contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
        while True:
            number, verb, arguments = pickle.load(requests)
            try:
                reply = pickle.dumps((number, answer(verb, *arguments), None))
            except BrayxError as error:
                reply = pickle.dumps((number, None, error))
            except Exception as error:
                logger.exception("a request of the console failed: %s", verb)
                reply = pickle.dumps(
                    (number, None, BrayxError(f"{verb}: {type(error).__name__}; the job's log has more"))
                )
            answers.write(reply)
            answers.flush()


def own_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """A child's pipes to and from its parent. From now on, the child prints to standard error."""
    requests = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return requests, os.fdopen(os.dup(0), "rb")
