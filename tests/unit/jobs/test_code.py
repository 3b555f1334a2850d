"""The code that a job names is checked before anything starts, and missing code is reported by its key."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from brayx.commands.cli import parser
from brayx.errors import ConfigError
from brayx.jobs.code import check_code
from brayx.jobs.config import JobConfig
from brayx.recording.drawing import Drawing

CODE = """
    import numpy as np
    from brayx.nets.policy import policy_for

    from brayx.actor.contract_agent import ContractAgent

    class Agent: ...
    class Learning(ContractAgent): ...
    def shaped(tick): return tick.reward
    def build_model(name, config): return policy_for(np.zeros(2, np.float32), num_actions=2)
    def build_source(name, config): ...
    def render(episode): ...
    def evaluate(model, step): ...
"""
JOB = """
    project: p
    trial: t
    agent: {kind: agent, module: MODULE, class: Agent}
    model: {kind: model, module: MODULE}
    actor: {kind: actor, agents: [agent]}
    buffer: {kind: buffer}
    games: {kind: source, module: MODULE, buffer: buffer}
    picture: {kind: render, module: MODULE}
    trainer: {kind: trainer, model: model, buffers: [buffer], hooks: MODULE}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A job with a module of a new name, because modules stay loaded."""
    module = f"code_of_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(textwrap.dedent(CODE))
    path = tmp_path / "job.yaml"
    path.write_text(textwrap.dedent(JOB).replace("MODULE", module))
    return path


WRONG = [
    ("agent.class=Agnt", "agent.class", "'Agnt'; nearest is 'Agent'"),
    ("games.func=build_sorce", "games.func", "'build_sorce'; nearest is 'build_source'"),
    ("picture.func=rendr", "picture.func", "'rendr'; nearest is 'render'"),
]


@pytest.mark.parametrize(("override", "key", "message"), WRONG)
def test_missing_code_is_reported_with_file_and_key(file: Path, override: str, key: str, message: str) -> None:
    check_code(JobConfig.load(file), ["actor"], mode="train")
    with pytest.raises(ConfigError) as raised:
        check_code(JobConfig.load(file, [override]), ["actor"], mode="train")
    assert raised.value.message.startswith(f"{file}: {key}: ")
    assert raised.value.message.endswith(message)


def test_a_module_that_raises_is_reported_with_its_key(file: Path) -> None:
    name = f"raises_{file.parent.name}"
    (file.parent / f"{name}.py").write_text("raise RuntimeError('no display')")
    with pytest.raises(ConfigError, match=r"picture\.module: .*raises_.*no display"):
        check_code(JobConfig.load(file, [f"picture.module={name}"]), ["actor"], mode="train")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"actor.reward": "MODULE.shapd"}, "actor.reward: .*'shapd'; nearest is 'shaped'"),
        ({"actor.reward": "MODULE.build_model"}, "actor.reward: .*build_model cannot be called with a tick: "),
        ({"actor.reward": "MODULE.shaped", "agent.class": "Agent"}, "actor.reward: agent .* no ContractAgent"),
        ({"actor.reward": "shaped"}, 'actor.reward: .*"shaped".* module.function'),
        ({"actor.reward": "MODULE.shaped", "actor.serialize": "json"}, "actor.reward: .* serialize is not contract"),
    ],
)
def test_a_reward_that_cannot_be_called_is_refused(file: Path, options: dict[str, str], message: str) -> None:
    def checked(**given: str) -> None:
        named = {key: value.replace("MODULE", f"code_of_{file.parent.name}") for key, value in given.items()}
        check_code(JobConfig.load(file, [f"{key}={value}" for key, value in named.items()]), ["actor"], mode="train")

    good = {"actor.serialize": "contract", "actor.reward": "MODULE.shaped", "agent.class": "Learning"}
    checked(**good)
    with pytest.raises(ConfigError, match=message):
        checked(**{**good, **options})


def test_hooks_that_cannot_be_called_are_refused_before_anything_starts(file: Path) -> None:
    name = f"hooks_{file.parent.name}"
    (file.parent / f"{name}.py").write_text("def handle(): ...")
    job = JobConfig.load(file, [f"trainer.hooks={name}"])
    with pytest.raises(ConfigError, match=r"trainer\.hooks: .* handle\(batch\)"):
        check_code(job, ["actor"], mode="train")
    check_code(job, ["actor"], mode="serve")


def test_serving_needs_neither_sources_nor_renders(file: Path) -> None:
    check_code(JobConfig.load(file, [override for override, *_ in WRONG[1:]]), ["actor"], mode="serve")


def test_serving_needs_the_render_that_draws_frames_of_recordings(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(f"{file.read_text()}recording: {{kind: recording, frames: picture}}\n")
    job = JobConfig.load(file)
    assert job.drawing == Drawing(f"code_of_{file.parent.name}", "render", str(file.parent))
    check_code(job, ["actor"], mode="serve")
    with pytest.raises(ConfigError, match=r"picture\.func: .*'rendr'.*'render'"):
        check_code(JobConfig.load(file, ["picture.func=rendr"]), ["actor"], mode="serve")
    assert JobConfig.load(file, ["recording.frames=obs/image"]).drawing is None
    assert JobConfig.load(file, ["recording.frames=null"]).drawing is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"recording\.frames: .*'brayx\[video\]'"):
        check_code(job, ["actor"], mode="serve")


def test_the_check_command_reports_it(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def check(*words: str) -> int:
        arguments = parser().parse_args(["check", str(file), *words])
        return arguments.run(arguments)

    assert check() == 0
    assert "func: render" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"picture\.func: "):
        check("--set", "picture.func=rendr")
    assert capsys.readouterr().out == ""
