"""Starts and ends the Ray cluster that a job runs on, or joins one, with Serve's ingress if the job has a door.

A local cluster takes the HAProxy ingress, because Serve's own proxy passes about 200 requests a second on two cores
and HAProxy ten times as many (`benchmarks/ticks.py`). It listens on loopback unless the job says otherwise. Knows
nothing of trials or agents.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import psutil

from brayx.cluster import NAMESPACE, ray_private
from brayx.cluster.start import join_ray, start_ray
from brayx.errors import StartupError, first_line
from brayx.gamecore.doors import http_urls
from brayx.ports import check_ports, free_port
from brayx.replay.config import STREAM_ENVIRONMENT
from brayx.temporary import temporary_files

logger = logging.getLogger(__name__)

Ingress = Literal["haproxy", "serve"]

_MIN_LOGICAL_CPUS = 4
"""Ray's reservations, not cores: with fewer, a Train worker and a Data task wait for each other on a small machine."""
_END_S = 2.0


def check_ingress(host: str, port: int, found_host: str | None, found_port: int) -> None:
    """Checks that the Serve of a joined cluster listens where the job's door must be.

    Args:
        host, port: address of the job's door; port 0 takes Serve's port.
        found_host, found_port: address of Serve; None: it does not listen.

    Raises:
        StartupError: it listens elsewhere, and Serve does not move while it runs.
    """
    if found_host is None:
        raise StartupError("Serve of the joined cluster runs without an HTTP ingress: shut it down first")
    if found_host == host and port in (0, found_port):
        return
    raise StartupError(
        f"the job's door must be {host}:{port}, but Serve of the joined cluster listens at {found_host}:{found_port} "
        f"already: use that with --set actor.host={found_host} --set actor.port={found_port} (the job's actor "
        f"component), or shut that Serve down first",
        port=found_port,
    )


