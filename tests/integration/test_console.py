"""The console of an actor on two replicas of a real Serve: its API with real clients, keys, a human's game, frames of
recordings, and replicas that die."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import ray
import yaml
from ray import serve
from ray.util import list_named_actors

import brayx.recording
from brayx.cluster import NAMESPACE
from brayx.cluster.directory import Location, stop_directory
from brayx.cluster.serving import console_application, serving_application
from brayx.errors import BrayxError, ConfigError, SessionLost
from brayx.jobs.config import JobConfig
from tests.end_to_end.console_jobs import PROJECT, Console, Job, new_keys, playing, write_code
from tests.integration.conftest import Ingress
from tests.processes import ours
from tests.waiting import until

WAIT_S = 60.0
pytestmark = pytest.mark.cluster
BOARD = """
import json

def board(opponent):
    yield "start", "me", None
    shown = {"rows": [[{"text": "1"}, {"text": "2"}]]}
    moves = [{"move": x, "label": str(x), "at": [0, x - 1]} for x in (1, 2)]
    while (x := (yield "ask", "", shown | {"moves": moves})) is not None:
        reply = json.loads((yield "tick", "me", {"x": x}))
        if x == 2:
            break
        shown["text"] = f"version {reply['version']}"
    yield "stop", "me", None
    return shown | {"moves": [], "result": "draw"}
