"""The documentation is true: its snippets are run or counted, its tables equal the code, its links are valid.

A comment before a fence classifies it: a file of an example, a part of a job, or the reason why it is not run. curl and
Python snippets play against a real door with the real CartPole agent and a predictable policy. No Ray cluster.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import http.client
import importlib
import io
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from websockets.sync.client import connect
from websockets.typing import Subprotocol

import brayx
from brayx import errors
from brayx.actor.agent import Services
from brayx.actor.agent_actor import AgentActorFactory
from brayx.actor.config import ActorConfig
from brayx.actor.doors.asgi import DoorApp
from brayx.actor.doors.grpc import GrpcDoor
from brayx.actor.doors.native import MAX_CONNECTIONS
from brayx.actor.table import MAX_WAITING, SessionTable
from brayx.algorithms.ppo import PPO, PPOConfig
from brayx.bridges import gym, pettingzoo
from brayx.commands import cli
from brayx.commands.train import training_options
from brayx.components import load
from brayx.engines import build_engine
from brayx.engines.bundle import Samples, write_bundle
from brayx.errors import ConfigError, TrackingError
from brayx.gamecore.protocol import MAX_HEADER_BYTES, WS_SUBPROTOCOL
from brayx.jobs.code import check_code
from brayx.jobs.config import KINDS, JobConfig
from brayx.jobs.contracts import built
from brayx.jobs.kinds import SourceConfig
from brayx.jobs.new import new_project
from brayx.jobs.shipped import TEMPLATES
from brayx.model.grpc import ModelDoor
from brayx.model.local import LocalModel
from brayx.nets.heads import MASKED
from brayx.replay.packing import BatchPacker
from brayx.search import space as search
from brayx.types import Fragment
from tests.unit.gamecore.echo_server import serving, serving_tcp
from tests.unit.gamecore.grpc_server import serving as serving_grpc

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TRANSLATIONS = [ROOT / "README.zh.md", *sorted((ROOT / "docs" / "zh").glob("*.md"))]
"""Their snippets are those of their sources (tests/unit/test_translations.py), so they are not run again."""
URL = "http://127.0.0.1:8000"

NOT_RUN = {
    "needs a champion that was trained with a contract; tests/unit/jobs/test_export.py exports one",
    "needs a recorded file; tests/end_to_end/test_unity.py clones one",
    "reads recordings; tests/unit/recording/test_forgetting.py does the same",
    "minutes of training",
    "trains for seconds; tests/unit/algorithms/test_own.py runs it",
    "trains; tests/end_to_end/test_tune.py does the same",
    "trains for seconds to minutes; tests/unit/commands/test_ppo.py runs it",
    "a drawing",
    "a prompt; tests/end_to_end/test_breakpoint.py opens one",
    "an error's message",
    "needs Ray; tests/integration/test_shards.py does the same",
    "needs Ray and Serve; tests/integration/test_remote_model.py does the same",
    "builds images; tests/unit/docker checks their parts",
    "needs PostgreSQL, Prometheus and HAProxy; tests/chaos/test_stack.py starts it",
    "needs Kubernetes; tests/unit/docker renders and checks every overlay",
    "needs machines; tests/nodes does the same",
    "needs a service; tests/unit/gamecore/test_load.py does the same",
    "needs a service to test; tests/unit/actor/doors/test_asgi.py does the same",
    "needs a trained champion in ./mlflow.db",
    "one line of a live display",
    "lines of a live display",
    "serves until Ctrl-C",
    "starts a Ray and trains",
    "reads a recording; tests/unit/recording does the same",
    "reads a recording; tests/end_to_end/test_recordings.py does the same",
    "trains for a minute; tests/end_to_end/test_recordings.py does the same",
    "reads a recording; tests/unit/regression/test_replay.py does the same",
    "needs a running job; tests/end_to_end/test_console.py does the same",
    "waits for Godot; tests/end_to_end/test_godot.py plays a stand-in",
    "waits for Unity; tests/end_to_end/test_unity.py plays a stand-in",
    "installs packages; tests/unit/test_package.py runs it without others",
    "writes a file of secrets",
    "serves until Ctrl-C; tests/end_to_end/test_console_page.py does the same",
    "starts a Ray and trains; tests/end_to_end/test_environments.py runs it with fewer steps",
    "a configuration of Prometheus",
    "a configuration of HAProxy",
    "needs an OpenTelemetry collector; tests/unit/actor/test_tracing.py has one",
}
"""The reasons for not running a snippet."""


@dataclass(frozen=True)
class Snippet:
    """A fenced block: where it is, its language, its text, and the comment before it."""

    file: Path
    line: int
    language: str
    text: str
    mark: str

    def __str__(self) -> str:
        return f"{self.file.name}:{self.line}"

    def is_(self, mark: str) -> str:
        """The text after ``mark:`` in the comment; empty if the comment has another mark."""
        return self.mark.removeprefix(f"{mark}:").strip() if self.mark.startswith(f"{mark}:") else ""


def snippets_of(file: Path) -> Iterator[Snippet]:
    lines = file.read_text().splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        if start is None and line.startswith("```"):
            start = number
        elif line == "```":
            assert start is not None
            before = next((text for text in reversed(lines[:start]) if text.strip()), "")
            mark = before[4:-3].strip() if before.startswith("<!--") and before.endswith("-->") else ""
            yield Snippet(file, start + 1, lines[start][3:], "\n".join(lines[start + 1 : number]), mark)
            start = None
    assert start is None, f"{file.name}: the fence of line {start} is not closed"


SNIPPETS = [snippet for file in FILES for snippet in snippets_of(file)]


def some_in(language: str) -> list[Snippet]:
    return [snippet for snippet in SNIPPETS if snippet.language == language and not snippet.is_("not run")]


def some(language: str) -> Any:
    return pytest.mark.parametrize("snippet", some_in(language), ids=str)


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every example file of the documentation, the files that its commands name, and the projects that
    they make."""
    folder = tmp_path_factory.mktemp("docs")
    for snippet in SNIPPETS:
        if name := snippet.is_("file"):
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            assert not path.exists(), f"{snippet}: {name} is shown twice"
            path.write_text(snippet.text + "\n")
    shipped = (
        "pipelines",
        "docker",
        "notebooks",
        "benchmarks",
        "clients",
        "deployments",
        "serve_config.yaml",
        "Makefile",
    )
    for name in shipped:
        (folder / name).symlink_to(ROOT / name)
    lines = [line for snippet in some_in("sh") for line in snippet.text.splitlines()]
    for words in itertools.chain.from_iterable(map(commands_in, lines)):
        if words[:2] == ["brayx", "new"]:
            project = cli.parser(["new"]).parse_args(words[1:])
            if not (folder / project.name).exists():
                new_project(project.name, project.template, folder)
    example = (torch.zeros(1, 4).numpy(),)
    write_bundle(folder / "bundle", Lean(), example, ["onnx"], Samples.of_example(example), batch_sizes=(1,))
    return folder


