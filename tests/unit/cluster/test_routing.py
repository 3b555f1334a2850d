"""The data that a replica sends to the directory. The rest of routing is tested on Ray."""

from __future__ import annotations

from types import SimpleNamespace

from brayx.actor.config import ActorConfig
from brayx.actor.ownership import SessionSnapshot
from brayx.cluster.directory import MAX_SNAPSHOT_BYTES, Directory
from brayx.cluster.membership import Membership
from brayx.cluster.routing import Routing
from brayx.metrics import Recorder


def test_a_snapshot_too_large_for_the_directory_is_counted() -> None:
    directory, recorder = Directory(), Recorder()
    directory.claim("s", "me")
    replies = []
    keep = SimpleNamespace(remote=lambda *snapshot: replies.append(directory.keep(*snapshot)))
    member = Membership(SimpleNamespace(keep=keep))
    member.owner = "me"
    routing = Routing(member, ActorConfig(agents=["agent"]), None, recorder)
    for actor, reply in ((MAX_SNAPSHOT_BYTES, None), (MAX_SNAPSHOT_BYTES - 1, b"x")):
        routing.keep("s", SessionSnapshot(1, 0, reply, bytes(actor)))
    assert replies == [True, True]
    assert "snapshots_failed" not in recorder.summary()
    for actor, reply in ((MAX_SNAPSHOT_BYTES + 1, None), (MAX_SNAPSHOT_BYTES, b"x")):
        routing.keep("s", SessionSnapshot(2, 0, reply, bytes(actor)))
        assert directory.keep("s", "me", SessionSnapshot(2, 0, reply, bytes(actor))) is False
    assert replies == [True, True], "a snapshot that would be refused is not sent"
    assert recorder.summary()["snapshots_failed"] == 2
