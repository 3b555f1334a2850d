"""Finding the training to scale: the running one of that name, with a Ray that answers."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pytest

from brayx.cluster.scale import _RAY_TAG, _running, scale
from brayx.commands.cli import main
from brayx.errors import BrayxError, ConfigError, JobNotRunning
from brayx.ports import free_port
from brayx.tracking import Trial


@pytest.fixture
def listening() -> Iterator[str]:
    """``host:port`` of a socket that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def running(uri: str, project: str, address: str) -> Trial:
    trial = Trial.open(project, "main", uri)
    trial.set_tag(_RAY_TAG, urlencode({"address": address, "auth": "", "host": "elsewhere"}))
    return trial


def refusal(uri: str, trial: str, kind: type[BrayxError]) -> str:
    with pytest.raises(kind) as refused:
        scale(trial, 2, tracking=uri)
    assert type(refused.value) is kind
    return refused.value.message


def test_a_missing_or_ended_trial_is_reported(tracking_db: str, listening: str) -> None:
    assert "no trial has the id or the name 'main'" in refusal(tracking_db, "main", ConfigError)
    trial = running(tracking_db, "games", listening)
    trial.finish("KILLED")
    said = "trial 'main' of project 'games' does not run here: MLflow says KILLED"
    assert refusal(tracking_db, "main", JobNotRunning) == said
    assert refusal(tracking_db, trial.run_id, JobNotRunning) == said


def test_a_trial_without_a_cluster_has_no_workers_to_ask_for(tracking_db: str) -> None:
    Trial.open("games", "main", tracking_db)
    assert "it trains in one process, or is only starting" in refusal(tracking_db, "main", ConfigError)


def test_a_trial_that_was_killed_or_runs_elsewhere_says_where_it_was(tracking_db: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    running(tracking_db, "games", address)
    said = refusal(tracking_db, "main", JobNotRunning)
    assert said.endswith(f"nothing answers at {address}, where its Ray was: run this on the cluster of elsewhere")


def test_among_trials_of_one_name_the_one_that_answers_is_chosen(tracking_db: str, listening: str) -> None:
    killed = running(tracking_db, "games", f"127.0.0.1:{free_port()}")
    alive = running(tracking_db, "more games", listening)
    running_trial, where = _running("main", tracking_db)
    assert (running_trial.run_id, where["address"]) == (alive.run_id, listening)
    killed.set_tag(_RAY_TAG, urlencode({**where, "host": "here"}))
    said = refusal(tracking_db, "main", ConfigError)
    assert said.startswith("2 trials named 'main' run: name one by its id, ")
    assert f"{killed.run_id} of project 'games'" in said
    assert _running(killed.run_id, tracking_db)[0].run_id == killed.run_id


@pytest.mark.parametrize("count", ["0", "-1", "many"])
def test_the_command_takes_one_worker_or_more(count: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["scale", "main", count])
    assert refused.value.code == 2
    assert "argument WORKERS" in capsys.readouterr().err