class Lean(torch.nn.Module):
    """CartPole's simple policy: push towards the side where the pole falls. Almost as good as a trained one."""

    def forward(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
        lean = obs[:, 2] + obs[:, 3]
        return {"logits": torch.stack([-lean, lean], -1), "value": lean}


class DocService(SessionTable):
    """A replica without Ray: one agent over one model and one buffer."""

    def __init__(self, folder: Path, module: str, agent: str, model: LocalModel, mode: str, buffer: Any = None) -> None:
        config = {"mode": mode, "seed": 0, "agent": {"options": {"model": "model", "buffer": "buffer"}}}
        buffers = {} if buffer is None else {"buffer": buffer}
        super().__init__(
            AgentActorFactory({"agent": load(module, agent, str(folder))}, config, Services({"model": model}, buffers))
        )

    def status(self) -> dict[str, Any]:
        """As `ActorReplica`'s; tests/end_to_end/test_serve_run.py compares the guide with that one."""
        described = {
            "service": "brayx",
            "application": "cartpole/actor/sessions",
            "sessions": len(self),
            "draining": False,
            "mode": "serve",
        }
        doors = {door: f"{door}://127.0.0.1:0" for door in ("http", "ws", "tcp")}
        return described | {"doors": doors, "policy_versions": {"model": 1}, "registered": {"model": []}}


@pytest.fixture(scope="module")
def door() -> Iterator[str]:
    """``host:port`` of a door with CartPole's agent."""
    model = LocalModel(build_engine("torch", Lean(), (torch.zeros(2, 4),)), version=1)
    service = DocService(ROOT / "pipelines" / "templates", "gym_agent", "GymAgent", model, "serve")
    with serving(DoorApp(service)) as address:
        yield address


def test_the_model_made_of_parts_acts_and_learns(examples: Path) -> None:
    """It is exported unchanged, never attacks an absent target, and can be updated."""
    module, forward_args = load("attack_model", "build_model", str(examples))("model", {})
    engine = build_engine("onnx", module, forward_args)
    rng = np.random.default_rng(0)
    obs = {
        "action_mask": (np.arange(8) < rng.integers(1, 9, (5, 1))).astype(np.float32),
        "flags": rng.integers(0, 2**16, 5),
        "phase": rng.integers(0, 5, 5),
        "units": rng.normal(size=(5, 8, 6)).astype(np.float32),
    }
    arrays = engine.run(engine.bind(engine.initial), [obs[name] for name in sorted(obs)])
    outputs = {leaf.path: array for leaf, array in zip(engine.spec.outputs, arrays, strict=True)}
    assert outputs["logits"].shape == (5, 8)
    assert outputs["value"].shape == (5,)
    assert (outputs["logits"][obs["action_mask"] == 0] == MASKED).all()
    actions = np.where(obs["action_mask"] > 0, outputs["logits"], -np.inf).argmax(-1)
    columns = {name: torch.from_numpy(np.stack([leaf[:-1], leaf[1:]], 1)) for name, leaf in obs.items()}
    zeros = torch.zeros(4, 2)
    batch = {
        "obs": columns,
        "action": torch.from_numpy(np.stack([actions[:-1], actions[1:]], 1)),
        "mask": torch.tensor([[1.0, 0.0]]).expand(4, 2).clone(),
        "reward": torch.randn(4, 2),
        "terminated": zeros.bool(),
        "truncated": zeros.bool(),
        "log_prob": zeros,
    }
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    PPO(module, torch.optim.Adam(module.parameters(), lr=1e-2), PPOConfig(epochs=2)).update(batch, 0.0)
    moved = {name.split(".")[0] for name, weight in module.state_dict().items() if not weight.equal(before[name])}
    assert moved >= {"phase", "units", "trunk", "target", "value"}


PUBLIC = {"algorithms", "errors", "gamecore", "nets", "recording"}
"""Packages of brayx that users write against; from all others they need the names in `brayx.__all__` alone."""


def test_code_for_users_uses_public_names_only() -> None:
    code = {str(snippet): snippet.text for snippet in SNIPPETS if snippet.language == "python"}
    code |= {path.name: path.read_text() for path in (ROOT / "pipelines" / "templates").rglob("*.py")}
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
        code |= {f"{notebook.name} {number}": "".join(cell["source"]) for number, cell in enumerate(cells)}
    internal = [f"{where}: {name}" for where, text in code.items() for name in imported(text) if not is_public(name)]
    assert internal == []


def imported(code: str) -> Iterator[str]:
    """The imports of code, and the attributes of `brayx` that it uses, as dotted names."""
    for node in ast.walk(ast.parse(re.sub(r"^ *[%!].*", "", code, flags=re.M))):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "brayx":
            yield f"brayx.{node.attr}"


def is_public(name: str) -> bool:
    package, _, inside = name.partition(".")
    if package == "brayx":
        return inside in ("", *brayx.__all__) or inside.split(".")[0] in PUBLIC
    return package not in ("pipelines", "deployments", "benchmarks", "tests")


def test_every_snippet_has_a_checked_kind() -> None:
    known = {"python", "sh", "yaml", "json", "text", "javascript", "csharp", "go"}
    marks = ("", "file:", "in:", "job:", "serve:", "not run:")
    for snippet in SNIPPETS:
        assert snippet.language in known, f"{snippet}: language {snippet.language!r}"
        assert snippet.mark.startswith(marks[1:]) or not snippet.mark, f"{snippet}: comment {snippet.mark!r}"
    assert {reason for snippet in SNIPPETS if (reason := snippet.is_("not run"))} == NOT_RUN


@pytest.fixture(scope="module")
def tcp_door() -> Iterator[int]:
    """Port of a TCP door with CartPole's agent."""
    model = LocalModel(build_engine("torch", Lean(), (torch.zeros(2, 4),)), version=1)
    service = DocService(ROOT / "pipelines" / "templates", "gym_agent", "GymAgent", model, "serve")
    with serving_tcp(service.step) as address:
        yield int(address.rpartition(":")[2])


class GrpcDocService(GrpcDoor, DocService):
    """The same behind the gRPC door."""


@pytest.fixture(scope="module")
def grpc_door() -> Iterator[str]:
    """``host:port`` of gRPC doors: with CartPole's agent, and of its model."""
    model = LocalModel(build_engine("torch", Lean(), (torch.zeros(2, 4),)), version=1)
    service = GrpcDocService(ROOT / "pipelines" / "templates", "gym_agent", "GymAgent", model, "serve")
    alone = ModelDoor()
    alone.model = model
    with serving_grpc(service, service.close, model=alone) as address:
        yield address


@some("python")
def test_python(
    snippet: Snippet, door: str, tcp_door: int, grpc_door: str, examples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = compile(snippet.text, str(snippet), "exec")
    if snippet.is_("file"):
        return  # runs as part of its example, in that example's tests
    monkeypatch.syspath_prepend(str(examples / (snippet.is_("in") or ".")))
    monkeypatch.chdir(examples)
    host, port = door.split(":")
    text = snippet.text.replace("127.0.0.1:8000", door).replace(f'"{host}", 8000', f'"{host}", {port}')
    text = text.replace(f'"{host}", 8101', f'"{host}", {tcp_door}').replace("127.0.0.1:9000", grpc_door)
    code = compile(text, str(snippet), "exec")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(code, {"__name__": "snippet"})
    assert said.getvalue().strip(), "a snippet that is run must print something"


def test_own_parts_of_a_game_fit_its_contract(examples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of the guide's table whose modules the guide has, with its contract."""
    guide = ROOT / "docs" / "guide-your-game.md"
    job = JobConfig.load(TEMPLATES / "game.yaml").as_dict()
    job["contract"] = next(json.loads(part.text) for part in some_in("json") if part.file == guide)
    lines = re.findall(r"^\| `(.*: my_(?:game|eyes)\.\w+}+)`", guide.read_text(), re.M)
    for line in lines:
        ((component, options),) = yaml.safe_load(line).items()
        job[component].update(options)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with own_modules(examples):
        own = JobConfig.of(job, str(examples))
        check_code(own, own.actors, mode="train")
        assert "\nencoders: camera: my_eyes.Eyes\n" in built(own)
    assert len(lines) == 2


@some("sh")
def test_sh(snippet: Snippet, door: str, examples: Path) -> None:
    lines = snippet.text.splitlines()
    folder = examples
    for line, after in itertools.zip_longest(lines, lines[1:], fillvalue=""):
        for words in commands_in(line):
            if words[0] == "curl":
                assert after.startswith("# "), f"{snippet}: a curl command is followed by its reply"
                check_curl(words, door, after[2:])
            elif words[0] == "cd":
                folder = folder / words[1]
                assert folder.is_dir(), f"{snippet}: {folder}"
            else:
                with own_modules(examples):
                    check_command(words, folder)
    assert folder.resolve() == examples.resolve(), f"{snippet}: the snippets after it are for another folder"


def commands_in(line: str) -> list[list[str]]:
    """The commands of a line as words, without the variables set for them."""
    commands: list[list[str]] = [[]]
    for word in shlex.split(line, comments=True):
        commands[-1].append(word.removesuffix(";"))
        if word.endswith(";"):
            commands.append([])
    without = [list(itertools.dropwhile(lambda word: re.match(r"[A-Z_]+=", word), words)) for words in commands]
    return [words for words in without if words]


def check_curl(words: list[str], door: str, expected: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    words = [word.replace("127.0.0.1:8000", door) for word in words]
    reply = subprocess.run(words, capture_output=True, text=True, timeout=240, check=True).stdout
    if '"policy_versions"' in expected:  # a page of live numbers
        assert shape(json.loads(reply)) == shape(json.loads(expected))
    else:
        assert reply == expected


def shape(value: Any) -> Any:
    return {key: shape(inner) for key, inner in value.items()} if isinstance(value, dict) else type(value)


def check_command(words: list[str], folder: Path) -> None:
    match words:
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), f"make has no {target}"
        case ["brayx", "gamecore", ("gym" | "pettingzoo") as kind, *rest]:
            check_options(rest, gamecore_help(kind))
        case ["brayx", *rest]:
            check_brayx(rest, folder)
        case ["serve", "run", target, *pairs]:
            check_serve(target, dict(pair.split("=", 1) for pair in pairs), folder)
        case [("python" | ".venv/bin/python"), "-m", module, *rest]:
            with contextlib.redirect_stdout(io.StringIO()) as said, pytest.raises(SystemExit):
                importlib.import_module(module).main(["--help"])
            check_options(rest, said.getvalue())
        case [("source" | "." | "python" | ".venv/bin/python"), file, *_]:
            assert file == ".venv/bin/activate" or (folder / file).is_file(), file
        case ["pytest"]:
            assert list(folder.glob("test_*.py")), folder
        case ["mlflow", "ui", "--workers", "1"] | ["set", ("-a" | "+a")] | ["export", _]:
            pass
        case ["sh", file, *rest]:
            assert (folder / file).is_file(), file
            check_command(rest, folder)
        case ["npm", "ci", "--ignore-scripts", "--prefix", place]:
            assert (folder / place / "package-lock.json").is_file()
        case ["node", file, "bundle"]:
            assert (folder / file).is_file()
        case ["jupyter", "lab", place]:
            assert (folder / place).is_dir()
        case _:
            raise AssertionError(f"nothing here checks the command {shlex.join(words)!r}")


def check_brayx(words: list[str], folder: Path) -> None:
    if words == ["--help"]:
        return
    arguments = cli.parser([words[0]]).parse_args(words)
    search.parse(getattr(arguments, "lines", []))
    config = getattr(arguments, "config", None)
    if config is not None:
        JobConfig.load(folder / config, arguments.overrides)


def gamecore_help(kind: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as said, pytest.raises(SystemExit):
        {"gym": gym, "pettingzoo": pettingzoo}[kind].main(["--help"])
    return said.getvalue()


def check_options(words: list[str], usage: str) -> None:
    for word in words:
        assert not word.startswith("--") or re.search(rf"{word}\b", usage), f"there is no option {word}"


@contextlib.contextmanager
def own_modules(folder: Path) -> Iterator[None]:
    """Forgets modules named like an example's, which other tests may have imported from elsewhere, for the time."""
    names = {file.stem for path in folder.iterdir() if not path.is_symlink() for file in path.glob("*.py")}
    others = {name: sys.modules.pop(name) for name in names & sys.modules.keys()}
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(others)


def check_serve(target: str, args: Mapping[str, Any], folder: Path) -> None:
    """Checks the target of ``serve run``, a file or an import path, without serving it."""
    if not target.endswith(".yaml"):
        applications = [{"import_path": target, "args": args}]
    else:
        applications = yaml.safe_load((folder / target).read_text())["applications"]
    for application in applications:
        module, _, attribute = application["import_path"].partition(":")
        from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as build

        args = application.get("args", {})
        with contextlib.chdir(folder), contextlib.ExitStack() as stack:
            if "models" in args:  # not trained here: the version is refused, not the file
                stack.enter_context(pytest.raises(TrackingError, match="no model"))
            build(load(module, attribute), args)


@some("yaml")
def test_yaml(snippet: Snippet, examples: Path, tmp_path: Path) -> None:
    if name := snippet.is_("file"):
        JobConfig.load(examples / name)
        return
    if snippet.is_("serve"):
        path = examples / "serve_example.yaml"
        path.write_text(snippet.text)
        with own_modules(examples):
            check_serve(path.name, {}, examples)
        return
    assert snippet.is_("job"), f"{snippet}: a comment before a YAML snippet says what it is"
    parts = yaml.safe_load(snippet.text)
    if match := re.match(r"job: part of (\w+)\.yaml(?:; with (\w+))?", snippet.mark):
        if (shipped := TEMPLATES / f"{match[1]}.yaml").exists():
            shutil.copy(shipped, tmp_path)
        else:
            shutil.copytree(examples / match[1], tmp_path, dirs_exist_ok=True)
        if match[2]:
            (tmp_path / f"{match[2]}.py").touch()
        whole = yaml.safe_load((tmp_path / f"{match[1]}.yaml").read_text())
        merged = {name: whole.get(name, {}) | part if isinstance(part, dict) else part for name, part in parts.items()}
        parts = whole | merged
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(parts))
    JobConfig.load(tmp_path / "job.yaml")


@some("json")
def test_json(snippet: Snippet) -> None:
    json.loads(snippet.text)


@some("text")
def test_text(snippet: Snippet, door: str, examples: Path, tmp_path: Path) -> None:
    """Output shown in the documentation is real: of the WebSocket door, an example's agents, the command line."""
    lines = snippet.text.splitlines()
    if lines[0].startswith("client "):
        said = [tuple(line.split(maxsplit=1)) for line in lines]
        with connect(f"ws://{door}/session", subprotocols=[Subprotocol(WS_SUBPROTOCOL)], proxy=None) as connection:
            for who, message in said:
                if who == "client":
                    connection.send(message.encode())
                else:
                    assert connection.recv(10) == message.encode()
    elif lines[0].startswith("tick "):
        tick, reply = (line.split(maxsplit=1)[1].encode() for line in lines)
        assert asyncio.run(answer_of_team(examples / "team", tick)) == reply
    elif lines[0].startswith("brayx: match.yaml"):
        shutil.copytree(examples / "match", tmp_path, dirs_exist_ok=True)
        job = tmp_path / "match.yaml"
        job.write_text(job.read_text().replace("[agent]", "[agnt]"))
        with contextlib.chdir(tmp_path), pytest.raises(ConfigError) as refused:
            JobConfig.load("match.yaml")
        assert f"brayx: {refused.value}" == snippet.text
    else:
        raise AssertionError(f"{snippet}: say why it is not checked")


async def answer_of_team(folder: Path, body: bytes) -> bytes:
    job = JobConfig.load(folder / "team.yaml")
    agents = {name: load(agent.module, agent.class_name, job.folder) for name, agent in job.agents.items()}
    actor = AgentActorFactory(agents, job.as_dict(), Services())()
    await actor.start("session", b"")
    return await actor.tick(body)


class Kept:
    """A buffer that keeps all pushes; to an agent it looks like a real one."""

    def __init__(self) -> None:
        self.fragments: list[Fragment] = []
        self.enough = threading.Event()

    def push(self, *fragments: Fragment) -> None:
        self.fragments.extend(fragments)
        if len(self.fragments) >= 5:
            self.enough.set()


@pytest.mark.parametrize("kind", ["http", "ws"])
def test_the_readme_game_plays_and_its_fragments_are_learnable(examples: Path, kind: str) -> None:
    folder = examples / "match"
    module, example = load("match_model", "build_model", str(folder))("model", {})
    buffer = Kept()
    model = LocalModel(build_engine("torch", module, example), version=1)
    service = DocService(folder, "match_agent", "MatchAgent", model, "train", buffer)
    with serving(DoorApp(service)) as address:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        game = subprocess.Popen([sys.executable, "match_game.py", f"{kind}://{address}"], cwd=folder, env=environment)
        try:
            assert buffer.enough.wait(60), "the game pushed nothing"
        finally:
            game.kill()
            game.wait()
    packer = BatchPacker(2, 20)
    batches = [batch for fragment in buffer.fragments for batch in packer.add(fragment)]
    assert batches
    for fragment in buffer.fragments[:5]:
        assert (len(fragment), fragment.terminated) == (20, True)
        named = fragment.obs[:-1].argmax(-1) == fragment.action
        assert (fragment.reward == named).all(), "a reward belongs to the action of its row"


def test_the_guide_s_source_gives_learnable_fragments(examples: Path, tmp_path: Path) -> None:
    games = 2
    for number in range(games):
        obs = np.eye(3, dtype=np.float32)[[number, 1, 2, 0]]
        ones = np.ones(3, np.float32)
        steps = {"action": np.arange(3), "log_prob": -ones, "reward": ones, "policy_version": np.zeros(3, int)}
        np.savez(tmp_path / f"{number}.npz", obs=obs, **steps)
    shutil.copytree(examples / "match", tmp_path, dirs_exist_ok=True)
    (snippet,) = (s for s in SNIPPETS if s.language == "yaml" and "module: match_data" in s.text)
    parts = yaml.safe_load((tmp_path / "match.yaml").read_text()) | yaml.safe_load(snippet.text)
    parts["data"]["folder"] = str(tmp_path)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(parts))
    job = JobConfig.load(tmp_path / "job.yaml")
    (source,) = job.sources.values()
    fragments = list(load(source.module, source.func, job.folder)("recorded", job.as_dict()))
    packer = BatchPacker(1, 3 * games)
    (batch,) = [batch for fragment in fragments for batch in packer.add(fragment)]
    assert batch["mask"].sum() == 3 * games
    assert batch["terminated"][0, [2, 5]].all()
    assert batch["obs"][0, [0, 3]].argmax(-1).tolist() == [0, 1]


def test_source_options_equal_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|", section("docs/guide-own-game.md", "Data at rest"), re.M)
    fields = SourceConfig.model_fields
    assert {name for name, _ in rows} == set(fields) - {"kind"}
    for name, means in rows:
        default = re.search(r"default: `?([\w{}]+)", means)
        assert (default is None) == fields[name].is_required(), name
        assert default is None or yaml.safe_load(default[1]) == fields[name].default, name


def test_error_table_equals_the_errors() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d{3}) \|", section("docs/protocol.md", "Errors"), re.M)
    assert {code: int(status) for code, status in rows} == {
        code: error.http_status for code, error in errors.BY_CODE.items()
    }
    assert len(rows) == len(errors.BY_CODE)


@pytest.mark.parametrize(
    ("kind", "body", "code", "then"),
    [
        ("tack", "{}", "bad_request", "runs"),
        ("tick", "{", "bad_body", "runs"),
        ("tick", '{"reward": 0.0}', "bad_body", "runs"),
        ("tick", '{"obs": [0.0, 0.1], "reward": 0.0}', "shape_mismatch", "session_lost"),
    ],
)
def test_sessions_end_as_the_readme_and_the_table_say(door: str, kind: str, body: str, code: str, then: str) -> None:
    session = uuid.uuid4().hex

    def step(kind: str, body: str) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection(door, timeout=30)
        with contextlib.closing(connection):
            connection.request("POST", "/step", body, {"session": session, "step_kind": kind})
            response = connection.getresponse()
            reply = response.read()
        return response.status, {} if reply == b"Game Started" else json.loads(reply)

    assert step("start", "") == (200, {})
    status, refused = step(kind, body)
    assert (status, refused["error"]) == (errors.BY_CODE[code].http_status, code)
    status, answer = step("tick", '{"obs": [0.0, 0.0, 0.1, 0.5], "reward": 0.0}')
    assert (answer.get("error", "runs"), answer.get("details", {}).get("reason", "")) == (
        then,
        "error" if then == "session_lost" else "",
    )
    (description,) = re.findall(rf"^\| `{code}` \| \d+ \| (.*?) \|", section("docs/protocol.md", "Errors"), re.M)
    assert description.endswith("he session goes on" if then == "runs" else "the session has ended")


def test_limits_table_equals_the_defaults() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+)( MiB)? \|", section("docs/guide-serve.md", "Limits"), re.M)
    assert len(rows) == 5
    for name, value, unit in rows:
        assert float(value) * (2**20 if unit else 1) == ActorConfig.model_fields[name].default, name
    fixed = re.findall(r"^\| not to be set \| (.*?) \|", section("docs/guide-serve.md", "Limits"), re.M)
    assert fixed == [str(MAX_CONNECTIONS), f"{MAX_HEADER_BYTES // 1024} KiB", str(MAX_WAITING)]


