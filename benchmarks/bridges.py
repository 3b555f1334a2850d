"""Compares brayx's bridges with the engines' own trainers, and CartPole by contract with Stable-Baselines3.

    python -m benchmarks.bridges --peers build/peers --install   # installs the peers there, and measures
    python -m benchmarks.bridges --quick                         # only checks that it runs

The games are the stand-ins of the tests (`tests.godot_game`, `tests.unity_game`), which speak the engines' wires: 8 and
16 agents that see a vector, or a picture of 84 x 84, too. Both trainers start the game themselves, and learn it by PPO
with the same hyperparameters. The game writes the course of the run (`Course`), so both are measured by the same clock.

``cartpole`` is a game that says its contract and plays over TCP in the packed encoding: eight games in one process, and
eight processes of one game each. Its reference is Stable-Baselines3 on the same environments without a door.

A peer that is not installed is named and left out. Stable-Baselines3 is in the extra ``bench``. godot_rl and mlagents
pin old versions of packages, so ``--install`` puts each into its own folder, without dependencies.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import json
import re
import shlex
import socket
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks import tables
from benchmarks.sb3 import FILE, INSTALL, STAMPED
from benchmarks.servers import TEMPLATE
from benchmarks.tables import Cell, Table, each, machine, median, median_ratio, show
from benchmarks.train import Outcome, Point, outcome, points_of, run_process, run_sb3
from brayx.errors import BrayxError
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.tracking import tracking_uri

BRAYX = "brayx"
PEERS = {"godot": "godot_rl, Stable-Baselines3", "unity": "mlagents-learn", "cartpole": "Stable-Baselines3, no door"}
PINS = {
    "godot": ("godot-rl==0.8.2",),
    "unity": ("mlagents==1.1.0", "mlagents-envs==1.1.0", "cattrs==1.5.0", "setuptools==80.9.0"),
}
UNROLL, MINIBATCH, ENTROPY = 64, 128, 1e-4
"""Recipe of all trainers: a batch has `UNROLL` transitions of each agent."""
_CARTPOLE = {
    "actor.episode_length": 32,
    "buffer.batch_size": 8,
    "buffer.unroll_length": 32,
    "network.normalise": False,
    "trainer.algorithm.gamma": 0.98,
    "trainer.algorithm.gae_lambda": 0.8,
    "trainer.algorithm.entropy_coef": 0.0,
    "trainer.algorithm.epochs": 20,
    "trainer.algorithm.minibatch_size": 256,
    "trainer.algorithm.kl_target": "null",
    "trainer.algorithm.learning_rate_schedule": "linear",
    "trainer.algorithm.clip_schedule": "linear",
    "trainer.learning_rate": 1e-3,
}
"""The recipe of `benchmarks.sb3.cartpole`, which is also that of the template cartpole.yaml."""
_GAMES = 8
_POINT_STEPS = 256
_START_S = 300.0
_MODULE = "benchmarks.bridges"


class Case(NamedTuple):
    """A game.

    Attributes:
        game: ``godot``, ``unity`` or ``cartpole``.
        agents: agents of the game; of cartpole the games of one process.
        picture: they see a picture, too.
    """

    game: str
    agents: int
    picture: bool = False

    @property
    def target(self) -> float:
        """Mean return of the last 100 episodes, whose time is measured."""
        return 475.0 if self.game == "cartpole" else 1.8 if self.picture else 1.5

    @property
    def epochs(self) -> int:
        """Passes over a batch of an engine's game. Ten overfit pictures, by Stable-Baselines3 as here."""
        return 4 if self.picture else 10

    @property
    def learning_rate(self) -> float:
        """Adam's, of an engine's game."""
        return 3e-4 if self.picture else 1e-3

    @property
    def title(self) -> str:
        """The name in the table."""
        if self.game == "cartpole":
            return "CartPole, " + ("one process of eight games" if self.agents > 1 else "eight processes of one game")
        return f"{self.game.capitalize()}, {self.agents} agents, {'picture' if self.picture else 'vector'}"


