"""Runs brayx with what it needs in production, on one machine without containers: `make stack`.

PostgreSQL under MLflow, which keeps the artifacts, too; `brayx serve`; Prometheus with the alerts; HAProxy, which ends
TLS. Only HAProxy listens for other machines, at 8443. Ctrl-C ends all, and so does the end of one. Debian's packages
postgresql, prometheus, haproxy and openssl must be there. docker/compose.yaml is the same of images.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

DOCKER = Path(__file__).parent
BIN = Path(sys.executable).parent
START_S, STOP_S = 180.0, 30.0
DATABASE = "postgresql+psycopg:///mlflow?host={}&user=postgres"


def postgres_program(name: str) -> str:
    """Path of a program of Debian's newest PostgreSQL, which is not on the PATH."""
    installed = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: float(path.parts[4]))
    return str(installed[-1]) if installed else name


def as_postgres(*words: str) -> list[str]:
    """The command as user `postgres` if this is root, as whom PostgreSQL does not run."""
    return (
        ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups", *words] if os.geteuid() == 0 else [*words]
    )


def make_database(folder: Path) -> None:
    """Creates PostgreSQL's files, unless they are there. Only its own user and root can open the folder."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if os.geteuid() == 0:
        shutil.chown(folder, "postgres")
    if subprocess.run(as_postgres("test", "-w", str(folder))).returncode != 0:
        sys.exit(f"user postgres cannot open {folder}: open its parents to all (mode 0711), or name another by --data")
    if (folder / "files").exists():
        return
    initdb = [postgres_program("initdb"), "--pgdata", str(folder / "files"), "--auth=trust", "--username=postgres"]
    subprocess.run(as_postgres(*initdb), check=True, stdout=subprocess.DEVNULL, cwd="/")


def postgres(folder: Path) -> list[str]:
    """PostgreSQL, reachable by a socket in the folder alone."""
    words = ["-D", str(folder / "files"), "-k", str(folder), "-c", "listen_addresses="]
    return as_postgres(postgres_program("postgres"), *words)


def is_database_ready(folder: Path) -> bool:
    """Whether PostgreSQL answers; makes MLflow's database."""
    create = [postgres_program("createdb"), "--host", str(folder), "--username=postgres", "mlflow"]
    done = subprocess.run(create, capture_output=True, text=True)
    return done.returncode == 0 or "already exists" in done.stderr


def is_open(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


def make_certificate(file: Path) -> None:
    """A certificate of this machine's own, for trying out."""
    words = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "365",
    ]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    key = file.with_suffix(".key")
    subprocess.run([*words, *names, "-keyout", str(key), "-out", str(file)], check=True, capture_output=True)
    file.write_text(file.read_text() + key.read_text())  # HAProxy reads both from one file
    key.unlink()
    file.chmod(0o600)


class Stack:
    """Programs that run together. A context manager, whose exit ends them, the newest first."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        logs.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Stack:
        return self

    def __exit__(self, *error: object) -> None:
        # A second Ctrl-C must not leave half of them.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for name, process in reversed(self._running.items()):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)  # to PostgreSQL a fast stop; to the others like a Ctrl-C
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            print(f"{name} ended", flush=True)

    def start(self, name: str, words: list[str], is_ready: Callable[[], bool], **env: str) -> None:
        """Starts a program and waits until it is ready. Its output is in a log."""
        began = time.monotonic()
        with (self._logs / f"{name}.log").open("ab") as log:
            # In a session of its own, so that a terminal's Ctrl-C comes from here, in order.
            self._running[name] = subprocess.Popen(
                words, stdout=log, stderr=log, env={**os.environ, **env}, start_new_session=True, cwd="/"
            )
        while not is_ready():
            self.check()
            if time.monotonic() > began + START_S:
                sys.exit(f"{name} was not ready within {START_S:g} s: see {self._logs / name}.log")
            time.sleep(0.1)
        print(f"{name} is ready after {time.monotonic() - began:.1f} s", flush=True)

    def check(self) -> None:
        """Ends this program if one of the others has ended."""
        for name, process in self._running.items():
            if process.poll() is not None:
                sys.exit(f"{name} ended with {process.returncode}: see {self._logs / name}.log")


@contextlib.contextmanager
def running(data: Path, job: str, database: str, certificate: Path | None) -> Iterator[Stack]:
    """All programs, the database's unless another one is named."""
    for folder in ("artifacts", "prometheus"):
        (data / folder).mkdir(parents=True, exist_ok=True)
    if certificate is None and not (certificate := data / "tls.pem").exists():
        make_certificate(certificate)
    with Stack(data / "logs") as stack:
        if not database:
            folder = data / "postgres"
            make_database(folder)
            stack.start("postgres", postgres(folder), lambda: is_database_ready(folder))
            database = DATABASE.format(folder)
        mlflow = [str(BIN / "mlflow"), "server", "--host", "127.0.0.1", "--port", "5000", "--workers", "1"]
        store = ["--backend-store-uri", database, "--artifacts-destination", str(data / "artifacts")]
        off = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        stack.start("mlflow", [*mlflow, *store], lambda: is_open(5000), **off)
        serve = [str(BIN / "brayx"), "serve", job, "--tracking", "http://127.0.0.1:5000"]
        stack.start("brayx", serve, lambda: is_open(8000))
        prometheus = ["prometheus", f"--config.file={DOCKER / 'prometheus' / 'prometheus.yaml'}"]
        where = [f"--storage.tsdb.path={data / 'prometheus'}", "--web.listen-address=127.0.0.1:9090"]
        stack.start("prometheus", [*prometheus, *where, "--enable-feature=exemplar-storage"], lambda: is_open(9090))
        edge = ["haproxy", "-db", "-f", str(DOCKER / "haproxy.cfg")]
        stack.start("haproxy", edge, lambda: is_open(8443), BRAYX_CERTIFICATE=str(certificate))
        yield stack


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--job", default="cartpole.yaml", help="the job to serve (default: %(default)s)")
    parser.add_argument("--data", type=Path, default=Path("stack"), help="folder of all data (default: %(default)s)")
    parser.add_argument("--database", default="", help="URL of another database, as SQLAlchemy has it")
    parser.add_argument("--certificate", type=Path, help="PEM file with certificate and key (default: one is made)")
    arguments = parser.parse_args()
    job = Path(arguments.job)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and their children
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with contextlib.suppress(KeyboardInterrupt):
        name = str(job.absolute()) if job.exists() else arguments.job
        certificate = arguments.certificate and arguments.certificate.absolute()
        with running(arguments.data.absolute(), name, arguments.database, certificate) as stack:
            print(
                "games: https://127.0.0.1:8443  MLflow: http://127.0.0.1:5000  Prometheus: http://127.0.0.1:9090",
                flush=True,
            )
            while True:
                stack.check()
                time.sleep(1.0)


if __name__ == "__main__":
    main()
