"""Everything that needs a GPU; and forwards of the torch engine on both: from which batch size on is the GPU faster?

    python -m benchmarks.gpu --markdown             # forwards alone
    python -m benchmarks.gpu --all --json FILE      # everything that needs a GPU, in a few minutes

A forward is timed as an actor sees it: NumPy in, NumPy out, both copies included. Without a GPU it shows the CPU's
half. Needs neither Ray nor MLflow.

With ``--all`` each part is a process with a deadline, so that one that fails or hangs costs no other; all end within
eight minutes. A part that lacks a GPU or a package says so and does the rest on the CPU. Results are in FILE after
every part; logs and plans lie beside it. Needs no Ray; ``jobs`` needs MLflow.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import torch
from torch import nn

from benchmarks import tables
from benchmarks.gpu_learning import NO_GPU, Part, has_gpu, learner, ranks, training
from benchmarks.servers import ROOT
from benchmarks.tables import Table, machine, percentile, show
from brayx.engines.torch import TorchEngine, example_leaves, module_weights
from brayx.nets.mlp import ActorCritic

BATCH_SIZES = (1, 64, 1024)

Model = tuple[nn.Module, tuple[Any, ...]]
Variants = Mapping[str, Callable[[nn.Module, tuple[Any, ...]], Any]]
"""What makes an engine of a module and its example arguments, by the engine's name in the table."""


