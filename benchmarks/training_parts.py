"""CPU of one training on the local host by part: a separate run, sampled by py-spy (in the extra ``bench``).

CPU seconds per thread come from the system; samples only divide those of the event loop's thread among its parts. A
sample counts for the innermost frame that belongs to a part; time in uvloop and the kernel without one counts for the
door.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from benchmarks.tables import Table
from benchmarks.usage import by_thread, tree

GAMECORE, DOOR, AGENT, FORWARD, FRAGMENT, LEARNER, REST = PARTS = (
    "gamecores",
    "door and session",
    "agent",
    "forward",
    "fragments",
    "learner",
    "MLflow and the rest",
)
_ON_THE_LOOP = {
    FRAGMENT: ("on_episode", "brayx/replay/", "brayx/local/buffer.py"),
    FORWARD: ("brayx/model/", "brayx/engines/", "onnxruntime/"),
    AGENT: (
        "gym_agent.py",
        "brayx/actor/agent_actor.py",
        "brayx/actor/codec.py",
        "brayx/actor/agent.py",
        "brayx/actor/decode.py",
        "json/",
    ),
    DOOR: ("",),
}
"""Pieces of a frame's text by part: a part's piece anywhere on the stack gives the sample to the first such part."""
_THREADS = {
    DOOR: "_run (brayx/local/host.py",
    LEARNER: "_run (brayx/local/learner.py",
    FORWARD: '"brayx-batcher',
}
"""Text in py-spy's dump of a thread that is only one part: the frame at which it begins, or the name if it waits."""
SPY = Path(shutil.which("py-spy") or Path(sys.executable).parent / "py-spy")
_FIRST_TICK_S = 60.0
_EVERY_S = 0.2
_LOOKS = 5


def shares(stacks: Iterable[str]) -> dict[str, float]:
    """Share of the samples by part.

    Args:
        stacks: lines of py-spy's raw format, of one thread: frames from the outermost to the innermost, then the number
            of samples.
    """
    counts: Counter[str] = Counter()
    for line in stacks:
        stack, _, samples = line.rpartition(" ")
        part = next(part for part, pieces in _ON_THE_LOOP.items() if any(piece in stack for piece in pieces))
        counts[part] += int(samples)
    total = sum(counts.values())
    return {part: count / total for part, count in counts.items()}


def cpu_by_part(words: Sequence[str], environment: Mapping[str, str], stamp: Path) -> dict[str, float]:
    """CPU seconds by part of a training, from its first tick until its gamecores end.

    Args:
        words: arguments of Python that train on the local host.
        environment: of the process.
        stamp: file that exists once the first tick is answered.

    Raises:
        RuntimeError: no tick arrived, or py-spy has no permission.
    """
    with tempfile.TemporaryDirectory(prefix="brayx-spy-") as folder:
        quiet = subprocess.DEVNULL
        process = subprocess.Popen([sys.executable, *words], env=environment, stdout=quiet, stderr=quiet)
        try:
            until = time.monotonic() + _FIRST_TICK_S
            while not stamp.exists():
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError("the training has had no tick")
                time.sleep(_EVERY_S)
            stacks = Path(folder) / "stacks"
            threads = _thread_parts(process.pid)
            record = [str(SPY), "record", "--pid", str(process.pid), "--threads", "--rate", "40"]
            with subprocess.Popen(
                [*record, "--format", "raw", "--output", str(stacks)], stdout=quiet, stderr=quiet
            ) as spy:
                before = last = now = _used(process.pid)
                while any(gamecore for _, gamecore, _ in now):
                    time.sleep(_EVERY_S)
                    last, now = last | now, _used(process.pid)  # the learner's thread ends before the gamecores
                spy.send_signal(signal.SIGINT)
            if not stacks.exists():
                raise RuntimeError("py-spy gave no samples")
            used = {key: seconds - before.get(key, 0.0) for key, seconds in last.items()}
            return _by_part(process.pid, used, threads, stacks.read_text().splitlines())
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


Thread = tuple[int, bool, int]
"""Process, whether that is a gamecore, and thread."""


def _used(root: int) -> dict[Thread, float]:
    """CPU seconds so far of every thread of a process tree."""
    found: dict[Thread, float] = {}
    for each in tree(root):
        gamecore = each.pid != root and "gamecore" in " ".join(_command(each))
        found.update({(each.pid, gamecore, thread): used for thread, used in by_thread(each.pid).items()})
    return found


def _thread_parts(pid: int) -> dict[int, str]:
    """Which part each thread of a process is, by what it runs: py-spy mistakes a thread's name now and then.

    Raises:
        RuntimeError: py-spy failed.
    """
    found: dict[int, str] = {}
    for _ in range(_LOOKS):
        dump = subprocess.run([str(SPY), "dump", "--pid", str(pid)], capture_output=True, text=True, check=False)
        for thread, stack in re.findall(r"^Thread (\d+)(.*?)(?=^Thread|\Z)", dump.stdout, re.MULTILINE | re.DOTALL):
            found |= {int(thread): part for part, frame in _THREADS.items() if frame in stack}
    if not found:
        raise RuntimeError(f"py-spy gave no stacks of threads: {dump.stderr.strip()[-500:]}")
    return found


def _by_part(
    root: int, used: Mapping[Thread, float], threads: Mapping[int, str], stacks: Sequence[str]
) -> dict[str, float]:
    of_loop = [line for line in stacks if _THREADS[DOOR] in line]
    parts = dict.fromkeys(PARTS, 0.0)
    for (process, gamecore, thread), seconds in used.items():
        if process != root:
            parts[GAMECORE if gamecore else REST] += seconds
        elif threads.get(thread) == DOOR:
            for part, share in shares(of_loop).items():
                parts[part] += share * seconds
        else:
            parts[threads.get(thread, REST)] += seconds
    return parts


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def parts_table(name: str, parts: Mapping[str, float], steps: int) -> Table:
    """CPU for each of ``steps``, by part, of a training of that name."""
    out = Table([name, ">CPU µs a step", ">%"])
    total, count = sum(parts.values()), steps
    for part, seconds in parts.items():
        out.add(part, 1e6 * seconds / count, 100 * seconds / total)
    out.add("all", 1e6 * total / count, 100.0)
    return out