CASES = (
    *(Case(game, agents, picture) for game in ("godot", "unity") for agents in (8, 16) for picture in (False, True)),
    Case("cartpole", _GAMES),
    Case("cartpole", 1),
)


class Course:
    """The course of a run as its game sees it, written to a file line by line.

    Args:
        file: has a line for each of `_POINT_STEPS` steps of agents, and one for the first.
        agents: number of agents.
    """

    def __init__(self, file: Path, agents: int) -> None:
        self._file = file.open("w", buffering=1)
        self._returns = [0.0] * agents
        self._finished: deque[float] = deque(maxlen=100)
        self._steps = self._episodes = self._written = 0

    def add(self, rewards: Sequence[float], dones: Sequence[bool]) -> None:
        """A step of all agents."""
        for index, (reward, done) in enumerate(zip(rewards, dones, strict=True)):
            self._returns[index] += reward
            if done:
                self._finished.append(self._returns[index])
                self._episodes += 1
                self._returns[index] = 0.0
        self._steps += len(rewards)
        if self._steps >= self._written + _POINT_STEPS or not self._written:
            self.write()

    def write(self) -> None:
        """Writes a line. Call it at the game's end, too: its trainer may have learned after the last step."""
        self._written = self._steps
        mean = sum(self._finished) / len(self._finished) if self._finished else None
        self._file.write(json.dumps((time.time(), self._steps, self._episodes, mean)) + "\n")


def play_godot(course: Course, agents: int, picture: bool, words: Sequence[str]) -> None:
    """Plays the stand-in of Godot; ``words`` are the flags that its trainer gave it."""
    from tests.godot_game import Document, GodotStandIn

    class Game(GodotStandIn):
        """Writes its course."""

        def _answer(self, message: Document) -> Document:
            answer = super()._answer(message)
            if message["type"] == "action":
                course.add(answer["reward"], answer["done"])
            return answer

    flags = dict(word.lstrip("-").partition("=")[::2] for word in words)
    Game(int(flags["port"]), agents=agents, picture=picture, seed=int(flags.get("env_seed", 1))).run()


def play_unity(course: Course, agents: int, picture: bool, words: Sequence[str]) -> None:
    """Plays the stand-in of Unity; ``words`` are the flags that its trainer gave it."""
    from tests.unity_game import Caller, Chaser, UnityGame

    class Game(UnityGame):
        """Writes its course."""

        def _act(self, asking: Sequence[Chaser], actions: Sequence[Any]) -> None:
            super()._act(asking, actions)
            course.add([chaser.reward for chaser in asking], [chaser.has_ended for chaser in asking])

    with Caller(int(words[words.index("--mlagents-port") + 1])) as caller:
        Game(agents, picture=picture).play(caller)


CONTRACT = {
    "contract": 1,
    "behaviour": "cartpole",
    "observations": {"obs": {"shape": [4], "dtype": "float32"}},
    "actions": {"push": {"kind": "discrete", "size": 2}},
    "encoding": "packed",
}
_TICK, _PUSH, _TERMINATED, _TRUNCATED = struct.Struct("<fB4f"), struct.Struct("<i"), 2, 4


def play_cartpole(url: str, games: int, seed: int) -> None:
    """Plays by contract until the service ends: several games as the rows of one session, one with a session for each
    episode."""
    import gymnasium

    from brayx.gamecore.transports.base import Endpoint
    from brayx.gamecore.transports.tcp import TcpSessions

    envs = [gymnasium.make(STAMPED, disable_env_checker=True) for _ in range(games)]
    with contextlib.suppress(BrayxError), TcpSessions(Endpoint.parse(url), _START_S) as sessions:
        if games > 1:
            _play_rows(sessions, envs, seed)
        else:
            _play_episodes(sessions, envs[0], seed)


def _ask(sessions: Any, kind: StepKind, session: str, body: bytes) -> bytes:
    """The reply to a request."""
    sessions.submit(StepRequest(kind, session, body))
    while True:
        for answered, reply in sessions.exchange():
            if not isinstance(reply, bytes):
                raise reply
            if answered == session:
                return reply


