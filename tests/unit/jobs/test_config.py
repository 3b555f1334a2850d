"""Jobs: valid ones load completely, and errors name place, key and the nearest right name."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from brayx.actor.config import MessageConfig
from brayx.algorithms.ppo import PPOConfig
from brayx.errors import ConfigError
from brayx.jobs.config import KINDS, JobConfig
from brayx.jobs.options import documented
from brayx.jobs.shipped import TEMPLATES
from brayx.local.training import Training

CARTPOLE = TEMPLATES / "cartpole.yaml"
GAME = TEMPLATES / "game.yaml"

JOB = """\
project: mine
trial: first

net:
  kind: config
  size: 3

model:
  kind: model
  module: my_model

agent:
  kind: agent
  module: my_agent
  class: Mine

actor:
  kind: actor
  agents: [agent]

buffer:
  kind: buffer

trainer:
  kind: trainer
  model: model
  buffers: [buffer]
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    (tmp_path / "my_model.py").write_text("raise AssertionError('a config is read without running its modules')")
    (tmp_path / "my_agent.py").write_text("raise AssertionError('a config is read without running its modules')")

    def to(text: str) -> str:
        (tmp_path / "job.yaml").write_text(text)
        return str(tmp_path / "job.yaml")

    return to


def refused(path: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        JobConfig.load(path, overrides)
    assert "\n" not in caught.value.message
    return caught.value.message.removeprefix(str(Path(path).parent) + "/")


class TestRight:
    def test_components_by_kind_and_name(self, write: Any) -> None:
        job = JobConfig.load(write(JOB))
        assert (job.project, job.trial, job.mode, job.seed, job.tracking.uri) == ("mine", "first", "train", 0, None)
        assert job.models["model"].module == "my_model"
        assert job.agents["agent"].class_name == "Mine"
        assert job.actors["actor"].agents == ["agent"]
        assert job.trainers["trainer"].buffers == ["buffer"]
        assert Path(job.file).name == "job.yaml"
        assert Path(job.folder, "my_model.py").exists()

    def test_as_dict_is_what_the_yaml_says_with_defaults(self, write: Any) -> None:
        job = JobConfig.load(write(JOB))
        plain = job.as_dict()
        assert plain["net"] == {"kind": "config", "size": 3}
        assert plain["agent"]["class"] == "Mine"
        assert plain["actor"]["serialize"] == "json"
        assert "file" not in plain
        again = JobConfig.load(write(yaml.safe_dump(plain)))
        assert again == job

    def test_the_chosen_options_differ_from_the_defaults(self, write: Any) -> None:
        job = JobConfig.load(write(JOB), ["trainer.num_steps=7"])
        options = job.options(player="main")
        assert options.whole == {"player": "main", **job.as_dict()}
        assert options.chosen["trainer"]["num_steps"] == 7
        assert set(options.chosen["actor"]) < set(options.whole["actor"])
        assert {"player", "seed", "net", "agent"} < set(options.chosen)
        defaults = JobConfig.load(write(JOB)).trainers["trainer"]
        assert options.chosen["trainer"]["learning_rate"] == defaults.learning_rate
        assert "max_failures" in options.whole["trainer"].keys() - options.chosen["trainer"].keys()

    def test_a_recorded_job_of_an_earlier_version_has_former_options(self, write: Any, tmp_path: Path) -> None:
        recorded = JobConfig.load(write(JOB)).as_dict()
        recorded["actor"]["episode_save_interval"] = 100
        recorded["render"] = {"kind": "render", "module": "my_agent", "video": "gif"}
        assert JobConfig.of(recorded, str(tmp_path)).renders["render"].module == "my_agent"

    def test_in_mode(self, write: Any) -> None:
        job = JobConfig.load(write(JOB))
        assert job.in_mode("serve").as_dict()["mode"] == "serve"
        assert job.mode == "train"

    @pytest.mark.parametrize("keys_file", ["keys.txt", "../secret/keys.txt", "/etc/keys.txt"])
    def test_a_keys_file_is_relative_to_the_jobs_folder(
        self, write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys_file: str
    ) -> None:
        path = write(JOB.replace("agents: [agent]", f"agents: [agent]\n  keys_file: {keys_file}"))
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        monkeypatch.chdir(elsewhere)
        for loaded in (JobConfig.load(path), JobConfig.load(path, [f"actor.keys_file={keys_file}"])):
            assert loaded.actors["actor"].keys_file == str(tmp_path / keys_file)
            assert loaded.as_dict()["actor"]["keys_file"] == str(tmp_path / keys_file)
        shipped = JobConfig.load(TEMPLATES / "godot.yaml", [f"actor.keys_file={keys_file}"])
        assert shipped.actors["actor"].keys_file == str(elsewhere / keys_file), "a shipped job has no folder of yours"

    def test_it_pickles(self, write: Any) -> None:
        job = JobConfig.load(write(JOB))
        assert pickle.loads(pickle.dumps(job)) == job

    @pytest.mark.parametrize(
        ("text", "value"),
        [("1e-3", 0.001), ("1E-3", 0.001), ("0.01", 0.01), ("5.e-2", 0.05), ("1", 1.0), (".5", 0.5), ("+1e-2", 0.01)],
    )
    def test_numbers_as_people_write_them(self, write: Any, text: str, value: float) -> None:
        path = write(f"{JOB}  learning_rate: {text}\n")
        assert JobConfig.load(path).trainers["trainer"].learning_rate == value
        assert JobConfig.load(path, [f"trainer.learning_rate={text}"]).trainers["trainer"].learning_rate == value

    @pytest.mark.parametrize("text", ["1e6", "1_000_000", "1000000", "1.0e+6"])
    def test_counts_as_people_write_them(self, write: Any, text: str) -> None:
        assert JobConfig.load(write(f"{JOB}  num_steps: {text}\n")).trainers["trainer"].num_steps == 1_000_000

    def test_a_date_is_text(self, write: Any) -> None:
        assert JobConfig.load(write(JOB.replace("first", "2026-01-31"))).trial == "2026-01-31"


class TestOverrides:
    def test_forms(self, write: Any) -> None:
        job = JobConfig.load(
            write(JOB),
            [
                "trial=second",
                "seed=7",
                "trainer.learning_rate=1e-4",
                "trainer.algorithm.gamma=0.9",
                "trainer.target_return=475",
                "actor.episode_length=null",
                'actor.gamecores=[{command: "play {url}", num: 2}]',
                "actor.gamecores.0.num=4",
                "net.size=5",
                "net.deep.er=[1, 2]",
                "tracking=/tmp/a=b.db",
            ],
        )
        trainer = job.trainers["trainer"]
        assert (job.trial, job.seed, job.tracking.uri) == ("second", 7, "/tmp/a=b.db")
        assert (trainer.learning_rate, trainer.algorithm.gamma, trainer.target_return) == (1e-4, 0.9, 475.0)
        assert job.actors["actor"].episode_length is None
        assert job.actors["actor"].gamecores[0].num == 4
        assert job.as_dict()["net"] == {"kind": "config", "size": 5, "deep": {"er": [1, 2]}}

    def test_a_kind_adds_a_component(self, write: Any) -> None:
        recording = JobConfig.load(write(JOB), ["record.kind=recording", "record.every=7"]).recording
        assert (recording.folder, recording.every) == ("recordings", 7)

    def test_the_last_wins(self, write: Any) -> None:
        assert JobConfig.load(write(JOB), ["seed=1", "seed=2"]).seed == 2

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("trainer", "--set trainer: expected NAME.KEY=VALUE"),
            ("=3", "--set =3: expected NAME.KEY=VALUE"),
            ("trainer..x=3", "--set trainer..x=3: expected NAME.KEY=VALUE"),
            ("traner.learning_rate=1", "there is no component 'traner'; nearest is 'trainer'"),
            ("trainer.learning_rat=1", "trainer.learning_rat: unknown key; nearest is 'learning_rate'"),
            ("trainer.algorithm.clip_range=1", "trainer.algorithm.clip_range: unknown key; use 'clip_param'"),
            ("trainer.algorithm.gama=1", "trainer.algorithm.gama: unknown key; nearest is 'gamma'"),
            ("trainer.algorithm.gamma=2", "trainer.algorithm.gamma: is 2, expected less than or equal to 1"),
            ("trainer.algorithm.name=pppo", "trainer.algorithm: name is 'pppo', expected one of 'ppo', "),
            ("trainer.learning_rate=fast", 'trainer.learning_rate: is "fast", expected a valid number'),
            ("trainer.learning_rate=2", "trainer.learning_rate: is 2, expected less than or equal to 1"),
            ("trainer.num_steps=true", "trainer.num_steps: is true, expected a valid integer"),
            ("trainer.num_steps=1.5", "trainer.num_steps: is 1.5, expected a valid integer"),
            ("trainer.learning_rate=[1", "--set trainer.learning_rate=[1: the value is not YAML"),
            ("trainer.learning_rate.x=1", "trainer.learning_rate: is"),
            ("project.x=1", "'project' is \"mine\", which has no keys"),
            ("actor.agents.3=x", "'actor.agents' is a list of 1, 3 is no index of it"),
            ("actor.agents.0=agnet", "actor.agents.0: there is no agent 'agnet'; nearest is 'agent'"),
            ("sed=3", "sed: unknown key; nearest is 'seed'"),
            ("target_return=475", "target_return: unknown key; did you mean 'trainer.target_return'?"),
            ("record.kind=recordin", 'record.kind: `kind` is "recordin", expected one of'),
        ],
    )
    def test_wrong_ones_are_refused(self, write: Any, override: str, message: str) -> None:
        error = refused(write(JOB), override)
        assert message in error
        assert f"--set {override}" in error


