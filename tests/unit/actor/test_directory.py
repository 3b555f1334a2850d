"""The session directory's logic, with a clock of the test's own."""

import pytest

from brayx.actor.directory import Directory, DirectoryRecovering, Location
from brayx.actor.session import Snapshot
from brayx.errors import Overloaded, SessionExists, SessionLost


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def directory(clock: Clock) -> Directory:
    directory = Directory(lease_s=5.0, clock=clock)
    directory.renew("a", "http://a", [])
    directory.renew("b", "http://b", [])
    return directory


def test_a_session_has_one_owner(directory: Directory) -> None:
    directory.claim("s", "a")
    with pytest.raises(SessionExists, match="'s'"):
        directory.claim("s", "b")
    location = directory.locate("s")
    assert location is not None
    assert (location.owner, location.address) == ("a", "http://a")
    directory.release("s", "b")
    assert directory.locate("s") is not None
    directory.release("s", "a")
    assert directory.locate("s") is None
    directory.claim("s", "b")


def test_a_dead_owner_is_told_once_then_the_id_is_free(directory: Directory, clock: Clock) -> None:
    directory.claim("s", "a")
    clock.now = 4.0
    directory.renew("b", "http://b")
    clock.now = 6.0
    with pytest.raises(SessionLost, match="died"):
        directory.locate("s")
    assert directory.locate("s") is None
    directory.claim("s", "b")
    assert directory.owners() == {"b": 1}


def test_a_start_over_a_dead_owners_session_takes_the_id(directory: Directory) -> None:
    directory.claim("s", "a")
    directory.bury("a")
    directory.claim("s", "b")
    location = directory.locate("s")
    assert location is not None
    assert location.owner == "b"


def test_a_buried_owner_that_lives_comes_back_with_its_sessions(directory: Directory) -> None:
    directory.claim("s", "a")
    directory.bury("a")
    assert directory.renew("a", "http://a") is None
    assert directory.renew("a", "http://a", ["s"]) == []
    assert directory.locate("s") is not None


def test_a_restarted_directory_asks_the_owners_for_their_sessions() -> None:
    directory = Directory()
    assert directory.renew("a", "http://a") is None
    assert directory.renew("a", "http://a", ["s", "t"]) == []
    assert directory.owners() == {"a": 2}


def test_a_restarted_directory_waits_for_the_owners_before_it_says_that_a_session_is_unknown(clock: Clock) -> None:
    directory = Directory(lease_s=5.0, recovery_s=3.0, clock=clock)
    for asked in (lambda: directory.locate("s"), lambda: directory.claim("s", "b")):
        with pytest.raises(DirectoryRecovering):
            asked()
    assert directory.renew("a", "http://a") is None
    assert directory.renew("a", "http://a", ["s"]) == []
    assert directory.renew("b", "http://b", []) == []
    location = directory.locate("s")
    assert location is not None
    assert location.owner == "a"
    with pytest.raises(SessionExists):
        directory.claim("s", "b")
    clock.now = 3.0
    assert directory.locate("t") is None
    directory.claim("t", "b")


@pytest.mark.parametrize("buried", [True, False])
def test_an_owner_that_comes_back_is_told_what_another_has_taken(
    directory: Directory, clock: Clock, buried: bool
) -> None:
    directory.claim("kept", "a")
    directory.claim("taken", "a")
    clock.now = 6.0
    directory.renew("b", "http://b", [])
    if buried:
        directory.bury("a")
    directory.claim("taken", "b")
    assert directory.renew("a", "http://a") is None
    assert directory.renew("a", "http://a", ["kept", "taken"]) == ["taken"]
    assert directory.renew("a", "http://a") == []
    assert directory.owners() == {"a": 1, "b": 1}
    location = directory.locate("taken")
    assert location is not None
    assert location.owner == "b"


def test_owners_dead_for_long_are_forgotten_with_their_sessions(clock: Clock) -> None:
    directory = Directory(lease_s=5.0, grace_s=100.0, clock=clock)
    for owner in ("gone", "buried", "alive"):
        directory.renew(owner, "http://x", [])
        directory.claim(f"of {owner}", owner)
    directory.bury("buried")
    clock.now = 90.0
    directory.renew("alive", "http://x", ["of alive"])
    with pytest.raises(SessionLost):
        directory.locate("of buried")
    clock.now = 106.0
    directory.renew("alive", "http://x", ["of alive"])
    assert directory.locate("of gone") is None
    assert set(directory._seen) == set(directory._sessions) == set(directory._address) == {"alive"}
    assert set(directory._owner_of) == {"of alive"}


