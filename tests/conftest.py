"""Fixtures every test may use: one local Ray for the session, a fresh tracking database, and the check for leftovers.

The environment is set here, before anything imports Ray. A new local cluster of Ray's would write an auth token into
the home folder; a token of this session's own keeps the cluster shut to others and the home as it was.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import math
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest
from xdist.scheduler import LoadScopeScheduling

from brayx import command_line
from brayx.cluster import NAMESPACE
from brayx.logs import limit
from brayx.replay.config import STREAM_ENVIRONMENT
from brayx.temporary import temporary_files
from tests.processes import SESSION_MARK, ours, ray_trouble
from tests.stores import new_store

LEFTOVER_WAIT_S = 60.0
_ON_RAY = "tests/integration/"

pytest.register_assert_rewrite("brayx.gamecore.compliance")  # a failure shows what the service said

os.environ[SESSION_MARK] = secrets.token_hex(8)
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(16)
os.environ.update(RAY_USAGE_STATS_ENABLED="0", MLFLOW_DISABLE_TELEMETRY="true", RAY_DEDUP_LOGS="0")
os.environ.update(STREAM_ENVIRONMENT)
# Otherwise a call to Ray from a test without `ray_cluster` starts a cluster, or joins one of somebody else.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
os.environ.pop("MLFLOW_TRACKING_URI", None)
os.environ.pop("RAY_ADDRESS", None)
for _threads in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_threads, "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background of a script: the commands of the tests would inherit that, and not end on Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A loaded machine is no fault of a property.
hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("untimed")

gc.disable()  # until all is imported: collections are up to half of the CPU time of that

_leftovers: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    """What libraries leave among the temporary files (MLflow a folder a model) goes with the session; pytest's own
    folders stay where they were, for looking at after a failure."""
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    stack = contextlib.ExitStack()
    stack.enter_context(temporary_files(output=True))
    config.add_cleanup(stack.close)


@pytest.fixture(autouse=True)
def _lines_of_one_test() -> None:
    """Resets the limit of log lines, and the time of a command's newest line, before each test."""
    limit.forget()
    command_line._said_at = math.inf


@pytest.fixture(autouse=True)
def _interrupts_of_one_test() -> Iterator[None]:
    """Restores what Ctrl-C does. Otherwise a command that ran in this process ends it 8 s after an interrupt in a later
    test."""
    hook = sys.unraisablehook
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    sys.unraisablehook = hook
    for number, handler in handlers.items():
        if handler is not None:  # it was not set by Python
            signal.signal(number, handler)


@pytest.fixture(scope="module", autouse=True)
def _modules_of_one_file() -> Iterator[None]:
    """Forgets the modules that a file's tests loaded from folders of jobs, since a process can load a name from one
    folder only: whether two files may use the same name must not depend on which of them share a worker."""
    path = list(sys.path)
    yield
    added = [folder for folder in sys.path if folder not in path]
    # Packages extend the path too, such as Ray by what it brings along.
    folders = [folder for folder in added if not Path(folder).is_relative_to(sys.prefix)]
    sys.path[:] = [*path, *(folder for folder in added if folder not in folders)]
    for name, module in sys.modules.copy().items():  # other threads may be importing
        file = getattr(module, "__file__", None)
        if file and any(Path(file).is_relative_to(folder) for folder in folders):
            del sys.modules[name]


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """One local Ray that all tests of the session share; the value is its namespace.

    It claims four CPUs whatever the machine has, since most actors here only wait. Tests clean up what they name.
    """
    import ray

    from brayx.cluster.start import start_ray

    with pytest.MonkeyPatch.context() as patch:
        # 15 by default, so Ray's workers would starve while other workers of pytest-xdist compute.
        patch.setenv("RAY_worker_niceness", "0")
        start_ray(
            ray_trouble.append,
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            namespace=NAMESPACE,
            object_store_memory=512 * 1024 * 1024,
        )
    yield NAMESPACE
    ray.shutdown()


@pytest.fixture(scope="session")
def new_tracking_db() -> Callable[[Path], str]:
    """Makes a fresh, migrated sqlite store in a folder, and gives its URI."""
    from brayx.tracking import initialise, tracking_uri

    return lambda folder: initialise(tracking_uri(new_store(folder)))


@pytest.fixture
def tracking_db(new_tracking_db: Callable[[Path], str], tmp_path: Path) -> str:
    """URI of a fresh, migrated sqlite store in ``tmp_path``."""
    return new_tracking_db(tmp_path)


class _OneRay(LoadScopeScheduling):
    """Distributes files, as ``--dist loadfile`` does, but all of `tests/integration` to one worker, which has Ray."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return _ON_RAY if file.startswith(_ON_RAY) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    return _OneRay(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


def pytest_collection_finish() -> None:
    gc.freeze()  # modules are never garbage
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Makes torch's ONNX exporter read its function library once instead of once per model, which is most of the time
    of a small export. Imports nothing."""
    exporter = sys.modules.get("torch.onnx._internal.exporter._registration")
    if exporter is not None and not hasattr(exporter.ONNXRegistry.from_torchlib, "cache_info"):
        exporter.ONNXRegistry.from_torchlib = staticmethod(functools.cache(exporter.ONNXRegistry.from_torchlib))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails the session if a process it started is still there: nothing may outlive the tests, ports included. Its exit
    code is not that of failed tests.

    A mark in their environment identifies them, because an orphan has another parent. With pytest-xdist, each worker
    has a separate mark and checks its own processes; the controller only gets the result.
    """
    if session.config.getoption("dist", "no") != "no":
        session.exitstatus = pytest.ExitCode.INTERRUPTED if _leftovers else session.exitstatus
        return
    deadline = time.monotonic() + LEFTOVER_WAIT_S
    while (left := ours()) and time.monotonic() < deadline:
        time.sleep(0.2)
    for process in left:
        with contextlib.suppress(psutil.Error):
            ports = sorted({c.laddr.port for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN})
            listening = f", listening on {ports}" if ports else ""
            test = process.environ().get("PYTEST_CURRENT_TEST", "no test")
            _leftovers.append(f"{process.pid}: {' '.join(process.cmdline())[:160]}{listening}, started by {test}")
            process.kill()
    if _leftovers:
        session.exitstatus = pytest.ExitCode.INTERRUPTED
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput |= {"leftovers": _leftovers, "ray_trouble": ray_trouble}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes over the findings of a worker of pytest-xdist."""
    output = getattr(node, "workeroutput", {})
    _leftovers.extend(output.get("leftovers", []))
    ray_trouble.extend(output.get("ray_trouble", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if ray_trouble:
        terminalreporter.section("Ray was started again", yellow=True)
        terminalreporter.write_line("\n".join(ray_trouble))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Names the processes at the very end, since only the end of a long log may be kept."""
    if _leftovers and not hasattr(config, "workerinput"):
        writer = config.get_terminal_writer()
        writer.sep("=", "processes left by the tests (killed now)", red=True)
        writer.line("\n".join(_leftovers))
