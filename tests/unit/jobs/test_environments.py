"""A job of environments without a door: its template, its checks before Ray starts, and its workers' settings."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
import yaml

from brayx.algorithms.base import critic_of
from brayx.cluster.job import cluster_for
from brayx.cluster.rollout_worker import worker_spec
from brayx.commands.cli import main
from brayx.commands.distributed import _evaluated
from brayx.errors import BrayxError, ConfigError, EnvironmentFailed, ModelError
from brayx.jobs.checks import check_job
from brayx.jobs.config import JobConfig
from brayx.jobs.environments import check_rollouts, lag_notes, policy_lag, spec_of
from brayx.jobs.models import build_model
from brayx.local.train import unless_failed
from brayx.local.training import Training
from brayx.rollout.component import RolloutComponent

TEMPLATE = Path(__file__).parents[3] / "pipelines" / "templates" / "ppo_env.yaml"
NAMES = {part: part for part in ("hub", "weights", "buffer/buffer", "moments")}


def job(*overrides: str) -> JobConfig:
    return JobConfig.load(TEMPLATE, overrides)


def refusal(*overrides: str) -> BrayxError:
    with pytest.raises(BrayxError) as refused:
        check_job(job(*overrides))
    return refused.value


def test_the_template_names_every_option_of_a_rollout_and_says_what_it_means() -> None:
    lines = TEMPLATE.read_text().splitlines()
    begin = lines.index("rollout:") + 1
    part = lines[begin : begin + lines[begin:].index("")]
    written = yaml.safe_load("\n".join(part))
    assert set(written) == set(RolloutComponent.model_fields)
    for line in part[1:]:
        assert "#" in line, line
    for name, value in written.items():
        default = RolloutComponent.model_fields[name].default
        if value != default and name not in ("env", "model", "buffer"):
            (line,) = [line for line in part if re.match(rf"\s+{name}:", line)]
            assert "default" in "\n".join(part[part.index(line) :][:2]), (
                f"{name} is not at its default, and does not say so"
            )


def test_the_template_is_a_job_without_an_actor_and_needs_no_door() -> None:
    assert check_job(job())[0] == ""
    assert cluster_for(job(), "haproxy", "").ingress is None


def test_an_unknown_environment_is_reported_with_file_component_and_name() -> None:
    error = refusal("rollout.env=CartPoll-v1")
    assert isinstance(error, ConfigError)
    assert error.message.startswith(f"{TEMPLATE}: rollout 'rollout' (CartPoll-v1): ")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("network.convolutions=impala", "network.convolutions is impala, but no observation is an image"),
        ("network.log_std=-1", "network.log_std is -1.0, but actions are discrete"),
        ("rollout.sde_steps=4", "sde_steps is 4, but the model's noise does not depend on the state"),
    ],
)
def test_an_option_without_effect_is_refused(override: str, message: str) -> None:
    assert message in refusal(override).message


def test_a_mask_in_info_reaches_workers_and_their_model() -> None:
    taxi = job("rollout.env=Taxi-v4")
    ((_, batch),) = check_rollouts(taxi).values()
    assert {"obs/obs", "obs/action_mask"} <= batch
    _, (example,) = build_model("model", taxi.as_dict())
    assert set(example) == {"obs", "action_mask"}


def test_blocking_workers_that_would_wait_for_each_other_are_refused() -> None:
    assert "2 workers x 7 environments give 14 columns" in refusal("rollout.num_envs=7").message
    assert "that must be a multiple" in refusal("rollout.num_workers=3").message
    check_job(job("rollout.num_envs=7", "rollout.mode=non_blocking"))
    check_job(job("rollout.num_envs=4"))  # two rounds with each version


def test_blocking_workers_that_would_share_out_a_batch_over_shards_are_refused() -> None:
    said = refusal("buffer.num_workers=2").message
    assert "of the buffer's 2 shards" in said
    assert "or num_envs 16, a whole batch" in said
    check_job(job("buffer.num_workers=2", "rollout.num_envs=16", "trainer.weights_publish_interval=2"))
    check_job(job("buffer.num_workers=2", "rollout.mode=non_blocking"))


def test_blocking_workers_before_a_buffer_that_samples_are_refused() -> None:
    said = refusal("buffer.sampler=uniform").message
    assert "sampler 'uniform'" in said
    assert "needs mode non_blocking, or sampler fifo" in said
    check_job(job("buffer.sampler=uniform", "rollout.mode=non_blocking"))


HEADS = "reward_heads: [{gamma: 0.9}, {gamma: 0.99}]"


@pytest.mark.parametrize(
    ("env", "algorithm", "message"),
    [
        ("Pendulum-v1", "{name: sac, n_step: 500}", "n_step 500, and columns have unroll_length 32"),
        ("CartPole-v1", "{name: mappo}", "a central value holds 'obs' and 'state', got ndarray"),
        ("CartPole-v1", "{name: bc}", "'bc' imitates recorded steps, .* without: ppo, impala, sac$"),
        ("Pendulum-v1", "{name: bc}", "'bc' imitates recorded steps, .* without: ppo, impala, sac$"),
        ("CartPole-v1", "{name: mixed}", "'mixed' imitates demonstrations, but no data is marked as such"),
        ("CartPole-v1", f"{{name: ppo, {HEADS}}}", "has reward_heads, and no data here has"),
    ],
)
def test_an_algorithm_that_does_not_fit_is_refused_before_anything_starts(
    env: str, algorithm: str, message: str
) -> None:
    error = refusal(f"rollout.env={env}", f"trainer.algorithm={algorithm}", "rollout.mode=non_blocking")
    assert isinstance(error, ConfigError)
    assert error.message.startswith(str(TEMPLATE))
    assert re.search(message, error.message), error.message


def test_priorities_that_the_algorithm_does_not_compute_are_refused() -> None:
    error = refusal("buffer.sampler=prioritised", "rollout.mode=non_blocking")
    assert isinstance(error, ConfigError)
    assert "'ppo' neither gives priorities" in error.message


def test_the_check_command_reports_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(TEMPLATE), "--set", "trainer.algorithm={name: mappo}"]) == 2
    said = capsys.readouterr()
    assert "a central value holds 'obs' and 'state'" in said.err
    assert said.out == ""


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [("{name: bc}", ""), ("{name: mixed}", "demonstration: true"), (f"{{name: ppo, {HEADS}}}", "")],
)
def test_what_a_source_gives_beside_the_play_counts(tmp_path: Path, algorithm: str, more: str) -> None:
    rows = {"reward": np.ones(3), "terminated": np.arange(3) == 2, "log_prob": np.zeros(3)}
    rows |= {"obs": np.zeros((3, 4), np.float32), "reward_heads": np.ones((3, 2), np.float32)}
    np.savez(tmp_path / "games.npz", action=np.zeros(3, np.int64), **rows)
    file = tmp_path / "job.yaml"
    source = f"\nrecorded:\n  kind: source\n  path: games.npz\n  buffer: buffer\n  {more}\n"
    file.write_text(TEMPLATE.read_text() + source)
    heads = ["network.value_heads=2"] if "reward_heads" in algorithm else []
    check_job(JobConfig.load(file, [f"trainer.algorithm={algorithm}", *heads]))


def test_data_of_another_shape_than_the_model_observes_are_refused_before_anything_starts(tmp_path: Path) -> None:
    rows = {"reward": np.ones(3), "terminated": np.arange(3) == 2, "log_prob": np.zeros(3)}
    np.savez(tmp_path / "games.npz", obs=np.zeros((3, 5), np.float32), action=np.zeros(3, np.int64), **rows)
    file = tmp_path / "job.yaml"
    file.write_text(TEMPLATE.read_text() + "\nrecorded:\n  kind: source\n  path: games.npz\n  buffer: buffer\n")
    with pytest.raises(ConfigError, match=r"'recorded': .*expected shape \(4,\)"):
        check_job(JobConfig.load(file, ["trainer.algorithm={name: bc}"]))


def recorded(tmp_path: Path, options: str) -> Path:
    """The template with a source of some rows beside its rollout."""
    rows = {"reward": np.ones(3), "terminated": np.arange(3) == 2, "log_prob": np.zeros(3)}
    np.savez(tmp_path / "games.npz", obs=np.zeros((3, 4), np.float32), action=np.zeros(3, np.int64), **rows)
    file = tmp_path / "job.yaml"
    file.write_text(f"{TEMPLATE.read_text()}\nother: {{kind: buffer}}\nrecorded: {{kind: source, {options}}}\n")
    return file


@pytest.mark.parametrize(
    ("change", "algorithm", "source", "message"),
    [
        ("normalise_obs=true", "{name: bc}", "buffer: buffer", "observations changed so, and from those of 'recorded'"),
        ("normalise_obs=true", "{name: mixed}", "buffer: other, demonstration: true", "'recorded' as they are"),
        ("normalise_obs=true", "{name: ppo}", "buffer: other", ""),
        ("normalise_reward=true", "{name: mixed, fit_value: 0.5}", "buffer: other, demonstration: true", "rewards"),
        ("reward_clip=1.0", "{name: ppo}", "buffer: buffer", ""),
        ("normalise_reward=true", "{name: mixed}", "buffer: other, demonstration: true", None),
        ("reward_clip=1.0", "{name: bc}", "buffer: buffer", None),
    ],
)
def test_data_as_they_are_beside_play_that_is_changed_are_refused(
    tmp_path: Path, change: str, algorithm: str, source: str, message: str | None
) -> None:
    """A policy would imitate observations, or a value fit rewards, that do not occur in play."""
    file = recorded(tmp_path, f"path: games.npz, {source}")
    overrides = [f"trainer.algorithm={algorithm}", "trainer.buffers=[buffer, other]"]
    check_job(JobConfig.load(file, overrides))
    made = JobConfig.load(file, [*overrides, f"rollout.{change}"])
    if message is None:
        check_job(made)
        return
    with pytest.raises(ConfigError, match=f"rollout.{change.split('=')[0]}: .*{message}"):
        check_job(made)


def test_data_as_they_are_are_not_measured_either_where_observations_are_normalised(tmp_path: Path) -> None:
    file = recorded(tmp_path, "path: games.npz, buffer: other")
    overrides = ["trainer.eval_buffers=[other]", "trainer.eval_interval=5", "rollout.normalise_obs=true"]
    with pytest.raises(ConfigError, match=r"expected normalise_obs off, .*recorded"):
        check_job(JobConfig.load(file, overrides))


def test_all_rollouts_of_a_job_normalise_what_they_observe_or_none_does() -> None:
    more = "more={kind: rollout, env: CartPole-v1, model: model, buffer: buffer}"
    error = refusal("rollout.normalise_obs=true", "rollout.mode=non_blocking", more)
    assert "from those of 'more' as they are" in error.message
    check_job(job("rollout.normalise_obs=true", "rollout.mode=non_blocking", f"{more[:-1]}, normalise_obs: true}}"))


def test_a_workers_spec_has_the_size_of_an_update() -> None:
    spec = spec_of(job("trainer.weights_publish_interval=3", "trainer.algorithm.gamma=0.9"), "rollout")
    assert (spec.update_columns, spec.gamma) == (48, 0.9)
    assert worker_spec(job(), "rollout", NAMES).moments == ""
    assert worker_spec(job("rollout.normalise_obs=true"), "rollout", NAMES).moments == "moments"


def test_a_rollout_feeds_what_the_trainer_reads_with_the_model_that_learns(tmp_path: Path) -> None:
    plain = yaml.safe_load(TEMPLATE.read_text())
    plain["other"] = {"kind": "buffer"}
    plain["rollout"]["buffer"] = "other"
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(plain))
    with pytest.raises(ConfigError, match=r"rollout.buffer: .*'other'.*\['buffer'\]"):
        check_rollouts(JobConfig.load(file))


FUNCTIONS = """
    import gymnasium

    def make(name, config):
        return gymnasium.make("CartPole-v1", max_episode_steps=config["limits"]["steps"])

    class Game(gymnasium.Env):
        observation_space = gymnasium.spaces.Dict(
            obs=gymnasium.spaces.Box(-1, 1, (2,)), state=gymnasium.spaces.Box(-1, 1, (5,))
        )
        action_space = gymnasium.spaces.Discrete(3)

        def reset(self, **_):
            return self.observation_space.sample(), {}

        def step(self, action):
            return self.observation_space.sample(), 1.0, False, False, {}

    def game(name, config):
        return Game()

    def broken(name, config):
        env = gymnasium.make("CartPole-v1")
        env.reset = lambda **_: 1 / 0
        return env
