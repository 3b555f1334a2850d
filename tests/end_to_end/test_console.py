"""The console's API against running jobs: read, follow, control, keys, and a process that dies or is never started."""

from __future__ import annotations

import base64
import importlib.util
import io
import itertools
import json
import os
import re
import socket
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import av
import httpx
import numpy as np
import psutil
import pytest
from PIL import Image

import brayx.recording
from brayx.console.api import create_app
from brayx.console.comparisons import Comparisons, Key
from brayx.console.guard import ConsoleKeys, basic
from brayx.console.job import console_keys
from brayx.console.serve import console
from brayx.console.source import Source
from brayx.errors import ConfigError, ModelNotFound, ServiceFull, SessionLost, StartupError
from brayx.gamecore.auth import Keys, new_key
from brayx.local.serving import Serving
from brayx.replay.files import Dataset
from brayx.tracking import find, local_files, promote, roll_back
from tests.end_to_end.console_jobs import PROJECT, WAIT_S, Console, Job, playing, write_code
from tests.end_to_end.jobs import FREE_PORTS, Command, job_folder, setting
from tests.end_to_end.jobs import brayx as command
from tests.processes import ours
from tests.waiting import until


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_code(tmp_path_factory.getbasetemp() / "watched-code")


@pytest.fixture
def job(tmp_path: Path, tracking_db: str, code: Path) -> Job:
    return Job(tmp_path, tracking_db, code)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, code: Path) -> Iterator[tuple[Job, Serving, Console]]:
    folder = tmp_path_factory.mktemp("watched")
    job = Job(folder, f"sqlite:///{folder / 'mlflow.db'}", code)
    job.add(1, "champion")
    job.add(2, "candidate")
    with job.served() as (serving, console):
        yield job, serving, console


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that is taken."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_the_process_starts_with_the_first_visit_and_again_after_its_death_on_a_free_port(job: Job, taken: int) -> None:
    before = {process.pid for process in ours("brayx.console.serve")}  # of other jobs, which may be ending

    def processes() -> list[psutil.Process]:
        return [process for process in ours("brayx.console.serve") if process.pid not in before]

    job.job = job.job.model_copy(update={"console_port": taken})
    with job.served() as (serving, console):
        said = f"console_port {taken} of 127.0.0.1 is taken; the console is {console.url}"
        assert job.lines == [said], "who opens the usual address sees another job's console"
        assert not console.url.endswith(f":{taken}")
        with playing(serving.url, "unseen") as tick:
            tick(1.0)
        assert not processes(), "nobody looks: there is no process"
        assert console.get("/api/job")["project"] == PROJECT
        (process,) = processes()
        for path in ("models", "trials", "recordings", "sessions"):
            console.get(f"/api/{path}")
        assert not [file.path for file in process.memory_maps() if "libtorch" in file.path], "200 MB for nothing"
        process.kill()
        process.wait(WAIT_S)
        again = Console(console.url)
        assert again.get("/api/job")["mode"] == "serve"
        with playing(serving.url, "still-served") as tick:
            assert tick(1.0)["version"] == 0
    until(lambda: not processes(), "the console's process ends with the job")
    with pytest.raises(httpx.ConnectError):
        console.get("/api/job")
    job.job = job.job.model_copy(update={"console_port": None})
    with Serving(job.job, job.uri) as serving, serving.console(job.lines.append):
        assert len(job.lines) == 1, "null: no console"


