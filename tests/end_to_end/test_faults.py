"""Training jobs under faults: killed games, Ctrl-C at any time, bad surroundings, bad agents and models.

Each job is a separate `brayx train`, watched from outside by its processes, its MLflow store and its output.
"""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from brayx.gamecore.client import Client
from brayx.recording import open as open_recordings
from brayx.tracking import Trial
from tests.end_to_end.jobs import (
    FREE_PORTS,
    ONE_GAME_EACH_OVER_WS,
    Command,
    brayx,
    control_c_in_time,
    goes_on,
    is_free,
    job_folder,
    metrics_of,
    said_on_failure,
    setting,
    trials,
    written,
)

RECORDED = ("recording.kind=recording", "recording.to_trial=1")
BATCH = 256
"""Transitions that the template's learner takes at once."""
TROUBLE = ("requests_refused", "sessions_ended.error", "sessions_ended.idle", "sessions_ended.lost")

LONG_GAME = '''
"""CartPole whose pole may fall: a game outlasts the job, so a gamecore that is killed is killed in a game, and no other
ends meanwhile. A step takes as long as one of a fast game, which leaves the cores to others."""
import math
import time

import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv


class LongCartPole(CartPoleEnv):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.theta_threshold_radians = self.x_threshold = math.inf

    def step(self, action):
        obs, *rest = super().step(action)
        time.sleep(0.004)
        return obs.clip(-10.0, 10.0), *rest


gymnasium.register("LongCartPole-v0", LongCartPole, max_episode_steps=100_000)
'''

TELLING_AGENT = '''
"""The template's agent; also records how many steps of a session were in episodes, by how that session ended.

It has a bug, too, which costs no episode.
"""
from brayx import record
from gym_agent import GymAgent


class TellingAgent(GymAgent):
    steps = 0

    async def on_episode(self, episode, done):
        await super().on_episode(episode, done)
        self.steps += len(episode) - 1
        if done:
            record("session_steps", self.steps, label=episode[-1].end, kind="sum")

    async def on_session_end(self, reason):
        raise RuntimeError(f"ended by {reason}")
'''

WAITING_HOOKS = '''
"""The learner stops while the file `stopped` is there."""
import time
from pathlib import Path


def handle(batch):
    while Path("stopped").exists():
        time.sleep(0.01)
    return batch
'''

RAISING_AGENT = '''
"""An agent with a bug."""
from brayx import Agent


class RaisingAgent(Agent):
    async def on_tick(self, state):
        raise KeyError("velocity")
'''


FORGETFUL_AGENT = '''
"""The template's agent with a bug at the end of nine games in ten."""
from gym_agent import GymAgent


class ForgetfulAgent(GymAgent):
    games = 0

    async def on_episode(self, episode, done):
        ForgetfulAgent.games += done
        if done and ForgetfulAgent.games % 10:
            raise ValueError("no reward")
        await super().on_episode(episode, done)
'''


def on_ray(folder: Path, *overrides: str, **files: str) -> list[str]:
    """Words of ``brayx train --cluster`` for two CartPole games."""
    return [*small_job(folder, *overrides, **files), "--cluster"]


def small_job(folder: Path, *overrides: str, **files: str) -> list[str]:
    """Words of ``brayx train`` for two CartPole games."""
    yaml = job_folder(folder, **files)
    options = [*FREE_PORTS, *ONE_GAME_EACH_OVER_WS, "actor.gamecores.0.num=2", "trainer.target_return=null", *overrides]
    return ["train", str(yaml), *setting(*options)]


def gamecores(command: Command) -> set[int]:
    """Process ids of the games. The words of ``brayx train`` name their command too, but with ``{url}``."""
    return command.pids("gamecore", "gym", "--url ws://")


def one_line(command: Command, tracebacks: int = 0) -> str:
    """The error that the command ended with: its last line, and no traceback but those of agents."""
    assert command.err.count("Traceback") == tracebacks, command.err
    last = command.err.strip().splitlines()[-1]
    assert last.startswith("brayx: "), command.err
    return last


@dataclass
class Stopped:
    """What was seen of a job while its learner was stopped.

    Attributes:
        before, after: metrics when its buffer had begun to drop, and after its games had played on for a while.
        actions: replies that a new client got through the door meanwhile.
        learned_after: metrics once the learner had gone on.
    """

    before: dict[str, float]
    after: dict[str, float]
    actions: list[int]
    learned_after: dict[str, float]


