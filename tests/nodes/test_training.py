"""Trainings on three machines, whose PostgreSQL restarts, and of which one is cut off and one is switched off.

Each machine has a door and a shard of the buffer, two have a rank of the learner. A fourth has MLflow.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep

import psutil
import pytest

from brayx.metrics.charts import CHARTS
from brayx.tracking import Trial, find_trial
from tests.chaos.test_stack import Database, needs_database
from tests.end_to_end.jobs import TEMPLATES, Command, goes_on, job_folder, numbers_of, said_on_failure, setting, written
from tests.nodes.machines import Machine, machines, on_machines, ray_address, ray_on
from tests.waiting import until

pytestmark = [*on_machines, needs_database]

MLFLOW, TCP = 5000, 8101
WITHOUT_DATABASE_S, CUT_S = 10.0, 20.0
LEARNED = 60.0
"""Mean return of the last 100 games of CartPole that shows learning; random play has 22."""
START_S = 900.0
"""Three machines' Ray, Serve and Ray Train start on the cores of one, beside whatever else runs there."""
RANK, REPLICA, SHARD = "ray::RayTrainWorker", "ray::ServeReplica:", "ray::BufferActor"
OPTIONS = (
    "console_port=null",
    "actor.host=0.0.0.0",
    "actor.native_host=0.0.0.0",
    "actor.gamecores=[]",
    "actor.num_workers=3",
    "actor.cpus_per_worker=0.5",
    "trainer.cpus_per_worker=3",
)
"""Two machines have the CPUs for a rank each, and every machine has them for two doors: one that moves leaves room."""
CARTPOLE = (
    "buffer.num_workers=3",
    "trainer.num_workers=2",
    "trainer.target_return=null",
    "trainer.num_steps=1_000_000",
)
FOUR = (
    "moves.num_workers=3",
    "moves.batch_size=16",
    "trainer.where=train",
    "league.players.main.snapshot_every=2000",
    "league.players.exploiter.snapshot_every=2000",
)
KINDS = {
    REPLICA: "doors and agents",
    SHARD: "buffer",
    RANK: "ranks",
    "ray::Hub": "hub",
    "ray::_WeightStore": "weight store",
    "ray::_WeightRelay": "relays",
    "brayx train": "job",
    "brayx gamecore": "games",
    "": "Ray",
}
"""Kind of a process by the first of these words that its command line has."""
SUMS = ("env_steps", "updates", "ticks", "fragments_pushed")


class Cluster(contextlib.ExitStack):
    """Ray on these machines, and MLflow on another; a context.

    The last machine has one CPU to reserve, the others have four.

    Args:
        hosts: the machines; Ray's head is on the first.
        store: machine of MLflow.
        folder: for the jobs, and MLflow's files.

    Attributes:
        database: PostgreSQL under MLflow.
    """

    def __init__(self, hosts: list[Machine], store: Machine, folder: Path) -> None:
        super().__init__()
        self.hosts, self._store, self._folder = hosts, store, folder
        self.uri = f"http://{store.address}:{MLFLOW}"

    def start(self) -> None:
        """Starts all of it; the context ends what was started, even if this fails."""
        sockets = Path("/tmp") / f"brayx-postgres-{os.getpid()}"  # short, and open to PostgreSQL's user
        sockets.mkdir()
        self.callback(shutil.rmtree, sockets)
        self.database = Database(sockets / "postgres")
        self.callback(self.database.stop)
        self.database.start()
        words = ["mlflow", "server", "--host", "0.0.0.0", "--port", str(MLFLOW), "--workers", "1"]
        words += ["--backend-store-uri", self.database.url, "--artifacts-destination", str(self._folder / "artifacts")]
        off = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        mlflow = self.enter_context(self._store.start(*words, environment=off))
        mlflow.until(mlflow.says("Application startup complete"), "MLflow started")
        for host in self.hosts:
            self.start_node(host)

    def start_node(self, machine: Machine) -> None:
        """Starts a machine's node of Ray."""
        head = self.hosts[0]
        cpus = 1 if machine is self.hosts[-1] else 4
        self.enter_context(ray_on(machine, None if machine is head else head, cpus=cpus))

    @contextlib.contextmanager
    def training(self, job: Path, *options: str) -> Iterator[Training]:
        """A training whose doors are open; ended by Ctrl-C."""
        head = self.hosts[0]
        words = ["brayx", "train", str(job), *setting(*OPTIONS, *options), "--cluster", ray_address(head)]
        words += ["--tracking", self.uri, "--trial", job.stem]  # a league's players have trials, too, such as main
        with head.start(*words) as command, said_on_failure(command):
            command.until(command.says("the door is"), "the doors were open", START_S)
            yield Training(self.hosts, command, find_trial(job.stem, self.uri))
            command.control_c()
            assert command.ended() == 130, command.err