class TestWrong:
    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            ("trial: first", "", "job.yaml: trial: is missing"),
            ("project: mine", "projct: mine", "job.yaml:1: projct: unknown key; nearest is 'project'"),
            ("project: mine", "project: 3", "job.yaml:1: project: is 3, expected a valid string"),
            ("project: mine", "project: a:b", 'job.yaml:1: project: is "a:b", expected up to 200 letters, digits'),
            ("project: mine", "project: a@b", 'job.yaml:1: project: is "a@b", expected up to 200 letters, digits'),
            ("project: mine", "project: my game_1.0", ""),
            ("module: my_model", "modul: my_model", "job.yaml:10: model.modul: unknown key; nearest is 'module'"),
            ("module: my_model", "module: my_modle", "job.yaml:10: model.module: module 'my_modle' is neither in"),
            ("module: my_model", "module: my_modle", "nearest is 'my_model'"),
            ("module: my_agent", "module: agents/my.py", "expected an import path"),
            ("kind: buffer", "kind: bufer", 'buffer.kind: `kind` is "bufer", expected one of model, agent'),
            ("kind: buffer", "kind: bufer", "nearest is 'buffer'"),
            ("kind: buffer", "kind: [buffer]", 'buffer.kind: `kind` is ["buffer"], expected one of model, agent'),
            ("kind: buffer", "size: 3", "job.yaml:21: buffer.kind: has no `kind`"),
            ("class: Mine", "clas: Mine", "agent.clas: unknown key; nearest is 'class'"),
            ("agents: [agent]", "agents: []", "job.yaml:19: actor.agents: is [], expected"),
            ("agents: [agent]", "agents: agent", 'actor.agents: is "agent", expected a valid array'),
            ("agents: [agent]", "agents: [agnt]", "job.yaml:19: actor.agents.0: there is no agent 'agnt'; nearest is"),
            ("model: model", "model: modle", "trainer.model: there is no model 'modle'; nearest is 'model'"),
            ("buffers: [buffer]", "buffers: [bufer]", "trainer.buffers.0: there is no buffer 'bufer'"),
            (
                "buffers: [buffer]",
                "buffers: [buffer]\n  eval_buffers: [held]",
                "trainer.eval_buffers.0: there is no buffer 'held'",
            ),
            ("buffers: [buffer]", "buffers: [buffer]\n  weights: [1, 2]", "weights has 2 numbers for 1 buffers"),
            ("buffers: [buffer]", "buffers: [buffer]\n  where: process\n  num_workers: 2", "2 ranks need where: train"),
            ("buffers: [buffer]", "buffers: [buffer]\n  eval_buffers: [buffer]", "a buffer is named more than once"),
            (
                "buffers: [buffer]",
                "buffers: [buffer]\n  num_workers: 2\n  algorithm: {name: mixed}",
                "num_workers is 2, and algorithm 'mixed' learns in one rank",
            ),
            ("buffers: [buffer]", "buffers: [buffer]\n  hooks: no_such", "trainer.hooks: module 'no_such' is neither"),
            ("buffers: [buffer]", "buffers: [buffer]\n  x_axis: steps", 'trainer.x_axis: is "steps", expected'),
            ("buffer:\n", "buffer: &b\n  <<: 3\n", "job.yaml"),
            ("agents: [agent]", "agents: [agent", "not YAML"),
            ("trial: first", "trial: first\ntrial: second", "job.yaml:3: key 'trial' is given twice"),
            ("class: Mine", "class: Mine\n  class: Other", "key 'agent.class' is given twice"),
            ("net:", "my-net:", "my-net: a component's name has letters, digits and underscores only"),
            ("size: 3", "size: 2026-01-31", ""),
        ],
    )
    def test_an_error_names_its_place(self, write: Any, old: str, new: str, message: str) -> None:
        assert old in JOB
        path = write(JOB.replace(old, new, 1))
        if message:
            assert message in refused(path)
        else:
            JobConfig.load(path)

    @pytest.mark.parametrize(
        ("lines", "messages"),
        [
            (
                "serialize: proto",
                [
                    "job.yaml:17: actor.tick_input_proto: is null, expected {module: ..., message: ...}, because",
                    "job.yaml:17: actor.tick_output_proto: is null, expected {module: ..., message: ...}, because",
                ],
            ),
            (
                "serialize: proto\n  tick_input_proto: {module: my_model, message: Seen}",
                ["actor.tick_output_proto: is null, expected {module: ..., message: ...}, because serialize is proto"],
            ),
            (
                "tick_input_proto: {module: my_model, message: Seen}",
                ["job.yaml:20: actor.tick_input_proto: is", "expected null, because serialize is json"],
            ),
        ],
    )
    def test_messages_that_do_not_fit_the_format(self, write: Any, lines: str, messages: list[str]) -> None:
        text = JOB.replace("agents: [agent]", f"agents: [agent]\n  {lines}")
        with pytest.raises(ConfigError) as caught:
            JobConfig.load(write(text))
        for message in messages:
            assert any(message in error for error in caught.value.details["errors"]), caught.value.details["errors"]

    def test_messages_that_fit_the_format(self, write: Any) -> None:
        messages = "".join(f"\n  tick_{way}_proto: {{module: my_model, message: M}}" for way in ("input", "output"))
        text = JOB.replace("agents: [agent]", f"agents: [agent]\n  serialize: proto{messages}")
        actor = JobConfig.load(write(text)).actors["actor"]
        assert actor.tick_input_proto == actor.tick_output_proto == MessageConfig(module="my_model", message="M")

    def test_nested_keys_name_the_nearest(self, write: Any) -> None:
        text = JOB.replace("agents: [agent]", "agents: [agent]\n  gamecores:\n    - comand: play")
        assert "job.yaml:21: actor.gamecores.0.comand: unknown key; nearest is 'command'" in refused(write(text))

    def test_everything_wrong_is_in_the_details(self, write: Any) -> None:
        text = JOB.replace("module: my_model", "module: absent").replace("class: Mine", "clas: Mine")
        with pytest.raises(ConfigError, match=r"\(and 2 more\)$") as caught:
            JobConfig.load(write(text))
        assert len(caught.value.details["errors"]) == 3

    def test_a_broken_component_is_reported_once(self, write: Any) -> None:
        assert "more)" not in refused(write(JOB.replace("kind: buffer", "kind: buffer\n  size: none")))

    @pytest.mark.parametrize("text", ["", "3", "[1, 2]", "just words", "3: x"])
    def test_a_file_without_a_job(self, write: Any, text: str) -> None:
        assert refused(write(text)).startswith("job.yaml: ")

    def test_a_missing_file(self, write: Any, tmp_path: Path) -> None:
        write(JOB)
        assert "nearest is 'job.yaml'" in refused(str(tmp_path / "jobb.yaml"))
        assert "cannot be read" in refused(str(tmp_path / "no" / "folder.yaml"))

    def test_a_binary_file(self, write: Any, tmp_path: Path) -> None:
        (tmp_path / "job.yaml").write_bytes(b"\xff\xfe\x00")
        assert "cannot be read" in refused(str(tmp_path / "job.yaml"))

    @pytest.mark.parametrize(
        ("encoding", "said"),
        [
            ("utf-16", "it is UTF-16"),
            ("utf-32", "it is UTF-32"),
            ("utf-16-le", "it has NUL characters, as UTF-16 does"),
            ("latin-1", "line 2 has the byte 0xe9, which is not UTF-8"),
        ],
    )
    def test_a_file_in_another_encoding(self, write: Any, tmp_path: Path, encoding: str, said: str) -> None:
        (tmp_path / "job.yaml").write_bytes(f"# a job\nproject: café\n{JOB}".encode(encoding))
        assert refused(str(tmp_path / "job.yaml")) == f"job.yaml: cannot be read: {said}: save it as UTF-8"

    def test_a_byte_order_mark_is_not_part_of_the_first_key(self, write: Any, tmp_path: Path) -> None:
        write(JOB)
        plain = JobConfig.load(tmp_path / "job.yaml")
        (tmp_path / "job.yaml").write_bytes(JOB.encode("utf-8-sig"))
        assert JobConfig.load(tmp_path / "job.yaml").as_dict() == plain.as_dict()

    def test_a_character_that_yaml_does_not_allow(self, write: Any) -> None:
        assert refused(write(f"{JOB}# a bell: \a\n")).startswith(f"job.yaml:{JOB.count(chr(10)) + 1}: not YAML: ")

    def test_python_tags_are_refused(self, write: Any) -> None:
        assert "not YAML" in refused(write("project: !!python/object/apply:os.system ['true']\n"))