def stop_the_learner(command: Command, url: str) -> Stopped:
    """Stops the learner, watches the games play on, and lets it go on."""
    stopped = command.folder / "stopped"
    stopped.touch()
    began = metrics_of(command)

    def grew(since: dict[str, float], **by: float) -> bool:
        now = metrics_of(command)
        return all(now.get(name, 0) >= since.get(name, 0) + least for name, least in by.items())

    dropped = {"replay_dropped.full": BATCH}
    # More than the buffer holds has come since: the last that the learner did is in the metrics.
    command.until(lambda: grew(began, env_steps=6 * BATCH, **dropped), "the drop count of the full buffer")
    before = metrics_of(command)
    with Client(url, timeout_s=30.0) as client:
        client.start()
        state = json.dumps({"obs": [0.0, 0.0, 0.0, 0.0], "reward": 0.0}).encode()
        actions = [json.loads(client.tick(state))["action"] for _ in range(100)]
        client.stop()
    after: dict[str, float] = {}

    def played_on() -> bool:
        """The two counts, which the metrics get at different times, must agree but for what waits in batches."""
        after.update(metrics_of(command))
        came, lost = (after[name] - before[name] for name in ("env_steps", "replay_dropped.full"))
        return after["ticks"] >= before["ticks"] + 4000 and lost >= BATCH and abs(came - lost) <= 4 * BATCH < came / 2

    command.until(played_on, "the games played on, and what they brought was dropped")
    stopped.unlink()

    def learned_on() -> bool:
        now = metrics_of(command)
        return all(now[name] >= after[name] + 3 for name in ("updates", "policy_version"))

    command.until(learned_on, "the learner went on")
    return Stopped(before, after, actions, metrics_of(command))


@dataclass
class Interrupted:
    """A job that lost a gamecore, and was then interrupted."""

    folder: Path
    words: list[str]
    games: set[int]
    games_after: set[int]
    metrics: dict[str, float]
    code: int
    port: int
    said: str
    trial: Trial
    temporary: list[str]


def long_job(folder: Path, *overrides: str) -> list[str]:
    """Words of ``brayx train`` for two endless games of CartPole, whose agent tells of its sessions."""
    overrides = ("agent.module=telling_agent", "agent.class=TellingAgent", *overrides)
    words = small_job(folder, *overrides, telling_agent=TELLING_AGENT, waiting_hooks=WAITING_HOOKS, long_game=LONG_GAME)
    return [word.replace("CartPole-v1", "long_game:LongCartPole-v0") for word in words]


def port_of_games(command: Command) -> int:
    """The door's port, once both games of a `long_job` are played and learned from."""

    def both_play() -> bool:
        now = metrics_of(command)
        learned = now.get("policy_version", 0) > 1  # the first is published before anything is learned
        return learned and now.get("env_steps", 0) > 256 and now["sessions_active"] >= 2

    command.until(both_play, "both games were played and learned from")
    (port,) = set(re.findall(r"the door is http://127\.0\.0\.1:(\d+)", command.err))
    return int(port)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """A job whose learner is stopped for a while."""
    folder = tmp_path_factory.mktemp("stopped")
    words = long_job(folder, "trainer.hooks=waiting_hooks", "trainer.num_steps=10_000_000")
    with brayx(folder, *words) as command, said_on_failure(command):
        return stop_the_learner(command, f"http://127.0.0.1:{port_of_games(command)}")


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    """Kills a gamecore of a job whose learner is a child process, waits until another plays in its place, and presses
    Ctrl-C."""
    folder = tmp_path_factory.mktemp("interrupted")
    words = long_job(folder)
    endless = setting("trainer.num_steps=10_000_000", "trainer.where=child")
    with brayx(folder, *words, *endless) as command, said_on_failure(command):
        port = port_of_games(command)
        games = gamecores(command)
        os.kill(min(games), signal.SIGKILL)

        def played_on() -> bool:
            now = metrics_of(command)
            # The agent is told of the end after it is counted.
            ended = now.get("sessions_ended.disconnect", 0) >= 1 and now.get("agent_errors.on_session_end", 0) >= 1
            learned = now.get("updates", 0) >= 1  # or there is nothing to save
            return bool(gamecores(command) - games) and ended and learned and now["sessions_active"] >= 2

        command.until(played_on, "a killed gamecore's session ended, another one played, and was learned from")
        games_after = gamecores(command)
        metrics = metrics_of(command)
        control_c_in_time(command)
        (trial,) = trials(folder)["main"]
        return Interrupted(
            folder, words, games, games_after, metrics, command.process.returncode, port,
            command.err + command.out, trial, command.temporary,
        )  # fmt: skip