"""
DIRECTORY = f"{PROJECT}/actor/sessions"


class Served:
    """A job on two replicas, and its console.

    Attributes:
        door: URL of the job at Serve's ingress.
        console, reader: clients of the console with the key of each scope.
        job: the job.
    """

    def __init__(self, door: str, folder: Path, uri: str, code: Path) -> None:
        self.door, self.job = f"{door}/{PROJECT}", Job(folder, uri, code)
        self.job.add(1, "champion")
        self.job.add(2, "candidate")
        file = folder / "keys.txt"
        self._headers = new_keys(file)
        parts = yaml.safe_load(Path(self.job.job.file).read_text())
        parts["actor"] |= {"num_workers": 2, "native_port": None, "tcp_port": None}
        parts["picture"] = {"kind": "render", "module": "watched_agent", "func": "draw"}
        parts["recording"]["frames"] = "picture"
        parts |= {"console_host": "0.0.0.0", "console_keys_file": str(file)}
        parts["board"] = {"kind": "board", "module": "watched_board"}
        (code / "watched_board.py").write_text(BOARD)
        Path(self.job.job.file).write_text(yaml.safe_dump(parts))
        self.job.job = JobConfig.load(self.job.job.file)
        serve.run(serving_application(self.job.job, uri), name=PROJECT, route_prefix=f"/{PROJECT}")
        self.open_console()

    def open_console(self) -> None:
        """Deploys the console, and connects to it."""
        serve.run(console_application(self.job.job, self.job.uri), name="console", route_prefix=None)
        port = serve.get_app_handle("console").remote().result(timeout_s=WAIT_S).rpartition(":")[2]
        self.at = f"http://127.0.0.1:{port}"
        self.reader, self.console = (Console(self.at, headers=self._headers[scope]) for scope in ("read", "control"))

    def acts_with(self) -> set[int]:
        """The versions that some new sessions act with."""
        versions = set()
        for _ in range(8):
            with playing(self.door, os.urandom(8).hex()) as tick:
                versions.add(int(tick(1.0)["version"]))
        return versions


@pytest.fixture(scope="module")
def served(
    loopback_ingress: Ingress, new_tracking_db: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("console")
    code = write_code(tmp_path_factory.getbasetemp() / "watched-code")  # as the other tests of this process
    yield Served(loopback_ingress.http, folder, new_tracking_db(folder), code)
    for name in ("console", PROJECT):
        serve.delete(name)
    stop_directory(DIRECTORY)
    for actor in list_named_actors(True):
        if actor["name"].startswith(f"{DIRECTORY}/pool/"):
            stop_directory(actor["name"])


@contextlib.contextmanager
def both_replicas(served: Served) -> Iterator[dict[str, Any]]:
    """Running sessions, at least one on each replica: their ticks, by id."""
    with contextlib.ExitStack() as stack:
        playing_ = {
            name: stack.enter_context(playing(served.door, name)) for name in (f"session/{i}" for i in range(12))
        }
        assert len({owner(name).address for name in playing_}) == 2
        yield playing_


def owner(session: str) -> Location:
    directory = ray.get_actor(DIRECTORY, namespace=NAMESPACE)
    location = ray.get(directory.locate.remote(session), timeout=WAIT_S)
    assert isinstance(location, Location)
    return location


def test_sessions_of_both_replicas_are_listed_and_one_is_followed_and_ended(served: Served) -> None:
    with both_replicas(served) as sessions:
        listed = {row["session"]: row for row in served.console.get("/api/sessions")}
        assert set(listed) == set(sessions)
        assert listed["session/0"]["arms"] == ["model/champion/1"]
        port = served.at.rpartition(":")[2]
        until(lambda: httpx.get(served.door).json()["console"].endswith(f":{port}"), "doors link to it", WAIT_S)
        job = served.console.get("/api/job")
        assert (job["mode"], job["sessions"], job["errors"]) == ("serve", len(sessions), [])
        assert job["registered"]["model"][0] == f"models:/{PROJECT}/1"

        for name, tick in list(sessions.items())[:4]:
            ticks, losses = [], list[str]()

            def play(tick: Any = tick, losses: list[str] = losses) -> None:
                try:
                    for x in range(100_000):
                        tick(float(x))
                        time.sleep(0.02)
                except SessionLost as error:
                    losses.append(str(error))

            ended = False
            player = threading.Thread(target=play, daemon=True)
            with served.console.http.stream("GET", "/api/sessions/follow", params={"session": name}) as stream:
                player.start()
                for line in stream.iter_lines():
                    if line.startswith("data: "):
                        message = json.loads(line.removeprefix("data: "))
                        ticks += message["ticks"]
                        is_drawn = message["frame"] is not None or len(ticks) > 5000
                        if len(ticks) > 10 and is_drawn and not ended:
                            ended = True
                            served.console.http.delete("/api/sessions", params={"session": name}).raise_for_status()
                    elif line.startswith("event: "):
                        pytest.fail(str(next(stream.iter_lines())))
            player.join(WAIT_S)
            assert message["end"] == "ended"
            assert message["frame"]["image"].startswith("data:image/png;base64,"), message["frame"]["failure"]
            assert [row["number"] for row in ticks[-5:]] == list(range(ticks[-5]["number"], ticks[-1]["number"] + 1))
            shown = ticks[-1]
            assert (shown["arrays"]["obs"], shown["output"]) == ([shown["input"]["x"], 0.0], {"version": 1})
            assert len(shown["probabilities"]) == 2
            assert len(losses) == 1
            assert "ended" in losses[0]
        assert served.console.refusal("GET", "/api/sessions/ticks?session=none") == (404, "session_unknown")
        assert served.console.refusal("DELETE", "/api/sessions?session=none") == (404, "session_unknown")


def test_a_promotion_changes_what_the_next_session_acts_with_and_shares_reach_every_replica(served: Served) -> None:
    acts_with = served.acts_with
    assert acts_with() == {1}
    served.console.post("/api/canaries/model", {"share": 1.0})
    until(lambda: acts_with() == {2}, "both replicas give the canary", WAIT_S)
    assert served.console.get("/api/job")["canaries"]["model"]["share"] == 1.0
    served.console.post("/api/canaries/model", {"share": 0.0})
    assert served.console.refusal("POST", "/api/canaries/other", json={"share": 0.5}) == (400, "bad_config")
    assert acts_with() == {1}

    moved = served.console.post(f"/api/models/{PROJECT}/promote", {"version": 2})
    assert (moved["version"], moved["before"]) == (2, 1)
    until(lambda: acts_with() == {2}, "the next sessions get the new champion", WAIT_S)
    served.console.post(f"/api/models/{PROJECT}/roll-back")
    until(lambda: acts_with() == {1}, "the next sessions get the old champion", WAIT_S)


def test_health_refusals_recordings_and_trials(served: Served) -> None:
    before = served.reader.get("/api/job")["refusals"].get("bad_body", 0.0)
    for _ in range(6):
        httpx.post(f"{served.door}/step", content=b"no json", timeout=WAIT_S)
    until(
        lambda: served.reader.get("/api/job")["refusals"].get("bad_body", 0.0) == before + 6,
        "refusals of both replicas add up",
        WAIT_S,
    )
    job = served.reader.get("/api/job")
    assert f"{before + 6:.0f} requests refused (bad_body); the newest: " in "\n".join(job["errors"])
    numbers = job["numbers"]
    assert numbers["sessions_started"] == numbers["sessions_ended.stop"] + numbers.get("sessions_ended.ended", 0.0)
    until(lambda: served.reader.get("/api/recordings")["total"] > 10, "recordings are written", WAIT_S)
    assert {trial["project"] for trial in served.reader.get("/api/trials")} == {PROJECT}
    assert served.reader.get("/api/league") is None


def test_a_session_with_images_has_a_video_of_its_frames(served: Served) -> None:
    with playing(served.door, "filmed", side=48) as tick:
        for x in range(1, 4):
            tick(float(x))

    row = served.reader.recorded("filmed")
    recording = served.job.job.recording
    assert recording is not None
    episode = brayx.recording.open(recording.folder).find(row["id"])
    assert episode is not None
    assert row["frames"] == episode.frames == 3
    for index in range(3):
        image = episode.image(index)
        assert image is not None
        assert image.shape == (48, 48, 3)
        assert np.abs(image.astype(int) - 10 * index).max() < 5
        reply = served.reader.http.get(f"/api/recordings/{row['id']}/frames/{index}")
        assert reply.content.startswith(b"\x89PNG")
    assert list(Path(recording.folder).glob("*.mp4"))
    episode.save_video(served.job.folder / "filmed.mp4")
    assert (served.job.folder / "filmed.mp4").stat().st_size > 0


def test_a_human_plays_at_serves_ingress(served: Served) -> None:
    assert served.reader.get("/api/opponents")["why_not"] == ""
    game = served.console.post("/api/games", {})
    session = f"{game['game']}-agent-me"
    assert session in {row["session"] for row in served.reader.get("/api/sessions")}
    path = f"/api/games/{game['game']}/moves"
    game = served.console.post(path, {"move": 1})
    assert (game["board"]["text"], game["over"]) == ("version 1", False)
    game = served.console.post(path, {"move": 2})
    assert (game["board"]["result"], game["over"]) == ("draw", True)
    assert session not in {row["session"] for row in served.reader.get("/api/sessions")}


def test_keys_have_scopes_and_a_games_door_has_no_control(served: Served) -> None:
    assert Console(served.at).refusal("GET", "/api/job") == (401, "unauthorized")
    promotion = {"json": {"version": 2}}
    assert served.reader.refusal("POST", f"/api/models/{PROJECT}/promote", **promotion) == (403, "forbidden")
    assert served.reader.refusal("DELETE", "/api/sessions?session=x") == (403, "forbidden")
    addresses = ray.get(ray.get_actor(DIRECTORY, namespace=NAMESPACE).addresses.remote(), timeout=WAIT_S)
    headers = {"Authorization": served.console.http.headers["Authorization"]}
    for url in (served.door, *addresses):
        for path in ("/api/job", "/console/api/job", "/docs"):
            assert httpx.get(f"{url}{path}", headers=headers, timeout=WAIT_S).status_code == 404
        path = f"{url}/api/models/{PROJECT}/promote"
        assert httpx.post(path, headers=headers, timeout=WAIT_S, **promotion).status_code >= 400
        call = {"content": b'["sessions"]', "headers": {"step_kind": "call"}}
        asked = httpx.post(f"{url}/-/console/step", timeout=WAIT_S, **call)
        assert asked.status_code in (401, 404), "only who has the application's secret may ask a replica"
    with pytest.raises(ConfigError, match="console_keys_file is not set"):
        console_application(served.job.job.model_copy(update={"console_keys_file": None}), served.job.uri)
    with pytest.raises(ConfigError, match="console_port is null"):
        console_application(served.job.job.model_copy(update={"console_port": None}), served.job.uri)


def test_a_replica_that_is_killed_while_its_session_is_followed_is_reported(served: Served) -> None:
    """A canary's share, set before by a console that has ended, is the new replica's too."""
    served.console.post("/api/canaries/model", {"share": 1.0})
    serve.delete("console")
    served.open_console()
    assert served.console.get("/api/job")["canaries"]["model"]["share"] == 1.0
    reached = False
    with contextlib.suppress(BrayxError), both_replicas(served) as sessions:  # of sessions that died
        name = next(iter(sessions))
        sessions[name](1.0)
        pids = {process.pid: process for process in ours(f"ray::ServeReplica:{PROJECT}:actor")}
        port = int(owner(name).address.rpartition(":")[2])
        (pid,) = [
            pid
            for pid, process in pids.items()
            if any(
                connection.laddr.port == port and connection.status == "LISTEN"
                for connection in process.net_connections()
            )
        ]
        lines = []
        with served.console.http.stream("GET", "/api/sessions/follow", params={"session": name}) as stream:
            sessions[name](2.0)
            for line in stream.iter_lines():
                lines.append(line)
                if line.startswith("data: ") and pid:
                    os.kill(pid, signal.SIGKILL)
                    pid = 0
        error = json.loads(lines[-2].removeprefix("data: "))
        assert error["error"] == "session_lost"
        assert "the replica that ran it died" in error["message"]
        left = {row["session"] for row in served.console.get("/api/sessions")}
        assert name not in left
        assert left, "the other replica's sessions go on"
        # The new replica is asked, too.
        until(lambda: len(ours(f"ray::ServeReplica:{PROJECT}:actor")) == 2, "there is another replica", WAIT_S)
        until(lambda: "replica" not in str(served.console.get("/api/job")["errors"]), "and it answers", WAIT_S)
        reached = True
    assert reached
    for _ in range(4):
        assert served.acts_with() == {2}
