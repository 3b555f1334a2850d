"""A user's own algorithm, a module next to the YAML: found, checked, refused by name, trained, sent to a process.

The algorithm is the one in docs/guide-algorithms.md.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import uuid

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from brayx.algorithms.build import AnyAlgorithm, build, check_fits
from brayx.errors import ConfigError, ModelError
from brayx.jobs.config import JobConfig
from brayx.local.train import train_local
from brayx.local.training import Training
from brayx.nets.mlp import ActorCritic
from brayx.search import space as search
from brayx.trainer.config import TrainerConfig
from brayx.trainer.fits import check_model
from brayx.trainer.loop import LearnerLoop
from tests.unit.algorithms.tables import Table, random_batch, sgd
from tests.unit.test_docs import ROOT, snippets_of
from tests.unit.trainer.parts import Folders, Numbers, Weights, batches

CONFIGS = TypeAdapter(AnyAlgorithm)
SHOWN = {
    snippet.is_("file"): snippet.text
    for snippet in snippets_of(ROOT / "docs" / "guide-algorithms.md")
    if snippet.is_("file")
}
AWR = SHOWN["regression/awr.py"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The guide's job, with its module renamed, because a process loads a name from one folder only."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    module = f"awr_{uuid.uuid4().hex}"
    (tmp_path / f"{module}.py").write_text(AWR)
    (tmp_path / "awr.yaml").write_text(SHOWN["regression/awr.yaml"].replace("module: awr", f"module: {module}"))
    return tmp_path


def module_of(folder):
    return next(folder.glob("awr_*.py")).stem


def options(folder, **options):
    return CONFIGS.validate_python({"module": module_of(folder), **options}, context={"folder": str(folder)})


def test_the_guides_algorithm_has_at_most_a_hundred_lines():
    assert len(AWR.splitlines()) <= 100


def test_a_job_names_its_module_and_gives_its_options(folder):
    job = JobConfig.load(folder / "awr.yaml")
    (trainer,) = job.trainers.values()
    assert type(trainer.algorithm).__name__ == "AWRConfig"
    assert (trainer.algorithm.name, trainer.algorithm.beta) == ("awr", 0.3)
    (buffer,) = job.buffers.values()
    assert (buffer.sampler, buffer.unroll_length, buffer.batch_size) == ("uniform", 32, 16)
    plain = job.as_dict()["trainer"]["algorithm"]
    assert plain["module"] == module_of(folder)
    assert CONFIGS.validate_python(plain) == trainer.algorithm


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("beta=-1", "trainer.algorithm.beta: .*-1.* 0"),
        ("betta=1", "trainer.algorithm.betta: .*'beta'"),
        ("module=awrr", "trainer.algorithm: module 'awrr'"),
        ("module=3", "trainer.algorithm: module is 3"),
        ("module=json", "'json' .*defines none"),
        ("module=several", "'several' .*defines One, Two"),
        ("module=unbuilt", "One needs a method build"),
        ("module=broken", "'broken' .*ZeroDivisionError"),
    ],
)
def test_mistakes_are_refused_by_name(folder, override, message):
    source = "from brayx.algorithms.optimise import OptimiseConfig\nclass One(OptimiseConfig):\n    pass\n"
    (folder / "unbuilt.py").write_text(source)
    (folder / "several.py").write_text(f"{source}class Two(One):\n    pass\n")
    (folder / "broken.py").write_text("1 / 0")
    try:
        with pytest.raises(ConfigError, match=message):
            JobConfig.load(folder / "awr.yaml", [f"trainer.algorithm.{override}"])
    finally:
        for name in ("unbuilt", "several", "broken"):
            sys.modules.pop(name, None)


def test_without_a_name_it_takes_its_modules_name(folder):
    (folder / f"{module_of(folder)}.py").write_text(AWR.replace('    name: Literal["awr"] = "awr"\n', ""))
    assert options(folder).name == module_of(folder)


def test_its_class_requirements_are_checked_against_the_job(folder):
    config = options(folder)
    check_fits(config, kind="discrete", unroll_length=32, sampler="uniform", gives={"obs"})
    with pytest.raises(ConfigError, match=r"sampler is 'fifo', .*'awr'"):
        check_fits(config, sampler="fifo")
    with pytest.raises(ConfigError, match="'awr' neither gives priorities"):
        check_fits(config, sampler="prioritised")
    with pytest.raises(ModelError, match="algorithm 'awr' needs an output 'value'"):
        check_model(config, Policy(), (np.zeros((1, 3), np.float32),))
    with pytest.raises(ValidationError, match="accumulate"):
        options(folder, accumulate=2)


class Policy(torch.nn.Linear):
    """A policy without a value."""

    def __init__(self):
        super().__init__(3, 2)

    def forward(self, obs):
        return {"logits": super().forward(obs)}


def test_one_whose_constructor_fails_is_refused_before_anything_starts(folder):
    (folder / f"{module_of(folder)}.py").write_text(AWR.replace("AWR(module, optimizer", "AWR(optimizer"))
    with pytest.raises(ModelError, match=r"'awr' raised AttributeError: .*:\d+\)"):
        check_model(options(folder), ActorCritic(3, 2), (np.zeros((1, 3), np.float32),))


def test_a_search_may_vary_its_options(folder, monkeypatch):
    monkeypatch.chdir(folder)
    config, training = search.arguments(module_of(folder), {"beta": 0.3, "num_envs": 4})
    assert (config.name, config.beta, training.num_envs) == ("awr", 0.3, 4)
    with pytest.raises(ConfigError, match=r"'betta'; .*'beta'"):
        search.arguments(module_of(folder), {"betta": 0.3})


def test_it_cannot_be_part_of_another_algorithm():
    with pytest.raises(ValidationError, match=r"reinforcement .*without a module"):
        CONFIGS.validate_python({"name": "mixed", "reinforcement": {"module": "awr"}})


def test_another_process_finds_it_without_its_folder_on_sys_path(folder):
    config = TrainerConfig(model="model", buffers=["buffer"], algorithm=options(folder, beta=0.25))
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).algorithm.beta)"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, input=pickle.dumps(config), capture_output=True, check=True, timeout=120, cwd=ROOT)
    assert done.stdout.decode().strip() == "0.25"


def test_its_update_matches_the_paper(folder):
    """Equation 7 step by step, for a tabular policy and value."""
    table, batch = Table(7, 3), random_batch()
    config = options(folder, max_grad_norm=None, learning_rate_schedule="constant", td_lambda=0.0, value_coef=0.0)
    policy, worth = table.policy.detach().clone().numpy(), table.worth.detach().numpy()
    data = {key: value.numpy() for key, value in batch.items()}
    steps = [place for place in np.ndindex(5, 9) if data["mask"][place]]
    after = {place: data["obs"][place[0], place[1] + 1] for place in steps}
    advantage = {
        place: data["reward"][place]
        + 0.99 * worth[after[place]] * (not data["terminated"][place])
        - worth[data["obs"][place]]
        for place in steps
    }
    every = np.array(list(advantage.values()))
    expected = np.zeros_like(policy)
    for place in steps:
        obs, action = data["obs"][place], data["action"][place]
        weight = min(np.exp((advantage[place] - every.mean()) / every.std() / config.beta), config.max_weight)
        probability = np.exp(policy[obs]) / np.exp(policy[obs]).sum()
        expected[obs] += weight * (probability - np.eye(3)[action]) / len(steps)
    build(config, table, sgd(table)).update(batch, 0.0)
    np.testing.assert_allclose(policy - table.policy.detach().numpy(), expected, atol=1e-6)


def test_it_learns(folder):
    """CartPole's random policy has a mean return of 22."""
    training = Training(num_steps=60_000, learning_rate=3e-3, min_columns=50, capacity=2_000, target_return=60, seed=1)
    result = train_local("CartPole-v1", options(folder, beta=0.3), training)
    assert result.reason == "target_return"
    assert result.return_mean >= 60