def test_a_session_is_listed_followed_and_ended(served: tuple[Job, Serving, Console]) -> None:
    _, serving, console = served
    with playing(serving.url, "live/1") as tick:
        tick(1.0)
        (row,) = [row for row in console.get("/api/sessions") if row["session"] == "live/1"]
        assert (row["ticks"], row["followed"], row["arms"]) == (1, False, ["model/champion/1"])

        begun = console.get("/api/sessions/ticks", session="live/1")
        assert (begun["ticks"], begun["end"]) == ([], ""), "it is followed from now on"
        tick(2.0)
        tick(-3.0)
        followed = console.get("/api/sessions/ticks", session="live/1", after=begun["after"])
        assert [tick["number"] for tick in followed["ticks"]] == [1, 2]
        last = followed["ticks"][-1]
        assert last["input"] == {"x": -3.0}
        assert last["output"] == {"version": 1}
        assert (last["action"], last["policy_version"], last["value"]) == (1, 1, -3.0)
        assert last["arrays"]["obs"] == [-3.0, 0.0]
        assert last["probabilities"] == pytest.approx([1 / (1 + np.exp(3)), 1 / (1 + np.exp(-3))])
        assert last["seconds"] > 0
        assert console.get("/api/sessions/ticks", session="live/1", after=followed["after"])["ticks"] == []

        with console.http.stream("GET", "/api/sessions/follow", params={"session": "live/1"}) as events:
            assert console.http.delete("/api/sessions", params={"session": "live/1"}).status_code == 200
            messages = [json.loads(line[6:]) for line in events.iter_lines() if line.startswith("data: ")]
        assert (messages[-1]["end"], messages[-1]["result"]) == ("ended", 7.0)
        with pytest.raises(SessionLost, match="ended"):
            tick(1.0)
    assert console.refusal("DELETE", "/api/sessions", params={"session": "live/1"}) == (404, "session_unknown")
    assert console.refusal("GET", "/api/sessions/ticks", params={"session": "none"}) == (404, "session_unknown")


def test_following_ends_when_nobody_asks_any_more(served: tuple[Job, Serving, Console]) -> None:
    _, serving, console = served
    with playing(serving.url, "left") as tick:

        def row() -> Any:
            return next(row for row in console.get("/api/sessions") if row["session"] == "left")

        console.get("/api/sessions/ticks", session="left")
        tick(1.0)
        assert row()["followed"]
        until(lambda: not row()["followed"], "the session is let go", WAIT_S)
        assert serving._host.table.get("left").actor._services.seen is None  # type: ignore[union-attr, attr-defined]


def test_a_promotion_a_roll_back_and_a_canarys_share(served: tuple[Job, Serving, Console]) -> None:
    _, serving, console = served

    def acts_with() -> int:
        with playing(serving.url, os.urandom(8).hex()) as tick:
            return int(tick(1.0)["version"])

    (model,) = console.get("/api/models")
    assert (model["name"], model["aliases"], model["before"]) == (PROJECT, {"champion": 1, "candidate": 2}, None)
    assert [(version["version"], version["step"]) for version in model["versions"]] == [(2, 2), (1, 1)]
    until(lambda: len(console.get("/api/job")["registered"]["model"]) == 2, "the candidate is served", WAIT_S)
    assert {acts_with() for _ in range(5)} == {1}

    assert console.get("/api/job")["canaries"]["model"]["share"] == 0.0
    console.post("/api/canaries/model", {"share": 1.0})
    assert {acts_with() for _ in range(5)} == {2}
    console.post("/api/canaries/model", {"share": 0.0})
    assert console.refusal("POST", "/api/canaries/model", json={"share": 1.5}) == (400, "bad_config")
    assert console.refusal("POST", "/api/canaries/other", json={"share": 0.5}) == (400, "bad_config")

    with playing(serving.url, "runs-on") as tick:
        moved = console.post(f"/api/models/{PROJECT}/promote", {"version": 2})
        assert (moved["version"], moved["before"]) == (2, 1)
        until(lambda: acts_with() == 2, "the next session gets the new champion", WAIT_S)
        assert tick(1.0)["version"] == 1, "a running session keeps its version"
    moved = console.post(f"/api/models/{PROJECT}/roll-back")
    assert (moved["version"], moved["before"]) == (1, 2)
    until(lambda: acts_with() == 1, "the next session gets the old champion", WAIT_S)
    assert console.refusal("POST", f"/api/models/{PROJECT}/roll-back") == (404, "model_not_found")
    assert console.refusal("POST", f"/api/models/{PROJECT}/promote", json={"version": 9}) == (404, "model_not_found")
    assert console.refusal("POST", f"/api/models/{PROJECT}/promote", json={}) == (400, "bad_request")