"""


def own(tmp_path: Path, func: str, module: str = "") -> JobConfig:
    module = module or f"own_{func}"
    (tmp_path / f"{module}.py").write_text(textwrap.dedent(FUNCTIONS))
    plain: dict[str, Any] = yaml.safe_load(TEMPLATE.read_text())
    plain["rollout"].update(env=None, module=module, func=func)
    plain["limits"] = {"kind": "config", "steps": 7}
    if func == "game":
        plain["trainer"]["algorithm"] = {"name": "mappo"}
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(plain))
    return JobConfig.load(file)


def test_a_user_function_makes_the_environment(tmp_path: Path) -> None:
    check_rollouts(own(tmp_path, "make"))


def test_a_game_with_a_state_of_its_own_fits_mappo(tmp_path: Path) -> None:
    check_job(own(tmp_path, "game"))


def test_a_value_of_the_state_that_is_a_column_is_refused_before_anything_starts(tmp_path: Path) -> None:
    model = """
        import torch
        from brayx.jobs.models import build_model as ready_made

        def build_model(name, config):
            module, example = ready_made(name, config)
            module.critic = torch.nn.Linear(5, 1)
            return module, example
    """
    (tmp_path / "own_model.py").write_text(textwrap.dedent(model))
    made = own(tmp_path, "game", "own_game_of_a_column").file
    with pytest.raises(ModelError, match=r"job.yaml: .*'model': .*critic.*\[2, 1\]"):
        check_job(JobConfig.load(made, ["model.module=own_model"]))


def test_an_environment_that_raises_is_reported_by_name(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailed, match=r"own_broken.*ZeroDivisionError.*reset"):
        check_rollouts(own(tmp_path, "broken"))


def test_what_was_learned_on_a_cluster_stays_when_an_environment_raises_in_its_evaluation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(gymnasium.Env[Any, Any]):
        observation_space = gymnasium.spaces.Box(-1, 1, (4,))
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            raise OSError("no display")

    gymnasium.register("BrokenReset-v0", Broken)
    try:
        model = build_model("model", job().as_dict())
        broken = job("rollout.env=BrokenReset-v0")
        assert unless_failed(lambda: _evaluated(broken, *model, {}, Training(evaluation_episodes=2))) is None
    finally:
        del gymnasium.registry["BrokenReset-v0"]
    assert "there is no evaluation: the environment raised OSError in reset: no display" in caplog.text


class TestReadyMadeModel:
    def test_it_fits_the_environment(self) -> None:
        _, (obs,) = build_model("model", job("rollout.env=Acrobot-v1").as_dict())
        assert obs.shape == (2, 6)
        module, _ = build_model("model", job("rollout.env=Pendulum-v1").as_dict())
        assert set(module(*build_model("model", job("rollout.env=Pendulum-v1").as_dict())[1])) >= {"mean", "log_std"}

    def test_sac_has_its_critics_and_the_sizes_that_suit_it(self) -> None:
        plain = job("rollout.env=Pendulum-v1", "trainer.algorithm={name: sac}").as_dict()
        module, example = build_model("model", plain)
        assert set(module(*example)) == {"tanh_mean", "tanh_log_std"}
        assert critic_of(module, "")(*example, torch.zeros(2, 1)).shape == (2, 2)
        assert module.trunk(torch.zeros(1, 3)).shape == (1, 64), "as the job says"
        module, _ = build_model("model", {**plain, "network": {"kind": "config"}})
        assert module.trunk(torch.zeros(1, 3)).shape == (1, 256)
        module, example = build_model("model", job("trainer.algorithm={name: sac}").as_dict())
        assert set(module(*example)) == {"logits"}
        assert critic_of(module, "")(*example, torch.zeros(2, 0)).shape == (2, 2, 2)

    def test_mappo_has_a_value_of_the_whole_game(self, tmp_path: Path) -> None:
        made = own(tmp_path, "game")
        module, example = build_model("model", made.as_dict())
        assert set(module(*example)) == {"logits"}
        assert critic_of(module, "")(torch.zeros(3, 5)).shape == (3,)

    def test_an_unknown_option_of_the_network_is_named(self) -> None:
        with pytest.raises(ConfigError, match=r"network\.hiden"):
            build_model("model", job("network.hiden=[3]").as_dict())

    def test_a_model_that_no_rollout_acts_with_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="no rollout uses it"):
            build_model("critic", job().as_dict())


@pytest.mark.parametrize(
    ("overrides", "lag"),
    [
        ([], 0),
        (["buffer.max_policy_lag=3"], 3),
        (["rollout.mode=non_blocking"], None),
        (["buffer.sampler=uniform"], None),
        (["more={kind: source, path: x.npz, buffer: buffer}"], None),
        (["more={kind: rollout, env: CartPole-v1, model: model, buffer: buffer, mode: blocking}"], None),
        (["more={kind: rollout, env: CartPole-v1, model: model, buffer: buffer}"], None),
        (["other={kind: buffer}", "more={kind: source, path: x.npz, buffer: other}"], 0),
        (["other={kind: buffer}", "trainer.buffers=[buffer, other]"], None),
        (["buffer.num_workers=2"], None),
        (["trainer.prefetch=1"], None),
    ],
)
def test_no_version_but_the_newest_is_learned_from_where_blocking_workers_alone_fill_a_buffer(
    overrides: list[str], lag: int | None
) -> None:
    assert policy_lag(job(*overrides), "buffer") == lag


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], ""),
        (["rollout.mode=non_blocking", "trainer.prefetch=1"], ""),
        (["buffer.max_policy_lag=1", "trainer.prefetch=1"], ""),
        (["trainer.prefetch=2"], "rollout.mode is blocking, but prefetch is 2: buffer.max_policy_lag is not 0 then"),
        (
            [
                "trainer={kind: trainer, model: model, buffers: [buffer], num_workers: 2}",
                "buffer.num_workers=3",
                "rollout.num_envs=16",
            ],
            "but the buffer has 3 shards and the trainer has 2 ranks:",
        ),
        (["other={kind: buffer}", "trainer.buffers=[buffer, other]"], "but the trainer reads several buffers:"),
        (["more={kind: source, path: FOLDER/x.npz, buffer: buffer}"], "but a source fills the buffer, too:"),
    ],
)
def test_check_says_where_blocking_does_not_mean_the_newest_version_only(
    overrides: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    step = {"obs": np.zeros((1, 4)), "action": np.zeros(1, int), "reward": np.ones(1), "log_prob": np.zeros(1)}
    np.savez(tmp_path / "x.npz", **step, terminated=np.ones(1))
    overrides = [override.replace("FOLDER", str(tmp_path)) for override in overrides]
    words = [word for override in overrides for word in ("--set", override)]
    assert main(["check", str(TEMPLATE), *words]) == 0
    notes = capsys.readouterr().err.removesuffix(f"{TEMPLATE}: ok\n")
    assert notes.startswith("brayx: note: rollout.mode is blocking") if said else notes == ""
    assert said in notes
    assert bool(lag_notes(job(*overrides))) == bool(said)
