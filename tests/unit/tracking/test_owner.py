"""`brayx.tracking.owner`: a run belongs to the process that opened it, as long as that runs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from brayx.errors import TrackingError
from brayx.tracking.owner import OWNER_TAG, owner_is_gone, owner_of, pid_here, refuse_if_owned

HERE = socket.gethostname()


def test_the_owner_is_gone_once_its_process_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True) as process:
        owner = owner_of(process.pid)
        assert pid_here(owner) == process.pid
        assert not owner_is_gone({OWNER_TAG: owner})
        with pytest.raises(TrackingError) as refused:
            refuse_if_owned("trial", "id", owner)
        assert refused.value.details == {"pid": process.pid, "run_id": "id"}
        process.communicate("\n")
    assert owner_is_gone({OWNER_TAG: owner})
    refuse_if_owned("trial", "id", owner)


def test_a_pid_that_is_used_again_is_another_owner() -> None:
    parent = os.getppid()
    assert not owner_is_gone({OWNER_TAG: owner_of(parent)})
    assert owner_is_gone({OWNER_TAG: f"{HERE}:{parent}:1"})


@pytest.mark.parametrize("owner", ["", "elsewhere:1:1", f"{HERE}:x:1", HERE])
def test_nothing_is_known_of_owners_elsewhere(owner: str) -> None:
    assert pid_here(owner) is None
    assert not owner_is_gone({OWNER_TAG: owner})
    refuse_if_owned("trial", "id", owner)


def test_a_process_is_not_refused_its_own_run() -> None:
    refuse_if_owned("trial", "id", owner_of(os.getpid()))
