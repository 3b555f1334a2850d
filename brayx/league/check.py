"""The gate's check: the user's function that scores a candidate's weights.

`score` calls the function. `GateCheck` does so in a separate process, so that neither ticks nor learners wait for it;
`main` runs there. Knows nothing of games.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from brayx import systems
from brayx.children import Channel, Child, RequestFailed
from brayx.components import load_named
from brayx.errors import BrayxError, LeagueError, first_line
from brayx.league.config import GateConfig
from brayx.league.gates import Verdict
from brayx.league.member import Member
from brayx.types import Weights

log = logging.getLogger(__name__)

_DEADLINE_S = 600.0
"""Maximum time of one check."""


@dataclass(frozen=True)
class Checked:
    """Everything that a check needs, besides the weights.

    Attributes:
        gate: the gate's options, with a ``check``.
        folder: searched first for the studio's modules.
        model: name of the model component.
        job: the whole job as plain dicts.
    """

    gate: GateConfig
    folder: str
    model: str
    job: Mapping[str, Any]


def score(checked: Checked, weights: Weights) -> float:
    """Scores weights with the gate's ``check``; less is better.

    Raises:
        ConfigError: the function does not exist.
        BadWeights: the weights do not fit the model.
        LeagueError: the function raised, or returned no finite number.
    """
    from brayx.engines.torch import with_weights
    from brayx.model.build import acting_model

    assert checked.gate.check is not None
    check = load_named(checked.gate.check, checked.folder)
    built, _ = acting_model(checked.folder, checked.job[checked.model]["module"], checked.model, checked.job)
    try:
        value = float(check(with_weights(built, weights).eval().requires_grad_(False), checked.job))
    except BrayxError:
        raise
    except Exception as error:
        raise LeagueError(f"check {checked.gate.check} raised {type(error).__name__}: {first_line(error)}") from error
    if not math.isfinite(value):
        raise LeagueError(f"check {checked.gate.check} returned {value}, expected a finite number")
    return value


def verdict(gate: GateConfig, score: float) -> Verdict:
    """Whether a candidate with this score may become champion."""
    assert gate.at_most is not None
    if score <= gate.at_most:
        return Verdict(True, f"{gate.check} is {score:.4g}, at most {gate.at_most:g}")
    return Verdict(False, f"{gate.check} is {score:.4g}, expected at most {gate.at_most:g}")


class GateCheck:
    """Checks each candidate once, one at a time.

    Args:
        of: the league's part of the check.
        weights: reads the weights of a registered version; called in a thread.
        record: records each score.
    """

    def __init__(self, checked: Checked, weights: Callable[[int], Weights], record: Callable[[float], None]) -> None:
        self._inputs, self._weights, self._record = checked, weights, record
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="brayx-check")
        self._child = Child("brayx.league.check")
        self._closed = False
        self._running: dict[Member, Future[float]] = {}
        self._verdicts: dict[Member, Verdict] = {}

    def verdict(self, candidate: Member) -> Verdict | None:
        """Whether a candidate passes the check; None: the check still runs, so call again later.

        If the check fails, the candidate does not pass, and the verdict says why.
        """
        decided = self._verdicts.get(candidate)
        if decided is not None or self._closed:
            return decided
        if candidate not in self._running:
            self._running[candidate] = self._threads.submit(self._checked, candidate)
        if not self._running[candidate].done():
            return None
        try:
            score = self._running.pop(candidate).result()
            self._record(score)
            decided = verdict(self._inputs.gate, score)
        except BrayxError as error:
            decided = Verdict(False, f"its check failed: {error.message}")
        self._verdicts[candidate] = decided
        return decided

    def close(self) -> None:
        """Ends the process. Idempotent."""
        self._closed = True
        self._child.close()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _checked(self, candidate: Member) -> float:
        """Scores a candidate in a new process; runs in the thread."""
        weights = self._weights(candidate.version)
        try:
            self._child.start()
            score_of_candidate: float = self._child.ask(self._inputs, weights, timeout_s=_DEADLINE_S)
        except TimeoutError:
            raise LeagueError(f"check {self._inputs.gate.check} took more than {_DEADLINE_S:.0f} s") from None
        except RequestFailed as error:
            raise LeagueError(f"the process of check {self._inputs.gate.check} {error}") from None
        finally:
            self._child.end()
        return score_of_candidate


def main(parent: Channel) -> None:
    """Answers each request with the score of its weights."""
    systems.lower_priority(5)  # sessions and learners have priority
    parent.serve(score)
