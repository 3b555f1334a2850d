"""brayx beside RLlib, Sample Factory, Ray Serve alone and Triton, each at its own work.

    python -m benchmarks.peers --peers build/peers --install   # installs the peers there, and measures
    python -m benchmarks.peers serve --rounds 3                # one of them

*Learning*: seconds from a process's start until the mean return of 100 games of CartPole-v1 is 475, each program with
settings that are known to work: brayx with its tuned preset, RLlib with those of its release tests, Sample Factory with
those of its example for CartPole.

*Serving*: an echo behind Ray Serve alone (its default proxy, and with RAY_SERVE_THROUGHPUT_OPTIMIZED=1) beside an echo
of brayx behind its own port, 16 sessions over HTTP, bodies of 256 bytes. And a policy of 4, 64, 64 and 2 behind
Triton's HTTP, batched, beside that of cartpole.yaml on brayx's local host: 16 connections with one request each.

A peer that is not installed is named and left out; ``--install`` needs PyPI.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from rich.console import Console

from benchmarks import tables
from benchmarks.servers import TEMPLATE, Service, load_generator, server, service, tell_and_wait
from benchmarks.tables import Table, machine, median, median_ratio, show
from benchmarks.train import Ran, environment_of, run_process

PINS = {
    "rllib": ("dm-tree==0.1.9", "lz4==4.4.4", "ormsgpack==1.7.0", "scipy==1.17.1"),
    "sample-factory": (
        "sample-factory==2.1.1",
        "signal-slot-mp==1.0.5",
        "faster-fifo==1.5.2",
        "colorlog==6.12.0",
        "opencv-python-headless==5.0.0.93",
        "tensorboardX==2.6.5",
        "threadpoolctl==3.8.0",
        "gymnasium==0.29.1",
        "huggingface-hub==0.36.0",
        "numpy==1.26.4",
    ),
    "triton": ("nvidia-pytriton==0.7.0",),
}
T = TypeVar("T")
TRITON_PYTHON = Path("triton", "bin", "python")
CASES = ("rllib", "sample-factory", "serve", "triton")
Rates = dict[str, list[float | None]]
TARGET = 475.0
SESSIONS = 16
_MODULE = "benchmarks.peers"
_TICK = json.dumps({"obs": [0.0, 0.0, 0.1, 0.5], "reward": 1.0}).encode()
_INFER = json.dumps(
    {"inputs": [{"name": "obs", "shape": [1, 4], "datatype": "FP32", "data": [0.0, 0.0, 0.1, 0.5]}]}
).encode()


def learn_rllib(seed: int) -> None:
    """Trains RLlib's PPO until the target; prints when it was reached."""
    import ray
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    config = (
        PPOConfig()  # type: ignore[no-untyped-call]
        .environment("CartPole-v1")
        .env_runners(num_env_runners=1)
        .training(lr=3e-4, num_epochs=6, vf_loss_coeff=0.01)
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[32], fcnet_activation="linear", vf_share_layers=True))
        .debugging(seed=seed)
    )
    algorithm: Any = config.build_algo()
    while algorithm.train()["env_runners"].get("episode_return_mean", 0.0) < TARGET:
        pass
    print(json.dumps({"at": time.time()}), flush=True)
    algorithm.stop()


def _make_env(name: str, config: Any = None, env_config: Any = None, render_mode: str | None = None) -> Any:
    """An environment for Sample Factory, whose workers are spawned and import this."""
    import gymnasium

    return gymnasium.make(name)


def learn_sample_factory(seed: int) -> None:
    """The same of Sample Factory's APPO."""
    from sample_factory.algo.runners.runner import AlgoObserver
    from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
    from sample_factory.envs.env_utils import register_env
    from sample_factory.train import make_runner

    class Target(AlgoObserver):  # type: ignore[misc]
        def on_training_step(self, runner: Any, training_iteration_since_resume: int) -> None:
            returns = runner.policy_avg_stats.get("reward", [()])[0]
            if len(returns) == 100 and sum(returns) / 100 >= TARGET:
                print(json.dumps({"at": time.time()}), flush=True)
                runner.cfg.train_for_env_steps = 0  # it ends with this step

    register_env("CartPole-v1", _make_env)
    with tempfile.TemporaryDirectory(prefix="brayx-bench-") as folder:
        words = [
            "--env=CartPole-v1", "--algo=APPO", "--use_rnn=False", "--num_workers=2", "--num_envs_per_worker=20",
            "--recurrence=1", "--with_vtrace=False", "--batch_size=512", "--reward_scale=0.1", "--device=cpu",
            f"--seed={seed}", f"--train_dir={folder}", "--experiment=cartpole",
        ]  # fmt: skip
        parser, _ = parse_sf_args(argv=words)
        _, runner = make_runner(parse_full_cfg(parser, words))
        runner.register_observer(Target())
        runner.init()
        runner.run()


