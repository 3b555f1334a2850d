"""Machines imitated on this one: network, host name, shared memory and Ray's folder are each machine's own.

They are Linux namespaces, joined by `tests.nodes.switch`; files and process ids are those of this machine. Needs root
and iproute2.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from tests.chaos.ledger import ROOT
from tests.end_to_end.jobs import BIN, Command
from tests.nodes.switch import MAC
from tests.processes import RAY_IS_LATE, alive, ray_trouble
from tests.waiting import until

NETWORK = "10.77.0"
RAY_PORT = 6379
REDIS_PORT = 6380
_STORE_BYTES = 128 * 2**20
_TRIES = 6
_READY = "Ray runtime started"
_SETUP = """
set -e
hostname "$0"
mkdir -p /tmp/ray "$1"
mount --bind "$1" /tmp/ray
mount -t tmpfs -o size=1g none /dev/shm
ip link set lo up
echo ready
exec sleep infinity
"""


def why_not() -> str:
    """Why there can be no such machines here; empty: there can."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    if not os.access("/dev/net/tun", os.W_OK):
        return "there is no /dev/net/tun"
    missing = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
    return f"{missing} are not installed" if missing else ""


on_machines = [pytest.mark.nodes, pytest.mark.skipif(bool(why_not()), reason=why_not())]
"""Marks of each test here."""


class Machine:
    """One machine.

    Args:
        name: its host name.
        number: number of its link.
        folder: for its files.
        rays: folder of Ray's files.
        holder: the process that keeps its namespaces.
        switch: the process of the switch.
    """

    def __init__(
        self,
        name: str,
        number: int,
        folder: Path,
        rays: Path,
        holder: subprocess.Popen[str],
        switch: subprocess.Popen[str],
    ) -> None:
        self.name = name
        self.address = f"{NETWORK}.{number}"
        self.folder = folder
        self._number = number
        self._rays = rays
        self._holder = holder
        self._switch = switch
        self._network = os.readlink(f"/proc/{holder.pid}/ns/net")

    def start(self, *words: str, environment: Mapping[str, str | None] | None = None) -> Command:
        """A command that runs on this machine; a context."""
        enter = ["nsenter", "--target", str(self._holder.pid), "--net", "--uts", "--mount", "/bin/sh", "-c"]
        command = [str(BIN / words[0]), *words[1:]]
        variables = {"RAY_TMPDIR": "/tmp", "PYTHONPATH": str(ROOT), **(environment or {})}
        self.folder.mkdir(exist_ok=True)
        tool = str(shutil.which(enter[0]))
        return Command([tool, *enter[1:], 'cd "$0" && exec "$@"', str(self.folder), *command], self.folder, variables)

    def processes(self, *words: str) -> list[psutil.Process]:
        """Its living processes; only those with all ``words`` in their command line."""
        here = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                line = " ".join(process.cmdline())
                if os.readlink(f"/proc/{process.pid}/ns/net") == self._network and all(word in line for word in words):
                    here.append(process)
        return [process for process in here if process.pid != self._holder.pid]

    def cut(self) -> None:
        """Cuts its link: no frame comes or goes, and nobody is told."""
        self._tell("cut")

    def mend(self) -> None:
        """Ends `cut`."""
        self._tell("mend")

    def kill(self) -> None:
        """Kills all its processes, and removes the address that Ray leaves, as in a container that starts again."""
        while processes := self.processes():
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL)
            until(lambda processes=processes: not any(alive(p.pid) for p in processes), f"the end of {self.name}")
        (self._rays / "ray_current_cluster").unlink(missing_ok=True)

    def power_off(self) -> None:
        """Ends it without a word to the others; `mend` after a `start` brings it back."""
        self.cut()
        self.kill()

    def _tell(self, word: str) -> None:
        assert self._switch.stdin is not None
        self._switch.stdin.write(f"{word} {self._number}\n")
        self._switch.stdin.flush()