def test_recordings_trials_health_and_refusals(served: tuple[Job, Serving, Console]) -> None:
    job, serving, console = served
    with playing(serving.url, "recorded") as tick:
        for x in range(5):
            tick(float(x))

    recording = console.recorded("recorded")
    assert (recording["ticks"], recording["end"], recording["result"]) == (5, "stop", 7.0)
    page = console.get(f"/api/recordings/{recording['id']}", first=1, count=2)
    assert (page["start"], page["start_reply"]) == (None, "Game Started")
    assert [(tick["number"], tick["input"], tick["arrays"]["obs"]) for tick in page["ticks"]] == [
        (1, {"x": 1.0}, [1.0, 0.0]),
        (2, {"x": 2.0}, [2.0, 0.0]),
    ]
    curves = console.get(f"/api/recordings/{recording['id']}/curves")
    assert curves["ticks"] == [0, 1, 2, 3, 4]
    assert curves["curves"]["policy_version"] == [1.0] * 5
    assert console.refusal("GET", "/api/recordings/none") == (404, "recording_unknown")
    for name, count in (("recorded", 1), ("rec*ded", 1), ("record", 0)):
        named = console.get("/api/recordings", session=name)
        assert [row["id"] for row in named["recordings"]] == [recording["id"]] * count
        assert named["total"] >= 1
        assert named["selected"] == count
    assert len(brayx.recording.open(str(job.folder / "recordings")))

    trials = console.get("/api/trials", project=PROJECT)
    assert job.trial.run_id in {trial["run_id"] for trial in trials}
    assert not any(trial["can_stop"] for trial in trials), "a service trains nothing"
    assert console.refusal("POST", f"/api/trials/{job.trial.run_id}/stop") == (404, "job_not_running")
    job.trial.log_metrics({"learner/loss": 0.5}, 10)
    assert console.get(f"/api/trials/{job.trial.run_id}")["curves"]["learner/loss"] == [[10, 0.5]]
    assert console.get("/api/league") is None

    before = console.get("/api/job")["refusals"].get("bad_body", 0.0)
    httpx.post(f"{serving.url}/step", content=b"no json", timeout=WAIT_S)
    until(lambda: console.get("/api/job")["refusals"].get("bad_body", 0.0) > before, "it is counted", WAIT_S)
    assert console.get("/openapi.json")["paths"]["/api/job"]
    assert "https://" not in console.http.get("/docs").text, "nothing is downloaded"
    calls = [call for methods in console.get("/openapi.json")["paths"].values() for call in methods.values()]
    assert all(call.get("description") for call in calls), "/docs has a line for every call"
    for method, path in (
        ("GET", "/api/nothing"),
        ("POST", "/api/job"),
        ("DELETE", "/api/"),
        ("GET", "/api"),
        ("OPTIONS", "/api/job"),
        ("TRACE", "/api/job"),
        ("GET", "/api/trials/a/b"),
    ):
        assert console.refusal(method, path) == (404, "bad_request"), "JSON, not the page's HTML"
    assert "<html" in console.http.get("/nothing").text


def test_no_name_in_a_call_makes_the_console_fail(served: tuple[Job, Serving, Console]) -> None:
    """Every call that OpenAPI describes gets names that nothing has, and some that nothing can have."""
    _, serving, console = served
    with playing(serving.url, "named") as tick:
        tick(1.0)
    until(lambda: console.get("/api/recordings")["total"], "there is a recording", WAIT_S)
    recording = console.get("/api/recordings")["recordings"][0]["id"]
    described = console.get("/openapi.json")
    names = ("none", "..", "%", "'", '"', "\\", " ", "\n", "\0", "é", "a/b", "-1", "9" * 40, "x" * 5000)
    for path, calls in described["paths"].items():
        for (method, call), name in itertools.product(calls.items(), names):
            queries = {"session": name, "version": f"models:/{name}/1", "project": name, "metric": name}
            known = {parameter["name"] for parameter in call.get("parameters", []) if parameter["in"] == "query"}
            query = {key: value for key, value in queries.items() if key in known}
            body = _body(call, name) if "requestBody" in call else None
            for value in (name, recording) if "{recording}" in path else (name,):
                url = path.replace("{recording}", quote(value, safe=""))
                reply = console.http.request(
                    method, re.sub(r"\{\w+\}", quote(name, safe=""), url), params=query, json=body
                )
                assert reply.status_code < 500, f"{method} {reply.url}: {reply.text}"
                if reply.status_code >= 400:
                    assert set(reply.json()) == set(described["components"]["schemas"]["RefusalDocument"]["properties"])
    assert console.refusal("GET", "/api/trials/none") == (404, "trial_not_found")


