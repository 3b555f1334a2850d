"""The session directory: which replica owns a session, and whether that replica is alive.

`Directory` is the logic, pure and synchronous; `brayx.cluster.membership` runs it as one named Ray actor. Replicas call
it when a session starts or ends, and when a tick reaches a replica that does not own the session; never on an ordinary
tick.

Owners renew a lease. An owner loses its sessions when its lease expires or a peer finds it dead. The directory keeps
each loss until a client has received it; then the id is free. An owner that returns gets a list of the sessions it has
lost. After a restart, the directory gets its sessions back from the owners' next renewals. Until each owner has had
time for one, the directory reports no session as unknown and gives out no id. For owners that died meanwhile, it reads
their sessions at their last renewal from Ray's key-value store.

A session's id names its game; the owner of a game is the living owner of the game's first session.

It also keeps the canaries' shares that a console has set, so that all replicas have the same, now and later.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from brayx.actor.ends import BETWEEN
from brayx.actor.ownership import SessionSnapshot
from brayx.cluster.named import end_actor, find_actor
from brayx.errors import Overloaded, SessionExists, SessionLost
from brayx.gamecore.protocol import game_of
from brayx.logs import limited

LEASE_S = 6.0
RENEW_S = 1.5
RECOVERY_S = 2 * RENEW_S
GRACE_S = 600.0


logger = limited(__name__)

_REMEMBERED_ENDS = 65536
MAX_SNAPSHOT_BYTES = 1024 * 1024
MAX_SNAPSHOTS_BYTES = 512 * 1024 * 1024
INTERFACE = 5
"""Version of the directory's methods and replies, and of the sessions' snapshots that it keeps. The actor outlives its
replicas, and so an update of brayx."""
PARKED = "parked"
"""Owner of sessions that are moving between replicas; never alive."""


class DirectoryRecovering(Overloaded):
    """The directory has just restarted and does not know all sessions yet; the caller should retry."""

    code = "directory_recovering"


@dataclass(frozen=True)
class Location:
    """The owner of a session and its address."""

    owner: str
    address: str


@dataclass(frozen=True)
class Renewal:
    """The reply to an owner that renewed its lease.

    Attributes:
        lost: sessions that it no longer owns, because another replica took them or reported their loss. That other
            replica counts their end.
        forgotten: number of sessions that ended without an owner since this was last reported. No replica has counted
            their end, so the receiver does.
        shares: as from `Directory.set_share`, by canary.
    """

    lost: list[str]
    forgotten: int
    shares: dict[str, float] = field(default_factory=dict)


class _Ends(OrderedDict[Any, Any]):
    """Remembers the newest ends of sessions."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        while len(self) > _REMEMBERED_ENDS:
            self.popitem(last=False)


class _Snapshots:
    """The newest snapshot of each session, up to a total size."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[SessionSnapshot, int]] = {}
        self._bytes = 0
        self._full = False

    def __contains__(self, session: str) -> bool:
        return session in self._kept

    def put(self, session: str, snapshot: SessionSnapshot) -> bool:
        """Keeps a snapshot; False if it is too large."""
        size = len(snapshot.actor) + len(snapshot.kept or b"")
        _, before = self._kept.get(session, (None, 0))
        total = self._bytes + size - before
        if size > MAX_SNAPSHOT_BYTES:
            return False  # the owner has checked the size before, and logged it
        if total > MAX_SNAPSHOTS_BYTES:
            if not self._full:
                logger.warning("snapshots fill %d MiB: sessions keep older ones until others end", total // 2**20)
            self._full = True
            return False
        self._full = False
        self._kept[session] = (snapshot, size)
        self._bytes = total
        return True

    def give(self, session: str) -> SessionSnapshot:
        """A session's snapshot for its new owner; what is kept is out of date once that continues."""
        snapshot, size = self._kept[session]
        self._kept[session] = (replace(snapshot, exact=False, holder=None), size)
        return snapshot

    def drop(self, session: str) -> None:
        """Drops a session's snapshot, if there is one."""
        _, size = self._kept.pop(session, (None, 0))
        self._bytes -= size


