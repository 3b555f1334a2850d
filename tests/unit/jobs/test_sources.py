"""`brayx.jobs.sources`: a job's sources are checked before anything starts, and read as configured."""

from __future__ import annotations

import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from brayx.actions import ActionSpec
from brayx.errors import ConfigError
from brayx.jobs.checks import check_learning
from brayx.jobs.config import JobConfig
from brayx.jobs.sources import Sources, check_sources
from brayx.replay import npz
from brayx.replay.packing import BatchPacker, Layout
from brayx.types import DEMONSTRATION, Fragment
from tests.waiting import until

JOB = """
project: p
trial: t
buffer: {kind: buffer}
data: {kind: source, buffer: buffer, SOURCE}
"""

MODULE = """
import numpy as np
from brayx import Fragment

def fragment(value):
    zeros = np.zeros(2, np.float32)
    return Fragment(obs=np.zeros((3, 2), np.float32), action=zeros, log_prob=zeros, reward=zeros + value,
                    terminated=True, truncated=False, policy_version=np.zeros(2, np.int64))

def one(name, config):
    return (fragment(value) for value in range(3))

def several(name, config):
    return [[fragment(10)], [fragment(20), fragment(21)]]

def raises(name, config):
    raise OSError("no such place")
"""


class Full:
    """A buffer that never has room."""

    def offer(self, *replays: object, timeout_s: float) -> list[object]:
        time.sleep(0.01)
        return list(replays)


class Buffer:
    def __init__(self) -> None:
        self.taken: list[float] = []
        self.fragments: list[Fragment] = []

    def offer(self, *replays: object, timeout_s: float) -> list[object]:
        self.fragments += replays  # type: ignore[arg-type]
        self.taken += [float(replay.reward[0]) for replay in replays]  # type: ignore[attr-defined]
        return []


def job(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> JobConfig:
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(__import__("sys").modules, "given_data", raising=False)
    (folder / "given_data.py").write_text(MODULE)
    (folder / "job.yaml").write_text(JOB.replace("SOURCE", source))
    return JobConfig.load(folder / "job.yaml")


def save(path: Path, width: int = 2, action: np.ndarray | None = None) -> None:
    np.savez(
        path,
        observations=np.zeros((2, width), np.float32),
        action=np.zeros(2) if action is None else action,
        reward=np.array([5.0, 6.0]),
        terminated=np.array([False, True]),
    )


@pytest.mark.parametrize(
    ("source", "taken"),
    [
        ("module: given_data, func: one, epochs: 2", [0, 0, 1, 1, 2, 2]),
        ("module: given_data, func: several, epochs: 2", [10, 10, 20, 20, 21, 21]),
        ("path: 'set*.npz', fields: {obs: observations}, num_workers: 2", [5, 5]),
    ],
)
def test_everything_is_read_as_often_as_the_job_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, taken: list[float]
) -> None:
    save(tmp_path / "set1.npz")
    save(tmp_path / "set2.npz")
    buffer = Buffer()
    with Sources(job(tmp_path, source, monkeypatch), {"buffer": buffer}) as sources:  # type: ignore[dict-item]
        assert sources.join(60)
        assert sources.done
    assert sorted(buffer.taken) == taken
    assert sources.fed == {"data": len(taken)}
    assert not sources.errors


def test_a_dataset_that_does_not_fit_is_refused_naming_what_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "set.npz", width=3)
    made = job(tmp_path, "path: set.npz, fields: {obs: observations}", monkeypatch)
    check_sources(made)
    with pytest.raises(ConfigError, match=r"'data': .*shape \(2,\).*fits: obs \(2,\)"):
        check_sources(made, Layout.of_model((np.zeros((1, 2), np.float32),)))
    with pytest.raises(ConfigError, match=r"'data': .* no obs; .*observations"):
        check_sources(job(tmp_path, "path: set.npz", monkeypatch))
    with pytest.raises(ConfigError, match="no such file"):
        check_sources(job(tmp_path, "path: other.npz", monkeypatch))


OWN = """
project: p
trial: t
network: {kind: config, hidden: [4]}
model: {kind: model, module: given_model}
buffer: {kind: buffer}
trainer: {kind: trainer, model: model, buffers: [buffer], algorithm: {name: bc}}
data: {kind: source, buffer: buffer, SOURCE}
"""
OF_TWO = """
import numpy as np
from brayx.nets.policy import policy_for

def build_model(name, config):
    return policy_for(np.zeros(2, np.float32), num_actions=4)
"""