@pytest.mark.cluster
def test_a_stopped_learner_leaves_ticks_alone(stopped: Stopped) -> None:
    before, after = stopped.before, stopped.after
    assert after["updates"] == before["updates"], "it was stopped"
    assert after["ticks"] >= before["ticks"] + 4000
    assert after["env_steps"] > before["env_steps"]
    assert set(stopped.actions) <= {0, 1}
    assert len(stopped.actions) == 100
    assert not [name for name in stopped.learned_after if name.startswith(TROUBLE)]


@pytest.mark.cluster
def test_what_a_stopped_learner_does_not_take_is_dropped_and_counted(stopped: Stopped) -> None:
    before, after = stopped.before, stopped.after
    dropped = after["replay_dropped.full"] - before["replay_dropped.full"]
    assert dropped >= BATCH
    # What came and is not dropped waits in the batches kept and in the one being filled.
    came = after["env_steps"] - before["env_steps"]
    assert abs(came - dropped) <= 4 * BATCH < came / 2
    assert after["replay_batches"] <= 4


@pytest.mark.cluster
def test_a_learner_that_was_stopped_goes_on(stopped: Stopped) -> None:
    assert stopped.learned_after["updates"] >= stopped.after["updates"] + 3
    assert stopped.learned_after["policy_version"] >= stopped.after["policy_version"] + 3


def test_a_killed_gamecore_ends_its_own_session_only(interrupted: Interrupted) -> None:
    assert interrupted.metrics["sessions_ended.disconnect"] == 1
    assert not [name for name in interrupted.metrics if name.startswith(TROUBLE)]
    assert len(interrupted.games) == len(interrupted.games_after) == 2
    assert len(interrupted.games & interrupted.games_after) == 1, "the other gamecore plays on"


def test_its_partial_episode_is_not_lost(interrupted: Interrupted) -> None:
    assert interrupted.metrics["session_steps.disconnect"] > 0
    assert not [name for name in interrupted.metrics if name.startswith("fragments_dropped")]


def test_exceptions_of_agents_are_shown_with_their_location(interrupted: Interrupted) -> None:
    line = TELLING_AGENT.splitlines().index('        raise RuntimeError(f"ended by {reason}")') + 1
    place = f"{interrupted.folder / 'telling_agent.py'}:{line}"
    shown = (
        rf"\d+ errors? in on_session_end; the newest: agent 'agent': RuntimeError: ended by \w+ \({re.escape(place)}\)"
    )
    assert re.search(shown, interrupted.said)
    assert f'  File "{interrupted.folder / "telling_agent.py"}", line {line}, in on_session_end' in interrupted.said
    assert interrupted.metrics["agent_errors.on_session_end"] >= 1


def test_ctrl_c_leaves_nothing_running(interrupted: Interrupted) -> None:
    assert is_free(interrupted.port)
    assert not interrupted.temporary


def test_ctrl_c_prints_how_to_resume(interrupted: Interrupted) -> None:
    assert interrupted.code == 130, interrupted.said
    assert "the same command resumes this trial" in interrupted.said
    assert interrupted.said.count("Traceback") == 1, "that of the agent, once for all sessions"