class _Record:
    """The sessions of each owner as they were written last.

    Args:
        write: as for `Directory`.
        written: what an earlier process wrote.
    """

    def __init__(self, write: Callable[[str, list[str]], None], written: Mapping[str, Sequence[str]]) -> None:
        self._write = write
        self._written = {owner: set(sessions) for owner, sessions in written.items()}

    def put(self, owner: str, sessions: set[str]) -> None:
        """Writes an owner's sessions, if they have changed."""
        if sessions == self._written.get(owner, set()):
            return
        self._write(owner, sorted(sessions))
        if sessions:
            self._written[owner] = set(sessions)
        else:
            self._written.pop(owner, None)


class Directory:
    """Maps sessions to owners.

    Args:
        lease_s: an owner that does not renew for this long is dead.
        recovery_s: time for owners to report their sessions after a restart.
        grace_s: time for which a dead owner's sessions are kept, so that clients learn of their loss.
        clock: returns seconds, for tests.
        renewed: sessions by owner at the last renewal, written by the directory before the restart.
        write: called with an owner and its sessions whenever a renewal changes them; an empty list deletes the record.
    """

    def __init__(
        self,
        lease_s: float = LEASE_S,
        recovery_s: float = 0.0,
        grace_s: float = GRACE_S,
        clock: Callable[[], float] = time.monotonic,
        renewed: Mapping[str, Sequence[str]] | None = None,
        write: Callable[[str, list[str]], None] = lambda owner, sessions: None,
    ) -> None:
        self._lease_s = lease_s
        self._grace_s = grace_s
        self._clock = clock
        self._recovered_at = clock() + recovery_s
        self._owner_of: dict[str, str] = {}
        self._sessions: dict[str, set[str]] = {}
        self._games: dict[str, dict[str, None]] = {}  # sessions of each game, in the order of their claims
        self._address: dict[str, str] = {}
        self._seen: dict[str, float] = {}
        self._snapshots = _Snapshots()
        self._reasons = _Ends()  # by session
        self._forgotten = 0
        self._secret = ""
        self._shares: dict[str, float] = {}
        self._left = _Ends()  # sessions taken from dead owners, as (session, owner)
        self._changed: set[str] = set()  # owners that lost sessions and may never renew again
        self._record = _Record(write, renewed or {})
        # Sessions of owners that have not renewed since the restart.
        self._recalled = {owner: set(sessions) for owner, sessions in (renewed or {}).items()}
        for owner, sessions in self._recalled.items():
            for session in sessions:
                self._take(session, owner)
        self._left.clear()  # either of two owners of a session may claim it after the restart
        self._changed.clear()

    def renew(
        self,
        owner: str,
        address: str,
        sessions: list[str] | None = None,
        shares: Mapping[str, float] | None = None,
    ) -> Renewal | None:
        """Renews an owner's lease.

        Args:
            owner: id of the owner, new with every start of a replica.
            address: URL at which peers reach it.
            sessions: all its sessions, if the last reply was None.
            shares: the shares of its last renewal, if the last reply was None.

        Returns:
            None if the directory does not know the owner as alive, after a restart or an expired lease; the owner
            should renew again with its sessions.
        """
        self._sweep()
        if sessions is None and not self._alive(owner):
            return None
        self._seen[owner] = self._clock()
        self._address[owner] = address
        self._sessions.setdefault(owner, set())
        for canary, share in (shares or {}).items():
            self._shares.setdefault(canary, share)  # a console may have set another since the restart
        if sessions is not None:
            for session in self._recalled.pop(owner, set()).difference(sessions):
                if self._owner_of.get(session) == owner:
                    self._forget(session)  # it has ended since the last renewal
        lost = []
        for session in sessions or ():
            holder = self._owner_of.get(session, owner)
            if (session, owner) in self._left or (holder != owner and self._alive(holder)):
                lost.append(session)
            else:
                self._take(session, owner)
        for changed in [owner, *self._changed]:
            self._record.put(changed, self._sessions.get(changed, set()))
        self._changed.clear()
        forgotten, self._forgotten = self._forgotten, 0
        return Renewal(lost, forgotten, dict(self._shares))

    def set_share(self, canary: str, share: float) -> None:
        """Keeps a canary's share; each owner gets it with its next renewal. ``canary`` is the owners' name for it."""
        self._shares[canary] = share

    def secret(self, offer: str, fresh: bool = False) -> str:
        """The shared secret by which owners authenticate each other: the first one offered.

        Args:
            offer: a secret of the caller; after a restart of the directory, the one in use before.
            fresh: the caller has just generated it.

        Raises:
            DirectoryRecovering: owners may not have offered the secret in use yet.
        """
        if not self._secret:
            if fresh:
                self._check_recovered()
            self._secret = offer
        return self._secret

    def claim(self, session: str, owner: str, together: bool = False) -> Location | None:
        """Assigns a session to an owner.

        Args:
            session: id of the session.
            owner: the new owner.
            together: refuse if another living owner has the session's game.

        Returns:
            None if the session is assigned; otherwise the owner of its game, and nothing has changed.

        Raises:
            SessionExists: a living owner has the session.
            DirectoryRecovering: the owner of the session or of its game is not known yet.
        """
        holder = self._owner_of.get(session)
        if holder is None or holder in self._recalled:
            self._check_recovered()
        if holder is not None and holder != owner and self._alive(holder):
            raise SessionExists(f"session {session!r} is already running: stop it first, or use another id")
        if together:
            first = self._game_owner(session)
            if first is None and holder != owner:
                self._check_recovered()
            if first is not None and first != owner:
                return Location(first, self._address[first])
        if holder is not None and holder != owner:
            self._forgotten += 1  # it ended with its owner or while moving, and this claim hides the loss
        self._snapshots.drop(session)
        self._reasons.pop(session, None)
        self._take(session, owner)
        return None

    def release(self, session: str, owner: str, reason: str = "stop") -> None:
        """Frees a session's id, if this owner still has it. `locate` reports the reason until `acknowledge`."""
        if self._owner_of.get(session) != owner:
            return
        self._forget(session)
        if reason != "stop":
            self._reasons[session] = reason

    def keep(self, session: str, owner: str, snapshot: SessionSnapshot) -> bool:
        """Keeps a session's newest snapshot in case its owner dies; False if it is too large, or not this owner's."""
        return self._owner_of.get(session) == owner and self._snapshots.put(session, snapshot)

    def park(self, session: str, owner: str, snapshot: SessionSnapshot) -> None:
        """Takes a session from an owner that shuts down, for the next replica that gets a request for it.

        Raises:
            Overloaded: the snapshot is too large.
        """
        if self._owner_of.get(session) != owner:
            return
        if not self._snapshots.put(session, snapshot):
            raise Overloaded(f"the snapshot of session {session!r} is too large to be kept", layer="snapshot")
        self._take(session, PARKED)
        self._changed.add(PARKED)
        self._seen[PARKED] = self._dead_since_now()

    def leave(self, owner: str) -> None:
        """Removes an owner that shut down in order and has no sessions left."""
        for session in list(self._sessions.get(owner, ())):
            self.release(session, owner, "drained")
        self.bury(owner)
        self._record.put(owner, set())

    def locate(self, session: str, taker: str = "") -> Location | SessionSnapshot | None:
        """Finds the living owner of a session; None if the session does not exist.

        Args:
            session: id of the session.
            taker: the calling owner. If the session's owner is dead and left a snapshot, the caller gets the snapshot
                and becomes the owner; if it repeats the call it gets the snapshot again. Empty: it takes no session.

        Raises:
            SessionLost: its owner ended it, or died without a snapshot. Raised until `acknowledge`, or until the id is
                claimed: the answer to the first call may be lost, or come after its deadline.
            DirectoryRecovering: it is not known yet whether the session exists.
        """
        owner = self._owner_of.get(session)
        if owner is None:
            if reason := self._reasons.get(session):
                raise SessionLost(f"session {session!r} was ended: {reason}", reason=reason)
            self._check_recovered()
            return None
        if self._alive(owner) and not (owner == taker and session in self._snapshots):
            return Location(owner, self._address[owner])
        if owner in self._recalled:
            self._check_recovered()
        if session in self._snapshots:
            if not taker:
                raise Overloaded(f"session {session!r} is moving to another replica; try again", layer=BETWEEN)
            self._take(session, taker)
            return self._snapshots.give(session)
        self._forget(session)
        self._leave(session, owner)
        self._forgotten += 1
        self._reasons[session] = "owner_died"
        raise SessionLost(
            f"session {session!r} was lost: the replica that ran it died; start a new one", reason="owner_died"
        )

    def acknowledge(self, session: str) -> None:
        """A client gets the loss of its session as answer: the id is free, and unknown from now on."""
        self._reasons.pop(session, None)

    def bury(self, owner: str) -> None:
        """Ends the lease of an owner that a peer could not reach."""
        if owner in self._seen:
            self._seen[owner] = self._dead_since_now()

    def _game_owner(self, session: str) -> str | None:
        """The living owner of the session's game."""
        for other in self._games.get(game_of(session), ()):
            owner = self._owner_of[other]
            if self._alive(owner):
                return owner
        return None

    def addresses(self) -> list[str]:
        """URLs of the living owners."""
        return [address for owner, address in self._address.items() if self._alive(owner)]

    def _leave(self, session: str, owner: str) -> None:
        """Remembers that a session was taken from an owner, to report it if the owner returns."""
        self._changed.add(owner)
        self._left[session, owner] = None

    def _alive(self, owner: str) -> bool:
        seen = self._seen.get(owner)
        return seen is not None and self._clock() - seen <= self._lease_s

    def _dead_since_now(self) -> float:
        return self._clock() - 2 * self._lease_s

    def _take(self, session: str, owner: str) -> None:
        before = self._owner_of.get(session, owner)
        self._left.pop((session, owner), None)
        if before != owner:
            self._unassign(session)
            self._leave(session, before)
        self._owner_of[session] = owner
        self._sessions.setdefault(owner, set()).add(session)
        game = game_of(session)
        if game:
            self._games.setdefault(game, {})[session] = None
        self._seen.setdefault(owner, self._dead_since_now())  # dead until its renewal gives its address

    def _sweep(self) -> None:
        """Forgets owners that died more than ``grace_s`` ago, with sessions that no client has requested since."""
        limit = self._clock() - self._lease_s - self._grace_s
        for owner in [owner for owner, seen in self._seen.items() if seen < limit]:
            for session in self._sessions.pop(owner, ()):
                self._leave(session, owner)
                self._forgotten += 1
                self._owner_of.pop(session, None)
                self._leave_game(session)
                self._snapshots.drop(session)
            self._address.pop(owner, None)
            self._recalled.pop(owner, None)
            del self._seen[owner]
            self._changed.add(owner)

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
        self._unassign(session)
        self._snapshots.drop(session)

    def _unassign(self, session: str) -> None:
        owner = self._owner_of.pop(session)
        self._leave_game(session)
        sessions = self._sessions.get(owner)
        if sessions is not None:
            sessions.discard(session)
            if not sessions and not self._alive(owner):
                self._sessions.pop(owner, None)
                self._address.pop(owner, None)
                self._seen.pop(owner, None)


def stop_directory(name: str) -> None:
    """Ends the directory's actor, if it exists."""
    end_actor(find_actor(name))