def test_a_check_reads_the_first_episode_once_and_nothing_of_a_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the model is looked at after the algorithm; what can be read only once is all there afterwards."""
    monkeypatch.setattr(f"{__name__}.JOB", OWN)
    (tmp_path / "given_model.py").write_text(OF_TWO)
    save(tmp_path / "set.npz", action=np.array([1, 3]))
    read: list[Path] = []
    inner = npz.episodes
    monkeypatch.setattr(npz, "episodes", lambda file, fields: (read.append(file), inner(file, fields))[1])
    check_learning(job(tmp_path, f"path: set.npz, {BESIDE}", monkeypatch))
    assert len(read) == 1
    made = job(tmp_path, "module: given_data, func: one", monkeypatch)
    check_learning(made)
    buffer = Buffer()
    with Sources(made, {"buffer": buffer}) as sources:  # type: ignore[dict-item]
        assert sources.join(60)
    assert buffer.taken == [0, 1, 2]


HANDLE = """
def handle(batch):
    return batch
"""


def test_records_without_what_a_memory_held_are_refused_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names another way to clone. A hook that handles batches may add a state."""
    monkeypatch.setattr(f"{__name__}.JOB", OWN.replace("given_model", "given_memory"))
    (tmp_path / "given_memory.py").write_text(
        OF_TWO.replace("num_actions=4", "num_actions=4, network=NetworkConfig(lstm=3)").replace(
            "import policy_for", "import NetworkConfig, policy_for"
        )
    )
    (tmp_path / "given_hooks.py").write_text(HANDLE)
    save(tmp_path / "set.npz", action=np.array([1, 3]))
    made = job(tmp_path, f"path: set.npz, {BESIDE}", monkeypatch)
    with pytest.raises(ConfigError, match=r"'data': .*state/c, state/h.*train_local"):
        check_learning(made)
    check_learning(JobConfig.load(tmp_path / "job.yaml", ["trainer.hooks=given_hooks"]))
    with np.load(tmp_path / "set.npz") as rows:
        memories = {f"state/{name}": np.zeros((2, 3), np.float32) for name in "hc"}
        np.savez(tmp_path / "set.npz", **rows, **memories)
    check_learning(made)


def test_a_buffer_that_drops_what_is_old_takes_no_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = job(tmp_path, "module: given_data, func: one", monkeypatch)
    check_sources(made)
    (buffer,) = made.buffers
    aged = JobConfig.load(tmp_path / "job.yaml", [f"{buffer}.max_policy_lag=1"])
    with pytest.raises(ConfigError, match=r"max_policy_lag is 1: .* version 0"):
        check_sources(aged)


def test_actions_that_the_model_does_not_have_are_refused_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "set.npz", action=np.array([1, 5]))
    made = job(tmp_path, "path: set.npz, fields: {obs: observations}", monkeypatch)
    example = (np.zeros((1, 2), np.float32),)
    with pytest.raises(ConfigError, match=r"'data': .*action: .*0 to 3, .*got 5"):
        check_sources(made, Layout.of_model(example, ActionSpec("discrete", (4,), ())))
    with pytest.raises(ConfigError, match=r"'data': .*action: expected .*\(2,\)"):
        check_sources(made, Layout.of_model(example, ActionSpec("box", (), (2,))))
    check_sources(made, Layout.of_model(example, ActionSpec("discrete", (6,), ())))


@pytest.mark.parametrize("source", ["epochs: 1", "module: given_data, path: set.npz"])
def test_a_source_is_a_module_or_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    with pytest.raises(ConfigError, match="either a `module` or a `path`"):
        job(tmp_path, source, monkeypatch)


def test_a_function_that_raises_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="'data' raised OSError: no such place"):
        Sources(job(tmp_path, "module: given_data, func: raises", monkeypatch), {"buffer": Buffer()})  # type: ignore[dict-item]


LEARNS = """
model: {kind: model, module: given_data}
trainer: {kind: trainer, model: model, buffers: [buffer], algorithm: {name: ALGORITHM}}
"""
BESIDE = "fields: {obs: observations}"


@pytest.mark.parametrize(
    ("algorithm", "source", "message"),
    [
        ("ppo", "", r"source 'data': .*has no log_prob.* 'ppo' .* without it sac, bc learn, or mixed"),
        ("impala", "", "has no log_prob"),
        ("mappo", "", "has no log_prob"),
        ("ppo", ", demonstration: true", "has no log_prob"),
        ("mixed", "", "steps to imitate are marked by `demonstration: true`"),
        ("mixed", ", demonstration: true", ""),
        ("bc", "", ""),
        ("sac", "", ""),
    ],
)
def test_records_do_not_count_as_the_agents_own_play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, source: str, message: str
) -> None:
    """The probabilities of their actions are unknown, unless they record them."""
    monkeypatch.setattr(f"{__name__}.JOB", JOB + LEARNS.replace("ALGORITHM", algorithm))
    save(tmp_path / "set.npz")
    made = job(tmp_path, f"path: set.npz, {BESIDE}{source}", monkeypatch)
    if message:
        with pytest.raises(ConfigError, match=message):
            check_sources(made)
    else:
        check_sources(made)
    with np.load(tmp_path / "set.npz") as rows:
        np.savez(tmp_path / "probabilities.npz", chance=np.full(2, -0.5), **rows)
    check_sources(job(tmp_path, "path: probabilities.npz, fields: {obs: observations, log_prob: chance}", monkeypatch))


