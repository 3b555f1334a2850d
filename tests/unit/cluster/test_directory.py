"""The session directory's logic, with a clock of the test's own."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from brayx.actor.ownership import SessionSnapshot
from brayx.cluster.directory import INTERFACE, Directory, DirectoryRecovering, Location, Renewal
from brayx.cluster.membership import check_directory
from brayx.errors import Overloaded, SessionExists, SessionLost, StartupError
from tests.clocks import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def directory(clock: Clock) -> Directory:
    directory = Directory(lease_s=5.0, clock=clock)
    directory.renew("a", "http://a", [])
    directory.renew("b", "http://b", [])
    return directory


def owners(directory: Directory) -> dict[str, int]:
    """Number of sessions by living owner."""
    return {owner: len(sessions) for owner, sessions in directory._sessions.items() if directory._alive(owner)}


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


def test_a_dead_owner_is_reported_and_then_the_id_is_free(directory: Directory, clock: Clock) -> None:
    directory.claim("s", "a")
    clock.now = 4.0
    directory.renew("b", "http://b")
    clock.now = 6.0
    with pytest.raises(SessionLost, match="died"):
        directory.locate("s")
    directory.acknowledge("s")
    assert directory.locate("s") is None
    directory.claim("s", "b")
    assert owners(directory) == {"b": 1}


def test_a_reported_loss_is_counted_once(directory: Directory) -> None:
    for session in ("reported", "resumed"):
        directory.claim(session, "a")
    directory.keep("resumed", "a", snapshot())
    directory.bury("a")
    for _ in range(2):
        with pytest.raises(SessionLost):
            directory.locate("reported", "b")
    assert directory.locate("resumed", "b") == snapshot()
    assert [directory.renew("b", "http://b", []) for _ in range(2)] == [Renewal([], 1), Renewal([], 0)]


def test_a_start_over_a_dead_owners_session_takes_the_id(directory: Directory) -> None:
    directory.claim("s", "a")
    directory.bury("a")
    directory.claim("s", "b")
    location = directory.locate("s")
    assert location is not None
    assert location.owner == "b"


@pytest.mark.parametrize("way", ["claimed", "reported", "resumed", "swept"])
def test_an_owner_that_wakes_up_learns_of_lost_sessions_even_without_a_new_owner(clock: Clock, way: str) -> None:
    directory = Directory(lease_s=5.0, grace_s=100.0, clock=clock)
    directory.renew("a", "http://a", [])
    for session in ("s", "t"):
        directory.claim(session, "a")
    clock.now = 200.0 if way == "swept" else 6.0
    directory.renew("b", "http://b", [])
    if way == "claimed":
        directory.claim("s", "b")
        directory.release("s", "b")
    elif way == "reported":
        with pytest.raises(SessionLost):
            directory.locate("s", "b")
        directory.acknowledge("s")
    elif way == "resumed":
        directory.keep("s", "a", snapshot())
        assert directory.locate("s", "b") == snapshot()
        directory.release("s", "b")
    assert directory.renew("a", "http://a") is None
    lost = ["s", "t"] if way == "swept" else ["s"]
    renewal = directory.renew("a", "http://a", ["s", "t"])
    assert renewal is not None
    assert renewal.lost == lost
    assert directory.locate("s") is None
    directory.claim("s", "a")
    assert directory.renew("a", "http://a", ["s"]) == Renewal([], 0), "a later session of the same id is separate"


def test_a_start_over_a_lost_session_counts_its_loss(directory: Directory) -> None:
    directory.claim("of the dead", "a")
    directory.claim("moved", "a")
    directory.claim("own", "b")
    directory.park("moved", "a", snapshot(exact=True))
    directory.bury("a")
    for session in ("of the dead", "moved", "own", "new"):
        directory.claim(session, "b")
    assert directory.renew("b", "http://b", []) == Renewal([], 2)


class Kept(dict[str, list[str]]):
    """The records that a directory writes."""

    def write(self, owner: str, sessions: list[str]) -> None:
        self.pop(owner, None)
        if sessions:
            self[owner] = sessions


def test_owners_get_the_canaries_shares_also_after_a_restart(directory: Directory, clock: Clock) -> None:
    directory.set_share("model/0.1", 0.5)
    for owner in "ab":
        renewal = directory.renew(owner, f"http://{owner}")
        assert renewal is not None
        assert renewal.shares == {"model/0.1": 0.5}
    restarted = Directory(lease_s=5.0, recovery_s=3.0, clock=clock)
    assert restarted.renew("a", "http://a") is None
    restarted.set_share("other/0", 1.0)
    for owner, offered in {"a": renewal.shares, "b": {"model/0.1": 0.4, "other/0": 0.3}, "c": {}}.items():
        again = restarted.renew(owner, f"http://{owner}", [], offered)
        assert again is not None
        assert again.shares == {"model/0.1": 0.5, "other/0": 1.0}, "the first that is offered, unless one was set since"


class TestRenewals:
    @pytest.fixture
    def renewals(self) -> Kept:
        return Kept()

    @pytest.fixture
    def directory(self, clock: Clock, renewals: Kept) -> Directory:
        """A restarted directory; at the last renewal "a" had two sessions and "b" another two."""
        first = Directory(lease_s=5.0, clock=clock, renewed=renewals, write=renewals.write)
        for session, owner in {"a1": "a", "a2": "a", "b1": "b", "b2": "b"}.items():
            first.claim(session, owner)
        for owner in "ab":
            first.renew(owner, f"http://{owner}", [])
            first.renew(owner, f"http://{owner}")
        assert renewals == {"a": ["a1", "a2"], "b": ["b1", "b2"]}
        return Directory(lease_s=5.0, recovery_s=3.0, clock=clock, renewed=renewals, write=renewals.write)

    def test_sessions_that_died_during_a_restart_are_reported_and_counted_once(
        self, directory: Directory, clock: Clock, renewals: Kept
    ) -> None:
        for request in (lambda: directory.locate("a1"), lambda: directory.claim("a1", "b")):
            with pytest.raises(DirectoryRecovering):
                request()
        assert directory.renew("b", "http://b") is None
        assert directory.renew("b", "http://b", ["b1", "b2", "b3"]) == Renewal([], 0)
        assert directory.locate("b1") == directory.locate("b3") == Location("b", "http://b")
        clock.now = 3.0
        with pytest.raises(SessionLost, match="died"):
            directory.locate("a1", "b")
        directory.acknowledge("a1")
        assert directory.locate("a1", "b") is None
        directory.claim("a2", "b")
        assert directory.renew("b", "http://b") == Renewal([], 2)
        assert renewals == {"b": ["a2", "b1", "b2", "b3"]}

    def test_a_living_owner_reports_its_sessions(self, directory: Directory, clock: Clock) -> None:
        assert directory.renew("a", "http://a", ["a2", "a3"]) == Renewal([], 0)
        clock.now = 3.0
        assert directory.locate("a1") is None, "the session has ended since"
        assert directory.locate("a2") == directory.locate("a3") == Location("a", "http://a")
        assert directory.renew("a", "http://a") == Renewal([], 0)

    def test_a_session_taken_over_meanwhile_belongs_to_the_new_owner(self, clock: Clock) -> None:
        renewals = Kept(a=["s"], b=["s"])
        directory = Directory(lease_s=5.0, recovery_s=3.0, clock=clock, renewed=renewals, write=renewals.write)
        assert directory.renew("b", "http://b", ["s"]) == Renewal([], 0)
        assert directory.renew("a", "http://a", ["s"]) == Renewal(["s"], 0)
        assert directory.locate("s") == Location("b", "http://b")

    def test_a_parked_session_is_lost_with_its_snapshot(self, clock: Clock, renewals: Kept) -> None:
        first = Directory(lease_s=5.0, clock=clock, renewed=renewals, write=renewals.write)
        first.renew("a", "http://a", [])
        first.claim("s", "a")
        first.park("s", "a", snapshot(exact=True))
        first.leave("a")
        first.renew("b", "http://b", [])
        second = Directory(lease_s=5.0, clock=clock, renewed=renewals, write=renewals.write)
        with pytest.raises(SessionLost):
            second.locate("s", "b")

    def test_an_owner_that_leaves_properly_leaves_no_record(self, directory: Directory, renewals: Kept) -> None:
        for owner in "ab":
            directory.renew(owner, f"http://{owner}", [f"{owner}1"])
            directory.leave(owner)
        assert renewals == {}


def test_a_buried_owner_that_lives_comes_back_with_its_sessions(directory: Directory) -> None:
    directory.claim("s", "a")
    directory.bury("a")
    assert directory.renew("a", "http://a") is None
    assert directory.renew("a", "http://a", ["s"]) == Renewal([], 0)
    assert directory.locate("s") is not None


def test_a_restarted_directory_asks_the_owners_for_their_sessions() -> None:
    directory = Directory()
    assert directory.renew("a", "http://a") is None
    assert directory.renew("a", "http://a", ["s", "t"]) == Renewal([], 0)
    assert owners(directory) == {"a": 2}


def test_a_restarted_directory_waits_for_the_owners_before_it_reports_an_unknown_session(clock: Clock) -> None:
    directory = Directory(lease_s=5.0, recovery_s=3.0, clock=clock)
    for request in (lambda: directory.locate("s"), lambda: directory.claim("s", "b")):
        with pytest.raises(DirectoryRecovering):
            request()
    assert directory.renew("a", "http://a") is None
    assert directory.renew("a", "http://a", ["s"]) == Renewal([], 0)
    assert directory.renew("b", "http://b", []) == Renewal([], 0)
    location = directory.locate("s")
    assert location is not None
    assert location.owner == "a"
    with pytest.raises(SessionExists):
        directory.claim("s", "b")
    clock.now = 3.0
    assert directory.locate("t") is None
    directory.claim("t", "b")


@pytest.mark.parametrize("buried", [True, False])
def test_an_owner_that_comes_back_learns_which_sessions_were_taken(
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
    assert directory.renew("a", "http://a", ["kept", "taken"]) == Renewal(["taken"], 1)
    assert directory.renew("a", "http://a") == Renewal([], 0)
    assert owners(directory) == {"a": 1, "b": 1}
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


@pytest.mark.parametrize("version", [None, INTERFACE - 1, INTERFACE + 1])
async def test_a_directory_of_another_version_is_refused(version: int | None) -> None:
    async def interface() -> int | None:
        return version

    # Like the handle of a Ray actor, which lacks methods that its class did not have.
    other = SimpleNamespace(**({} if version is None else {"interface": SimpleNamespace(remote=interface)}))
    with pytest.raises(StartupError, match=r"stop_directory\('it/sessions'\)"):
        await check_directory("it/sessions", other)
    version = INTERFACE
    await check_directory("it/sessions", SimpleNamespace(interface=SimpleNamespace(remote=interface)))


def snapshot(data: bytes = b"x", *, exact: bool = False) -> SessionSnapshot:
    return SessionSnapshot(4, 4, b"kept", data, exact)


def test_the_reason_of_an_end_is_reported_except_for_a_stop(directory: Directory) -> None:
    for session, reason in (("s", "idle"), ("t", "stop")):
        directory.claim(session, "a")
        directory.release(session, "a", reason)
    with pytest.raises(SessionLost, match="idle") as lost:
        directory.locate("s")
    directory.acknowledge("s")
    assert lost.value.details == {"reason": "idle"}
    assert directory.locate("s") is None
    assert directory.locate("t") is None
    directory.claim("s", "a")
    directory.release("s", "a", "idle")
    directory.claim("s", "b")
    assert directory.locate("s") is not None, "a restarted session is not an ended one"


class TestSnapshots:
    def test_a_dead_owners_session_goes_to_the_next_caller_with_its_last_snapshot(self, directory: Directory) -> None:
        directory.claim("s", "a")
        assert directory.keep("s", "a", snapshot(b"old"))
        assert directory.keep("s", "a", snapshot(b"new"))
        directory.bury("a")
        assert directory.locate("s", "b") == snapshot(b"new")
        location = directory.locate("s", "c")
        assert isinstance(location, Location)
        assert location.owner == "b"

    def test_a_repeated_takeover_gets_the_snapshot_again_marked_as_possibly_old(self, directory: Directory) -> None:
        directory.claim("s", "a")
        parked = replace(snapshot(b"moved", exact=True), holder="a|1")
        directory.park("s", "a", parked)
        assert directory.locate("s", "b") == parked
        assert directory.locate("s", "b") == snapshot(b"moved"), (
            "its answer may be lost, and another connection hold it"
        )
        directory.bury("b")
        assert directory.locate("s", "c") == snapshot(b"moved")

    def test_a_loss_is_reported_until_it_is_acknowledged(self, directory: Directory) -> None:
        directory.claim("ended", "a")
        directory.claim("died", "b")
        directory.release("ended", "a", "idle")
        directory.bury("b")
        for session, reason in (("ended", "idle"), ("died", "owner_died")):
            for _ in range(2):
                with pytest.raises(SessionLost) as lost:
                    directory.locate(session, "a")
                assert lost.value.details["reason"] == reason
            directory.acknowledge(session)
            assert directory.locate(session, "a") is None
            directory.claim(session, "a")
            directory.release(session, "a")
            assert directory.locate(session, "a") is None

    def test_only_the_owner_can_keep_a_snapshot(self, directory: Directory) -> None:
        directory.claim("s", "a")
        assert not directory.keep("s", "b", snapshot())
        assert not directory.keep("unknown", "b", snapshot())
        directory.bury("a")
        with pytest.raises(SessionLost):
            directory.locate("s", "b")

    def test_a_caller_that_cannot_take_over_must_retry_and_the_session_stays(self, directory: Directory) -> None:
        directory.claim("s", "a")
        directory.park("s", "a", snapshot(exact=True))
        with pytest.raises(Overloaded, match="is moving to another replica"):
            directory.locate("s")
        assert directory.locate("s", "b") == snapshot(exact=True)

    def test_a_parked_session_outlives_its_owners_leaving_and_others_do_not(self, directory: Directory) -> None:
        directory.claim("moved", "a")
        directory.claim("left", "a")
        directory.park("moved", "a", snapshot(exact=True))
        directory.leave("a")
        with pytest.raises(SessionLost, match="drained"):
            directory.locate("left", "b")
        directory.acknowledge("left")
        assert directory.locate("left", "b") is None
        assert directory.locate("moved", "b") == snapshot(exact=True)
        assert owners(directory) == {"b": 1}

    def test_a_start_takes_the_id_of_a_lost_session_and_forgets_its_snapshot(self, directory: Directory) -> None:
        directory.claim("s", "a")
        directory.keep("s", "a", snapshot())
        directory.bury("a")
        directory.claim("s", "b")
        directory.bury("b")
        with pytest.raises(SessionLost):
            directory.locate("s", "c")

    def test_snapshots_are_bounded_and_their_space_is_released(
        self, directory: Directory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("brayx.cluster.directory.MAX_SNAPSHOT_BYTES", 20)
        monkeypatch.setattr("brayx.cluster.directory.MAX_SNAPSHOTS_BYTES", 30)
        for session in ("s", "t"):
            directory.claim(session, "a")
        assert not directory.keep("s", "a", snapshot(bytes(17)))
        with pytest.raises(Overloaded, match="too large"):
            directory.park("s", "a", snapshot(bytes(17)))
        assert directory.keep("s", "a", snapshot(bytes(16)))
        assert directory.keep("s", "a", snapshot(bytes(15))), "it replaces the previous snapshot"
        assert not directory.keep("t", "a", snapshot(bytes(15)))
        directory.release("s", "a")
        assert directory.keep("t", "a", snapshot(bytes(15)))

    def test_parked_sessions_without_requests_are_eventually_forgotten(
        self, directory: Directory, clock: Clock
    ) -> None:
        directory.claim("s", "a")
        directory.park("s", "a", snapshot(exact=True))
        clock.now = 700.0
        renewals = [directory.renew("b", "http://b", []) for _ in range(2)]
        assert renewals == [Renewal([], 1), Renewal([], 0)], "their end is counted once"
        assert directory.locate("s", "b") is None


class TestGames:
    """All sessions of a game that are claimed ``together`` have one owner."""

    @pytest.fixture
    def directory(self, clock: Clock) -> Directory:
        directory = Directory(lease_s=5.0, clock=clock)
        for owner in "abc":
            directory.renew(owner, f"http://{owner}", [])
        return directory

    def test_the_first_claim_owns_the_game_and_others_learn_the_owner(self, directory: Directory) -> None:
        assert directory.claim("g-agent-x", "a", True) is None
        for _ in range(2):
            assert directory.claim("g-agent-y", "b", True) == Location("a", "http://a")
            assert directory.locate("g-agent-y") is None, "a claim that is not granted changes nothing"
        assert directory.claim("g-agent-y", "a", True) is None
        assert directory.claim("h-agent-y", "b", True) is None
        assert owners(directory) == {"a": 2, "b": 1, "c": 0}

    def test_sessions_without_a_game_or_claimed_apart_may_have_any_owner(self, directory: Directory) -> None:
        assert directory.claim("g-agent-x", "a") is None
        assert directory.claim("g-agent-y", "b") is None
        for session, owner in (("g", "a"), ("h", "b"), ("-agent-x", "a"), ("-agent-y", "b")):
            assert directory.claim(session, owner, True) is None

    def test_a_running_session_is_refused_to_every_owner(self, directory: Directory) -> None:
        directory.claim("g-agent-x", "a", True)
        with pytest.raises(SessionExists):
            directory.claim("g-agent-x", "b", True)
        assert directory.claim("g-agent-x", "a", True) is None

    @pytest.mark.parametrize("how", ["release", "leave", "park", "sweep"])
    def test_a_game_goes_with_its_last_session(self, directory: Directory, clock: Clock, how: str) -> None:
        for session in ("g-agent-x", "g-agent-y"):
            directory.claim(session, "a", True)
        directory.release("g-agent-x", "a")
        assert directory.claim("g-agent-x", "b", True) == Location("a", "http://a")
        if how == "release":
            directory.release("g-agent-y", "a")
        elif how == "leave":
            directory.leave("a")
        elif how == "park":
            directory.park("g-agent-y", "a", snapshot(exact=True))
        else:
            clock.now = 700.0
            directory.renew("b", "http://b", [])
        assert ("g" in directory._games) == (how == "park"), "a parked session still belongs to the game"
        assert directory.claim("g-agent-x", "b", True) is None
        assert directory.claim("g-agent-z", "b", True) is None
        for session in ("g-agent-x", "g-agent-z"):
            directory.release(session, "b")
        assert set(directory._games) == ({"g"} if how == "park" else set())

    def test_starting_a_session_of_a_dead_owners_game_takes_the_game(self, directory: Directory) -> None:
        directory.claim("g-agent-x", "a", True)
        directory.bury("a")
        assert directory.claim("g-agent-y", "b", True) is None
        assert directory.claim("g-agent-z", "c", True) == Location("b", "http://b")
        assert directory.claim("g-agent-x", "b", True) is None

    def test_sessions_resumed_apart_leave_the_game_with_the_first_of_them(self, directory: Directory) -> None:
        for session in ("g-agent-x", "g-agent-y"):
            directory.claim(session, "a", True)
            directory.park(session, "a", snapshot(exact=True))
        assert directory.locate("g-agent-y", "b") == directory.locate("g-agent-x", "c") == snapshot(exact=True)
        for owner in ("a", "c"):
            assert directory.claim("g-agent-z", owner, True) == Location("b", "http://b")
        assert directory.claim("g-agent-z", "b", True) is None

    def test_a_restarted_directory_knows_the_games_by_their_sessions(self, clock: Clock) -> None:
        directory = Directory(lease_s=5.0, recovery_s=3.0, clock=clock)
        assert directory.renew("a", "http://a", ["old-agent-x"]) == Renewal([], 0)
        assert directory.renew("b", "http://b", []) == Renewal([], 0)
        with pytest.raises(DirectoryRecovering):
            directory.claim("g-agent-y", "b", True)
        assert directory.renew("c", "http://c", ["g-agent-x"]) == Renewal([], 0)
        clock.now = 3.0
        assert directory.claim("g-agent-y", "b", True) == Location("c", "http://c")
        assert directory.claim("old-agent-y", "b", True) == Location("a", "http://a")

    def test_a_dead_owners_session_is_not_taken_before_its_games_owner_is_known(self, clock: Clock) -> None:
        directory = Directory(lease_s=5.0, recovery_s=3.0, clock=clock)
        directory.renew("a", "http://a", ["g-agent-x"])
        directory.bury("a")
        with pytest.raises(DirectoryRecovering):
            directory.claim("g-agent-x", "b", True)


def test_the_first_secret_is_shared_by_all_and_survives_a_restart() -> None:
    first = Directory()
    assert first.secret("one", True) == "one"
    assert first.secret("other", True) == "one"
    now = [0.0]
    restarted = Directory(recovery_s=3.0, clock=lambda: now[0])
    with pytest.raises(DirectoryRecovering):
        restarted.secret("new", True)
    assert restarted.secret("one") == "one"
    assert restarted.secret("new", True) == "one"
    lonely = Directory(recovery_s=3.0, clock=lambda: now[0])
    now[0] = 3.0
    assert lonely.secret("new", True) == "new"