@dataclass
class Cluster:
    """A context: inside it Ray runs, connected in namespace ``brayx``, with Serve's ingress at `url` if it has a door.

    Attributes:
        host, port: where the ingress listens; port 0 takes a free one, or that of the Serve which runs there already.
        ingress: ``haproxy``, or Serve's own proxy ``serve``, for a cluster started here; None: there is no door, and
            Serve is left alone.
        address: of a running cluster to join (``auto``: the one on this machine); empty starts one.
        ports: all that a job opens here, as for `check_ports`; empty: the ingress's alone.
    """

    host: str = "127.0.0.1"
    port: int = 0
    ingress: Ingress | None = "haproxy"
    address: str = ""
    ports: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    _node_id: str = ""
    _after: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def url(self) -> str:
        """Base URL of the HTTP door."""
        return f"http://{'127.0.0.1' if self.host == '0.0.0.0' else self.host}:{self.port}"

    @property
    def urls(self) -> dict[str, str]:
        """Base URL of each door at that port, by name."""
        return http_urls(self.url.removeprefix("http://"))

    def __enter__(self) -> Cluster:
        wanted = self.port
        if self.ingress is not None:
            self.port = self.port or free_port(self.host)
        if not self.address:
            if self.ingress is not None:
                ports = self.ports or {"actor.port": (self.host, self.port)}
                _end_orphans({port for _, port in ports.values()})
                check_ports(ports)
            for name, value in self.environment().items():
                os.environ.setdefault(name, value)  # the user's own value stays
        with contextlib.ExitStack() as after:
            if not self.address:
                after.enter_context(temporary_files())
            self._start(wanted)
            self._after = after.pop_all()
        return self

    def _start(self, wanted: int) -> None:
        """Starts or joins Ray and Serve; ``wanted`` is the port that the caller gave."""
        import ray  # after its environment is set

        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": NAMESPACE}
        if self.address:
            join_ray(self.address, **options)
        else:
            start_ray(num_cpus=max(_MIN_LOGICAL_CPUS, os.cpu_count() or 1), include_dashboard=False, **options)
        self._node_id = ray.get_runtime_context().get_node_id()
        logging.getLogger("ray").setLevel(logging.ERROR)
        if self.ingress is None:
            return
        ray_private.warn_if_open(logger)
        from ray import serve

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        try:
            where = "EveryNode" if self.address else "HeadOnly"  # with a replica, so that games find a door near them
            serve.start(proxy_location=where, http_options={"host": self.host, "port": self.port})
            if self.address:  # where Serve may run already; then it keeps its own options, and only logs that
                host, self.port = ray_private.serve_http_address()
                check_ingress(self.host, wanted, host, self.port)
        except BaseException as error:
            self._end()
            if isinstance(error, TimeoutError | ray.exceptions.RayError):
                raise StartupError(f"Serve's ingress did not start: {first_line(error)}") from error
            raise

    def __exit__(self, *_: object) -> None:
        self._end()

    def environment(self) -> dict[str, str]:
        """Environment of Ray and Serve; ``docker/serve.sh`` sets the same for Serve, and replicas' priority."""
        variables = {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_SERVE_LOG_TO_STDERR": "0",
            "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
            # A job starts a dozen small actors at once; Ray warns of that by default.
            "RAY_worker_maximum_startup_concurrency": "8",
            # Ray's control store keeps the newest 100 000 calls for the dashboard, which does not run here: it grows
            # for minutes, and each process sends it a message a second.
            "RAY_task_events_report_interval_ms": "0",
            # Each OpenTelemetry export leaks 4 KB per series in every process: 200 MB an hour with 150 series. Ray's
            # older exporter does not leak, and a job has no reader for either.
            "RAY_enable_open_telemetry": "0",
            # The default of 5 s kills an ingress that is slow to start on a busy machine, and the job with it.
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
            # Run user code on the ingress's thread: changing threads costs more than an agent's tick.
            "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        }
        if self.ingress == "haproxy":
            variables |= {
                "RAY_SERVE_ENABLE_HA_PROXY": "1",
                "RAY_SERVE_HAPROXY_NBTHREAD": "1",
                # Route a session's requests to the replica that owns it; few sessions move when replicas change.
                # HAProxy waits for its timeout, at most 1 s, before it retries after a replica has ended.
                "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": (
                    "hdr(session)\n    hash-type consistent djb2 avalanche\n    timeout connect 250ms"
                ),
                "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "2",
                # The default of 30 s is for external balancers; a replica that ends would hold its resources so long.
                "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
                "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
                "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
            }
        return variables | STREAM_ENVIRONMENT

    def _end(self) -> None:
        """Ends what was started here; a cluster that was joined keeps running.

        Skips Serve's orderly shutdown: the applications were deleted by their owners, and waiting for the controller
        takes longer than ending the cluster. HAProxy is not a child of Ray, so it is ended by process id.
        """
        import ray

        ray.shutdown()
        if self.address:
            return
        _end_processes([process for process, node_id in _haproxies() if node_id == self._node_id])
        self._after.close()


def _haproxies() -> Iterator[tuple[psutil.Process, str]]:
    """HAProxy processes of Ray and the ids of their nodes: the folder of the configuration is named after the node."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        nodes = [match[1] for word in words if (match := re.search(r"/([0-9a-f]{56})/[^/]+$", word))]
        if nodes and words[0].endswith("haproxy"):
            yield process, nodes[0]


def _end_orphans(ports: set[int]) -> None:
    """Ends each HAProxy that holds one of the ports and has outlived its Ray: nothing else would end it."""
    orphans = []
    for process, node_id in _haproxies():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == os.getuid() and ports & _listens_at(process) and not _node_lives(node_id):
                logger.warning("ending HAProxy (pid %d), which a killed Ray left behind", process.pid)
                orphans.append(process)
    _end_processes(orphans)


def _listens_at(process: psutil.Process) -> set[int]:
    return {
        listening.laddr.port for listening in process.net_connections("tcp") if listening.status == psutil.CONN_LISTEN
    }


def _node_lives(node_id: str) -> bool:
    """Whether a process of a Ray node runs on this machine, besides HAProxy: the command lines have the node's id."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any(node_id in word for word in words) and not words[0].endswith("haproxy"):
            return True
    return False


def _end_processes(processes: list[psutil.Process]) -> None:
    for send in (psutil.Process.terminate, psutil.Process.kill):
        for process in processes:
            with contextlib.suppress(psutil.Error):
                send(process)
        _, processes = psutil.wait_procs(processes, timeout=_END_S)
