"""Runs brayx's commands as a user does, in separate processes and folders, and watches them from outside.

All processes of such a command carry a mark in their environment, which distinguishes them from those of other tests.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import psutil

from brayx.metrics.charts import NUMBERS_FILE
from brayx.shutdown import marked
from brayx.tracking import Trial, tracking_uri
from tests.processes import RAY_IS_LATE, ray_trouble
from tests.stores import new_store

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / "pipelines" / "templates"
BIN = Path(sys.executable).parent
MARK = "BRAYX_TEST_COMMAND"
WRITES_TRIALS = ("train", "demo", "tune")
"""Commands that make an MLflow store where there is none, and do not load MLflow to look into one."""
FREE_PORTS = ("actor.port=0", "actor.native_port=0", "actor.tcp_port=0")
"""Overrides of a job with free ports."""
NO_RAY = """
import os, traceback
with open(os.environ["RAY_IMPORTED"], "a") as imported:
    imported.write("".join(traceback.format_stack()))
raise ImportError("Ray must not be imported here")
"""
ONE_GAME_EACH = "brayx gamecore gym CartPole-v1 --url {url} --seed {index} --quiet"
ONE_GAME_EACH_OVER_WS = (f"actor.gamecores.0.command={ONE_GAME_EACH}", "actor.gamecores.0.door=ws")
"""Overrides of the CartPole job: each gamecore plays one game, whose session ends with its connection."""
START_S = 240.0
"""For a whole stack to come up, on a machine that does other things too."""
LEFT_S = 60.0
"""For the last process of a command that has ended; no promise, only a failing test waits as long."""
CONTROL_C_S = 10.0
"""From Ctrl-C to the last process's end on an idle machine: the eight seconds that are promised, and what measuring
takes."""


def job_folder(folder: Path, **files: str) -> Path:
    """Copies the CartPole job and further modules to a folder, as for a user's game; returns its YAML."""
    for file in (TEMPLATES / "cartpole.yaml", *TEMPLATES.glob("*.py")):
        shutil.copy(file, folder)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder / "cartpole.yaml"


