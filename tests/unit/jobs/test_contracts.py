"""A job's contract: from its file or the YAML itself, in words, and in what a checkpoint records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from brayx.errors import ConfigError
from brayx.gamecore.contract import Contract
from brayx.jobs.behaviours import further_job
from brayx.jobs.checks import check_job, check_one_contract
from brayx.jobs.config import JobConfig
from brayx.jobs.contracts import built, by_contract, check_served_limits, contract_lines, unused_limits
from brayx.jobs.options import documented
from brayx.jobs.recorded import contract_to_resume, with_resumed_contract
from brayx.jobs.shipped import TEMPLATES
from brayx.tracking import Trial
from tests.unit.jobs.contracts import SMALL, job, recorded_in

CONTRACT = {
    "contract": 1,
    "observations": {
        "eyes": {"kind": "image", "shape": [8, 8, 3]},
        "units": {"kind": "entities", "shape": [5, 2]},
        "card": {"kind": "category", "size": 52, "start": 1},
        "said": {"kind": "text", "size": 20},
        "speed": {"shape": [2]},
    },
    "actions": {
        "dash": {"kind": "discrete", "size": 2, "mask": True},
        "steer": {"kind": "continuous", "size": 2, "low": [-1, 0], "high": 1},
        "fire": {"kind": "continuous"},
    },
}


@pytest.mark.parametrize("text", [json.dumps(SMALL), "contract: 1\nobservations: {speed: {shape: [2]}}\nactions:\n"
                                  "  dash: {kind: discrete, size: 2}\n"])  # fmt: skip
def test_a_contract_is_read_from_a_file_here_or_beside_the_yaml(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.json").write_text(text)
    monkeypatch.chdir(tmp_path)
    found = job("contract=mine.json")
    assert found.contract == Contract.parse(SMALL).as_dict()
    assert not found.needs_contract
    assert JobConfig.of(found.as_dict(), found.folder).contract == found.contract, "as a trial records it"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no-such.json", r"--set contract=no-such\.json: contract: no-such\.json cannot be read: No such file"),
        ('{"contract": 1}', "contract: observations is missing"),
        ("7", "contract: the body is 7, expected an object: a contract"),
        ("[]", "contract: the list has no contract"),
        (json.dumps([SMALL, SMALL]), "contract: two contracts are of behaviour 'agent', expected one of each"),
    ],
)
def test_a_contract_that_cannot_be_used_is_refused_with_the_job(value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        job(f"contract={value}")


def test_several_contracts_are_a_list_in_a_file_or_in_the_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [SMALL, {**CONTRACT, "behaviour": "runner"}]
    (tmp_path / "mine.json").write_text(json.dumps(documents))
    monkeypatch.chdir(tmp_path)
    for value in ("mine.json", json.dumps(documents)):
        several = job(f"contract={value}", "behaviours.runner.network.hidden=[32]")
        first, runner = by_contract(several)
        assert several.contracts == [Contract.parse(document).as_dict() for document in documents]
        assert (first.contracts, runner.contracts) == ([several.contracts[0]], [several.contracts[1]])
        assert runner.as_dict()["network"]["hidden"] == [32]
        (tmp_path / "printed.yaml").write_text(documented(several))
        assert JobConfig.load(tmp_path / "printed.yaml").contracts == several.contracts
    lines = built(several).splitlines()
    learns = "team 0; learned by ppo; vectors normalised"
    assert [line for line in lines if line.startswith("behaviour")] == [
        f"behaviour agent, {learns}",
        f"behaviour runner, {learns}",
    ]
    assert JobConfig.of(several.as_dict(), several.folder).contracts == several.contracts
    assert check_job(several) == check_job(first)
    with pytest.raises(ConfigError, match="contract has the behaviours agent, runner, and why: name"):
        check_one_contract(several, "why")


def test_a_job_without_its_contract_is_refused_where_no_game_can_say_it() -> None:
    assert job().needs_contract
    with pytest.raises(ConfigError, match="contract is null, and only `brayx train` learns"):
        check_job(job())


def test_a_contract_in_words() -> None:
    observations, actions = contract_lines(job(f"contract={json.dumps(CONTRACT)}"))
    assert observations == (
        "observations: eyes: image 8x8x3 HWC uint8; units: up to 5 entities of 2 float32; "
        "card: one of 52 categories from 1; said: text of up to 20 bytes; speed: 2 float32"
    )
    assert actions == (
        "actions: dash: one of 2 choices from 0, masked; steer: 2 numbers within bounds; fire: 1 number from -1 to 1"
    )


BEHAVIOURS = json.dumps([SMALL, {**CONTRACT, "behaviour": "runner"}])


def test_limits_are_of_each_behaviour_that_has_the_action() -> None:
    limited = job(
        f"contract={BEHAVIOURS}",
        "actor.forbidden.dash=[1]",
        "actor.forced.fire=0.5",
        "behaviours.runner.actor.forced.steer=[0, 1]",
    )
    small, runner = by_contract(limited)
    assert contract_lines(small)[2:] == ["limits: dash never 1"]
    assert contract_lines(runner)[2:] == ["limits: dash never 1; fire always 0.5; steer always 0, 1"]
    check_served_limits([small, runner])
    with pytest.raises(ConfigError, match=r"^actor\.forced\.fire has no effect: no game has this action; there"):
        check_served_limits([small])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor.forced.dsh=0", r"^actor\.forced\.dsh has no effect: no game has this action; nearest is 'dash'"),
        ("actor.forced.dash=2", r"^actor\.forced\.dash is 2, expected a whole number from 0 to 1"),
        ("actor.forced.steer=[0, 2]", r"^actor\.forced\.steer\[1\] is 2\.0, expected 0 to 1"),
        ("actor.forced.steer=[0, true]", r"^actor\.forced\.steer\[1\] is true, expected a finite number"),
        ("behaviours.runner.actor.forced.dash=left", r"^actor\.forced\.dash is 'left', expected a whole number"),
    ],
)
def test_limits_that_fit_no_contract_are_refused_by_option(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_served_limits(by_contract(job(f"contract={BEHAVIOURS}", override)))


def test_a_training_takes_only_limits_that_its_model_sees() -> None:
    check_job(job(f"contract={json.dumps(CONTRACT)}", "actor.forbidden.dash=[1]"))
    with pytest.raises(ConfigError, match=r"^actor\.forced\.fire limits an action while the model learns"):
        check_job(job(f"contract={json.dumps(CONTRACT)}", "actor.forced.fire=0"))
    with pytest.raises(ConfigError, match=r"^actor\.forbidden\.dash limits an action while the model learns"):
        further_job(job("actor.forbidden.dash=[1]"), Contract.parse(SMALL), ["runner"])
    assert unused_limits([further_job(job("actor.forced.jump=1"), Contract.parse(SMALL), ["runner"])]) == {
        "actor.forced.jump": "actor.forced.jump has no effect: no game has this action; there is 'dash'"
    }, "another behaviour may still come"


def test_limits_need_a_contract() -> None:
    with pytest.raises(ConfigError, match=r"actor\.forced: .*expected \{\}, because serialize is not contract"):
        JobConfig.load(TEMPLATES / "cartpole.yaml", ["actor.forced.dash=0"])


def test_what_is_built_has_the_layers_and_their_parameters() -> None:
    document = {**SMALL, "behaviour": "chaser", "team": 1}
    lines = built(job(f"contract={json.dumps(document)}", "network.normalise=false")).splitlines()
    assert lines[0] == "behaviour chaser, team 1; learned by ppo; vectors not normalised"
    assert lines[1] == "observations: speed: 2 float32"
    assert any(line.startswith("encoder.speed ") for line in lines), "layers have the observation's name"
    assert "model:" in lines
    assert lines[-1].endswith("parameters in all")


def test_the_contract_to_resume_is_that_of_an_interrupted_trial_s_newest_checkpoint(
    tmp_path: Path, tracking_db: str
) -> None:
    assert contract_to_resume("game", "main", tracking_db) is None
    trial = Trial.open("game", "main", tracking_db)
    assert contract_to_resume("game", "main", tracking_db) is None, "it has no weights yet"
    (checkpoint := tmp_path / "checkpoint").mkdir()
    trial.save_checkpoint(recorded_in(checkpoint, Contract.parse(SMALL).as_dict()), 100)
    recorded = contract_to_resume("game", "main", tracking_db)
    assert with_resumed_contract(job(), "main", recorded).contract == Contract.parse(SMALL).as_dict()
    trial.finish()
    assert contract_to_resume("game", "main", tracking_db) is None, "a finished trial is not resumed"