def test_only_what_is_learned_from_must_fit_the_algorithm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learns = LEARNS.replace("[buffer]", "[other], eval_buffers: [buffer]").replace("ALGORITHM", "ppo")
    monkeypatch.setattr(f"{__name__}.JOB", JOB + "other: {kind: buffer}\n" + learns)
    save(tmp_path / "set.npz")
    check_sources(job(tmp_path, f"path: set.npz, {BESIDE}", monkeypatch))


def test_what_is_learned_from_is_done_though_held_out_data_wait_for_the_next_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learns = LEARNS.replace("[buffer]", "[buffer], eval_buffers: [held_out]").replace("ALGORITHM", "bc")
    rest = "held_out: {kind: buffer}\nmore: {kind: source, buffer: held_out, module: given_data, func: one}\n"
    monkeypatch.setattr(f"{__name__}.JOB", JOB + rest + learns)
    made = job(tmp_path, "module: given_data, func: one", monkeypatch)
    with Sources(made, {"buffer": Full(), "held_out": Buffer()}) as sources:  # type: ignore[dict-item]
        until(lambda: sources.fed["more"] == 3)
        assert not sources.done
    with Sources(made, {"buffer": Buffer(), "held_out": Full()}) as sources:  # type: ignore[dict-item]
        until(lambda: sources.fed["data"] == 3)
        until(lambda: sources.done)
        assert not sources.join(0.05), "the other one is not"


def test_files_are_marked_as_demonstrations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "set.npz")
    for source, marked in [("", False), (", demonstration: true", True)]:
        buffer = Buffer()
        with Sources(job(tmp_path, f"path: set.npz, {BESIDE}{source}", monkeypatch), {"buffer": buffer}) as sources:  # type: ignore[dict-item]
            assert sources.join(60)
        (fragment,) = buffer.fragments
        assert (DEMONSTRATION in fragment.extras) is marked
        (batch,) = BatchPacker(1, 2).add(fragment)
        assert (DEMONSTRATION in batch) is marked
    with pytest.raises(ConfigError, match="a module marks its fragments"):
        job(tmp_path, "module: given_data, demonstration: true", monkeypatch)


PLAYS = """
project: p
trial: t
model: {kind: model, module: brayx.jobs.models}
buffer: {kind: buffer}
rollout: {kind: rollout, env: Pendulum-v1, model: model, buffer: buffer, num_envs: 1}
data: {kind: source, buffer: buffer, path: set.npz, ACTIONS}
trainer: {kind: trainer, model: model, buffers: [buffer], algorithm: {name: sac}}
"""


def test_actions_of_the_rollouts_environment_are_converted(tmp_path: Path) -> None:
    """`Pendulum-v1` takes -2 to 2."""
    zeros = np.zeros((3, 3), np.float32)
    rows = {"obs": zeros, "next_obs": zeros, "reward": np.ones(3), "terminated": [False] * 3}
    np.savez(tmp_path / "set.npz", **rows, action=np.array([[-2.0], [0.5], [2.0]], np.float32))
    file = tmp_path / "job.yaml"
    file.write_text(PLAYS.replace("ACTIONS", ""))
    with pytest.raises(ConfigError, match=r"'data': .*Box \[1\] .*-2 to 2, .*-1 to 1"):
        check_learning(JobConfig.load(file))
    file.write_text(PLAYS.replace("ACTIONS", "actions: environment"))
    made = JobConfig.load(file)
    layout, buffer = check_learning(made), Buffer()
    with Sources(made, {"buffer": buffer}, layout.env) as sources:  # type: ignore[dict-item]
        assert sources.join(60)
    assert not sources.errors
    assert [fragment.action.tolist() for fragment in buffer.fragments] == [[[-1], [0.25], [1]]]


def test_a_dataset_from_a_function_is_converted_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = """
def given(name, config):
    return brayx.Dataset("FILE", fields={"obs": "observations"}, actions="environment")
"""
    given = given.replace("FILE", str(tmp_path / "set.npz"))
    monkeypatch.setattr(f"{__name__}.MODULE", "import brayx\n" + MODULE + given)
    save(tmp_path / "set.npz", action=np.array([5, 7]))
    made, buffer = job(tmp_path, "module: given_data, func: given, epochs: 2", monkeypatch), Buffer()
    env = ActionSpec.of(gymnasium.spaces.Discrete(3, start=5))
    with Sources(made, {"buffer": buffer}, env) as sources:  # type: ignore[dict-item]
        assert sources.join(60)
    assert [fragment.action.tolist() for fragment in buffer.fragments] == [[0, 2], [0, 2]]
