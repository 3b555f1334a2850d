"""The contract that a checkpoint's job records, and the one that a resumed trial goes on with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from brayx.errors import ConfigError
from brayx.gamecore.contract import Contract
from brayx.jobs.recorded import contracts_of_children, recorded_contract, with_contract, with_resumed_contract
from brayx.model.arms import WeightSource
from brayx.tracking import Trial
from tests.unit.jobs.contracts import SMALL, job, recorded_in


def test_a_served_job_has_the_contract_of_its_weights(tmp_path: Path) -> None:
    contract = Contract.parse(SMALL).as_dict()
    sources = {"model": WeightSource(checkpoint=str(recorded_in(tmp_path, contract)))}
    assert with_contract(job(), sources).contract == contract
    same = job(f"contract={json.dumps({**SMALL, 'encoding': 'packed'})}")
    assert with_contract(same, sources) is same, "the encoding is the game's matter"
    other = {**SMALL, "observations": {"speed": {"shape": [3]}}}
    with pytest.raises(ConfigError, match=r"weights of model 'model': observations\.speed\.shape is \[3\], expected"):
        with_contract(job(f"contract={json.dumps(other)}"), sources)
    with pytest.raises(ConfigError, match="no model that is served has one: train the job first"):
        with_contract(job(), {"model": WeightSource()})


def test_a_resumed_trial_keeps_its_contract() -> None:
    contract = Contract.parse(SMALL).as_dict()
    assert with_resumed_contract(job(), "main", contract).contract == contract
    assert with_resumed_contract(job(), "main", None).needs_contract, "its first game says it again"
    same = job(f"contract={json.dumps({**SMALL, 'encoding': 'packed'})}")
    assert with_resumed_contract(same, "main", contract) is same
    other = job(f"contract={json.dumps({**SMALL, 'observations': {'speed': {'shape': [3]}}})}")
    assert with_resumed_contract(other, "main", None) is other
    with pytest.raises(ConfigError, match=r"trial 'main' learned another: observations\.speed\.shape is .* add --new"):
        with_resumed_contract(other, "main", contract)


def test_a_checkpoint_of_a_job_without_a_contract_has_none(tmp_path: Path) -> None:
    assert recorded_contract(tmp_path) is None
    assert recorded_contract(recorded_in(tmp_path, None)) is None


def test_a_resumed_trial_has_the_behaviours_of_its_children(tmp_path: Path, tracking_db: str) -> None:
    trial = Trial.open("p", "main", tracking_db)
    assert contracts_of_children(trial, "agent") == []
    contract = {**Contract.parse(SMALL).as_dict(), "behaviour": "runner"}
    other = Trial.open("p", "other", tracking_db)
    for name, parent in (("runner", trial), ("late", trial), ("chaser", other)):
        child = Trial.open("p", name, tracking_db, parent=parent)
        if name != "late":  # it has no checkpoint, so its games say their contract again
            folder = tmp_path / name
            folder.mkdir()
            child.save_checkpoint(recorded_in(folder, {**contract, "behaviour": name}), 100)
    assert contracts_of_children(trial, "agent") == [contract]
    assert contracts_of_children(trial, "runner") == [], "the trial's first game is of that behaviour now"
