"""The session directory's Ray actor, and a replica's entry in it: its id, address, lease, and what its peers have too.

Knows nothing of routing.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from brayx.actor.ownership import Lease, SessionSnapshot
from brayx.actor.table import SessionTable
from brayx.cluster import NAMESPACE
from brayx.cluster.directory import (
    INTERFACE,
    LEASE_S,
    RECOVERY_S,
    RENEW_S,
    Directory,
    DirectoryRecovering,
    Renewal,
)
from brayx.cluster.named import HEAD, is_restarted, named_actor, unwrap
from brayx.cluster.peers import Peers
from brayx.cluster.ray_private import KeyValueStore
from brayx.errors import BrayxError, Overloaded, StartupError
from brayx.logs import limited

logger = limited(__name__)

NO_ANSWER = "directory"
"""Layer of the error for a call that the directory has not answered: it may have carried it out, or may do so yet."""
_ANSWER_S = 5.0
_RETRY_S = 0.05


class Membership:
    """One replica as a member of its application.

    Args:
        directory: handle of the session directory.
        on_shares: called with the canaries' shares, as `Renewal.shares`, at each renewal and each change.

    Attributes:
        owner: the replica's id.
        address: URL where its peers reach it; empty before `join`.
        lease: the time until which it may answer for its sessions.
        peers: connections to its peers.
    """

    def __init__(self, directory: Any, on_shares: Callable[[Mapping[str, float]], None] | None = None) -> None:
        self.owner = uuid.uuid4().hex
        self.address = ""
        self.lease = Lease(0.0)
        self.peers = Peers(self.secret)
        self._directory = directory
        self._on_shares = on_shares
        self._shares: Mapping[str, float] = {}
        self._secret = secrets.token_hex(32)
        # Not the context of a request: if that request's client leaves, Ray would cancel the call to the directory,
        # which may have made the change already.
        self._context = contextvars.copy_context()

    def secret(self) -> str:
        """The secret by which the application's replicas authenticate each other."""
        return self._secret

    async def ask(self, method: str, *args: Any) -> Any:
        """Calls the directory, again while it restarts, within a deadline.

        Raises:
            BrayxError: the directory's own typed error.
            Overloaded: there was no answer in time.
        """
        try:
            async with asyncio.timeout(_ANSWER_S):
                while True:
                    try:
                        return await self._context.run(getattr(self._directory, method).remote, *args)
                    except RayError as error:
                        cause = unwrap(error)
                        if not isinstance(cause, ActorUnavailableError | DirectoryRecovering):
                            raise cause from None
                        await asyncio.sleep(_RETRY_S)
        except (TimeoutError, RayActorError) as error:
            raise Overloaded(
                f"the session directory did not answer {method} within {_ANSWER_S} s; try again", layer=NO_ANSWER
            ) from error

    def keep(self, session: str, snapshot: SessionSnapshot) -> None:
        """Sends a snapshot to the directory without waiting: the next one replaces it anyway."""
        self._directory.keep.remote(session, self.owner, snapshot)

    async def agree(self, *, fresh: bool = False) -> None:
        """Agrees with the directory on the secret; ``fresh``: this replica has just started."""
        agreed = await self.ask("secret", self._secret, fresh)
        if agreed != self._secret:
            self._secret = agreed
            await self.peers.close()  # open connections use the previous secret

    async def join(self, table: SessionTable) -> None:
        """Gets the first lease; set `address` before."""
        called_at = time.monotonic()
        self._renewed(table, await self.ask("renew", self.owner, self.address, []), called_at)

    async def renew(self, table: SessionTable, listen: Callable[[], Awaitable[str]]) -> None:
        """Renews the lease until cancelled.

        Args:
            table: the replica's sessions; those that the directory has given to others end.
            listen: returns the address, which may change.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.lease.wanted.wait(), RENEW_S)
            self.lease.wanted.clear()
            try:
                self.address = await listen()
                called_at = time.monotonic()
                renewal = await self.ask("renew", self.owner, self.address)
                if renewal is None:  # the directory has restarted
                    await self.agree()
                    called_at = time.monotonic()
                    renewal = await self.ask("renew", self.owner, self.address, table.sessions, self._shares)
                self._renewed(table, renewal, called_at)
            except (BrayxError, RayTaskError, OSError) as error:
                logger.warning("the session directory did not take the lease's renewal: %s", error)
                await asyncio.sleep(_RETRY_S)

    async def set_share(self, canary: str, share: float) -> None:
        """Sets a canary's share for all replicas, also those that start later; errors as for `ask`."""
        await self.ask("set_share", canary, share)
        self._take({**self._shares, canary: share})  # not with the next renewal only: the directory may die before

    def _take(self, shares: Mapping[str, float]) -> None:
        self._shares = shares
        if self._on_shares is not None:
            self._on_shares(shares)

    def _renewed(self, table: SessionTable, renewal: Renewal, called_at: float) -> None:
        """Ends the sessions that this replica has lost, and counts ends that no replica has counted.

        Args:
            table: this replica's sessions.
            renewal: the directory's answer.
            called_at: time of the call, by `time.monotonic`; the lease starts later in the directory.
        """
        over_s = time.monotonic() - self.lease.ends
        if over_s > 0 and self.lease.ends > 0:
            message = "this replica's lease was over for %.1f s: it answered no request, and lost %d of its sessions"
            logger.warning(message, over_s, len(renewal.lost))
        table.lose(renewal.lost)
        self._take(renewal.shares)
        self.lease.renew(called_at + LEASE_S)  # last: requests that wait for it must find lost sessions ended
        if renewal.forgotten:
            table.recorder.add("sessions_ended", float(renewal.forgotten), label="lost")


class _DirectoryActor(Directory):
    """The directory as a Ray actor; it detects its own restart.

    Args:
        name: name of the actor.
    """

    def __init__(self, name: str) -> None:
        restarted = is_restarted()
        store = renewals(name)
        renewed = store.read_all()
        if not restarted:
            for owner in renewed:
                store.put(owner, None)
            renewed = {}
        super().__init__(recovery_s=RECOVERY_S if restarted else 0.0, renewed=renewed, write=store.write)

    def interface(self) -> int:
        """See `INTERFACE`."""
        return INTERFACE


def renewals(name: str) -> KeyValueStore:
    """The record of sessions by owner, written by the directory of that name."""
    return KeyValueStore(NAMESPACE, f"{name}/")


def create_directory(name: str) -> Any:
    """Finds the directory's Ray actor of that name, or starts it.

    It is detached, so that it outlives the replica that started it; the owner of the application ends it with
    `stop_directory`. It is on the head node: every session needs it, and no other node's loss may stop them all.
    """
    options = {"lifetime": "detached", "max_task_retries": 1, "resources": {HEAD: 0.001}}
    return named_actor(_DirectoryActor, name, **options).remote(name)


async def check_directory(name: str, directory: Any) -> None:
    """Checks that a directory has the interface of this version of brayx.

    Args:
        name: name of its actor.
        directory: the actor's handle.

    Raises:
        StartupError: it has another interface.
    """
    # A handle has the methods of the class that the actor was created from.
    interface = await directory.interface.remote() if hasattr(directory, "interface") else 1
    if interface != INTERFACE:
        raise StartupError(
            f"the session directory {name!r} was started by another version of brayx (its interface is {interface}, "
            f"expected {INTERFACE}): delete the application, end the directory with brayx.cluster.directory."
            f"stop_directory({name!r}) in a process connected to this Ray cluster, and deploy again",
            name=name,
        )
