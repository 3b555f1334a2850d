"""The chain of docs/guide-recordings.md, by its commands: a shipped game is recorded, cloned and learned on from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

import brayx.recording
from brayx.engines.base import load_weights
from brayx.engines.torch import with_weights
from brayx.tracking import Trial
from pipelines.templates.gym_model import build_model
from tests.end_to_end.jobs import FREE_PORTS, ROOT, said_on_failure, setting, trials, without_ray
from tests.end_to_end.jobs import brayx as run_brayx
from tests.recorded import ended
from tests.unit.test_docs import snippets_of
from tests.waiting import until

NETWORK: Mapping[str, Any] = {"network": {"obs_size": 4, "num_actions": 2}}
_TIMEOUT_S = 900.0


def example(folder: Path) -> None:
    """Writes the files that the guide shows."""
    for snippet in snippets_of(ROOT / "docs" / "guide-recordings.md"):
        if (name := snippet.is_("file")).startswith("shipped/"):
            (folder / Path(name).name).write_text(snippet.text + "\n")


def record(folder: Path, games: int, seed: int) -> list[float]:
    """Serves the shipped agent, plays games and records them; returns what each returned."""
    with run_brayx(folder, "serve", "shipped.yaml", *setting(*FREE_PORTS, "console_port=null")) as served:
        served.until(lambda: "  ws  " in served.err, "it serves")
        url = next(line.split()[1] for line in served.err.splitlines() if line.startswith("  ws "))
        words = ["gamecore", "gym", "CartPole-v1", "--url", url, "--games", str(games), "--seed", str(seed)]
        with run_brayx(folder, *words) as gamecore, said_on_failure(gamecore):
            assert gamecore.ended(_TIMEOUT_S) == 0
        served.control_c()
        assert served.ended() == 0
    # On a busy machine the writer may take longer than the host waits for it at its end.
    recorded = folder / "recordings"
    until(lambda: recorded.is_dir() and ended(recorded) == games, "they are written", 60.0)
    return [float(len(episode)) for episode in brayx.recording.open(str(recorded))]  # 1 for each tick


def train(folder: Path, job: str, *options: str) -> Trial:
    """Runs ``brayx train``; returns its trial."""
    words = setting("console_port=null", *options)
    with run_brayx(folder, "train", job, *words, environment=without_ray(folder)) as command, said_on_failure(command):
        assert command.ended(_TIMEOUT_S) == 0
    name = "clone" if job == "clone.yaml" else "main"
    return trials(folder)[name][-1]


def greedy_return(trial: Trial, games: int = 50) -> float:
    """Mean return of the newest checkpoint's most likely actions."""
    folder = trial.latest_checkpoint()
    assert folder is not None
    module = with_weights(build_model("model", NETWORK)[0], load_weights(folder / "weights.npz")).eval()
    returns = []
    for game in range(games):
        env = gymnasium.make("CartPole-v1")
        obs, _ = env.reset(seed=100_000 + game)
        returned, over = 0.0, False
        while not over:
            with torch.no_grad():
                action = int(module(torch.from_numpy(obs)[None])["logits"].argmax())
            obs, reward, terminated, truncated, _ = env.step(action)
            returned += float(reward)
            over = terminated or truncated
        returns.append(returned)
    return float(np.mean(returns))
