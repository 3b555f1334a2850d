"""When a job on Ray stops waiting, and which stores its learner cannot reach."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from brayx.cluster import job as train_module
from brayx.cluster.job import _undeploy, _wait_for_weights, check_store_reachable
from brayx.errors import ConfigError, StartupError
from brayx.jobs.progress import Progress
from brayx.ports import free_port


class Starting:
    """A learner that takes longer to start than any wait."""

    running = True

    def state(self):
        return "has published no weights yet"


def test_a_service_that_is_not_ready_names_the_learners_state(monkeypatch):
    monkeypatch.setattr(train_module, "READY_TIMEOUT_S", 0.2)
    progress = Progress("t", num_steps=1, console=Console(file=io.StringIO()))
    with pytest.raises(StartupError, match=r"refused.*; .*published no weights"):
        _wait_for_weights(f"http://127.0.0.1:{free_port()}", Starting(), "model", progress)


def test_an_application_that_does_not_end_in_time_is_reported(monkeypatch):
    said = []
    for ended in (True, False):
        monkeypatch.setattr(train_module, "delete_application", lambda name, timeout_s, ended=ended: ended)
        _undeploy("actor", 2.0, said.append)
    assert said == ["the actor 'actor' did not end within 2 s: its last metrics may be missing"]


@pytest.mark.parametrize("uri", ["sqlite:////home/me/mlflow.db", "file:///home/me/mlruns"])
def test_a_store_in_a_file_is_refused_where_a_learner_on_another_machine_could_not_reach_it(uri):
    def node(name, address, *, alive=True):
        return {"NodeID": name, "NodeManagerAddress": address, "Alive": alive}

    here, beside, gone = node("a", "10.0.0.1"), node("b", "10.0.0.1"), node("c", "10.0.0.2", alive=False)
    far = node("d", "10.0.0.3")
    with pytest.raises(ConfigError, match=r"10\.0\.0\.3 .* `mlflow server"):
        check_store_reachable(uri, False, [here, beside, gone, far], "a")
    check_store_reachable(uri, True, [here, far], "a")
    check_store_reachable(uri, False, [here, beside, gone], "a")
    check_store_reachable("http://store:5000", False, [here, far], "a")