def run(folder, keeper, count, algorithm):
    torch.manual_seed(0)
    config = TrainerConfig(model="model", buffers=["buffer"], algorithm=algorithm, num_steps=10_000)
    weights, numbers = Weights(), Numbers()
    summary = LearnerLoop(
        config,
        ActorCritic(3, 2, hidden=(16,)),
        (np.zeros((1, 3), np.float32),),
        batches=batches(count),
        publisher=lambda newest: weights,
        numbers=numbers,
        keeper=keeper,
    ).run()
    return summary, numbers


def test_a_training_continues_from_its_checkpoint(folder, tmp_path):
    keeper = Folders(tmp_path / "checkpoints")
    first, numbers = run(folder, keeper, 4, options(folder))
    assert {"loss", "policy_loss", "value_loss", "learner/largest_weight"} <= set(numbers.samples)
    second, _ = run(folder, keeper, 4, options(folder))
    assert second.resumed
    assert (second.updates, second.env_steps) == (2 * first.updates, 2 * first.env_steps)


def test_an_error_names_its_file_and_line_and_is_not_retried(folder, tmp_path):
    known = "        target = values"
    broken = AWR.replace(known, f'        missing = batch["missing"]\n{known}')
    file = folder / f"{module_of(folder)}.py"
    file.write_text(broken)
    line = next(number for number, text in enumerate(broken.splitlines(), 1) if "missing =" in text)
    with pytest.raises(ModelError, match=f"'awr' raised KeyError: .*{file}:{line}"):
        run(folder, Folders(tmp_path / "checkpoints"), 1, options(folder))