def _play_episodes(sessions: Any, env: Any, seed: int) -> None:
    obs, _ = env.reset(seed=seed)
    while True:
        session = uuid.uuid4().hex
        _ask(sessions, StepKind.START, session, json.dumps(CONTRACT).encode())
        body, kind = _TICK.pack(0.0, 0, *obs), StepKind.TICK
        while kind is StepKind.TICK:
            (push,) = _PUSH.unpack(_ask(sessions, kind, session, body))
            obs, reward, terminated, truncated, _ = env.step(push)
            flags = _TERMINATED * terminated + _TRUNCATED * truncated
            kind = StepKind.STOP if flags else StepKind.TICK
            body = _TICK.pack(reward, flags, *obs)
        sessions.submit(StepRequest(kind, session, body))  # with the next start
        obs, _ = env.reset()


def _play_rows(sessions: Any, envs: Sequence[Any], seed: int) -> None:
    """Two sessions, so that one's games are stepped while the other's actions are chosen."""
    half = len(envs) // 2
    halves = {uuid.uuid4().hex: range(half), uuid.uuid4().hex: range(half, len(envs))}
    for session, agents in halves.items():
        _ask(sessions, StepKind.START, session, json.dumps({**CONTRACT, "rows": True}).encode())
        rows = [(agent, 0.0, 0, envs[agent].reset(seed=seed + agent)[0]) for agent in agents]
        sessions.submit(StepRequest(StepKind.TICK, session, _packed(rows)))
    while True:
        for session, reply in sessions.exchange():
            if isinstance(reply, BrayxError):
                raise reply
            rows = []
            for agent, (push,) in zip(halves[session], _PUSH.iter_unpack(reply), strict=True):
                obs, reward, terminated, truncated, _ = envs[agent].step(push)
                rows.append((agent, reward, _TERMINATED * terminated + _TRUNCATED * truncated, obs))
                if terminated or truncated:
                    rows.append((agent, 0.0, 0, envs[agent].reset()[0]))
            sessions.submit(StepRequest(StepKind.TICK, session, _packed(rows)))


def _packed(rows: Sequence[tuple[int, float, int, Any]]) -> bytes:
    """The body of a tick with rows: agent, reward, end and observation of each."""
    count = len(rows)
    agents, rewards, ends, obs = zip(*rows, strict=True)
    head = struct.pack(f"<HB{count}i{count}f{count}B", count, 0, *agents, *rewards, *ends)
    return head + b"".join([row.tobytes() for row in obs])


def train_godot_rl(case: Case, build: str, steps: int, seed: int) -> None:
    """Trains as godot_rl's own `stable_baselines_training` does, with this benchmark's recipe."""
    import torch
    from godot_rl.wrappers.stable_baselines_wrapper import StableBaselinesGodotEnv
    from stable_baselines3 import PPO
    from stable_baselines3.common.utils import set_random_seed
    from stable_baselines3.common.vec_env.vec_monitor import VecMonitor

    if not case.picture:
        torch.set_num_threads(1)  # faster there than torch's own number
    set_random_seed(seed)  # PPO's option would seed the environments, which godot_rl refuses
    env = VecMonitor(StableBaselinesGodotEnv(env_path=build, seed=seed, port=_free_port()))
    model = PPO(
        "MultiInputPolicy",
        env,
        n_steps=UNROLL,
        batch_size=MINIBATCH,
        n_epochs=case.epochs,
        learning_rate=case.learning_rate,
        ent_coef=ENTROPY,
        device="cpu",
    )
    model.learn(steps)
    env.close()


def train_mlagents(words: Sequence[str]) -> None:
    """Runs ``mlagents-learn`` with today's numpy and torch, without the files at its end: they fail with these."""
    import numpy as np

    np.float = float  # type: ignore[attr-defined]
    from mlagents.trainers.learn import main as learn
    from mlagents.trainers.torch_entities.model_serialization import ModelSerializer
    from mlagents.trainers.training_status import GlobalTrainingStatus

    ModelSerializer.export_policy_model = GlobalTrainingStatus.save_state = lambda *_: None
    sys.argv[1:] = words
    learn()


