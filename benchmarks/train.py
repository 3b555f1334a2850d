"""brayx's whole training loop and Stable-Baselines3's PPO on CartPole-v1 in the same run.

    python -m benchmarks.train --seeds 0 1 2      # the tables of docs/benchmarks.md
    python -m benchmarks.train --quick            # does it run at all
    python -m benchmarks.train --parts            # only what the loop is made of: environments, updates, distributions
    python -m benchmarks.train --cluster          # the host on Ray, too

``ppo`` is `python -m pipelines.ppo` in one process with its tuned preset, ``same`` is it with Stable-Baselines3's
hyperparameters. With these, eight games play through a door: those of one gamecore over TCP, as in the template, on
the local host (``once``) or on Ray (``ray``, with ``--cluster``); or on Ray of eight gamecores, each a process, over
HAProxy's WebSocket (``process``).
``pendulum`` and ``pong`` are the tuned preset on other games, without a baseline; ``pong`` needs the extra
`atari`.

Every run is a process of its own with one thread of torch. Both sides count the same: the return of a game is what
its player earned while it learned (actions sampled), and the target is reached when the mean of the last 100 finished
games is 475 or more, at least 100 games being finished. CPU is of all processes, from the first game to the end of
the last.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import tables
from benchmarks.parts import CpuClock, parts
from benchmarks.sb3 import CARTPOLE_UNROLL, FILE, INSTALL, NUM_ENVS, STAMPED
from benchmarks.servers import TEMPLATE
from benchmarks.tables import Table, each, machine, median, median_ratio, show

TARGET = 475.0
WINDOW_GAMES = 100
YARDSTICK = "Stable-Baselines3"
VARIANTS = {
    "ppo": "brayx, one process",
    "same": "... with SB3's recipe",
    "once": "brayx, local host",
    "ray": "brayx, on Ray",
    "process": "... eight gamecores, HAProxy's WebSocket",
    "sb3": YARDSTICK,
}
CLUSTER = ("ray", "process")
"""Variants on Ray."""
GAMES = {"pendulum": ("Pendulum-v1", 400_000), "pong": ("PongNoFrameskip-v4", 30_000)}
"""Environment and env steps of a run."""
_TUNED_STEPS = 200_000
"""Of a run with the tuned preset, at least: what its schedules are made for; they take seconds."""
_TUNED = ("--preset", "tuned")
_SAME = (
    *("--num-workers", "1", "--num-envs", str(NUM_ENVS), "--set", f"unroll_length={CARTPOLE_UNROLL}"),
    *("--set", "minibatch_size=256", "--set", "epochs=20", "--gamma", "0.98", "--gae-lambda", "0.8"),
    *("--entropy-coef", "0", "--lr", "1e-3", "--clip-param", "0.2", "--set", "threads=1"),
    *("--set", "learning_rate_schedule=linear", "--set", "clip_schedule=linear"),
)
"""Hyperparameters of `benchmarks.sb3.cartpole`; the networks are the same by default."""
_TIMEOUT_S = 900.0
GAMECORE = f"brayx gamecore gym {STAMPED} --url {{url}} --seed {{index}} --quiet"
_NUM_GAMES = 8
_EVALUATED = 100
"""Episodes that a finished policy is measured by."""


@dataclass(frozen=True)
class Point:
    """The state of a run at one moment.

    Attributes:
        time_s: on the epoch's clock.
        env_steps, games: so far.
        mean_return: of the last 100 finished games; None before the first.
    """

    time_s: float
    env_steps: int
    games: int
    mean_return: float | None


@dataclass(frozen=True)
class Outcome:
    """The result of one run.

    Attributes:
        steps_per_s: while games were played and learned from.
        startup_s: from the process's start to the first game.
        target_s: from the first game to the target; None: not reached.
        target_steps: env steps at the target.
        total_s: from the process's start to its end.
        final_return: mean of the last 100 games at the end.
        cpu_us: CPU of all processes for each env step, in µs, the start left out; None: not measured.
        startup_cpu_s: CPU of all processes up to the first game; None: not measured.
    """

    steps_per_s: float
    startup_s: float
    target_s: float | None
    target_steps: int | None
    total_s: float
    final_return: float | None
    cpu_us: float | None = None
    startup_cpu_s: float | None = None

    @property
    def target_from_start_s(self) -> float | None:
        """From the process's start to the target."""
        return None if self.target_s is None else self.startup_s + self.target_s


@dataclass(frozen=True)
class Ran:
    """A process that has ended.

    Attributes:
        out: its standard output.
        started_s, ended_s: on the epoch's clock.
        cpu_at: CPU seconds of it and all that it started, up to a moment on the epoch's clock.
    """

    out: str
    started_s: float
    ended_s: float
    cpu_at: Callable[[float], float]