def test_serve_arguments_equal_the_code() -> None:
    from brayx.cluster.serving import ServeArgs

    rows = re.findall(r"^\| `(\w+)` \|", section("docs/guide-serve.md", "Your own job"), re.M)
    assert rows == list(ServeArgs.model_fields)


def test_train_options_equal_the_parser() -> None:
    parser = argparse.ArgumentParser()
    training_options(parser)
    shown = set(re.findall(r"^\| `(--\w+)", section("docs/guide-train.md", "Options"), re.M))
    assert shown | {"-h", "--set"} == {action.option_strings[0] for action in parser._actions}


def test_glossary_is_in_order() -> None:
    words = re.findall(r"^\*\*(.+?)\*\*:", (ROOT / "docs" / "glossary.md").read_text(), re.M)
    assert words == sorted(words)


def section(file: str, title: str) -> str:
    """A section of a document, including its subsections."""
    text = (ROOT / file).read_text()
    match = re.search(rf"^(#+) {re.escape(title)}\n(.*?)(?=^#{{1,2}} |\Z)", text, re.M | re.S)
    assert match, f"{file} has no section {title!r}"
    return match[2]


def prose(file: Path) -> str:
    return re.sub(r"^```.*?^```$", "", file.read_text(), flags=re.M | re.S)


