"""The rate of `brayx replay`: recorded ticks/s that go through another version of a model, files and all.

    python -m benchmarks.comparison

CartPole's observations and bodies, recorded in sessions of some lengths; a 64x64 MLP, and the same with an LSTM.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.tables import Table, machine, median, show
from brayx.actions import sample
from brayx.actor.agent import State
from brayx.metrics import Recorder
from brayx.nets.policy import NetworkConfig, policy_for
from brayx.recording import Comparison, Version, compare
from brayx.recording import open as open_recordings
from brayx.recording.config import RecordingConfig
from brayx.recording.recorder import SessionRecorder
from brayx.types import Step

MODELS = {"64x64 MLP": NetworkConfig(), "64x64 MLP, LSTM of 64": NetworkConfig(lstm=64)}
LENGTHS = (20, 200, 20_000)
"""Ticks of a session."""
_OBS = np.zeros(4, np.float32)


def record(folder: Path, ticks: int, length: int) -> None:
    """Records ``ticks`` ticks in sessions of ``length``, at least one session."""
    recorder = SessionRecorder(RecordingConfig(folder=str(folder), memory_mb=4096), Recorder())
    rng = np.random.default_rng(0)
    for session in range(max(1, ticks // length)):
        log = recorder.open(f"{session}", b"{}", "", "")
        assert log is not None
        seen = rng.standard_normal((length, *_OBS.shape)).astype(np.float32)
        action, log_prob = sample({"logits": rng.standard_normal((length, 2)).astype(np.float32)}, rng)
        for tick, (obs, chosen, probability) in enumerate(zip(seen, action, log_prob.tolist(), strict=True)):
            state = State(f"{session}", tick=tick)
            state.step, state.value = Step(obs, chosen, probability, 1), 0.5
            body = json.dumps({"obs": obs.tolist(), "reward": 1.0}).encode()
            log.tick(state, body, b'{"action":%d}' % chosen, 0.0, 0.0)
        log.end("stop", float(length))
    recorder.close(timeout_s=300.0)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ticks", type=int, default=60_000, help="of each recording (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--markdown", action="store_true", help="print plain markdown")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    versions = {
        name: Version(name, *policy_for(_OBS, num_actions=2, network=network)) for name, network in MODELS.items()
    }
    table = Table(["model", ">ticks of a session", ">ticks/s"])
    with tempfile.TemporaryDirectory(prefix="brayx-comparison-") as temporary:
        folders = {length: Path(temporary, f"{length}") for length in LENGTHS}
        for length, folder in folders.items():
            record(folder, options.ticks, length)
        rates: dict[tuple[str, int], list[float | None]] = {
            (name, length): [] for name in versions for length in LENGTHS
        }
        for _ in range(options.rounds):
            for (name, length), found in rates.items():
                began = time.perf_counter()
                compared = list(compare(open_recordings(str(folders[length])), versions[name]))
                found.append(
                    sum(len(each) for each in compared if isinstance(each, Comparison)) / (time.perf_counter() - began)
                )
    for (name, length), found in rates.items():
        table.add(name, length, median(found))
    show(f"{machine()}; {options.rounds} rounds, medians", table.markdown(), markdown=options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