def outcome(points: Sequence[Point], ran: Ran, began_s: float | None = None, target: float = TARGET) -> Outcome:
    """Reads a run's course.

    Args:
        points: in order of time, at least two, with different times.
        ran: the process.
        began_s: when the first game began, on the epoch's clock. None: it is extrapolated from the first point, which
            comes some steps later, by the rate between the first and the last.
        target: mean return whose time is looked for.

    The rate is that up to the last point with new steps.

    Raises:
        ValueError: fewer than two moments.
    """
    first, last = (points[0], points[-1]) if points else (None, None)
    if first is None or last is None or last.time_s <= first.time_s:
        raise ValueError(f"{len(points)} points are no course of a run")
    last = next(point for point in points if point.env_steps == last.env_steps)
    if began_s is None:
        rate = (last.env_steps - first.env_steps) / (last.time_s - first.time_s)
        began_s = first.time_s - (first.env_steps / rate if rate > 0 else 0.0)
    rate = last.env_steps / (last.time_s - began_s)
    reached = next(
        (p for p in points if p.games >= WINDOW_GAMES and p.mean_return is not None and p.mean_return >= target), None
    )
    startup_cpu_s = ran.cpu_at(began_s)
    return Outcome(
        steps_per_s=rate,
        startup_s=began_s - ran.started_s,
        target_s=None if reached is None else reached.time_s - began_s,
        target_steps=None if reached is None else reached.env_steps,
        total_s=ran.ended_s - ran.started_s,
        final_return=points[-1].mean_return,
        cpu_us=1e6 * (ran.cpu_at(last.time_s) - startup_cpu_s) / last.env_steps,
        startup_cpu_s=startup_cpu_s,
    )


Outcomes = dict[str, list[Outcome | None]]
"""Outcomes by variant, one a seed; None for a run that failed."""


def table(outcomes: Outcomes) -> Table:
    """Medians over seeds, one row a variant, with each seed's ratio to the yardstick."""
    out = Table(
        [
            *("what", ">env steps/s", ">to SB3", ">start s", ">start CPU s", ">475 after s", ">to SB3"),
            *(">475 from start s", ">to SB3", ">CPU µs a step", ">to SB3", ">steps to 475", ">reached"),
        ]
    )
    base = outcomes.get("sb3")
    for variant, runs in outcomes.items():
        yardstick: list[Outcome | None] = [None] * len(runs) if base is None else base
        cells: list[float | None] = []
        for read in _READ:
            values = each(runs, read)
            cells += [median(values), median_ratio(values, each(yardstick, read))]
        rate, rate_ratio, target, target_ratio, whole, whole_ratio, cpu, cpu_ratio = cells
        out.add(
            VARIANTS[variant],
            rate,
            rate_ratio,
            median(each(runs, lambda run: run.startup_s)),
            median(each(runs, lambda run: run.startup_cpu_s)),
            target,
            target_ratio,
            whole,
            whole_ratio,
            cpu,
            cpu_ratio,
            median(each(runs, lambda run: run.target_steps)),
            f"{sum(run is not None and run.target_s is not None for run in runs)} of {len(runs)}",
        )
    return out


_READ: tuple[Callable[[Outcome], float | None], ...] = (
    lambda run: run.steps_per_s,
    lambda run: run.target_s,
    lambda run: run.target_from_start_s,
    lambda run: run.cpu_us,
)


def run_brayx(variant: str, seed: int, steps: int, overrides: Sequence[str] = ()) -> Outcome | None:
    """One ``brayx train`` from scratch, in its own folder."""
    with tempfile.TemporaryDirectory(prefix="brayx-bench-", ignore_cleanup_errors=True) as folder:
        stamp = Path(folder) / "first-tick"
        words = train_words(variant, seed, steps, folder, overrides)
        ran = run_process(words, {FILE: str(stamp)})
        return outcome(points_of(Path(folder)), ran, float(stamp.read_text())) if ran is not None else None


def train_words(variant: str, seed: int, steps: int, folder: str, overrides: Sequence[str]) -> list[str]:
    """Arguments of Python for ``brayx train``, with its trial in ``folder`` and further ``overrides`` of the job."""
    apart = variant == "process"
    # No early stop: both sides learn from the same number of steps, towards which their learning rates fall.
    options = {
        "trainer.num_steps": steps,
        "trainer.target_return": "null",
        "seed": seed,
        "actor.port": 0,
        "actor.native_port": 0,
        "actor.tcp_port": 0,
        "actor.gamecores.0.command": GAMECORE if apart else f"{GAMECORE} --at-once {_NUM_GAMES}",
        "actor.gamecores.0.num": _NUM_GAMES if apart else 1,
        "actor.gamecores.0.door": "ws" if apart else "tcp",
    }
    options |= {"trainer.where": "process"} if variant in CLUSTER else {}
    settings = [*(f"{name}={value}" for name, value in options.items()), *overrides]
    words = [word for setting in settings for word in ("--set", setting)]
    words += ["--cluster"] if variant in CLUSTER else []
    return ["-m", "brayx", "train", str(TEMPLATE), "--tracking", str(Path(folder) / "mlflow.db"), *words]