class Training:
    """A running training.

    Attributes:
        command: its command.
        trial: its trial.
    """

    def __init__(self, hosts: list[Machine], command: Command, trial: Trial) -> None:
        self.command, self.trial, self._hosts = command, trial, hosts

    def number(self, name: str) -> float:
        """One of its numbers, a few seconds old."""
        return numbers_of(self.trial).get(name, 0.0)

    def reaches(self, name: str, value: float) -> float:
        """Waits until one of its numbers is at least so large; the seconds that took."""
        began = monotonic()
        self.command.until(lambda: self.number(name) >= value, f"{name} was {value:g}", 600.0)
        return monotonic() - began

    def learns_on(self, batches: int = 20) -> float:
        """Waits until it has learned from more batches; the seconds that took."""
        return self.reaches("updates", self.number("updates") + batches)

    def where(self, part: str) -> list[str]:
        """Names of the machines with processes of this kind, one for each."""
        return [machine.name for machine in self._hosts for _ in machine.processes(part)]

    def doors(self) -> list[str]:
        """TCP URL of each machine with a replica; there are several."""
        urls = [f"tcp://{machine.address}:{TCP}" for machine in self._hosts if machine.processes(REPLICA)]
        assert len(urls) > 1, "Serve spreads replicas"
        return urls

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time so far of its machines' processes, by `KINDS`."""
        used: dict[str, float] = dict.fromkeys(KINDS.values(), 0.0)
        for process in itertools.chain.from_iterable(machine.processes() for machine in self._hosts):
            with contextlib.suppress(psutil.Error):
                line, times = " ".join(process.cmdline()), process.cpu_times()
                used[next(kind for word, kind in KINDS.items() if word in line)] += times.user + times.system
        return used

    @contextlib.contextmanager
    def measured(self, what: str) -> Iterator[None]:
        """Prints rate and CPU time of each transition in this context; see docs/scaling.md."""
        steps, began, used = self.number("env_steps"), monotonic(), self.cpu_seconds()
        yield
        steps, took_s = self.number("env_steps") - steps, monotonic() - began
        costs = {kind: f"{1e6 * (s - used[kind]) / steps:.0f} us" for kind, s in self.cpu_seconds().items()}
        print(f"{what}: {steps:.0f} env steps in {took_s:.0f} s; CPU time of each: {costs}")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("nodes")
    with machines(folder, "one", "two", "three", "store") as (*hosts, store), Cluster(hosts, store, folder) as made:
        made.start()
        yield made


def cartpoles(machine: Machine, door: str, seed: int) -> Command:
    """Games on a machine; a context."""
    words = ["brayx", "gamecore", "gym", "CartPole-v1", "--url", door, "--seed", str(seed), "--at-once", "8"]
    return machine.start(*words, "--give-up-after-s", "600", "--timeout-s", "5")


def test_a_training_goes_on_without_its_database_and_a_machine(cluster: Cluster, tmp_path: Path) -> None:
    _, two, three = cluster.hosts
    with contextlib.ExitStack() as stack:
        training = stack.enter_context(cluster.training(job_folder(tmp_path), *CARTPOLE))
        for seed, door in enumerate(training.doors()):
            stack.enter_context(cartpoles(three, door, seed))
        assert training.where(RANK) == ["one", "two"]
        assert training.where(SHARD) == ["one", "two", "three"]
        training.reaches("updates", 1)
        with training.measured(f"until the mean return was {LEARNED:g}"):
            training.reaches("episode_return.last100", LEARNED)
        with training.measured("with a restart of PostgreSQL"):
            cluster.database.stop()
            sleep(WITHOUT_DATABASE_S)
            cluster.database.start()
            training.learns_on()

        two.cut()
        sleep(CUT_S)
        two.mend()
        print(f"cut off for {CUT_S:g} s: learned on {training.learns_on():.0f} s later")

        failed = training.number("ranks_failed")
        two.power_off()
        killed = monotonic()
        print(f"switched off: noticed {training.reaches('ranks_failed', failed + 1):.0f} s later")
        assert "of the learner failed" in training.command.err
        two.mend()
        cluster.start_node(two)
        training.command.until(lambda: training.where(RANK) == ["one", "two"], "the ranks were there again")
        training.learns_on()
        print(f"switched off: learned on {monotonic() - killed:.0f} s later")
        until(lambda: len(training.where(REPLICA)) == 3, "the replica was there again, or elsewhere")
        counted = numbers_of(training.trial)
    metrics = training.trial.metrics()
    for name in SUMS:
        assert metrics[CHARTS[name]] >= counted[name] > 0
        assert goes_on(written(training.trial, CHARTS[name]))


def test_a_league_is_spread_over_all_machines(cluster: Cluster, tmp_path: Path) -> None:
    _, two, _ = cluster.hosts
    folder = shutil.copytree(TEMPLATES / "league", tmp_path / "four")
    with contextlib.ExitStack() as stack:
        training = stack.enter_context(cluster.training(folder / "four.yaml", *FOUR))
        assert training.where(RANK) == ["one", "two"]
        assert set(training.where(SHARD)) == {"one", "two", "three"}
        for machine, door in zip(cluster.hosts, itertools.cycle(reversed(training.doors())), strict=False):
            stack.enter_context(machine.start("python", str(folder / "four_game.py"), door, "--at-once", "8"))
        training.reaches("league_pool", 2)
        two.cut()
        sleep(CUT_S)
        two.mend()
        games = training.number("league_games.counted")
        training.reaches("league_games.counted", games + 100)
        training.reaches("league_pool", 4)