def _body(call: Any, name: str) -> Any:
    """A valid body of a call in OpenAPI."""
    reference = call["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    return {
        "ReferenceDocument": {"version": 1, "alias": name},
        "ShareDocument": {"share": 0.5},
        "NewGameDocument": {"opponent": {"level": name}},
        "HumanMoveDocument": {"move": name},
    }[reference.rpartition("/")[2]]


def test_a_recording_is_downloaded_in_each_format(served: tuple[Job, Serving, Console], tmp_path: Path) -> None:
    _, serving, console = served
    for session, more in (("plain", {}), ("filmed", {"side": 32})):
        with playing(serving.url, session, **more) as tick:
            for x in range(20):
                tick(float(x))

    def download(session: str, **query: str) -> Path:
        reply = console.http.get(f"/api/recordings/{console.recorded(session)['id']}/file", params=query)
        assert reply.status_code == 200, reply.text
        assert int(reply.headers["content-length"]) == len(reply.content)
        named = reply.headers["content-disposition"].split('"')[1]
        assert named.startswith(f"{session}-{console.recorded(session)['id'][:8]}.")
        file = tmp_path / named
        file.write_bytes(reply.content)
        if file.suffix != ".zip":
            return file
        zipfile.ZipFile(file).extractall(tmp_path)
        return file.with_suffix("")

    (plain,) = brayx.recording.open(str(download("plain")))
    assert (plain.session, plain["obs"][:, 0].tolist()) == ("plain", [*map(float, range(20))])
    (filmed,) = brayx.recording.open(str(download("filmed", format="parquet")))
    image = filmed.image(7)
    assert image is not None
    np.testing.assert_allclose(image, np.full((32, 32, 3), 70), atol=3)
    with av.open(download("filmed", format="mp4")) as video:
        assert video.streams.video[0].frames == 20
    path = f"/api/recordings/{console.recorded('plain')['id']}/file"
    if importlib.util.find_spec("rerun"):
        assert download("plain", format="rerun").read_bytes().startswith(b"RRF2")
    else:
        assert console.refusal("GET", path, params={"format": "rerun"}) == (400, "bad_config"), "an extra is missing"
    if importlib.util.find_spec("h5py"):
        (fragment,) = Dataset(download("plain", format="minari"))
        np.testing.assert_array_equal(np.asarray(fragment.obs)[:, 0], range(20))
    assert console.refusal("GET", path, params={"format": "mp4"}) == (400, "bad_config"), "it has no frames"
    assert console.refusal("GET", path, params={"format": "gif"}) == (400, "bad_request")
    assert console.refusal("GET", "/api/recordings/none/file") == (404, "recording_unknown")


def test_frames_live_and_recorded(served: tuple[Job, Serving, Console]) -> None:
    _, serving, console = served
    with playing(serving.url, "pictured", side=300) as tick:
        console.get("/api/sessions/ticks", session="pictured")
        for x in range(3):
            tick(float(x))
        live = console.get("/api/sessions/ticks", session="pictured")["ticks"]
        assert [tick["image"] is not None for tick in live] == [False, False, True], "a large one only of the newest"
        shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(live[-1]["image"].partition(",")[2]))))
        np.testing.assert_array_equal(shown, np.full((300, 300, 3), 20))

    recording = console.recorded("pictured")
    assert recording["frames"] == 3
    path = f"/api/recordings/{recording['id']}/frames"
    reply = console.http.get(f"{path}/2")
    assert reply.headers["content-type"] == "image/png"
    np.testing.assert_allclose(np.asarray(Image.open(io.BytesIO(reply.content))), np.full((300, 300, 3), 20), atol=3)
    assert console.refusal("GET", f"{path}/3") == (422, "bad_recording")
    assert console.refusal("GET", f"{path}/-1") == (400, "bad_request")
    with playing(serving.url, "unpictured") as tick:
        tick(0.0)
    other = console.recorded("unpictured")
    assert (other["frames"], console.http.get(f"/api/recordings/{other['id']}/frames/0").status_code) == (0, 204)