class Command:
    """A command of this environment (``brayx``, ``serve``), running as a context; ended whole at its end.

    Its temporary files are in a separate folder, except Ray's, because sockets need short paths, and torch's caches.

    Args:
        words: the command, of this environment or with its whole path, and its arguments.
        folder: where it runs; its output is kept there.
        environment: variables to set; None takes one away.
        runs_in: where it runs, if not in ``folder``.
    """

    _count = 0

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        environment: Mapping[str, str | None] | None = None,
        runs_in: Path | None = None,
    ) -> None:
        Command._count += 1
        self.folder = folder
        self._mark = secrets.token_hex(8)
        self._out = folder / f"stdout-{Command._count}.txt"
        self._err = folder / f"stderr-{Command._count}.txt"
        self._temporary = folder / f"tmp-{Command._count}"
        self._temporary.mkdir()
        defaults = {
            "COLUMNS": "400",
            "RAY_TMPDIR": os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp",
            "TMPDIR": str(self._temporary),
            "TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")),
        }
        variables = {**os.environ, **defaults, **(environment or {}), MARK: self._mark}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [str(BIN / words[0]), *words[1:]],
                cwd=runs_in or folder,
                env={name: value for name, value in variables.items() if value is not None},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait(timeout=240)

    @property
    def out(self) -> str:
        """Its standard output so far."""
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        """Its standard error so far."""
        return self._err.read_text(errors="replace")

    @property
    def temporary(self) -> list[str]:
        """Its existing temporary files."""
        return sorted(str(file.relative_to(self._temporary)) for file in self._temporary.rglob("*"))

    def processes(self, *words: str) -> list[psutil.Process]:
        """Its living processes, itself included; only those whose command line has all ``words``."""
        return marked(MARK, self._mark, *words)

    def pids(self, *words: str) -> set[int]:
        """Process ids of `processes`."""
        return {process.pid for process in self.processes(*words)}

    def lines(self) -> list[str]:
        """Process ids and command lines of `processes`, for people."""
        lines = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                lines.append(f"{process.pid}: {' '.join(process.cmdline())[:120]}")
        return lines

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = START_S) -> None:
        """Waits for a condition while the command runs."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            over = "the command ended" if self.process.poll() is not None else f"{timeout_s:g} s were over"
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{over} before {what}; it said:\n{self.err[-4000:]}\n{self.out[-1000:]}")
            time.sleep(0.1)

    def says(self, text: str) -> Callable[[], bool]:
        """A condition: it has written ``text``."""
        return lambda: text in self.err or text in self.out

    def ended(self, timeout_s: float = START_S) -> int:
        """Waits for it to end; returns the exit code."""
        try:
            return self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s:g} s; it said:\n{self.err[-4000:]}") from None

    def control_c(self, *, group: bool = True) -> None:
        """SIGINT as a terminal sends it: to the whole foreground group; or to the command alone."""
        if group:
            os.killpg(self.process.pid, signal.SIGINT)
        else:
            self.process.send_signal(signal.SIGINT)

    def gone(self, timeout_s: float = LEFT_S) -> float:
        """Waits until neither the command nor anything that it started is alive; seconds that took."""
        began = time.monotonic()
        while self.process.poll() is None or self.processes():
            if time.monotonic() - began > timeout_s:
                raise AssertionError(f"left after {timeout_s:.1f} s: {self.lines()}; it said:\n{self.err[-4000:]}")
            time.sleep(0.05)
        return time.monotonic() - began


@contextlib.contextmanager
def serve_run(
    words: Sequence[str],
    folder: Path,
    answers: Callable[[], bool],
    environment: Mapping[str, str | None] | None = None,
    runs_in: Path | None = None,
) -> Iterator[Command]:
    """A `serve run` that answers. A Ray that is late is started once more, and the summary of the tests says so.

    Args:
        words, folder, environment, runs_in: as of `Command`.
        answers: whether the service answers.
    """
    with contextlib.ExitStack() as stack:
        command = stack.enter_context(Command(words, folder, environment, runs_in))
        command.until(lambda: answers() or RAY_IS_LATE in command.err, "the service answered")
        if RAY_IS_LATE in command.err:
            ray_trouble.append(f"{' '.join(words)}: the node {RAY_IS_LATE}")
            stack.close()
            command = stack.enter_context(Command(words, folder, environment, runs_in))
        stack.enter_context(said_on_failure(command))
        command.until(answers, "the service answered")
        yield command
        command.control_c(group=False)
        command.gone(60.0)


def tuned(*words: str) -> list[str]:
    """A command of this environment with the settings for HAProxy, as the guide has users start it."""
    return ["/bin/sh", str(ROOT / "docker" / "serve.sh"), str(BIN / words[0]), *words[1:]]


def setting(*options: str) -> list[str]:
    """The words that override options of a job: ``--set KEY=VALUE ...``."""
    return [word for option in options for word in ("--set", option)]


def brayx(folder: Path, *words: str, environment: Mapping[str, str | None] | None = None) -> Command:
    """``brayx WORDS`` running in ``folder``. If it writes trials, there is an empty store, unless one was made before.

    That a command makes its store itself: `tests/end_to_end/test_new.py`.
    """
    if words[0] in WRITES_TRIALS and not (folder / "mlflow.db").exists():
        new_store(folder)
    return Command(["brayx", *words], folder, environment)


def without_ray(folder: Path) -> dict[str, str]:
    """Variables of a command where importing Ray fails, and is noted in ``imported.txt`` of ``folder``."""
    (folder / "without" / "ray").mkdir(parents=True, exist_ok=True)
    (folder / "without" / "ray" / "__init__.py").write_text(NO_RAY)
    path = os.pathsep.join(filter(None, [str(folder / "without"), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "RAY_IMPORTED": str(folder / "imported.txt")}


def serves(url: str, model: str) -> bool:
    """Whether a service answers there that acts with a trained ``model``, for a condition of `Command.until`."""
    try:
        with urllib.request.urlopen(f"{url}/", timeout=5) as reply:
            facts = json.load(reply)
    except (OSError, ValueError):
        return False
    return bool(facts["mode"] == "serve" and facts["policy_versions"][model] > 0)


def alone_for(seconds: float, command: Command) -> float:
    """``seconds`` of an idle machine, scaled to this one: other processes' measured share of the CPUs is allowed for.

    On an idle machine this is ``seconds`` itself, and never more than five times that.
    """
    cores = os.cpu_count() or 1
    busy, ours = _cpu_seconds(), _cpu_seconds(command)
    began = time.monotonic()
    time.sleep(0.5)
    elapsed = time.monotonic() - began
    others = max(0.0, (_cpu_seconds() - busy) - max(0.0, _cpu_seconds(command) - ours)) / elapsed
    free = max(cores - others, cores / 5)
    return seconds * cores / free if others > 0.1 * cores else seconds


def control_c_in_time(command: Command, *, group: bool = True) -> None:
    """Ctrl-C, after which nothing may be left within `CONTROL_C_S`, scaled to the load before or after it.

    Others may begin to need the CPUs at any moment, so one look does not do.
    """
    limit_s = alone_for(CONTROL_C_S, command)
    command.control_c(group=group)
    gone_s = command.gone(5 * CONTROL_C_S)
    if gone_s >= limit_s:
        limit_s = alone_for(CONTROL_C_S, command)
    assert gone_s < limit_s, f"{gone_s:.1f} s after Ctrl-C, expected at most {limit_s:.1f} s; it said:\n{command.err}"


def _cpu_seconds(command: Command | None = None) -> float:
    """CPU time used so far by the whole machine, or by a command's processes."""
    if command is None:
        times = psutil.cpu_times()
        return float(times.user + times.system + times.nice)
    total = 0.0
    for process in command.processes():
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def trials(folder: Path, project: str = "cartpole") -> dict[str, list[Trial]]:
    """Trials by name, oldest first, of the MLflow store in ``folder``."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri(folder / "mlflow.db"))
    experiment = client.get_experiment_by_name(project)
    trials_by_name: dict[str, list[Trial]] = {}
    if experiment is not None:
        for run in client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"]):
            trial = Trial(tracking_uri(folder / "mlflow.db"), run.info.run_id, project, run.info.run_name or "")
            trials_by_name.setdefault(trial.name, []).append(trial)
    return trials_by_name


def written(trial: Trial, metric: str) -> list[tuple[int, float]]:
    """Every ``(step, value)`` of a metric in the order in which they were written."""
    from mlflow import MlflowClient

    points = MlflowClient(trial.uri).get_metric_history(trial.run_id, metric)
    return [(point.step, point.value) for point in sorted(points, key=lambda point: point.timestamp)]


def goes_on(points: Sequence[tuple[int, float]]) -> bool:
    """Whether steps and values of `written` metrics never decrease."""
    return all(a[0] <= b[0] and a[1] <= b[1] for a, b in itertools.pairwise(points))


def metrics_of(command: Command, name: str = "main") -> dict[str, float]:
    """Newest numbers of the trial that a training command runs; empty while there are none.

    The store is not opened before the command has made it, as two processes cannot make it at once.
    """
    if not any(command.folder.glob(f"mlartifacts/*/*/artifacts/{NUMBERS_FILE}")):
        return {}
    return numbers_of(trials(command.folder)[name][-1])


def numbers_of(trial: Trial) -> dict[str, float]:
    """Every number of a trial by brayx's own name, seconds old at most; empty before they are first written."""
    from mlflow.artifacts import download_artifacts
    from mlflow.exceptions import MlflowException

    try:
        path = download_artifacts(run_id=trial.run_id, artifact_path=NUMBERS_FILE, tracking_uri=trial.uri)
        return json.loads(Path(path).read_text())
    except (MlflowException, OSError, ValueError):  # missing, or being written
        return {}


def is_free(port: int) -> bool:
    """Whether the ports that the test chose or the command took are free again."""
    return all(c.laddr.port != port or c.status != psutil.CONN_LISTEN for c in psutil.net_connections("tcp"))


@contextlib.contextmanager
def said_on_failure(command: Command) -> Iterator[None]:
    """Adds what the command said to an assertion that fails."""
    try:
        yield
    except AssertionError as error:
        error.add_note(f"the command said:\n{command.err[-4000:]}\n{command.out[-1000:]}")
        raise