def mlagents_config(case: Case, steps: int) -> dict[str, Any]:
    """The file of ``mlagents-learn``, with this benchmark's recipe."""
    behaviour = {
        "trainer_type": "ppo",
        "hyperparameters": {
            "batch_size": MINIBATCH,
            "buffer_size": UNROLL * case.agents,
            "learning_rate": case.learning_rate,
            "beta": ENTROPY,
            "epsilon": 0.2,
            "lambd": 0.95,
            "num_epoch": case.epochs,
            "learning_rate_schedule": "constant",
        },
        "network_settings": {"hidden_units": 64, "num_layers": 2, "vis_encode_type": "nature_cnn"},
        "reward_signals": {"extrinsic": {"gamma": 0.99, "strength": 1.0}},
        "time_horizon": UNROLL,
        "max_steps": steps,
        "summary_freq": steps,
    }
    return {"behaviors": {"Chaser": behaviour}}


def brayx_words(case: Case, folder: Path, build: Path, steps: int, seed: int, overrides: Sequence[str]) -> list[str]:
    """Arguments of Python for ``brayx train``."""
    options: dict[str, Any] = {
        "seed": seed,
        "actor.port": 0,
        "actor.native_port": 0,
        "actor.tcp_port": 0,
        "trainer.num_steps": steps,
    }
    if case.game == "cartpole":
        play = f"{shlex.quote(sys.executable)} -m {_MODULE} --play cartpole --agents {case.agents}"
        command, num, template = f"{play} --url {{url}} --seeds {{index}}", _GAMES // case.agents, "game"
        options |= _CARTPOLE
    else:
        bridge = f"brayx gamecore {case.game} --url {{url}} --quiet --listen {_free_port()}"
        command, num, template = f"{bridge} --command {build} --seed {seed}", 1, case.game
        options |= {
            "network.hidden": "[64,64]",
            "network.normalise": False,
            "buffer.batch_size": case.agents,
            "trainer.algorithm.minibatch_size": MINIBATCH,
            "trainer.algorithm.epochs": case.epochs,
            "trainer.algorithm.entropy_coef": ENTROPY,
            "trainer.algorithm.kl_target": "null",
            "trainer.learning_rate": case.learning_rate,
        }
    options["actor.gamecores"] = json.dumps([{"command": command, "num": num, "door": "tcp"}])
    settings = [*(f"{name}={value}" for name, value in options.items()), *overrides]
    words = [word for setting in settings for word in ("--set", setting)]
    path = TEMPLATE.with_name(f"{template}.yaml")
    return ["-m", "brayx", "train", str(path), "--tracking", str(folder / "mlflow.db"), *words]