@pytest.mark.cluster
def test_a_recording_is_compared_with_versions_one_at_a_time(job: Job) -> None:
    job.add(1, "champion")
    job.add(2, "candidate", -1.0)
    with job.served() as (serving, console):
        with playing(serving.url, "compared") as tick:
            for x in range(5):
                tick(float(x))
        recording = console.recorded("compared")
        path = f"/api/recordings/{recording['id']}/comparison"

        def compared(**query: str) -> Any:
            result = console.get(path, **query)
            until(lambda: (result.update(console.get(path, **query)), result["done"])[1], "it is compared", WAIT_S)
            return result

        other, itself = f"models:/{PROJECT}/2", f"models:/{PROJECT}/1"
        begun = console.get(path, version=other)
        assert (begun["done"], begun["first"], begun["curves"]) == (False, None, None)
        again = {"params": {"version": itself}}
        assert console.refusal("GET", path, **again) == (503, "service_full"), "one at a time"
        result = compared(version=other)
        assert (result["ticks"], result["left_out"], result["first"], result["agreement"]) == (5, 0, 1, 0.2)
        # Of p = softmax(x, 0) and q = softmax(-x, 0): x tanh(x / 2).
        kl = [x * np.tanh(x / 2) for x in range(5)]
        assert (result["kl"], result["kl_max"], result["kl_exact"]) == (
            pytest.approx(np.mean(kl)),
            pytest.approx(kl[-1]),
            True,
        )
        assert result["value"] == 0.0
        assert result["curves"]["ticks"] == [0, 1, 2, 3, 4]
        assert result["curves"]["curves"]["KL"] == pytest.approx(kl)
        (third,) = console.get(f"{path}/ticks", version=other, first=3, count=1)
        assert (third["number"], third["equal"], third["kl"]) == (3, False, pytest.approx(kl[3]))
        assert third["chosen"]["version"]["action"] == 1
        assert third["chosen"]["version"]["probabilities"] == pytest.approx([1 / (1 + np.exp(3)), 1 / (1 + np.exp(-3))])

        result = compared(version=itself, reference=other)
        assert (result["first"], result["agreement"]) == (1, 0.2)
        (first,) = console.get(f"{path}/ticks", version=itself, reference=other, first=1, count=1)
        assert {name: chosen["action"] for name, chosen in first["chosen"].items()} == {"version": 0, "reference": 1}

        assert console.refusal("GET", path, params={"version": "models:/watched@champion"}) == (400, "bad_request")
        assert console.refusal("GET", path, params={"version": "/tmp/folder"}) == (400, "bad_request")
        assert console.refusal("GET", f"{path}/ticks", params={"version": "models:/x/1"}) == (422, "bad_recording")
        assert console.refusal("GET", path, params={"version": f"models:/{PROJECT}/9"}) == (404, "model_not_found")
        job.add(3, "broken")
        files = local_files(find(f"models:/{PROJECT}/3", job.uri), job.uri)
        assert files is not None
        (files / "weights.npz").write_bytes(b"no weights")
        broken = {"version": f"models:/{PROJECT}/3"}
        assert not console.get(path, **broken)["done"]
        until(lambda: console.http.get(path, params=broken).status_code == 422, "it fails", WAIT_S)
        assert not console.get(path, **broken)["done"], "a failed one can be tried again"