class NatureCNN(nn.Module):
    """The network of Mnih et al. 2015, "Human-level control through deep reinforcement learning", with a value beside
    the logits: ``[B, 4, 84, 84]`` float32 in [0, 1] -> ``{"logits": [B, A], "value": [B]}``.

    Args:
        num_actions: number of discrete actions, ``A``.
    """

    def __init__(self, num_actions: int = 6) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(4, 32, 8, 4), nn.ReLU(),
            nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
            nn.Conv2d(64, 64, 3, 1), nn.ReLU(),
            nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU(),
        )  # fmt: skip
        self.logits, self.value = nn.Linear(512, num_actions), nn.Linear(512, 1)

    def forward(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
        """The logits and the value of each observation."""
        hidden = self.body(obs)
        return {"logits": self.logits(hidden), "value": self.value(hidden).squeeze(-1)}


def nature_cnn() -> Model:
    """The network and its example arguments."""
    torch.manual_seed(0)
    return NatureCNN(), (np.zeros((1, 4, 84, 84), np.float32),)


def mlp() -> Model:
    """CartPole's network and its example arguments."""
    torch.manual_seed(0)
    return ActorCritic(4, 2, (64, 64)), (np.zeros((1, 4), np.float32),)


MODELS = {"MLP 64x64": mlp, "Nature CNN": nature_cnn}


def seconds_per_run(engine: Any, inputs: Sequence[np.ndarray], runs: int, seconds: float) -> list[float]:
    """Durations of forwards: ``runs`` of them, or as many as fit into ``seconds``, after a few that do not count."""
    bound = engine.bind(engine.initial)
    for _ in range(5):
        engine.run(bound, inputs)
    taken: list[float] = []
    ends = time.perf_counter() + seconds
    while len(taken) < runs and (time.perf_counter() < ends or len(taken) < 5):
        began = time.perf_counter()
        engine.run(bound, inputs)
        taken.append(time.perf_counter() - began)
    return taken


def torch_engines() -> Variants:
    """The torch engine on the CPU, and on the GPU if there is one."""

    def on(device: str) -> Callable[[nn.Module, tuple[Any, ...]], TorchEngine]:
        return lambda module, example: TorchEngine(module, example, device=device)

    return {device: on(device) for device in ("cpu", *(("cuda",) if has_gpu() else ()))}


def measure(variants: Variants, runs: int, seconds: float) -> Table:
    """A row for each model and batch size; ratios are to the first variant."""
    heads = list(variants)
    ratios_to = [f">{heads[0]} to {head}" for head in heads[1:]]
    table = Table(["model", ">batch", *(f">{head}, µs" for head in heads), *ratios_to])
    for name, build in MODELS.items():
        module, example = build()
        engines = [make(module, example) for make in variants.values()]
        for batch_size in BATCH_SIZES:
            inputs = example_leaves(example, batch_size)
            medians = [percentile(seconds_per_run(engine, inputs, runs, seconds), 0.5) for engine in engines]
            ratios = [medians[0] / median for median in medians[1:]]
            table.add(name, batch_size, *(1e6 * median for median in medians), *ratios)
    return table


def about(folder: Path, quick: bool) -> Part:
    """The machine, the versions and the GPU."""
    facts: dict[str, Any] = {"machine": machine(), "torch": torch.__version__, "numpy": np.__version__}
    if not has_gpu():
        return Part(facts=facts, skipped=[NO_GPU])
    card = torch.cuda.get_device_properties(0)
    facts |= {"gpu": card.name, "memory_GB": round(card.total_memory / 1e9, 1), "cuda": torch.version.cuda}
    return Part(facts=facts | {"cudnn": torch.backends.cudnn.version(), "nccl": torch.cuda.nccl.version()})  # type: ignore[no-untyped-call]


def tests(folder: Path, quick: bool) -> Part:
    """Every test that is marked ``gpu``; the log and a report lie in the folder."""
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    report, log_file = folder / "gpu-tests.xml", folder / "gpu-tests.txt"
    report.unlink(missing_ok=True)
    # pytest's other plugins are not needed, and those of this machine may be of any version.
    command = [sys.executable, "-m", "pytest", "-p", "pytest_asyncio.plugin", "-p", "no:cacheprovider", "-m", "gpu"]
    command += ["-v", "--durations=15", f"--junitxml={report}", *map(str, files)]
    # A test that hangs ends pytest: its name and the results before it count, though not those after it.
    command += ["-o", "faulthandler_timeout=60", "-o", "faulthandler_exit_on_timeout=true"]
    with open(log_file, "w") as log:
        code = subprocess.run(
            command,
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            check=False,
        ).returncode
    if not report.exists():
        return _without_report(code, log_file.read_text())
    cases = list(ElementTree.parse(report).iter("testcase"))
    states = {case: next((child.tag for child in case if child.tag in _STATES), "passed") for case in cases}
    table = Table([f">{state}" for state in ("passed", *_STATES)])
    table.add(*(list(states.values()).count(state) for state in ("passed", *_STATES)))
    bad = [case for case, state in states.items() if state in ("failure", "error")]
    reasons = {str(child.get("message")) for case in cases for child in case if child.tag == "skipped"}
    failed = [f"{case.get('classname')}::{case.get('name')}: {_first_message(case)}" for case in bad]
    return Part(
        {"tests marked gpu": table},
        skipped=sorted(reasons),
        failed=failed or ([f"pytest exited with {code}"] if code else []),
    )


_STATES = ("failure", "error", "skipped")


def _without_report(code: int, log: str) -> Part:
    """The result of a run that ended before its report, from its verbose log."""
    words = ("PASSED", "FAILED", "ERROR", "SKIPPED")
    names = {word: re.findall(rf"^(tests/.+::.+) {word}\b", log, re.M) for word in words}
    table = Table([f">{word.lower()}" for word in words])
    table.add(*map(len, names.values()))
    hung = re.search(r"^(tests/.+::.+) Timeout \(", log, re.M)
    reason = f"{hung[1]} took longer than 60 s" if hung else f"pytest exited with {code}: {log[-2000:]}"
    failed = [*names["FAILED"], *names["ERROR"], reason]
    return Part({"tests marked gpu, up to where pytest ended": table}, failed=failed)


def _first_message(case: ElementTree.Element) -> str:
    return next((str(child.get("message"))[:500] for child in case if child.tag in ("failure", "error")), "")


def tensorrt(folder: Path, quick: bool) -> Part:
    """Builds and verifies TensorRT's engine of each model; the plans lie in the folder."""
    if (missing := "" if has_gpu() else NO_GPU) or importlib.util.find_spec("tensorrt") is None:
        return Part(skipped=[missing or "no tensorrt"])
    from brayx.engines.tensorrt import TensorRTEngine

    table = Table(["model", ">build and verify, s", ">plan, MB"])
    for name, build in MODELS.items():
        began = time.perf_counter()
        engine = TensorRTEngine(*build(), max_batch_size=1024, cache=folder / "cache")
        (folder / f"{name.split()[0].lower()}.plan").write_bytes(engine.plan)
        table.add(name, time.perf_counter() - began, len(engine.plan) / 1e6)
    variants = {
        "torch cuda": torch_engines()["cuda"],
        "tensorrt": lambda module, example: TensorRTEngine(
            module, example, max_batch_size=1024, cache=folder / "cache"
        ),
    }
    return Part({"TensorRT": table, "TensorRT's forwards": measure(variants, 1000, 0.1 if quick else 1.0)})


class OnnxOnDevice:
    """ONNX Runtime with one of its execution providers; NumPy in and out, copies included.

    On a GPU the inputs are copied from pinned memory, as `TorchEngine` does.
    """

    initial = None

    def __init__(self, module: nn.Module, example: tuple[Any, ...], provider: str) -> None:
        import onnxruntime

        from brayx.engines.export import to_onnx, with_constants

        graph = to_onnx(module, example)
        self._inputs, self._outputs = graph.inputs, list(graph.outputs)
        weights = with_constants(graph, module_weights(module))
        self._session = onnxruntime.InferenceSession(weights, providers=[provider])
        self._pinned: dict[tuple[str, tuple[int, ...]], np.ndarray] = {}

    def bind(self, weights: None) -> None:
        """The weights are constants of the graph."""

    def run(self, bound: None, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The outputs for a batch."""
        copies = {name: self._pinned_copy(name, array) for name, array in zip(self._inputs, inputs, strict=True)}
        outputs: list[np.ndarray] = self._session.run(self._outputs, copies)
        return outputs

    def _pinned_copy(self, name: str, array: np.ndarray) -> np.ndarray:
        key = (name, array.shape)
        if key not in self._pinned:
            memory = torch.from_numpy(np.empty_like(array))
            self._pinned[key] = (memory.pin_memory() if has_gpu() else memory).numpy()
        np.copyto(self._pinned[key], array)
        return self._pinned[key]


def acting(folder: Path, quick: bool) -> Part:
    """Forwards of every engine: ONNX Runtime and torch on the CPU with all cores, and those of the GPU."""
    import onnxruntime

    from brayx.engines.onnx import OnnxEngine

    def onnx(module: nn.Module, example: tuple[Any, ...]) -> OnnxEngine:
        return OnnxEngine(module, example, threads=torch.get_num_threads())

    variants: dict[str, Any] = {"ORT cpu": onnx} | {f"torch {name}": of for name, of in torch_engines().items()}
    skipped = [] if has_gpu() else [f"torch on a GPU: {NO_GPU}"]
    provider = "CUDAExecutionProvider"
    if has_gpu() and provider in onnxruntime.get_available_providers():
        variants["ORT cuda"] = lambda module, example: OnnxOnDevice(module, example, provider)
    else:
        skipped.append(f"ORT on a GPU: no {provider}, or {NO_GPU}")
    return Part({"one forward": measure(variants, 1000, 0.05 if quick else 1.0)}, skipped)


_BRAYX = f"{sys.executable} -m brayx.commands.cli"
_OPEN = ["console_port=null", "actor.port=0", "actor.native_port=0", "actor.tcp_port=0"]
_GYM = f"{_BRAYX} gamecore gym CartPole-v1 --url {{tcp_url}} --seed {{index}} --at-once 8 --quiet"
_GAMES = f"actor.gamecores.0.command={_GYM}"
_LEARNS = "trainer.use_gpu=true"
JOBS = {
    "games over TCP, cpu": ("cartpole.yaml", [*_OPEN, _GAMES]),
    "games over TCP, learns on cuda": ("cartpole.yaml", [*_OPEN, _GAMES, _LEARNS, "trainer.prefetch=1"]),
    "games over TCP, learns and acts on cuda": (
        "cartpole.yaml",
        [*_OPEN, _GAMES, _LEARNS, "model.engine=torch", "model.device=cuda"],
    ),
    "rollout, cpu": ("ppo_env.yaml", ["console_port=null"]),
    "rollout, learns on cuda": ("ppo_env.yaml", ["console_port=null", _LEARNS]),
}
"""Templates that `brayx train` runs, and their options."""
_LONGEST_S = 110.0


def jobs(folder: Path, quick: bool) -> Part:
    """``brayx train`` of two templates, with MLflow, doors and games, all at once; then ``brayx ppo`` of real Pong."""
    if importlib.util.find_spec("mlflow") is None:
        return Part(skipped=["no mlflow"])
    table = Table(["job", "end", ">s"])
    part = Part({"brayx train": table}, skipped=[] if has_gpu() else [f"jobs on a GPU: {NO_GPU}"])
    chosen = {name: job for name, job in JOBS.items() if has_gpu() or "cuda" not in name}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    # One thread each for what computes on the CPU, as a job's default is.
    environment |= {"OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true", "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryDirectory() as temporary:

        def start(name: str, words: Sequence[str]) -> tuple[Path, subprocess.Popen[Any]]:
            place = Path(temporary, re.sub(r"\W+", "-", name))
            place.mkdir()
            with open(place / "log", "w") as log:
                command = [*_BRAYX.split(), *words, "--tracking", str(place)]
                return place / "log", subprocess.Popen(
                    command, cwd=place, stdout=log, stderr=log, env=environment, start_new_session=True
                )

        steps = "trainer.num_steps=3000" if quick else "trainer.num_steps=100000"
        begun = {}
        for name, (template, overrides) in chosen.items():
            options = [word for override in [*overrides, steps] for word in ("--set", override)]
            begun[name] = start(name, ["train", str(ROOT / "pipelines" / "templates" / template), *options])
        codes = _wait_for_all([process for _, process in begun.values()], _LONGEST_S)
        for (name, (log, _)), code in zip(begun.items(), codes, strict=True):
            lines = log.read_text().splitlines()
            seconds = next((found[1] for line in lines if (found := re.search(r"after (\d+) s of training", line))), "")
            table.add(name, lines[-1].strip() if lines else "", float(seconds) if seconds else None)
            fell_back = [line for line in lines if "keeps acting with torch" in line]
            if code or fell_back or not (quick or "target_return" in lines[-1]):
                part.failed.append(f"{name}: exit code {code}: {' / '.join(fell_back or lines[-3:])}")
        if importlib.util.find_spec("ale_py") is None:
            part.skipped.append("Pong: no ale_py")
        else:
            _pong(part, start, quick)
        (folder / "gpu-jobs.txt").write_text(
            "\n".join(f"== {path.parent.name}\n{path.read_text()}" for path in sorted(Path(temporary).glob("*/log")))
        )
    return part


def _pong(part: Part, start: Callable[[str, Sequence[str]], tuple[Path, subprocess.Popen[Any]]], quick: bool) -> None:
    """Adds the rates of Pong's recipe, with the Nature CNN, by device and precision."""
    table = Table(["Pong", ">env steps", ">env steps/s"])
    part.tables["brayx ppo, Pong, the tuned preset, Nature CNN"] = table
    words = ["ppo", "--env", "PongNoFrameskip-v4", "--distributed", "false", "--preset", "tuned"]
    words += ["--set", "network.convolutions=nature"]
    ways = [("cpu", "fp32"), ("cuda", "fp32"), ("cuda", "bf16")] if has_gpu() else [("cpu", "fp32")]
    for device, precision in ways:
        title = f"{device}, {precision}"
        steps = "1024" if quick else "12288" if device == "cpu" else "30720"
        options = ["--device", device, "--timesteps", steps, "--set", f"precision={precision}"]
        log, process = start(f"pong {title}", [*words, *options])
        (code,) = _wait_for_all([process], 60.0)
        lines = log.read_text().splitlines()
        if code or not lines or not lines[-1].startswith("{"):
            part.failed.append(f"Pong on {title}: exit code {code}: {' / '.join(lines[-3:])}")
            continue
        summary = json.loads(lines[-1])
        table.add(title, summary["env_steps"], summary["steps_per_s"])


def _wait_for_all(running: Sequence[subprocess.Popen[Any]], seconds: float) -> list[int]:
    """Exit codes. What runs longer is ended, and everything that it started; its code is not 0."""
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until and any(process.poll() is None for process in running):
            time.sleep(0.1)
    finally:
        late = [process for process in running if process.poll() is None]
        for process in late:
            os.killpg(process.pid, signal.SIGTERM)
        for process in late:
            try:
                process.wait(15.0)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
    return [process.wait() or (-1 if process in late else 0) for process in running]


PARTS: dict[str, tuple[Callable[[Path, bool], Part], float]] = {
    "about": (about, 60),
    "tests": (tests, 200),
    "ranks": (ranks, 200),
    "jobs": (jobs, 300),
    "tensorrt": (tensorrt, 240),
    "acting": (acting, 90),
    "training": (training, 120),
    "learner": (learner, 200),
}
"""Each part, and its deadline in seconds."""
TOGETHER = ("tests", "ranks", "jobs", "tensorrt")
"""Parts that are not timed, so they run side by side."""
_ALL_S = 480.0
"""Deadline of all parts together, so that borrowed time on a GPU suffices."""


def run_all(file: Path, *, quick: bool = False, only: Sequence[str] | None = None) -> int:
    """Runs the parts, prints each, and writes all into ``file``; 1 if one failed."""
    folder = file.absolute().parent
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    chosen = [name for name in PARTS if only is None or name in only]
    stages = [[name] for name in chosen if name not in TOGETHER]
    stages.insert(1, [name for name in chosen if name in TOGETHER])
    until = time.monotonic() + _ALL_S
    with tempfile.TemporaryDirectory() as temporary:
        for stage in stages:
            running = {}
            for name in stage:
                command = [sys.executable, "-m", "benchmarks.gpu", "--part", name, str(folder), f"{temporary}/{name}"]
                command += ["--quick"] if quick else []
                running[name] = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
            seconds = max((PARTS[name][1] for name in stage), default=0)
            codes = _wait_for_all(list(running.values()), min(seconds, until - time.monotonic()))
            for name, code in zip(stage, codes, strict=True):
                given = Path(temporary, name)
                none = asdict(Part(failed=[f"exit code {code}, without a result"]))
                results[name] = json.loads(given.read_text()) if given.exists() else none
            file.write_text(json.dumps(results, indent=1))
    failed = [f"- {name}: {line}" for name, part in results.items() for line in part["failed"]]
    print("\n".join(["## Failures\n" if failed else "All parts passed.", *failed]), flush=True)
    return 1 if failed else 0


def run_part(name: str, folder: str, file: str, quick: bool) -> int:
    """Runs one part in this process, and writes its result into ``file``."""
    began = time.monotonic()
    try:
        part = PARTS[name][0](Path(folder), quick)
    except Exception as error:
        part = Part(failed=[f"{type(error).__name__}: {error}"])
        traceback.print_exc()
    part.seconds = round(time.monotonic() - began, 1)
    print(f"## {name}, {part.seconds} s\n\n{part.text()}\n", flush=True)
    Path(file).write_text(json.dumps(asdict(part), default=str))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = tables.options(__doc__, seconds=3.0)
    parser.add_argument("--runs", type=int, default=1000, help="forwards of a case at most (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=None, help="torch's, on the CPU (default: torch's own)")
    parser.add_argument("--all", action="store_true", help="every check that needs a GPU, in minutes; the rest is said")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="results of --all; logs go beside it")
    parser.add_argument("--quick", action="store_true", help="with --all: does it run at all")
    parser.add_argument("--only", nargs="+", metavar="PART", help="with --all: these parts alone")
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.part:
        name, folder, file = arguments.part
        return run_part(name, folder, file, arguments.quick)
    if arguments.all:
        return run_all(arguments.json, quick=arguments.quick, only=arguments.only)
    about = machine()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    text = measure(torch_engines(), arguments.runs, arguments.seconds).markdown()
    gpu = torch.cuda.get_device_name() if has_gpu() else NO_GPU
    about = f"{gpu}; {about}; {torch.get_num_threads()} threads, torch {torch.__version__}; medians"
    show(about, text, markdown=arguments.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
