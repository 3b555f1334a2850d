"""A job that is served with its console, a client of that, and a game's session: for the console's tests."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml

from brayx.console.guard import SCOPES, basic
from brayx.engines.base import save_weights
from brayx.gamecore.auth import Keys, new_key
from brayx.gamecore.client import Client
from brayx.jobs.config import JobConfig
from brayx.local.serving import Serving
from brayx.tracking import Trial, register
from tests.scale_job import scale_model
from tests.waiting import until

PROJECT = "watched"
WAIT_S = 30.0
MODEL = scale_model('{"logits": obs * self.factor, "value": obs.sum(-1)}', 2)
AGENT = """
import numpy as np
from brayx import Agent, Step, forward, record

class WatchedAgent(Agent):
    returned = 7.0

    async def on_tick(self, state):
        obs = np.array([state.input["x"], 0.0], np.float32)
        outputs, version = await forward("model", obs)
        state.logits, state.value = outputs["logits"], outputs["value"]
        state.step = Step(obs, np.asarray(int(np.argmax(outputs["logits"]))), 0.0, version)
        state.output = {"version": version}
        self.returned = state.input.get("returned", self.returned)
        if side := state.input.get("side"):
            state.image = np.full((side, side, 3), 10 * state.tick, np.uint8)

    async def on_session_end(self, reason):
        record("episode_return", self.returned)

def draw(states):
    sides = [state.input.get("side", 32) for state in states]
    shades = [10 * state.tick % 256 for state in states]
    return [np.full((side, side, 3), shade, np.uint8) for side, shade in zip(sides, shades, strict=True)]
"""


def write_code(folder: Path) -> Path:
    """Writes the modules of the job, which a process can load from one folder only; returns the folder."""
    folder.mkdir(exist_ok=True)
    (folder / "watched_model.py").write_text(MODEL)
    (folder / "watched_agent.py").write_text(AGENT)
    return folder


def new_keys(file: Path) -> dict[str, dict[str, str]]:
    """Writes a file with a key of each scope; returns the headers of a client that has it, by scope."""
    names = {scope: new_key(file, "eve", scope) for scope in SCOPES}
    keys = Keys.load(file)
    return {scope: {"Authorization": basic(name, keys.secret(name))} for scope, name in names.items()}


def unframed(reply: httpx.Response) -> None:
    """Asserts that browsers refuse to show a response in a frame."""
    policies = reply.headers.get("Content-Security-Policy"), reply.headers.get("X-Frame-Options")
    assert policies == ("frame-ancestors 'none'", "DENY"), (reply.request.url, reply.headers)


class Console:
    """A client of a console's API, which returns JSON. Also checks that no page may show a response in a frame."""

    def __init__(self, url: str, **options: Any) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=240.0, event_hooks={"response": [unframed]}, **options)

    def get(self, path: str, **query: Any) -> Any:
        reply = self.http.get(path, params=query)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def post(self, path: str, body: Any = None) -> Any:
        reply = self.http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def recorded(self, session: str) -> Any:
        """The newest recording of a session, once it has ended and is written."""
        written: list[Any] = []

        def has_ended() -> bool:
            written[:] = self.get("/api/recordings", session=session)["recordings"][:1]
            return bool(written and written[0]["end"])

        until(has_ended, "the recording is written", WAIT_S)
        return written[0]

    def refusal(self, method: str, path: str, **options: Any) -> tuple[int, str]:
        reply = self.http.request(method, path, **options)
        return reply.status_code, reply.json()["error"]


class Job:
    """A served job, its registry and its console.

    Args:
        folder: of its files.
        uri: its store.
        code: folder of its modules, see `write_code`; its job is put there.
    """

    def __init__(self, folder: Path, uri: str, code: Path) -> None:
        self.folder, self.uri, self.lines = folder, uri, list[str]()
        self.trial = Trial.open(PROJECT, "t", uri)
        parts = {
            "project": PROJECT,
            "trial": "t",
            "console_port": 0,
            "model": {
                "kind": "model", "module": "watched_model", "follow_s": 0.2, "engine": "torch",
                "canary": {"alias": "candidate", "share": 0.0},
            },
            "agent": {"kind": "agent", "module": "watched_agent", "class": "WatchedAgent"},
            "actor": {"kind": "actor", "agents": ["agent"], "port": 0, "native_port": 0, "tcp_port": 0},
            "recording": {"kind": "recording", "folder": str(folder / "recordings"), "flush_s": 0.2, "frames": "image"},
        }  # fmt: skip
        (code / "job.yaml").write_text(yaml.safe_dump(parts))
        self.job = JobConfig.load(code / "job.yaml")

    def add(self, version: int, alias: str | None, factor: float | None = None) -> None:
        """Registers a version, whose logits for ``x`` are ``x * factor`` and 0; None: the version's number."""
        self._register(PROJECT, self.job.as_dict(), version, float(version) if factor is None else factor, alias)

    def add_of_two(self, step: int, factor: float) -> str:
        """Registers a version of a job with two models, of which this one is ``model``; returns its name."""
        job = self.job.as_dict()
        self._register(f"{PROJECT}-model", job | {"other": job["model"]}, step, factor, None)
        return f"{PROJECT}-model"

    def _register(self, name: str, job: dict[str, Any], step: int, factor: float, alias: str | None) -> None:
        folder = self.folder / f"checkpoint-{step}"
        folder.mkdir()
        save_weights(folder / "weights.npz", {"factor": np.array([factor, -factor], np.float32)})
        (folder / "meta.json").write_text(json.dumps({"job": job, "folder": self.job.folder}))
        register(self.trial, self.trial.save_checkpoint(folder, step), name, alias=alias)

    @contextlib.contextmanager
    def served(self) -> Iterator[tuple[Serving, Console]]:
        with Serving(self.job, self.uri) as serving, serving.console(self.lines.append):
            yield serving, Console(self.lines[-1].rpartition(" ")[2])


LABELLED = json.dumps(
    {
        "contract": 1,
        "observations": {"obs": {"shape": [2], "labels": ["height", "speed"]}},
        "actions": {"action": {"kind": "discrete", "size": 2, "labels": ["left", "right"]}},
    }
).encode()
"""A start that names what the agent observes, and what it does."""


@contextlib.contextmanager
def playing(
    url: str, session: str, stop: bytes = b"", start: bytes = b"", **more: Any
) -> Iterator[Callable[[float], Any]]:
    """A session; call what it gives to play a tick. ``more`` is in each body: ``side`` gives a tick a square image,
    ``returned`` the game a return.
    ``start`` and ``stop`` are the bodies of its start and its stop."""
    with Client(url, timeout_s=WAIT_S) as client:
        client.start(start, session=session)
        yield lambda x: json.loads(client.tick(json.dumps({"x": x, **more})))
        if client.session is not None:
            client.stop(stop)