@pytest.mark.cluster
def test_a_trial_goes_from_the_local_host_to_a_cluster_and_back(interrupted: Interrupted) -> None:
    cut_off = "ending took too long" in interrupted.said  # on a busy machine, before it could write how it ended
    assert interrupted.trial.status == ("RUNNING" if cut_off else "KILLED")
    saved = interrupted.trial.checkpoints()[-1].step
    assert saved > 0
    before = written(interrupted.trial, "learner/policy_version")
    # The other jobs on a cluster learn in their own process.
    endless = setting("trainer.num_steps=10_000_000", "trainer.where=train")
    with brayx(interrupted.folder, *interrupted.words, "--cluster", *endless) as command, said_on_failure(command):
        command.until(
            lambda: len(written(interrupted.trial, "learner/policy_version")) > len(before) + 2, "it learned there"
        )
        assert "cartpole / main (resumed)" in command.err
        control_c_in_time(command)
        assert command.process.returncode == 130
    on_cluster = interrupted.trial.checkpoints()[-1].step
    assert on_cluster > saved
    target = on_cluster + 2048
    words = [*interrupted.words, *setting(f"trainer.num_steps={target}")]
    with brayx(interrupted.folder, *words) as command, said_on_failure(command):
        assert command.ended() == 0
        command.gone()
        assert "cartpole / main (resumed)" in command.err
    (trial,) = trials(interrupted.folder)["main"]
    assert (trial.run_id, trial.status) == (interrupted.trial.run_id, "FINISHED")
    assert trial.metrics()["replay/env_steps"] >= target
    assert target <= trial.checkpoints()[-1].step < target + 2048, "it counted on from the checkpoint, not from 0"
    curve = written(trial, "learner/policy_version")
    assert curve[: len(before)] == before
    assert goes_on(curve), "env steps and versions go on where they were"


@pytest.mark.cluster
def test_ctrl_c_while_mlflow_starts_keeps_what_was_learned(tmp_path: Path) -> None:
    with brayx(tmp_path, *small_job(tmp_path, "trainer.num_steps=10_000_000")) as command, said_on_failure(command):
        command.until(lambda: bool(command.processes("brayx.tracking.clerk_process")), "MLflow's process was there")
        (mlflow,) = command.processes("brayx.tracking.clerk_process")
        mlflow.suspend()
        command.until(lambda: re.search(r"version ([2-9]|\d\d)", command.err) is not None, "it learned")
        command.control_c(group=False)
        command.until(command.says("to save the last checkpoint"), "it waited for MLflow")
        mlflow.resume()
        assert command.ended() == 130
        command.gone()
        assert not command.temporary
    (trial,) = trials(tmp_path)["main"]
    assert trial.status == "KILLED"
    assert trial.checkpoints()[-1].step > 0


@pytest.mark.cluster
def test_ctrl_c_before_anything_is_learned_or_mlflow_has_started_is_one_line(tmp_path: Path) -> None:
    words = small_job(tmp_path, "console_port=0", "buffer.batch_size=4096")
    with brayx(tmp_path, *words) as command, said_on_failure(command):
        command.until(lambda: bool(command.processes("brayx.tracking.clerk_process")), "MLflow's process is there")
        (mlflow,) = command.processes("brayx.tracking.clerk_process")
        mlflow.suspend()
        command.until(command.says("play"), "games play")
        before = command.err
        command.control_c(group=False)
        assert command.ended() == 130
        command.gone()
    said = [line for line in command.err.removeprefix(before).splitlines() if "env steps" not in line]
    assert said[-1] == "brayx: interrupted before MLflow had started: nothing is kept"
    assert not [line for line in said if "checkpoint" in line or "not written" in line or "shows this trial" in line]


@pytest.mark.cluster
def test_ctrl_c_while_ray_starts_leaves_nothing_running(tmp_path: Path) -> None:
    with brayx(tmp_path, *on_ray(tmp_path, "trainer.where=process")) as command, said_on_failure(command):
        interrupt_at(command, "gcs_server", group=True)
        assert "interrupted before training began" in command.err or "processes were killed" in command.err


@pytest.mark.cluster
def test_ctrl_c_while_the_actor_starts_and_another_trial_name_is_another_run(interrupted: Interrupted) -> None:
    before = interrupted.trial.metrics()
    words = [*interrupted.words, "--cluster", "--trial", "second"]
    with brayx(interrupted.folder, *words) as command, said_on_failure(command):
        interrupt_at(command, "ServeReplica", group=False)
    (second,) = trials(interrupted.folder)["second"]
    assert second.status == "KILLED"
    assert second.run_id != interrupted.trial.run_id
    assert len(trials(interrupted.folder)["main"]) == 1
    assert interrupted.trial.metrics() == before