def test_a_comparison_that_nobody_waits_for_is_stopped(
    served: tuple[Job, Serving, Console], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, serving, console = served
    with playing(serving.url, "left-alone") as tick:
        tick(1.0)

    comparisons, key = Comparisons(job.uri), Key(console.recorded("left-alone")["id"], f"models:/{PROJECT}/1", "")

    def processes() -> list[psutil.Process]:
        return ours("brayx.console.comparison_process")

    def starts() -> bool:
        try:
            return not comparisons.ask(key, str(job.folder / "recordings"), 1).done
        except ServiceFull:  # the process has ended, and this is noticed in a moment
            return False

    for _ in range(2):  # the second one starts because the first one was stopped
        until(starts, "it runs", WAIT_S)
        (process,) = processes()
        process.suspend()  # it never ends by itself
        with monkeypatch.context() as later:
            later.setattr("brayx.console.comparisons._ASKED_S", 0.0)
            until(lambda: not processes(), "it is killed", WAIT_S)

    monkeypatch.setattr("brayx.console.comparisons._FREE_S", 0.0)
    until(starts, "it runs", WAIT_S)
    (process,) = processes()
    process.suspend()
    other = key._replace(version=f"models:/{PROJECT}/2")
    assert not comparisons.ask(other, str(job.folder / "recordings"), 1).done, "another one takes its place"
    until(lambda: not processes(), "both have ended", WAIT_S)


def test_foreign_pages_and_names_are_refused_and_a_games_door_has_no_control(
    served: tuple[Job, Serving, Console],
) -> None:
    _, serving, console = served
    for headers in ({"Host": "console.example.com"}, {"Origin": "http://example.com"}, {"Origin": "null"}):
        assert console.refusal("GET", "/api/job", headers=headers) == (403, "forbidden")
        assert console.refusal("DELETE", "/api/sessions?session=x", headers=headers) == (403, "forbidden")
    assert console.http.get("/api/job", headers={"Origin": console.url}).status_code == 200
    parts = set(re.findall(r'/_nicegui/[^"]+\.(?:js|css)', console.http.get("/").text))
    assert parts
    for part in parts:
        assert console.http.get(part).status_code == 200
    for url in serving.urls.values():
        if url.startswith("http"):
            assert httpx.get(f"{url}/api/job", timeout=WAIT_S).status_code != 200
            path = f"{url}/api/models/{PROJECT}/promote"
            assert httpx.post(path, json={"version": 2}, timeout=WAIT_S).status_code >= 400


def test_keys_have_scopes(job: Job, tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    read, control = new_key(file, "eve", "read"), new_key(file, "bob", "control")
    keys = Keys.load(file)
    job.add(1, "champion")
    job.job = job.job.model_copy(update={"console_host": "0.0.0.0"})
    with pytest.raises(ConfigError, match="console_keys_file is not set"):
        console_keys(job.job)
    job.job = job.job.model_copy(update={"console_keys_file": str(file)})
    with job.served() as (_, console):
        port = console.url.rpartition(":")[2]
        url = f"http://127.0.0.1:{port}"

        def client(key: str, secret: bytes) -> Console:
            return Console(url, headers={"Authorization": basic(key, secret)})

        reader, controller = (client(key, keys.secret(key)) for key in (read, control))
        assert Console(url).http.get("/api/job").headers["WWW-Authenticate"].startswith("Basic")
        assert Console(url).refusal("GET", "/api/job") == (401, "unauthorized")
        assert client(read, b"wrong" * 8).refusal("GET", "/api/job") == (401, "unauthorized")
        assert client("control/none", b"wrong" * 8).refusal("GET", "/api/job") == (401, "unauthorized")
        assert reader.get("/api/job")["project"] == PROJECT
        (scheme,) = reader.get("/openapi.json")["components"]["securitySchemes"].values()
        assert scheme == {"type": "http", "scheme": "basic"}
        promotion = {"json": {"version": 1}}
        assert reader.refusal("POST", f"/api/models/{PROJECT}/promote", **promotion) == (403, "forbidden")
        assert controller.post(f"/api/models/{PROJECT}/promote", {"version": 1})["version"] == 1
        assert "kind: board" in reader.get("/api/opponents")["why_not"]
        assert reader.refusal("POST", "/api/games", json={}) == (403, "forbidden")
        assert controller.refusal("POST", "/api/games", json={}) == (400, "bad_config")
        compared = {"params": {"version": f"models:/{PROJECT}/1"}}
        assert reader.refusal("GET", "/api/recordings/none/comparison", **compared) == (404, "recording_unknown")
    new_key(file, "game")
    with pytest.raises(ConfigError, match="'game' has no scope"):
        ConsoleKeys(Keys.load(file))


def test_roll_backs_go_back_one_by_one(job: Job) -> None:
    for version in (1, 2, 3):
        job.add(version, "champion" if version == 1 else None)
    for version in (2, 3):
        promote(f"models:/{PROJECT}/{version}", job.uri)
    assert [roll_back(PROJECT, job.uri)[0].version for _ in range(2)] == [2, 1]
    with pytest.raises(ModelNotFound, match="no champion before version 1"):
        roll_back(PROJECT, job.uri)
    assert find(f"models:/{PROJECT}@champion", job.uri).version == 1


async def test_a_store_without_a_job_can_be_looked_at(tmp_path: Path) -> None:
    app = create_app(Source(f"sqlite:///{tmp_path}/mlflow.db"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:

        async def get(path: str) -> Any:
            return (await client.get(path)).json()

        assert not (await get("/api/job"))["running"]
        assert [await get(f"/api/{what}") for what in ("sessions", "models", "trials")] == [[], [], []]
        assert await get("/api/league") is None
        assert (await get("/api/recordings"))["total"] == 0
        assert (await client.delete("/api/sessions?session=x")).status_code == 404


@pytest.mark.cluster
def test_a_training_is_watched_and_finished(tmp_path: Path) -> None:
    job_folder(tmp_path)
    steps = ("trainer.num_steps=1000000", "trainer.target_return=null", "trainer.target_games=1")
    with command(tmp_path, "train", "cartpole.yaml", *setting(*FREE_PORTS, "console_port=0", *steps)) as training:
        training.until(training.says("plays at tcp://"), "games play")
        console = Console(_url(training))
        job = {}

        def learns() -> bool:
            job.update(console.get("/api/job"))
            return job["numbers"].get("updates", 0) > 1 and job["numbers"]["games_in_window"] > 0

        until(learns, "it learns, and knows a return", WAIT_S)
        assert (job["mode"], job["trial"], job["can_stop"]) == ("train", "main", True)
        until(lambda: any(trial["can_stop"] for trial in console.get("/api/trials")), "MLflow has the trial", WAIT_S)
        (trial,) = [trial for trial in console.get("/api/trials") if trial["can_stop"]]
        until(lambda: console.get(f"/api/trials/{trial['run_id']}")["curves"], "it has curves", WAIT_S)
        assert console.refusal("POST", "/api/trials/other/stop") == (404, "job_not_running")
        console.post(f"/api/trials/{trial['run_id']}/stop?register=true")
        assert training.ended() == 0
        assert "champion: cartpole version 1" in training.out
        assert "ended from the console: mean return" in training.out
        assert training.processes() == []


def _url(training: Command) -> str:
    match = re.search(r"the console is (http://\S+)", training.err)
    assert match is not None
    return match[1]


def test_a_console_that_cannot_be_shown_is_a_typed_error(served: tuple[Job, Serving, Console]) -> None:
    job, _, shown = served

    def refusal(url: str, **options: Any) -> str:
        with pytest.raises(StartupError) as refused:
            console(url, uri=job.uri, **options)
        return refused.value.message

    assert refusal(f"{shown.url}/trials") == f"{shown.url}/trials is no job's console: use the URL that the job prints"
    assert refusal("http://127.0.0.1:1").startswith("no console answers at http://127.0.0.1:1: ")
    number = int(shown.url.rpartition(":")[2])
    assert refusal("", port=number) == f"--port {number} of 127.0.0.1 is taken"
    assert refusal("", port=70_000) == "--port is 70000, expected 0 to 65535"
