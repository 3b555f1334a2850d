"""A job on Ray that waits for its first game's contract: its replicas hold starts, and this process asks for them.

Knows nothing of what the job then builds.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Self

from brayx.cluster.hub import create_hub, take_requests
from brayx.cluster.lobby import RayLobby
from brayx.cluster.named import end_actor
from brayx.cluster.scale import hub_name
from brayx.gamecore.contract import Contract
from brayx.jobs.config import JobConfig, only
from brayx.jobs.gamecores import Gamecores, gamecores_of
from brayx.jobs.waiting import WaitingJob
from brayx.tracking import Trial


class WaitingOnRay(WaitingJob):
    """Opens a job's doors and starts its gamecores; a context manager, at whose end both have ended.

    Args:
        job: the job, without a contract.
        actor: name of its actor.
        trial: its trial.
        deploy: opens the doors, whose replicas find the trial's hub; returns their URLs.
        end: closes them; idempotent.

    Attributes:
        lobby: has the requests of replicas.
    """

    def __init__(
        self,
        job: JobConfig,
        actor: str,
        trial: Trial,
        deploy: Callable[[], Mapping[str, str]],
        end: Callable[[], object],
    ) -> None:
        super().__init__(job)
        self._gamecores, self._keys_file = gamecores_of(job, actor), job.actors[actor].keys_file
        self._trial, self._deploy, self._end = trial, deploy, end

    def __enter__(self) -> Self:
        x_axis = self.job.trainers[only("trainer", self.job.trainers)].x_axis
        with contextlib.ExitStack() as stack:
            # The first behaviour's, once it is known: that finds this one.
            hub = self._hub = create_hub(hub_name(self._trial), self._trial, x_axis=x_axis)
            stack.callback(end_actor, hub)
            self.lobby = RayLobby(self.job, lambda key, answer: hub.answer.remote(key, answer))
            stack.callback(self._end)
            self._urls = self._deploy()
            parts = self._gamecores, self._urls, self.job.files_folder, self._failed, lambda text: self.say(text)
            self.games = Gamecores(*parts, keys_file=self._keys_file)
            self.games.__enter__()
            stack.callback(self.games.stop)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def urls(self) -> Mapping[str, str]:
        """See `WaitingJob.urls`."""
        return self._urls

    def next(self, timeout_s: float) -> Contract | None:
        """See `WaitingJob.next`."""
        for key, request in take_requests(self._hub):
            if isinstance(request, Contract):
                self.lobby.meet(key, request)
        contract = self.lobby.next()
        if contract is None:
            time.sleep(timeout_s)
        return contract