def run(case: Case, side: str, seed: int, steps: int, peers: Path, overrides: Sequence[str] = ()) -> Outcome | None:
    """One run of a side, ``brayx`` or the peer; None: it failed."""
    if case.game == "cartpole" and side != BRAYX:
        return run_sb3(seed, steps)
    with tempfile.TemporaryDirectory(prefix="brayx-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        build, course, stamp = folder / "game.x86_64", folder / "course", folder / "first-tick"
        picture = " --picture" if case.picture else ""
        play = f"-m {_MODULE} --play {case.game} --agents {case.agents}{picture} --course {shlex.quote(str(course))}"
        build.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {play} "$@"\n')
        build.chmod(0o755)
        environment, folders = {FILE: str(stamp)}, []
        if side == BRAYX:
            (folder / "mlflow.db").write_bytes(_new_database())
            words = brayx_words(case, folder, build, steps, seed, overrides)
        else:
            folders = [peers / case.game]
            words = ["-m", _MODULE, "--trainer", case.game]
            if case.game == "godot":
                words += ["--build", str(build), "--steps", f"{steps}", "--seeds", f"{seed}"]
                words += ["--agents", f"{case.agents}", *["--picture"] * case.picture]
            else:
                config = folder / "config.yaml"
                config.write_text(json.dumps(mlagents_config(case, steps)))
                words += [str(config), "--env", str(build), "--no-graphics", "--torch-device", "cpu"]
                words += ["--seed", f"{seed}", "--base-port", f"{_free_port()}", "--results-dir", str(folder / "out")]
        ran = run_process(words, environment, folders)
        if ran is None:
            return None
        if case.game == "cartpole":
            return outcome(points_of(folder), ran, float(stamp.read_text()))
        points = [Point(*json.loads(line)) for line in course.read_text().splitlines()]
        result = outcome(points, ran, points[0].time_s, target=case.target)
        # Until the game's end, and of the steps learned from: a game may play ahead of its learner.
        ended_s = points[-1].time_s
        cpu_us = 1e6 * (ran.cpu_at(ended_s) - ran.cpu_at(points[0].time_s)) / steps
        return replace(result, steps_per_s=steps / (ended_s - points[0].time_s), cpu_us=cpu_us)


@functools.cache
def _new_database() -> bytes:
    """MLflow's database without a trial, as the first training in a folder makes it: that takes MLflow seconds."""
    from brayx.tracking.store import client_of

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mlflow.db"
        client_of(tracking_uri(path)).search_experiments(max_results=1)
        return path.read_bytes()


def is_installed(case: Case, peers: Path) -> bool:
    """Whether the peer of a case is installed."""
    return find_spec("stable_baselines3") is not None if case.game == "cartpole" else (peers / case.game).is_dir()


def install(peers: Path) -> None:
    """Installs godot_rl and mlagents, each into its own folder, without dependencies."""
    for game, pins in PINS.items():
        folder = peers / game
        if folder.is_dir():
            continue
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-requires-python"]
        subprocess.run([*pip, "--target", str(folder), *pins], check=True)
        if game == "unity":
            _renew_protobuf(folder)


def _renew_protobuf(folder: Path) -> None:
    """Compiles mlagents' messages again: today's protobuf refuses the code of its compiler."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

    texts = [path.read_text() for path in (folder / "mlagents_envs/communicator_objects").glob("*_pb2.py")]
    literals = [re.search(r"(?:serialized_pb=_b\(|SerializedFile\(b)('.*'|\".*\")\)", text) for text in texts]
    protos = [FileDescriptorProto.FromString(ast.literal_eval(f"b{literal[1]}")) for literal in literals if literal]
    by_name = {proto.name: proto for proto in protos}
    ordered: dict[str, FileDescriptorProto] = {}

    def add(name: str) -> None:
        for needed in by_name[name].dependency:
            add(needed)
        ordered.setdefault(name, by_name[name])

    for name in by_name:
        add(name)
    with tempfile.NamedTemporaryFile() as file:
        file.write(FileDescriptorSet(file=ordered.values()).SerializeToString())
        file.flush()
        protoc = [sys.executable, "-m", "grpc_tools.protoc", f"--descriptor_set_in={file.name}"]
        subprocess.run([*protoc, f"--python_out={folder}", *ordered], check=True)


def table(outcomes: Mapping[Case, Mapping[str, Sequence[Outcome | None]]]) -> Table:
    """Medians over seeds, one row for each trainer of a game, with the ratios to the peer's run of the same seed."""
    out = Table(
        [
            *("game", "trainer", ">agent steps/s", ">to peer", ">CPU s per 1000 steps", ">to peer"),
            *(">to the return s", ">to peer", ">from start s", ">to peer", ">reached"),
        ]
    )
    for case, sides in outcomes.items():
        for side, runs in sides.items():
            peer = sides.get(PEERS[case.game], [None] * len(runs))
            cells: list[Cell] = []
            for read in _READ:
                values = each(runs, read)
                cells += [median(values), median_ratio(values, each(peer, read))]
            reached = sum(run is not None and run.target_s is not None for run in runs)
            out.add(case.title if side == BRAYX else "", side, *cells, f"{reached} of {len(runs)}")
    return out


_READ: tuple[Callable[[Outcome], float | None], ...] = (
    lambda run: run.steps_per_s,
    lambda run: None if run.cpu_us is None else run.cpu_us / 1000,
    lambda run: run.target_s,
    lambda run: run.target_from_start_s,
)


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def parse(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The options, and for a game or a trainer the words that another program gave it."""
    parser = tables.options(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(default: 0 1 2)")
    parser.add_argument("--game", nargs="+", choices=list(PEERS), default=list(PEERS), help="(default: all)")
    parser.add_argument("--agents", type=int, nargs="+", default=[1, 8, 16], help="of a game (default: 1 8 16)")
    parser.add_argument("--see", nargs="+", choices=["vector", "picture"], default=["vector", "picture"])
    parser.add_argument("--side", nargs="+", choices=["brayx", "peer"], default=["brayx", "peer"])
    parser.add_argument(
        "--steps", type=int, default=100_000, help="agent steps of a run; a tenth with pictures (default: %(default)s)"
    )
    parser.add_argument("--peers", type=Path, default=Path("build/peers"), help="folder of godot_rl and mlagents")
    parser.add_argument("--install", action="store_true", help="install godot_rl and mlagents there first")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="an option of brayx's jobs"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run there")
    parser.add_argument("--quick", action="store_true", help="one seed, 8 agents, few steps: reaches nothing")
    for hidden in ("--play", "--url", "--build", "--trainer"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--picture", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--course", type=Path, help=argparse.SUPPRESS)
    options, words = parser.parse_known_args(argv)
    if words and not options.play and not options.trainer:
        parser.error(f"unrecognized arguments: {' '.join(words)}")
    if options.quick:
        options.seeds, options.steps, options.agents = options.seeds[:1], 5_000, [8]
    if options.steps < 1:
        parser.error("--steps must be positive")
    return options, words


def _run_part(options: argparse.Namespace, words: Sequence[str]) -> None:
    """Runs a part of a benchmark's run: a game or a peer's trainer."""
    agents, seed = options.agents[0], options.seeds[0]
    if options.trainer == "godot":
        train_godot_rl(Case("godot", agents, options.picture), options.build, options.steps, seed)
    elif options.trainer:
        train_mlagents(words)
    elif options.play == "cartpole":
        play_cartpole(options.url, agents, seed)
    else:
        play, course = play_godot if options.play == "godot" else play_unity, Course(options.course, agents)
        play(course, agents, options.picture, words)
        course.write()


def main(argv: Sequence[str] | None = None) -> int:
    """Trains and prints; exit code 1 if a run failed."""
    options, words = parse(argv)
    if options.play or options.trainer:
        _run_part(options, words)
        return 0
    console = Console(stderr=True, highlight=False)
    if options.install:
        install(options.peers)
    about = (
        f"{machine()}; {options.steps:,} agent steps, a tenth with pictures; medians over {len(options.seeds)} seeds"
    )
    cases = [case for case in CASES if case.game in options.game and case.agents in options.agents]
    cases = [case for case in cases if ("picture" if case.picture else "vector") in options.see]
    outcomes: dict[Case, dict[str, list[Outcome | None]]] = {}
    for case in cases:
        sides = [BRAYX] if "brayx" in options.side else []
        if "peer" in options.side and is_installed(case, options.peers):
            sides.append(PEERS[case.game])
        elif "peer" in options.side:
            how = INSTALL if case.game == "cartpole" else "--install"
            console.print(f"{case.title}: {PEERS[case.game]} is not installed: {how}", markup=False)
        outcomes[case] = {side: [] for side in sides}
    for seed in options.seeds:
        for case, by_side in outcomes.items():
            steps = options.steps // 10 if case.picture else options.steps
            for side, runs in by_side.items():
                runs.append(run(case, side, seed, steps, options.peers.resolve(), options.overrides))
                console.print(f"seed {seed}, {case.title}, {side}: {runs[-1]}", style="dim")
    show(about, table(outcomes).markdown(), markdown=options.markdown)
    every = [(case, side, runs) for case, by_side in outcomes.items() for side, runs in by_side.items()]
    if options.json is not None:
        rows = [
            {**case._asdict(), "trainer": side, "runs": [None if run is None else asdict(run) for run in runs]}
            for case, side, runs in every
        ]
        options.json.write_text(json.dumps({"about": about, "seeds": options.seeds, "cases": rows}, indent=1))
    return 1 if any(None in runs for _, _, runs in every) else 0


if __name__ == "__main__":
    sys.exit(main())
