"""Times the first agent of an engine's project: from the command's start in an empty folder to the line that it learns.

    python -m benchmarks.first_agent --rounds 3 --markdown

The command is that of the guides, ``brayx train godot.yaml`` or ``brayx train unity.yaml``, without options or files.
The game is the stand-in of the tests. It starts when the screen says to press Play, so a person's reaction is not
counted.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence

from benchmarks import tables
from benchmarks.tables import Table, machine, median, show
from benchmarks.train import environment_of

GAMES = {
    "godot": ("-m", "tests.godot_game", "--port=11008"),
    "unity": ("-m", "tests.unity_game", "--mlagents-port=5004"),
}
"""Each engine's stand-in, with the port where the engine's add-on looks for its trainer."""
LINES = ("press Play", "observations: ", "it is learning")
"""Parts of the lines that are timed."""
_TIMEOUT_S = 120.0


def seconds_to_lines(game: str) -> Mapping[str, float]:
    """Trains in an empty folder until the screen says that it learns, then interrupts.

    Returns:
        Seconds from the process's start to each of `LINES` that came; the screen is shown if one did not.
    """
    times: dict[str, float] = {}
    screen: list[str] = []
    environment = environment_of({})
    environment.pop("MLFLOW_TRACKING_URI", None)
    with tempfile.TemporaryDirectory(prefix="brayx-bench-", ignore_cleanup_errors=True) as folder:
        began = time.monotonic()
        train = subprocess.Popen(
            [sys.executable, "-m", "brayx", "train", f"{game}.yaml"],
            cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert train.stdout is not None
        timeout = threading.Timer(_TIMEOUT_S, train.kill)
        timeout.start()
        player: subprocess.Popen[bytes] | None = None
        try:
            for text in train.stdout:
                screen.append(text)
                for line in LINES:
                    if line in text:
                        times.setdefault(line, time.monotonic() - began)
                if player is None and LINES[0] in text:
                    player = subprocess.Popen(
                        [sys.executable, *GAMES[game]], env=environment, stdout=subprocess.DEVNULL
                    )
                if LINES[-1] in text:
                    train.send_signal(signal.SIGINT)
            train.wait()
        finally:
            timeout.cancel()
            train.kill()
            if player is not None:
                player.kill()
                player.wait()
    if len(times) < len(LINES):
        print(f"brayx train {game}.yaml ended with {train.returncode}:\n{''.join(screen)[-2000:]}", file=sys.stderr)
    return times


def main(argv: Sequence[str] | None = None) -> int:
    """Trains and prints; exit code 1 if a run failed."""
    parser = tables.options(__doc__, rounds=3)
    options = parser.parse_args(argv)
    about = f"{machine()}; medians of {options.rounds} runs, in seconds from the command's start"
    rounds = [{game: seconds_to_lines(game) for game in GAMES} for _ in range(options.rounds)]
    out = Table(["line on the screen", *(f">{game.capitalize()}" for game in GAMES)])
    for line in LINES:
        out.add(line.rstrip(": "), *(median([times[game].get(line) for times in rounds]) for game in GAMES))
    show(about, out.markdown(), markdown=options.markdown)
    return 1 if any(len(times) < len(LINES) for by_game in rounds for times in by_game.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