@contextlib.contextmanager
def machines(folder: Path, *names: str) -> Iterator[list[Machine]]:
    """Machines on one network, of which this process's is another, with the number 100.

    Args:
        folder: for their files.
        names: their host names.
    """
    with contextlib.ExitStack() as stack:
        taps = [f"brayx{os.getpid()}-{number}" for number in range(len(names) + 1)]
        switch = stack.enter_context(_process([sys.executable, "-m", "tests.nodes.switch", *taps]))
        _join(taps[0], 0, f"{NETWORK}.100", [])
        made = []
        for number, name in enumerate(names, start=1):
            rays = folder / f"ray-{name}"
            holder = stack.enter_context(
                _process(["unshare", "--net", "--uts", "--mount", "sh", "-c", _SETUP, name, str(rays)])
            )
            _call("ip", "link", "set", taps[number], "netns", str(holder.pid))
            _join(taps[number], number, f"{NETWORK}.{number}", ["nsenter", "--target", str(holder.pid), "--net"])
            machine = Machine(name, number, folder / name, rays, holder, switch)
            stack.callback(machine.kill)
            made.append(machine)
        yield made


@contextlib.contextmanager
def ray_on(machine: Machine, head: Machine | None = None, redis: str = "", cpus: int = 4) -> Iterator[Command]:
    """A node of Ray.

    Args:
        machine: where it runs.
        head: machine of the head, if that is another.
        redis: ``host:port`` of the Redis where a head keeps what it knows; empty: it keeps that in its memory.
        cpus: CPUs that Ray may reserve there.
    """
    environment = {"RAY_gcs_rpc_server_reconnect_timeout_s": "300", "RAY_REDIS_ADDRESS": redis or None}
    environment |= {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}  # by default Serve kills one that takes 5 s
    words = ["ray", "start", "--block", f"--node-ip-address={machine.address}", f"--num-cpus={cpus}"]
    words += [f"--object-store-memory={_STORE_BYTES}", "--disable-usage-stats"]
    if head is None:
        words += ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
    else:
        words += [f"--address={ray_address(head)}"]
    with contextlib.ExitStack() as stack:
        for _ in range(_TRIES):
            command = stack.enter_context(machine.start(*words, environment=environment))
            if _is_up(command):
                break
            ray_trouble.append(f"{' '.join(words)}: the node {RAY_IS_LATE}")
            machine.kill()
        command.until(command.says(_READY), "the node started")
        yield command


@contextlib.contextmanager
def redis_on(machine: Machine) -> Iterator[str]:
    """A Redis; gives its ``host:port``, or an empty string if it is not installed."""
    server = shutil.which("redis-server")
    if server is None:
        yield ""
        return
    words = [server, "--port", str(REDIS_PORT), "--bind", "0.0.0.0", "--protected-mode", "no", "--save", ""]
    words += ["--set-proc-title", "no"]  # the title would overwrite its environment, which has the mark of `Command`
    with machine.start(*words) as command:
        command.until(command.says("Ready to accept connections"), "Redis started")
        yield f"{machine.address}:{REDIS_PORT}"


def ray_address(head: Machine) -> str:
    """Address of the Ray whose head is on this machine."""
    return f"{head.address}:{RAY_PORT}"


def _is_up(command: Command) -> bool:
    """Waits until a node has started, or has failed to: on a busy machine Ray's parts give each other up."""

    def is_decided() -> bool:
        is_late = RAY_IS_LATE in command.err + command.out
        return _READY in command.out or is_late or command.process.poll() is not None

    command.until(is_decided, "the node started")
    return _READY in command.out


def _join(tap: str, number: int, address: str, prefix: Sequence[str]) -> None:
    mac = ":".join(f"{byte:02x}" for byte in (*MAC, number))
    _call(*prefix, "ip", "link", "set", tap, "address", mac, "addrgenmode", "none")
    _call(*prefix, "ip", "address", "add", f"{address}/24", "dev", tap)
    _call(*prefix, "ip", "link", "set", tap, "up")


def _call(*words: str) -> None:
    subprocess.run(words, check=True, timeout=30)


@contextlib.contextmanager
def _process(words: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that says when it is ready, and is killed at the end."""
    process = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", f"{words} did not start"
            yield process
        finally:
            process.kill()
