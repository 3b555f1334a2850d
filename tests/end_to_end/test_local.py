"""`brayx train` where Ray cannot even be imported: a whole training, killed, interrupted, resumed, finished."""

from __future__ import annotations

import json
import re
import shutil
import urllib.request
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from brayx.recording import open as open_recordings
from brayx.recording.reader import Recording
from brayx.tracking import Trial, find
from tests.end_to_end.jobs import (
    FREE_PORTS,
    TEMPLATES,
    Command,
    brayx,
    control_c_in_time,
    goes_on,
    is_free,
    job_folder,
    said_on_failure,
    setting,
    trials,
    without_ray,
    written,
)

OPTIONS = (
    "actor.gamecores.0.num=2",
    "tracking.tensorboard=true",
    "buffer.batch_size=2",
    "trainer.checkpoint_interval=4",
    "trainer.target_games=5",
    "trainer.target_return=null",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The CartPole job."""
    job_folder(tmp_path)
    return tmp_path


def train(folder: Path, num_steps: int) -> Command:
    options = setting(*FREE_PORTS, *OPTIONS, f"trainer.num_steps={num_steps}")
    return brayx(folder, "train", "cartpole.yaml", *options, environment=without_ray(folder))


def door(command: Command) -> str:
    """The door's URL, once games play through it."""
    command.until(command.says("2 gamecores play at tcp://"), "games play")
    match = re.search(r"the door is (http://127\.0\.0\.1:\d+)", command.err)
    assert match is not None
    return match[1]


def saved(folder: Path) -> list[int]:
    """Steps of the trial's checkpoints."""
    if not (folder / "mlflow.db").is_file():
        return []
    main_trials = trials(folder).get("main")
    return [checkpoint.step for checkpoint in main_trials[-1].checkpoints()] if main_trials else []


def the_trial(folder: Path) -> Trial:
    (trial,) = trials(folder)["main"]
    return trial


def acts_with(command: Command) -> str:
    """The engine that the trial is to record, once the command has said that the model acts with it."""
    said = r"the model acts with engine onnx from policy version (\d+)"
    command.until(lambda: re.search(said, command.err) is not None, "the engine is built")
    return f"onnx from version {re.findall(said, command.err)[0]}"


def recorded(folder: Path) -> list[Recording]:
    """The recorded sessions, all of which can be read."""
    recordings = open_recordings(str(folder / "recordings"))
    assert recordings.unreadable == {}
    for recording in recordings:
        assert recording["obs"].shape == (len(recording), 4)
        assert [json.loads(reply)["action"] for reply in recording.outputs()] == recording["action"].tolist()
    return list(recordings)


def shown(folder: Path, trial: Trial, part: str = "") -> EventAccumulator:
    """What TensorBoard shows of a trial."""
    return EventAccumulator(str(folder / "tensorboard" / "cartpole" / f"main {trial.run_id[:8]}" / part)).Reload()


@pytest.mark.cluster
def test_a_training_is_killed_interrupted_resumed_and_finished_without_ray(folder: Path) -> None:
    with (folder / "cartpole.yaml").open("a") as job:
        job.write("\nrecording: {kind: recording, every: 2, to_trial: 2, flush_s: 0.5, frames: render}\n")
    with train(folder, 1_000_000) as killed, said_on_failure(killed):
        url = door(killed)
        engine = acts_with(killed)
        killed.until(lambda: "env steps" in killed.err, "it shows progress")
        with urllib.request.urlopen(url, timeout=10) as reply:
            assert b'"mode": "train"' in reply.read()
        # The store must not be touched before the command has made it, which it has when it saves.
        killed.until(lambda: any(folder.glob("mlartifacts/**/weights.npz")) and bool(saved(folder)), "it is saved")
        killed.until(lambda: the_trial(folder).tags().get("brayx.engine.model") == engine, "the engine is recorded")
        killed.process.kill()
        killed.gone()
    before = recorded(folder)
    assert "terminated" in {recording.end for recording in before}
    steps = max(saved(folder))
    assert the_trial(folder).status == "RUNNING"
    assert is_free(int(url.rpartition(":")[2]))

    with train(folder, 1_000_000) as interrupted, said_on_failure(interrupted):
        url = door(interrupted)
        assert "cartpole / main (resumed)" in interrupted.err
        engine = acts_with(interrupted)
        interrupted.until(lambda: max(saved(folder)) > steps, "it is saved again")
        interrupted.until(lambda: the_trial(folder).tags()["brayx.engine.model"] == engine, "the engine is recorded")
        interrupted.until(
            lambda: any(
                recording.result is not None
                for recording in list(open_recordings(str(folder / "recordings")))[len(before) :]
            ),
            "a game is recorded",
        )
        control_c_in_time(interrupted)
        assert interrupted.process.returncode == 130
        assert "interrupted: the learner saves a last checkpoint; the same command resumes this trial" in (
            interrupted.err
        )
        assert "interrupted (the same command resumes it)" in interrupted.out
        assert interrupted.temporary == []
        copied = re.search(r"(\d+) recorded sessions are artifacts of the trial: ([^\s;]+)", interrupted.err)
        assert copied is not None
    trial = the_trial(folder)
    assert trial.status == "KILLED"
    assert max(saved(folder)) > steps
    copies = open_recordings(copied[2], tracking=trial.uri)
    assert len(copies) == int(copied[1]) >= 1, "the best of the interrupted run"
    interrupted_ids = {recording.id for recording in copies}
    assert interrupted_ids <= {recording.id for recording in recorded(folder)} - {recording.id for recording in before}
    steps = max(saved(folder))
    assert is_free(int(url.rpartition(":")[2]))

    # Eight games of at most 500 steps, so some end, however well they are played by now.
    last = steps + 10_000
    with train(folder, last) as finished, said_on_failure(finished):
        assert finished.ended() == 0
        finished.gone()
        assert "trial 'main' of project 'cartpole': finished after" in finished.out
        assert "champion: cartpole version 1" in finished.out
        assert finished.temporary == []
    trial = the_trial(folder)
    assert trial.status == "FINISHED"
    assert max(saved(folder)) >= last
    # Not the policy version: the kill lost the versions that no checkpoint had, and their numbers are given again.
    for metric in ("replay/env_steps", "learner/updates"):
        assert goes_on(written(trial, metric)), metric
    champion = find("models:/cartpole@champion", trial.uri)
    assert float(champion.tags["return"]) > 0
    assert list(folder.rglob("curve.png"))
    assert {path.name.split("+")[0] for path in folder.rglob("images/*.png")} == {
        "distributions~actions", "distributions~advantages", "distributions~weights"
    }  # fmt: skip
    (layers,) = folder.rglob("model/layers.txt")
    assert layers.read_text().endswith("9,155 parameters in all\n")
    curves = shown(folder, trial)
    newest = curves.Scalars("learner/updates")[-1]
    assert (newest.step, newest.value) == written(trial, "learner/updates")[-1]
    assert set(curves.Tags()["histograms"]) >= {"actions", "advantages", "weights/policy.layers.0.weight"}
    assert shown(folder, trial, "model").Graph().node
    after = recorded(folder)
    assert {recording.id for recording in before} < {recording.id for recording in after}
    assert {recording.end for recording in after} <= {
        "terminated",
        "truncated",
        "stop",
        "shutdown",
        "disconnect",
        "drained",
        "",
    }
    of_trial = open_recordings(f"runs:/{trial.run_id}/recordings", tracking=trial.uri)
    assert any(recording.frames for recording in of_trial), "the render has drawn their ticks"
    copied_ids = {recording.id for recording in of_trial}
    assert (
        interrupted_ids < copied_ids <= {recording.id for recording in after} - {recording.id for recording in before}
    )
    assert 2 <= len(copied_ids - interrupted_ids) <= 4, "the best and the worst of the last run"
    words = ("replay", "recordings", "--model", "models:/cartpole@champion", "--json")
    with brayx(folder, *words, environment=without_ray(folder)) as replayed, said_on_failure(replayed):
        assert replayed.ended() == 0
    report = json.loads(replayed.out)
    assert report["model"] == "models:/cartpole/1"
    assert [row["recording"] for row in report["recordings"]] == [recording.id for recording in after]
    assert report["total"]["ticks"] == sum(map(len, after))
    assert 0.0 < report["total"]["agreement"] < 1.0, "a training explores"
    assert report["total"]["kl"] > 0.0
    imported = folder / "imported.txt"
    assert not imported.exists(), imported.read_text()


TWO_AGENT = """
from brayx import forward, record
from gym_agent import GymAgent

class Two(GymAgent):
    async def on_tick(self, state):
        await super().on_tick(state)
        _, version = await forward("left" if self.model == "right" else "right", state.step.obs)
        record("other_version", version)
"""


@pytest.mark.cluster
def test_the_models_of_a_job_that_are_not_learned_act_with_their_champions(folder: Path) -> None:
    (folder / "two.py").write_text(TWO_AGENT)
    job = (folder / "cartpole.yaml").read_text().replace("\nmodel:\n", "\nleft:\n")
    (folder / "two.yaml").write_text(job + "\nright: {kind: model, module: gym_model, placement: remote}\n")
    shared = (*FREE_PORTS, *OPTIONS, "trainer.num_steps=3000", "agent.module=two", "agent.class=Two")
    for learned, says in (("left", "model 'right' acts untrained: cartpole-right has no champion"), ("right", "")):
        options = setting(*shared, f"trainer.model={learned}", f"agent.options.model={learned}")
        words = ("train", "two.yaml", "--trial", learned, *options)
        with brayx(folder, *words, environment=without_ray(folder)) as command, said_on_failure(command):
            assert command.ended() == 0
            assert says in command.err
            assert f"champion: cartpole-{learned} version 1" in command.out
    versions = {name: written(named[-1], "game/other_version") for name, named in trials(folder).items()}
    assert {value for _, value in versions["left"]} == {0.0}
    assert {value for _, value in versions["right"]} == {1.0}


@pytest.mark.parametrize("options", [(), ("actor.gamecores=[]",)], ids=["beside games", "alone"])
def test_a_source_is_read_into_a_buffer_of_this_process(tmp_path: Path, options: tuple[str, ...]) -> None:
    for file in (TEMPLATES / "catch").iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    words = ("train", "imitation.yaml", *setting(*FREE_PORTS, "trainer.num_steps=6000", *options))
    with brayx(tmp_path, *words, environment=without_ray(tmp_path)) as command, said_on_failure(command):
        assert command.ended() == 0
        assert "trial 'imitation' of project 'catch': finished" in command.out
    (trial,) = trials(tmp_path, "catch")["imitation"]
    assert trial.status == "FINISHED"
    assert max(checkpoint.step for checkpoint in trial.checkpoints()) >= 6000