def run_ppo(recipe: Sequence[str], seed: int, steps: int) -> Outcome | None:
    """One `python -m pipelines.ppo` from nothing in one process, with no early stop."""
    with tempfile.TemporaryDirectory(prefix="brayx-bench-", ignore_cleanup_errors=True) as folder:
        database = Path(folder) / "mlflow.db"
        words = ["--env", "CartPole-v1", "--distributed", "false", "--tracking", str(database), *recipe]
        words += ["--seed", str(seed), "--timesteps", str(steps), "--course", str(Path(folder) / "course.json")]
        ran = run_process(["-m", "pipelines.ppo", *words])
        if ran is None:
            return None
        course = json.loads((Path(folder) / "course.json").read_text())
        return outcome([Point(*point) for point in course], ran)


@dataclass(frozen=True)
class Played:
    """The result of one run of a game without a baseline.

    Attributes:
        steps_per_s: while collecting and learning.
        seconds: from the process's start until it had learned.
        final_return: mean of the last 100 training episodes.
        evaluated: mean over `_EVALUATED` greedy episodes; None where they were not played.
    """

    steps_per_s: float
    seconds: float
    final_return: float | None
    evaluated: float | None


def run_game(game: str, seed: int, steps: int | None) -> Played | None:
    """One `python -m pipelines.ppo` with its tuned preset; its own number of steps if None."""
    env, usual = GAMES[game]
    evaluated = _EVALUATED if game == "pendulum" else 0
    with tempfile.TemporaryDirectory(prefix="brayx-bench-", ignore_cleanup_errors=True) as folder:
        words = ["--env", env, "--distributed", "false", "--preset", "tuned", "--tracking", f"{folder}/mlflow.db"]
        words += ["--seed", str(seed), "--timesteps", str(steps or usual), "--set", f"evaluation_episodes={evaluated}"]
        ran = run_process(["-m", "pipelines.ppo", *words])
    if ran is None:
        return None
    result = json.loads(ran.out.splitlines()[-1])
    return Played(result["steps_per_s"], result["seconds"], result["return_mean"], result.get("eval_return_mean"))


def games_table(played: dict[str, list[Played | None]]) -> Table:
    """Medians over seeds, and the worst of them where it is a promise that each seed holds."""
    out = Table(["game", ">env steps/s", ">seconds", ">return in training", ">greedy, median", ">greedy, worst seed"])
    for game, runs in played.items():
        greedy = each(runs, lambda run: run.evaluated)
        known = [value for value in greedy if value is not None]
        out.add(
            GAMES[game][0],
            median(each(runs, lambda run: run.steps_per_s)),
            median(each(runs, lambda run: run.seconds)),
            median(each(runs, lambda run: run.final_return)),
            median(greedy),
            min(known) if len(known) == len(runs) and known else None,
        )
    return out


def run_sb3(seed: int, steps: int) -> Outcome | None:
    """One run of Stable-Baselines3."""
    ran = run_process(["-m", "benchmarks.sb3", "cartpole", "--seeds", str(seed), "--steps", str(steps)])
    if ran is None:
        return None
    return outcome([Point(*point) for point in json.loads(ran.out.splitlines()[-1])["points"]], ran)


def run(variant: str, seed: int, steps: int, overrides: Sequence[str] = ()) -> Outcome | None:
    """One run of a variant."""
    if variant == "sb3":
        return run_sb3(seed, steps)
    if variant == "ppo":
        return run_ppo(_TUNED, seed, max(steps, _TUNED_STEPS))
    return run_ppo(_SAME, seed, steps) if variant == "same" else run_brayx(variant, seed, steps, overrides)


def run_process(
    words: Sequence[str], environment: Mapping[str, str] | None = None, folders: Sequence[Path] = ()
) -> Ran | None:
    """Runs a Python process to its end; None, with its standard error shown, if it failed. Its modules are looked up in
    ``folders`` first."""
    started_s = time.time()
    process = subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment_of(environment or {}, *folders),
    )
    with CpuClock(process.pid) as cpu:
        try:
            out, err = process.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
    if process.returncode == 0:
        return Ran(out, started_s, time.time(), cpu.at)
    print(f"{' '.join(words[:4])} ended with {process.returncode}:\n{err.strip()[-2000:]}", file=sys.stderr)
    return None


