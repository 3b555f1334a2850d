"""How a training calls its league, which may be in another thread or process: each host implements `call`."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from brayx.league.gates import Verdict
    from brayx.league.league import Standing
    from brayx.league.member import Member


class RunningLeague(abc.ABC):
    """The methods of `League` that a training calls, under the same names."""

    @abc.abstractmethod
    def call(self, method: str, *args: Any) -> Any:
        """Calls the method of the `League` with that name."""

    def champion_now(self) -> Member | None:
        champion: Member | None = self.call("champion_now")
        return champion

    def due(self, player: str, env_steps: int) -> str:
        return str(self.call("due", player, env_steps))

    def has(self, digest: str) -> bool:
        return bool(self.call("has", digest))

    def freeze(self, player: str, version: int, digest: str, env_steps: int) -> Member:
        member: Member = self.call("freeze", player, version, digest, env_steps)
        return member

    def frozen_steps(self, player: str) -> int:
        return int(self.call("frozen_steps", player))

    def candidates(self) -> list[Member]:
        return list(self.call("candidates"))

    def crown(self, candidate: Member) -> Verdict:
        verdict: Verdict = self.call("crown", candidate)
        return verdict

    def refuse(self, candidate: Member, reason: str) -> None:
        self.call("refuse", candidate, reason)

    def standings(self) -> list[Standing]:
        return list(self.call("standings"))

    def retire(self, player: str, reason: str) -> None:
        self.call("retire", player, reason)