LEARN = {"rllib": learn_rllib, "sample-factory": learn_sample_factory}


def learning_peer(peer: str, seed: int, peers: Path) -> tuple[float | None, float | None]:
    """Seconds from the process's start to the target, and those of CPU; None: it failed."""
    ran = run_process(["-m", _MODULE, "--learn", peer, "--seeds", str(seed)], {"OMP_NUM_THREADS": "1"}, [peers / peer])
    found = None if ran is None else re.search(r'{"at": (.*)}', ran.out)  # Sample Factory's failures exit with 0
    return (None, None) if ran is None or found is None else spent(ran, float(found[1]))


def learning_brayx(seed: int) -> tuple[float | None, float | None]:
    """The same of ``brayx ppo``, to its end: it stops at the target."""
    with tempfile.TemporaryDirectory(prefix="brayx-bench-") as folder:
        words = ["--env", "CartPole-v1", "--preset", "tuned", "--distributed", "false", "--seed", str(seed)]
        ran = run_process(
            ["-m", "brayx", "ppo", *words, "--set", f"target_return={TARGET:g}", "--tracking", f"{folder}/mlflow.db"]
        )
    return (None, None) if ran is None else spent(ran, ran.ended_s)


def spent(ran: Ran, until_s: float) -> tuple[float, float]:
    """Seconds of a process until then, and those of CPU, which other work on the machine hardly changes."""
    return until_s - ran.started_s, ran.cpu_at(until_s)


def serve_alone() -> None:
    """An echo on Ray Serve without brayx, until standard input ends."""
    from ray import serve
    from starlette.requests import Request
    from starlette.responses import Response

    @serve.deployment(max_ongoing_requests=256, ray_actor_options={"num_cpus": 0})
    class Echo:
        async def __call__(self, request: Request) -> Response:
            return Response(await request.body())

    port = 18400
    serve.start(http_options={"host": "127.0.0.1", "port": port, "access_log": False})
    serve.run(Echo.bind(), name="echo", route_prefix="/")  # type: ignore[attr-defined]
    tell_and_wait({"http": f"http://127.0.0.1:{port}"})
    serve.shutdown()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def environment(**more: str) -> Iterator[None]:
    """These variables, while processes are started."""
    before = dict(os.environ)
    os.environ.update(more)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def alone(**more: str) -> Iterator[Service]:
    """Ray Serve alone, with these variables."""
    with environment(**more), service(_MODULE, "--serve", "serve") as running:
        yield running


def rates(
    started: Sequence[tuple[Callable[[], contextlib.AbstractContextManager[Service]], Mapping[str, str]]],
    rounds: int,
    measure: Callable[[str], float],
) -> Rates:
    """Rates by program.

    Args:
        started: each service, with the programs that are measured at it: their names, and of the service's URLs theirs.
        rounds: in each, the services run one after the other, since each takes both cores.
        measure: the rate at a URL.
    """
    found: Rates = {name: [] for _, programs in started for name in programs}
    for _ in range(rounds):
        for start, programs in started:
            with contextlib.ExitStack() as stack:
                urls = _or_none(lambda: stack.enter_context(start()).urls)  # noqa: B023
                for name, url in programs.items():
                    found[name].append(None if urls is None else _or_none(lambda: measure(urls[url])))  # noqa: B023
    return found


def _or_none(function: Callable[[], T]) -> T | None:
    """What the function returns; None, with a line on standard error, if it failed."""
    try:
        return function()
    except (RuntimeError, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return None


def echoes(rounds: int, seconds: float) -> Rates:
    """Ticks/s of an echo on Ray Serve alone, and of brayx's on its own port and behind HAProxy."""
    started = (
        (alone, {"Ray Serve alone": "http"}),
        (partial(alone, RAY_SERVE_THROUGHPUT_OPTIMIZED="1"), {"... RAY_SERVE_THROUGHPUT_OPTIMIZED=1": "http"}),
        (
            partial(server, "serve", "--ingress", "haproxy"),
            {"brayx on Ray Serve, native port": "echo native", "brayx on Ray Serve, HAProxy": "echo"},
        ),
    )
    with load_generator() as load:
        return rates(started, rounds, lambda url: load(url, SESSIONS, seconds).ticks_per_s)


def policies(rounds: int, seconds: float, python: Path) -> Rates:
    """Replies/s of a policy behind Triton's HTTP, and of the untrained one of cartpole.yaml behind brayx's."""

    @contextlib.contextmanager
    def triton() -> Iterator[Service]:
        with environment(**environment_of({})), service("benchmarks.triton", python=str(python)) as running:
            yield running

    started = (
        (triton, {"Triton": "http"}),
        (partial(service, _MODULE, "--serve", "brayx"), {"brayx": "http"}),
    )
    return rates(started, rounds, lambda url: asyncio.run(replies(url, seconds)))


async def replies(url: str, seconds: float) -> float:
    """Replies/s of `SESSIONS` connections with one request each, the same client for both services."""
    address = urlsplit(url)
    until = time.perf_counter() + seconds

    async def play(index: int) -> int:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)

        async def post(kind: str, body: bytes) -> None:
            head = (
                f"POST {address.path} HTTP/1.1\r\nhost: {address.netloc}\r\nsession: s{index}\r\nstep_kind: {kind}\r\n"
            )
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            reply = (await reader.readuntil(b"\r\n\r\n")).lower()
            if not reply.startswith(b"http/1.1 200"):
                raise RuntimeError(reply.decode(errors="replace"))
            await reader.readexactly(int(re.search(rb"content-length: (\d+)", reply)[1]))  # type: ignore[index]

        is_brayx = address.path == "/step"
        if is_brayx:
            await post("start", b"")
        count = 0
        while time.perf_counter() < until:
            await post("tick", _TICK if is_brayx else _INFER)
            count += 1
        writer.close()
        return count

    return sum(await asyncio.gather(*map(play, range(SESSIONS)))) / seconds