class TestTemplates:
    @pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.yaml")), ids=lambda path: path.name)
    def test_it_loads(self, path: Path) -> None:
        JobConfig.load(path)

    def test_cartpole_shows_every_option(self) -> None:
        shown = yaml.safe_load(CARTPOLE.read_text())
        full = JobConfig.load(CARTPOLE).as_dict()

        def keys(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: keys(inner) for key, inner in value.items()}
            return [keys(inner) for inner in value] if isinstance(value, list) else None

        assert keys(shown) == keys(full)

    def test_kinds_are_named_like_their_models(self) -> None:
        for kind, model in KINDS.items():
            assert model.model_fields["kind"].default == kind


def test_missing_options_of_a_buffer_are_the_algorithms_defaults(write: Any) -> None:
    text = JOB.replace("buffers: [buffer]", "buffers: [buffer]\n  algorithm: {name: sac, n_step: 4}")
    job = JobConfig.load(write(text))
    buffer = job.buffers["buffer"]
    assert (buffer.sampler, buffer.unroll_length, buffer.batch_size) == ("uniform", 4, 64)
    assert (buffer.samples_per_insert, buffer.min_columns) == (256, 1_000)
    assert 100_000 <= buffer.capacity < 100_000 + 64
    printed = documented(job)
    assert re.search(r"^  sampler: uniform$", printed, re.MULTILINE)
    assert "  samples_per_insert: 256.0\n" in printed
    assert JobConfig.load(write(printed)).buffers == job.buffers, "the printed value is the default"

    given = JobConfig.load(
        write(text),
        ["buffer.sampler=prioritised", "buffer.batch_size=16", "buffer.size=8", "buffer.samples_per_insert=null"],
    )
    buffer = given.buffers["buffer"]
    assert (buffer.sampler, buffer.batch_size, buffer.capacity) == ("prioritised", 16, 128)
    assert (buffer.unroll_length, buffer.samples_per_insert, buffer.min_columns) == (4, None, 128)