@pytest.mark.parametrize("file", [*FILES, *TRANSLATIONS], ids=lambda file: str(file.relative_to(ROOT)))
def test_links_are_valid(file: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", prose(file)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (file.parent / path).resolve() if path else file
        assert linked.is_relative_to(ROOT), f"{file.name} links to {target}, outside the repository"
        assert linked.exists(), f"{file.name} links to {target}, which is not there"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", prose(linked), re.M)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in anchors, f"{file.name} links to {target}; there are {sorted(anchors)}"


@pytest.mark.parametrize("file", [*FILES, *TRANSLATIONS], ids=lambda file: str(file.relative_to(ROOT)))
def test_files_named_in_prose_exist(file: Path) -> None:
    for name in re.findall(
        r"`((?:brayx|deployments|pipelines|benchmarks|tests|docker|docs|notebooks)/[\w./]*)`", prose(file)
    ):
        assert (ROOT / name).exists(), f"{file.name} names {name}, which is not there"


def test_the_map_of_promises_says_which_suite_runs_a_file() -> None:
    """A file with tests that CI does not run has the names of their suites after it."""
    table = (ROOT / "docs" / "testing.md").read_text().partition("## Which test keeps which promise")[2]
    for name, suites in re.findall(r"`(tests/(?:unit|integration|end_to_end)/[\w/]+\.py)`(?: \(([a-z, ]+)\))?", table):
        text = (ROOT / name).read_text()
        marked = [suite for suite in ("cluster", "chaos", "learning", "alone") if f"pytest.mark.{suite}" in text]
        assert suites == ", ".join(marked), f"{name} runs in make test and {marked}"


def test_template_mentions_every_option_once() -> None:
    """The README sends readers to cartpole.yaml for every option: it names them all."""
    plain = JobConfig.load(ROOT / "pipelines" / "templates" / "cartpole.yaml").as_dict()
    written = yaml.safe_load((ROOT / "pipelines" / "templates" / "cartpole.yaml").read_text())
    for name, part in plain.items():
        if isinstance(part, dict):
            assert set(part) <= set(written[name]), name


def test_template_shows_a_component_of_every_kind() -> None:
    """Components that CartPole lacks are shown in comments, also with their defaults."""
    text = (ROOT / "pipelines" / "templates" / "cartpole.yaml").read_text()
    shown = {}
    for block in re.findall(r"^# \w+:\n(?:#   .*\n)+", text, re.M):
        (parts,) = yaml.safe_load(re.sub(r"^# ", "", block, flags=re.M)).values()
        shown[parts["kind"]] = parts
    assert set(shown) == {"source", "recording"}
    for kind, parts in shown.items():
        assert set(parts) == set(KINDS[kind].model_fields)
        for name, field in KINDS[kind].model_fields.items():
            assert field.is_required() or parts[name] == field.default or name == "module", name
    written = [part["kind"] for part in yaml.safe_load(text).values() if isinstance(part, dict) and "kind" in part]
    # A job with a door has no rollout: ppo_env.yaml shows that. CartPole has one player and nothing for a human:
    # league/four.yaml has a league and a board, game.yaml self-play.
    assert {*written, *shown, "rollout", "league", "board", "self_play"} == set(KINDS)