def serve_brayx() -> None:
    """cartpole.yaml's untrained model on the local host, until standard input ends."""
    import brayx

    with tempfile.TemporaryDirectory(prefix="brayx-bench-") as folder:
        options = {"actor.port": 0, "actor.native_port": None, "actor.tcp_port": None, "console_port": None}
        with brayx.serve(str(TEMPLATE), options, tracking=str(Path(folder) / "mlflow.db")) as running:
            tell_and_wait({"http": f"{running.url}/step"})


SERVES = {"serve": serve_alone, "brayx": serve_brayx}


def install(peers: Path, cases: Sequence[str]) -> None:
    """Installs the peers of these cases that are missing.

    Those that train have a folder beside the packages of brayx. Triton has an environment of the system's Python, since
    its processes load the system's libpython.
    """
    for case in cases:
        folder, pip = peers / case, [sys.executable, "-m", "pip"]
        if case not in PINS or folder.exists():
            continue
        if case == "triton":
            subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", str(folder)], check=True)
            words = ["--python", str(peers / TRITON_PYTHON), "install", "--quiet"]
        else:
            words = ["install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*pip, *words, *PINS[case]], check=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; exit code 1 if a case failed."""
    parser = tables.options(__doc__, rounds=3, seconds=3.0)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], help=f"(default: {' '.join(CASES)})")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of learning (default: 0 1 2)")
    parser.add_argument("--peers", type=Path, default=Path("build/peers"), help="their folder (default: %(default)s)")
    parser.add_argument("--install", action="store_true", help="install the peers that are missing")
    parser.add_argument("--learn", choices=list(LEARN), help=argparse.SUPPRESS)
    parser.add_argument("--serve", choices=list(SERVES), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.learn or options.serve:
        LEARN[options.learn](options.seeds[0]) if options.learn else SERVES[options.serve]()
        return 0
    cases = options.cases or CASES
    if options.install:
        install(options.peers, cases)
    say = Console(stderr=True, highlight=False).print
    table = Table(["what", "program", ">median", ">brayx to it"])
    for case in cases:
        if case in PINS and not (options.peers / case).exists():
            say(f"{case} is not installed: --install")
            continue
        say(f"measuring {case}", style="dim")
        if case in LEARN:
            name = "RLlib" if case == "rllib" else "Sample Factory"
            measured: dict[str, list[tuple[float | None, float | None]]] = {"brayx, tuned preset": [], name: []}
            for seed in options.seeds:
                measured["brayx, tuned preset"].append(learning_brayx(seed))
                measured[name].append(learning_peer(case, seed, options.peers))
            for at, unit in enumerate(("s", "CPU s")):
                one = {program: [values[at] for values in seeds] for program, seeds in measured.items()}
                add(table, f"CartPole: {unit} from start to 475", one)
        elif case == "serve":
            add(table, "an echo over HTTP, ticks/s", echoes(options.rounds, options.seconds))
        else:
            add(
                table,
                "a policy over HTTP, replies/s",
                policies(options.rounds, options.seconds, options.peers / TRITON_PYTHON),
            )
    show(
        f"{machine()}; medians of {options.rounds} rounds, or of {len(options.seeds)} seeds",
        table.markdown(),
        markdown=options.markdown,
    )
    return 1 if any(row[2] is None for row in table.rows) else 0


def add(table: Table, what: str, measured: Rates) -> None:
    """Rows of these programs, and what brayx has of their rate or time."""
    best = next(name for name in measured if name.startswith("brayx"))
    for name, values in measured.items():
        table.add(what, name, median(values), median_ratio(measured[best], values))


if __name__ == "__main__":
    sys.exit(main())