def test_python_and_yaml_have_the_same_defaults(write: Any) -> None:
    job = JobConfig.load(write(JOB))
    (trainer,), buffer = job.trainers.values(), job.buffers["buffer"]
    training = Training().of(PPOConfig())
    assert trainer.algorithm == PPOConfig()
    assert trainer.learning_rate == training.learning_rate
    assert (buffer.sampler, buffer.unroll_length) == (training.sampler, training.unroll_length)
    assert buffer.batch_size == training.num_envs, "columns of one rollout of all environments"


def test_an_invalid_buffer_is_refused_with_its_own_error(write: Any) -> None:
    for override, message in (
        ("buffer.unroll_length=0", "buffer.unroll_length: is 0"),
        ("buffer.batch_size=many", 'buffer.batch_size: is "many"'),
        ("trainer.algorithm={name: sack}", "trainer.algorithm: name is 'sack'"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            JobConfig.load(write(JOB), [override])


def test_another_algorithms_name_alone_says_how_to_replace_its_options() -> None:
    with pytest.raises(ConfigError, match=r"gae_lambda: unknown key.*--set 'trainer.algorithm=\{name: sac\}'"):
        JobConfig.load(GAME, ["trainer.algorithm.name=sac"])


class TestBehaviours:
    def test_a_behaviours_options_are_those_of_the_job_and_its_own(self) -> None:
        own = "{trainer: {num_steps: 7, algorithm: {epochs: 2}}, network: {hidden: [8]}, actor: {episode_length: 9}}"
        slow = "{trainer: {algorithm: {name: sac}}}"
        job = JobConfig.load(GAME, [f"behaviours={{Quick: {own}, Slow: {slow}}}"])
        shared, quick, sac = job.of_behaviour("Other"), job.of_behaviour("Quick"), job.of_behaviour("Slow")
        assert shared.as_dict() == {**job.as_dict(), "behaviours": {}}
        assert (quick.trainers["trainer"].num_steps, quick.actors["actor"].episode_length) == (7, 9)
        assert quick.configs["network"].model_dump()["hidden"] == [8]
        ppo = job.trainers["trainer"].algorithm
        assert quick.trainers["trainer"].algorithm == ppo.model_copy(update={"epochs": 2})
        assert quick.buffers == job.buffers
        assert sac.trainers["trainer"].algorithm.name == "sac", "another algorithm has its own defaults"
        buffer = sac.buffers["buffer"]
        assert (buffer.sampler, buffer.size * buffer.batch_size * buffer.unroll_length) == ("uniform", 100_096)

    def test_a_behaviours_own_buffer_is_laid_over_its_algorithms(self) -> None:
        own = "{trainer: {algorithm: {name: sac}}, buffer: {batch_size: 64}}"
        assert JobConfig.load(GAME, [f"behaviours={{Slow: {own}}}"]).of_behaviour("Slow").buffers == (
            JobConfig.load(GAME, ["trainer.algorithm={name: sac}", "buffer={kind: buffer, batch_size: 64}"]).buffers
        )

    def test_a_change_of_the_job_is_kept(self) -> None:
        job = JobConfig.load(GAME, ["behaviours.Quick.trainer.num_steps=7"])
        contract = {"contract": 1, "observations": {"at": {"shape": [1]}}, "actions": {"go": {"size": 2}}}
        assert job.model_copy(update={"contract": contract}).of_behaviour("Quick").contract == contract
        assert JobConfig.of(job.as_dict(), job.folder).of_behaviour("Quick").trainers["trainer"].num_steps == 7

    @pytest.mark.parametrize(
        ("option", "message"),
        [
            (
                "Quick.trainer.num_stepps=7",
                "behaviour 'Quick': .*trainer.num_stepps: unknown key; nearest is 'num_steps'",
            ),
            ("Quick.trainr.num_steps=7", "behaviour 'Quick': .*trainr.kind: has no `kind`"),
            ("Quick.seed=7", "behaviours.Quick.seed: is an option of the whole job"),
            ("Quick=7", "behaviours.Quick: is 7, expected"),
        ],
    )
    def test_a_wrong_option_is_named(self, option: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            JobConfig.load(GAME, [f"behaviours.{option}"])