def snapshot(data: bytes = b"x", *, exact: bool = False) -> Snapshot:
    return Snapshot(4, 4, b"kept", data, exact)


def test_why_a_session_ended_is_told_once_to_whoever_asks_and_a_stop_is_no_news(directory: Directory) -> None:
    for session, reason in (("s", "idle"), ("t", "stop")):
        directory.claim(session, "a")
        directory.release(session, "a", reason)
    with pytest.raises(SessionLost, match="idle") as lost:
        directory.locate("s")
    assert lost.value.details == {"reason": "idle"}
    assert directory.locate("s") is None
    assert directory.locate("t") is None
    directory.claim("s", "a")
    directory.release("s", "a", "idle")
    directory.claim("s", "b")
    assert directory.locate("s") is not None, "a session started anew is not an ended one"


class TestSnapshots:
    def test_a_dead_owners_session_goes_to_who_asks_with_its_last_snapshot(self, directory: Directory) -> None:
        directory.claim("s", "a")
        assert directory.keep("s", "a", snapshot(b"old"))
        assert directory.keep("s", "a", snapshot(b"new"))
        directory.bury("a")
        assert directory.locate("s", "b") == snapshot(b"new")
        location = directory.locate("s", "c")
        assert isinstance(location, Location)
        assert location.owner == "b"

    def test_nobody_keeps_a_snapshot_of_a_session_that_is_not_its_own(self, directory: Directory) -> None:
        directory.claim("s", "a")
        assert not directory.keep("s", "b", snapshot())
        assert not directory.keep("unknown", "b", snapshot())
        directory.bury("a")
        with pytest.raises(SessionLost):
            directory.locate("s", "b")

    def test_who_takes_none_is_told_to_try_again_and_the_session_stays(self, directory: Directory) -> None:
        directory.claim("s", "a")
        directory.park("s", "a", snapshot(exact=True))
        with pytest.raises(Overloaded, match="between two replicas"):
            directory.locate("s")
        assert directory.locate("s", "b") == snapshot(exact=True)

    def test_a_parked_session_outlives_its_owners_leaving_and_others_do_not(self, directory: Directory) -> None:
        directory.claim("moved", "a")
        directory.claim("left", "a")
        directory.park("moved", "a", snapshot(exact=True))
        directory.leave("a")
        with pytest.raises(SessionLost, match="drained"):
            directory.locate("left", "b")
        assert directory.locate("left", "b") is None
        assert directory.locate("moved", "b") == snapshot(exact=True)
        assert directory.owners() == {"b": 1}

    def test_a_start_takes_the_id_of_a_lost_session_and_forgets_its_snapshot(self, directory: Directory) -> None:
        directory.claim("s", "a")
        directory.keep("s", "a", snapshot())
        directory.bury("a")
        directory.claim("s", "b")
        directory.bury("b")
        with pytest.raises(SessionLost):
            directory.locate("s", "c")

    def test_what_is_kept_is_bounded_and_given_back(
        self, directory: Directory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("brayx.actor.directory.MAX_SNAPSHOT_BYTES", 20)
        monkeypatch.setattr("brayx.actor.directory.MAX_SNAPSHOTS_BYTES", 30)
        for session in ("s", "t"):
            directory.claim(session, "a")
        assert not directory.keep("s", "a", snapshot(bytes(17)))
        with pytest.raises(Overloaded, match="too large"):
            directory.park("s", "a", snapshot(bytes(17)))
        assert directory.keep("s", "a", snapshot(bytes(16)))
        assert directory.keep("s", "a", snapshot(bytes(15))), "the one before is replaced"
        assert not directory.keep("t", "a", snapshot(bytes(15)))
        directory.release("s", "a")
        assert directory.keep("t", "a", snapshot(bytes(15)))

    def test_parked_sessions_that_nobody_asks_for_are_forgotten_in_the_end(
        self, directory: Directory, clock: Clock
    ) -> None:
        directory.claim("s", "a")
        directory.park("s", "a", snapshot(exact=True))
        clock.now = 700.0
        directory.renew("b", "http://b", [])
        assert directory.locate("s", "b") is None
