"""`brayx.league.check`: what a check's function is given, and what becomes of its answer, in a separate process."""

from __future__ import annotations

import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brayx.errors import BadWeights, ConfigError, LeagueError, VersionUnknown
from brayx.league.check import Checked, GateCheck, score
from brayx.league.config import GateConfig
from brayx.league.gates import Verdict
from brayx.league.member import Member
from brayx.types import Weights

FUNCTIONS = """
import os
import time

import torch

def build_model(name, config):
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(torch.zeros(2))
    return module, (torch.zeros(1, 1),)

def weight(module, config):
    print("a print is not the answer")
    assert not module.training and not module.w.requires_grad
    return module.w[0] * config["settings"]["factor"]

def nothing(module, config):
    return None

def infinite(module, config):
    return float("inf")

def dies(module, config):
    os._exit(3)

def hangs(module, config):
    time.sleep(600)
"""
MAIN = [Member("main", version) for version in range(4)]


def checked(folder: Path, function: str = "weight", at_most: float = 2.0) -> Checked:
    module = "check_functions"
    (folder / f"{module}.py").write_text(FUNCTIONS)
    gate = GateConfig(check=f"{module}.{function}", at_most=at_most)
    return Checked(gate, str(folder), "model", {"model": {"module": module}, "settings": {"factor": 2.0}})


def weights(version: int) -> Weights:
    """The first weight is the version."""
    if version == 3:
        raise VersionUnknown("no weights of version 3", version=3)
    return {"w": np.array([version, 0], np.float32)}


def settled(check: GateCheck, member: Member) -> Verdict:
    until = time.monotonic() + 120
    while (verdict := check.verdict(member)) is None:
        assert time.monotonic() < until
        time.sleep(0.05)
    return verdict


def test_candidates_are_scored_once_each_in_another_process(tmp_path: Path) -> None:
    recorded: list[float] = []
    check = GateCheck(checked(tmp_path), weights, recorded.append)
    try:
        assert check.verdict(MAIN[1]) is None, "nobody waits"
        assert check.verdict(MAIN[2]) is None
        assert settled(check, MAIN[1]) == (True, "check_functions.weight is 2, at most 2")
        assert settled(check, MAIN[2]) == (False, "check_functions.weight is 4, expected at most 2")
        assert settled(check, MAIN[3]) == (False, "its check failed: no weights of version 3")
        assert settled(check, MAIN[1]).passed
        assert recorded == [2.0, 4.0]
    finally:
        check.close()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("infinite", "its check failed: .*check_functions.infinite.* inf"),
        ("dies", "its check failed: .*check_functions.dies.* code 3"),
    ],
)
def test_a_check_that_fails_lets_nobody_pass(tmp_path: Path, function: str, expected: str) -> None:
    check = GateCheck(checked(tmp_path, function), weights, pytest.fail)
    try:
        passed, reason = settled(check, MAIN[1])
        assert not passed
        assert re.match(expected, reason), reason
    finally:
        check.close()


def test_a_check_that_runs_does_not_hold_up_the_end(tmp_path: Path) -> None:
    check = GateCheck(checked(tmp_path, "hangs"), weights, pytest.fail)
    assert check.verdict(MAIN[1]) is None
    assert check.verdict(MAIN[2]) is None
    check.close()
    check.close()
    assert not any(thread.name.startswith("brayx-check") for thread in threading.enumerate())
    assert check.verdict(MAIN[2]) is None


def test_what_cannot_be_scored_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other: Any = {"v": np.zeros(2, np.float32)}
    monkeypatch.setattr("sys.path", list(sys.path))
    with pytest.raises(BadWeights, match="'w'"):
        score(checked(tmp_path), other)
    with pytest.raises(ConfigError, match=r"'check_functions'.* has no 'wieght'.*weight"):
        score(checked(tmp_path, "wieght"), weights(1))
    with pytest.raises(LeagueError, match=r"check_functions\.nothing raised TypeError"):
        score(checked(tmp_path, "nothing"), weights(1))