def environment_of(more: Mapping[str, str], *folders: Path) -> dict[str, str]:
    """The environment of a process that finds this package wherever it runs, and first those in ``folders``."""
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, (*map(str, folders), root, os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path, **more}


def points_of(folder: Path) -> list[Point]:
    """The course of the one run in the MLflow database of a folder, as the hub wrote it."""
    from mlflow import MlflowClient

    from brayx.metrics.charts import CHARTS
    from brayx.tracking import tracking_uri

    client = MlflowClient(tracking_uri(folder / "mlflow.db"))
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    (found,) = client.search_runs(experiments)
    written: dict[int, dict[str, float]] = {}
    for name in ("env_steps", "games", "episode_return.last100"):
        for metric in client.get_metric_history(found.info.run_id, CHARTS[name]):
            written.setdefault(metric.timestamp, {})[name] = metric.value
    points, steps, games = [], 0.0, 0.0
    for timestamp in sorted(written):
        values = written[timestamp]
        steps, games = values.get("env_steps", steps), values.get("games", games)
        if steps:
            points.append(Point(timestamp / 1000, int(steps), int(games), values.get("episode_return.last100")))
    return points


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; ``--quick`` overrides what takes time."""
    parser = tables.options(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(default: 0 1 2)")
    parser.add_argument(
        "--steps", type=int, default=100_000,
        help=f"env steps of a run; {_TUNED_STEPS:,} at least with the tuned preset (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--variant", nargs="+", choices=list(VARIANTS), help=f"(default: all but {', '.join(CLUSTER)})")
    parser.add_argument("--cluster", action="store_true", help=f"{', '.join(CLUSTER)}, too: they start Ray")
    parser.add_argument("--games", nargs="*", choices=list(GAMES), default=["pendulum"], help="(default: pendulum)")
    parser.add_argument("--parts", action="store_true", help="measure only what the loop is made of")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE",
        help="an option of brayx's job, in the runs through a door",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run there")
    parser.add_argument("--quick", action="store_true", help="one seed, 10,000 steps: reaches nothing")
    options = parser.parse_args(argv)
    if options.variant is None:
        options.variant = [variant for variant in VARIANTS if options.cluster or variant not in CLUSTER]
    options.game_steps = 4_000 if options.quick else None
    if options.quick:
        options.seeds, options.steps = options.seeds[:1], 10_000
    if options.parts:
        options.variant, options.games = [], []
    if options.steps < 1:
        parser.error("--steps must be positive")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Trains and prints; exit code 1 if a run failed."""
    options = parse(argv)
    console = Console(stderr=True, highlight=False)
    if "sb3" in options.variant and find_spec("stable_baselines3") is None:
        message = f"Stable-Baselines3 is not installed, so there is nothing to compare with: {INSTALL}"
        console.print(message, markup=False)
        options.variant = [variant for variant in options.variant if variant != "sb3"]
    steps = f"{options.steps:,} env steps"
    if "ppo" in options.variant and options.steps < _TUNED_STEPS:
        steps += f" ({_TUNED_STEPS:,} with the tuned preset)"
    about = f"{machine()}; {steps}, medians over {len(options.seeds)} seeds"
    measured = parts(0.2 if options.quick else 2.0)  # first: nothing else runs then
    outcomes: Outcomes = {variant: [] for variant in options.variant}
    for seed in options.seeds:
        for variant, runs in outcomes.items():
            runs.append(run(variant, seed, options.steps, options.overrides))
            console.print(f"seed {seed}, {VARIANTS[variant]}: {runs[-1]}", style="dim")
    played: dict[str, list[Played | None]] = {game: [] for game in options.games}
    for seed in options.seeds:
        for game, games in played.items():
            games.append(run_game(game, seed, options.game_steps))
            console.print(f"seed {seed}, {GAMES[game][0]}: {games[-1]}", style="dim")
    tables = [table(outcomes)] if outcomes else []
    tables += [games_table(played)] if played else []
    text = "\n\n".join(each.markdown() for each in (*tables, *measured))
    show(about, text, markdown=options.markdown)
    if options.json is not None:
        rows: dict[str, list[Any]] = {
            variant: [None if run is None else asdict(run) for run in runs] for variant, runs in outcomes.items()
        }
        rows |= {game: [None if run is None else asdict(run) for run in games] for game, games in played.items()}
        options.json.write_text(json.dumps({"about": about, "seeds": options.seeds, "runs": rows}, indent=1))
    everything: list[object] = [run for runs in outcomes.values() for run in runs]
    everything += [run for games in played.values() for run in games]
    return 1 if None in everything else 0


if __name__ == "__main__":
    sys.exit(main())
