"""The session directory: which replica owns a session, and whether that replica still lives.

`Directory` is the logic, pure and synchronous; `create_directory` runs it as one named Ray actor, asked at a session's
start and end and when a tick comes to a replica that does not own it, never on an ordinary tick. Owners renew a lease;
an owner whose lease ran out, or whom a peer found dead, has lost its sessions: each loss is told once, then the id is
free. The directory keeps nothing on disk: after its own restart the owners' next renewal brings their sessions back,
and until each has had time for one, nobody is told that a session is unknown or its id free.

Which sessions are one game's is in their ids; the owner of a game is the living owner of the first of them.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from brayx.actor.session import Snapshot
from brayx.errors import Overloaded, SessionExists, SessionLost
from brayx.gamecore.protocol import game_of

LEASE_S = 6.0
RENEW_S = 1.5
RECOVERY_S = 2 * RENEW_S
GRACE_S = 600.0


logger = logging.getLogger(__name__)

_REMEMBERED_ENDS = 65536
MAX_SNAPSHOT_BYTES = 1024 * 1024
MAX_SNAPSHOTS_BYTES = 512 * 1024 * 1024
PARKED = "parked"
"""Owner of sessions between two replicas; never alive."""


class DirectoryRecovering(Overloaded):
    """The directory has just restarted and does not know all sessions yet: ask again."""

    code = "directory_recovering"


@dataclass(frozen=True)
class Location:
    """Where a session lives."""

    owner: str
    address: str


class Directory:
    """Sessions by owner.

    Args:
        lease_s: an owner not heard of for this long is dead.
        recovery_s: after a restart, how long owners have to bring their sessions back.
        grace_s: how long the sessions of a dead owner are kept for a client to be told of their loss.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        lease_s: float = LEASE_S,
        recovery_s: float = 0.0,
        grace_s: float = GRACE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lease_s = lease_s
        self._grace_s = grace_s
        self._clock = clock
        self._recovered_at = clock() + recovery_s
        self._owner_of: dict[str, str] = {}
        self._sessions: dict[str, set[str]] = {}
        self._games: dict[str, dict[str, None]] = {}  # a game's sessions in the order in which they were taken
        self._address: dict[str, str] = {}
        self._seen: dict[str, float] = {}
        self._snapshots: dict[str, tuple[Snapshot, int]] = {}
        self._snapshot_bytes = 0
        self._full = False
        self._reasons: OrderedDict[str, str] = OrderedDict()
        self._forgotten = 0
        self._secret = ""

    def renew(self, owner: str, address: str, sessions: list[str] | None = None) -> list[str] | None:
        """Keeps an owner alive.

        Args:
            owner: its id, new with every start of a replica.
            address: URL under which peers reach it.
            sessions: all its sessions; given after the answer was None.

        Returns:
            None: this directory does not know the owner as a living one (either of the two was away), which should
            send its sessions. Otherwise those of ``sessions`` that another living owner has taken since: this owner
            has lost them.
        """
        self._sweep()
        if sessions is None and not self._alive(owner):
            return None
        self._seen[owner] = self._clock()
        self._address[owner] = address
        self._sessions.setdefault(owner, set())
        lost = []
        for session in sessions or ():
            holder = self._owner_of.get(session, owner)
            if holder != owner and self._alive(holder):
                lost.append(session)
            else:
                self._take(session, owner)
        return lost

    def secret(self, offer: str, fresh: bool = False) -> str:
        """What the owners prove to each other with that they are owners: the first offer, for as long as this lives.

        Args:
            offer: a secret of the owner that asks; after a restart of this directory, the one that it had.
            fresh: the owner has just made it up.

        Raises:
            DirectoryRecovering: owners that have one may not have offered it yet.
        """
        if not self._secret:
            if fresh:
                self._check_recovered()
            self._secret = offer
        return self._secret

    def claim(self, session: str, owner: str, together: bool = False) -> Location | None:
        """Makes a session an owner's.

        Args:
            session: its id.
            owner: who is to have it.
            together: only if no other living owner has the game that the session is one agent of.

        Returns:
            None: it is this owner's now. Otherwise the owner of its game, and nothing has changed.

        Raises:
            SessionExists: a living owner has it.
            DirectoryRecovering: whether one has it, or its game, is not known yet.
        """
        holder = self._owner_of.get(session)
        if holder is None:
            self._check_recovered()
        if holder is not None and holder != owner and self._alive(holder):
            raise SessionExists(f"session {session!r} is already running: stop it first, or use another id")
        if together:
            first = self._game_owner(session)
            if first is None and holder != owner:
                self._check_recovered()
            if first is not None and first != owner:
                return Location(first, self._address[first])
        self._drop_snapshot(session)
        self._reasons.pop(session, None)
        self._take(session, owner)
        return None

    def release(self, session: str, owner: str, reason: str = "stop") -> None:
        """Frees a session's id, if it is still this owner's; whoever asks for it next is told the reason, once."""
        if self._owner_of.get(session) != owner:
            return
        self._forget(session)
        if reason != "stop":
            self._keep_reason(session, reason)

    def keep(self, session: str, owner: str, snapshot: Snapshot) -> bool:
        """Keeps a session's newest snapshot in case its owner dies; False: it is too large, or not this owner's."""
        if self._owner_of.get(session) != owner:
            return False
        return self._store(session, snapshot)

    def park(self, session: str, owner: str, snapshot: Snapshot) -> None:
        """Takes a session over from an owner that ends, for the next replica that is asked for it.

        Raises:
            Overloaded: the snapshot is too large to be kept.
        """
        if self._owner_of.get(session) != owner:
            return
        if not self._store(session, snapshot):
            raise Overloaded(f"the snapshot of session {session!r} is too large to be kept", layer="directory")
        self._take(session, PARKED)
        self._seen[PARKED] = self._dead_since_now()

    def leave(self, owner: str) -> None:
        """An owner ends in order: it has no sessions any more."""
        for session in list(self._sessions.get(owner, ())):
            self.release(session, owner, "drained")
        self.bury(owner)

    def _store(self, session: str, snapshot: Snapshot) -> bool:
        size = len(snapshot.actor) + len(snapshot.kept or b"")
        held = self._snapshots.get(session)
        total = self._snapshot_bytes + size - (held[1] if held else 0)
        if size > MAX_SNAPSHOT_BYTES:
            return False  # its owner has seen to that, and told
        if total > MAX_SNAPSHOTS_BYTES:
            if not self._full:
                logger.warning("snapshots fill %d MiB: sessions keep older ones until others end", total // 2**20)
            self._full = True
            return False
        self._full = False
        self._snapshots[session] = (snapshot, size)
        self._snapshot_bytes = total
        return True

    def locate(self, session: str, taker: str = "", repeats: bool = False) -> Location | Snapshot | None:
        """The living owner of a session; None: there is no such session.

        Args:
            session: its id.
            taker: the owner that asks. It gets the snapshot of a session that has lost its own, which is its own from
                then on; again if it asks again, since it does not have it. Empty: it takes none.
            repeats: the request may be a repeat of one whose reply has not arrived.

        Raises:
            SessionLost: its owner ended it, or died without a snapshot. Told once, to ``repeats`` each time until the
                id is claimed: it is free afterwards.
            DirectoryRecovering: whether there is one is not known yet.
        """
        owner = self._owner_of.get(session)
        if owner is None:
            reason = self._reasons.get(session, "") if repeats else self._reasons.pop(session, "")
            if reason:
                raise SessionLost(f"session {session!r} was ended: {reason}", reason=reason)
            self._check_recovered()
            return None
        if self._alive(owner) and not (owner == taker and session in self._snapshots):
            return Location(owner, self._address[owner])
        if session in self._snapshots:
            if not taker:
                raise Overloaded(f"session {session!r} is between two replicas; try again", layer="directory")
            snapshot, size = self._snapshots[session]
            self._take(session, taker)
            self._snapshots[session] = (replace(snapshot, exact=False), size)  # its taker goes on from it
            return snapshot
        self._forget(session)
        if repeats:
            self._keep_reason(session, "owner_died")
        raise SessionLost(
            f"session {session!r} was lost: the replica that ran it died; start a new one", reason="owner_died"
        )

    def forgotten(self) -> int:
        """How many sessions have ended unheard since this was last asked: without an owner, and nobody asked for them.

        No replica has counted their end: who asks does.
        """
        count, self._forgotten = self._forgotten, 0
        return count

    def bury(self, owner: str) -> None:
        """A peer could not reach this owner: its lease ends now."""
        if owner in self._seen:
            self._seen[owner] = self._dead_since_now()

    def _game_owner(self, session: str) -> str | None:
        """The living owner of the game that a session is one agent of."""
        for other in self._games.get(game_of(session), ()):
            owner = self._owner_of[other]
            if self._alive(owner):
                return owner
        return None

    def owners(self) -> dict[str, int]:
        """Number of sessions by living owner."""
        return {owner: len(held) for owner, held in self._sessions.items() if self._alive(owner)}

    def addresses(self) -> list[str]:
        """URLs of the living owners."""
        return [address for owner, address in self._address.items() if self._alive(owner)]

    def _keep_reason(self, session: str, reason: str) -> None:
        self._reasons[session] = reason
        while len(self._reasons) > _REMEMBERED_ENDS:
            self._reasons.popitem(last=False)

    def _alive(self, owner: str) -> bool:
        seen = self._seen.get(owner)
        return seen is not None and self._clock() - seen <= self._lease_s

    def _dead_since_now(self) -> float:
        return self._clock() - 2 * self._lease_s

    def _drop_snapshot(self, session: str) -> None:
        _, size = self._snapshots.pop(session, (None, 0))
        self._snapshot_bytes -= size

    def _take(self, session: str, owner: str) -> None:
        before = self._owner_of.get(session, owner)
        if before != owner:
            kept = self._snapshots.get(session)
            self._forget(session)
            if kept is not None:
                self._snapshots[session] = kept
                self._snapshot_bytes += kept[1]
        self._owner_of[session] = owner
        self._sessions.setdefault(owner, set()).add(session)
        game = game_of(session)
        if game:
            self._games.setdefault(game, {})[session] = None
        self._seen.setdefault(owner, self._dead_since_now())  # until its renewal has told its address

    def _sweep(self) -> None:
        """Forgets owners that have been dead for long, and their sessions, which nobody has asked for since."""
        limit = self._clock() - self._lease_s - self._grace_s
        for owner in [owner for owner, seen in self._seen.items() if seen < limit]:
            for session in self._sessions.pop(owner, ()):
                self._forgotten += 1
                self._owner_of.pop(session, None)
                self._leave_game(session)
                self._drop_snapshot(session)
            self._address.pop(owner, None)
            del self._seen[owner]

    def _check_recovered(self) -> None:
        if self._clock() < self._recovered_at:
            raise DirectoryRecovering("the session directory has just restarted; try again", layer="directory")

    def _leave_game(self, session: str) -> None:
        game = game_of(session)
        sessions = self._games.get(game)
        if sessions is not None:
            sessions.pop(session, None)
            if not sessions:
                del self._games[game]

    def _forget(self, session: str) -> None:
        owner = self._owner_of.pop(session)
        self._leave_game(session)
        self._drop_snapshot(session)
        held = self._sessions.get(owner)
        if held is not None:
            held.discard(session)
            if not held and not self._alive(owner):
                self._sessions.pop(owner, None)
                self._address.pop(owner, None)
                self._seen.pop(owner, None)


NAMESPACE = "brayx"
"""Ray namespace of brayx's named actors: a Serve replica, a driver and a notebook must mean the same one."""


class _DirectoryActor(Directory):
    """The directory in its actor, which knows whether it is a restarted one."""

    def __init__(self) -> None:
        import ray

        with warnings.catch_warnings():  # the property itself uses what Ray has deprecated
            warnings.simplefilter("ignore")
            restarted = ray.get_runtime_context().was_current_actor_reconstructed
        super().__init__(recovery_s=RECOVERY_S if restarted else 0.0)


def create_directory(name: str) -> Any:
    """The directory's Ray actor of that name, started if there is none.

    It is detached, so that it outlives the replica that happened to start it; who owns the application ends it with
    `stop_directory`.
    """
    import ray

    options = {"lifetime": "detached", "num_cpus": 0, "max_restarts": -1, "max_task_retries": 1}
    return ray.remote(_DirectoryActor).options(name=name, namespace=NAMESPACE, get_if_exists=True, **options).remote()


def stop_directory(name: str) -> None:
    """Ends the directory's actor, if there is one."""
    import ray

    try:
        ray.kill(ray.get_actor(name, namespace=NAMESPACE))
    except ValueError:
        return