@pytest.mark.chaos
def test_ctrl_c_ends_a_job_whose_ray_hangs(tmp_path: Path) -> None:
    with brayx(tmp_path, *on_ray(tmp_path, "trainer.where=process")) as command, said_on_failure(command):
        command.until(lambda: metrics_of(command).get("env_steps", 0) > 256, "games were played")
        for process in command.processes("ray"):
            if process.pid != command.process.pid:
                process.suspend()
        control_c_in_time(command, group=False)
        assert command.process.returncode == 130
        assert "processes were killed" in command.err
        assert not command.temporary


@pytest.mark.cluster
def test_ctrl_c_while_the_demo_plays_against_its_champion(tmp_path: Path) -> None:
    words = ["demo", "--games", "500", *setting(*FREE_PORTS, "trainer.num_steps=1500")]
    with brayx(tmp_path, *words) as command, said_on_failure(command):
        interrupt_at(command, "bridges.gym", group=True)
    (trial,) = trials(tmp_path)["main"]
    assert trial.status == "FINISHED", "the training had ended"


def interrupt_at(command: Command, moment: str, *, group: bool) -> None:
    """Ctrl-C as soon as there is a process whose command line has ``moment`` in it."""
    command.until(lambda: bool(command.pids(moment)), f"{moment} was there")
    control_c_in_time(command, group=group)
    assert command.process.returncode == 130
    assert "Traceback" not in command.err
    assert not command.temporary


@pytest.mark.parametrize(
    ("overrides", "why", "says", "traceback"),
    [
        pytest.param(
            ["network.obs_size=5", "trainer.max_lost_share=null"],
            "no env step has arrived for",
            r"expected \[obs: \[5\] float32\], got \[obs: \[4\] float32\]",
            "",
            marks=pytest.mark.cluster,
        ),
        (
            ["agent.module=raising_agent", "agent.class=RaisingAgent", *RECORDED],
            "errors take more than trainer.max_lost_share 0.5 allows",
            r"\d+ errors in on_tick; the newest: agent 'agent': KeyError: 'velocity' \(\S+raising_agent.py:8\)",
            r'File "\S+raising_agent.py", line 8, in on_tick\n +raise KeyError\("velocity"\)\n *KeyError: .velocity.\n',
        ),
        pytest.param(
            ["agent.module=forgetful_agent", "agent.class=ForgetfulAgent"],
            "errors take more than trainer.max_lost_share 0.5 allows",
            r"\d+ errors in on_episode; the newest: agent 'agent': ValueError: no reward \(\S+forgetful_agent.py:12\)",
            r'File "\S+forgetful_agent.py", line 12, in on_episode\n +raise ValueError\("no reward"\)\n *ValueError:',
            marks=pytest.mark.cluster,
        ),
    ],
    ids=["model that does not fit", "on_tick raises", "on_episode raises"],
)
def test_a_job_that_cannot_learn_gives_up_and_says_why(
    tmp_path: Path, overrides: list[str], why: str, says: str, traceback: str
) -> None:
    words = small_job(tmp_path, *overrides, raising_agent=RAISING_AGENT, forgetful_agent=FORGETFUL_AGENT)
    with brayx(tmp_path, *words) as command:
        assert command.ended() == 2
        said = one_line(command, tracebacks=bool(traceback))
        assert said.startswith(f"brayx: {why}")
        assert re.search(traceback, command.err)
        assert re.search(says, said)
        assert re.search(r"lost: \d+ of the last \d+ games", said)
        assert re.search(r"return \S+ \(\d+ games?, \d+ failed\)", command.err)
        command.gone()
    (trial,) = trials(tmp_path)["main"]
    assert trial.status == "FAILED"
    if RECORDED[0] in overrides:
        assert "recorded sessions are artifacts of the trial" in command.err
        recordings = open_recordings(f"runs:/{trial.run_id}/recordings", tracking=trial.uri)
        assert "error" in {recording.end for recording in recordings}, "what led there can be seen"


def test_a_missing_agent_is_named_before_anything_starts(tmp_path: Path) -> None:
    sessions = tmp_path / "ray"
    words = on_ray(tmp_path, "agent.module=gym_agnet")
    with brayx(tmp_path, *words, environment={"RAY_TMPDIR": str(sessions)}) as command:
        assert command.ended() == 2
        said = one_line(command)
        assert "gym_agnet" in said
        assert "gym_agent" in said, "the nearest right name"
        assert "Ray is up" not in command.err
        assert not sessions.exists(), "a Ray that starts makes its folder there"
