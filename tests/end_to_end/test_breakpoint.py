"""`breakpoint()` in `on_tick` of a training on a terminal: a prompt that is not drawn over, and deadlines that wait."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from brayx.shutdown import marked
from tests.end_to_end.jobs import BIN, FREE_PORTS, START_S, job_folder, numbers_of, setting, trials, without_ray

MARK, MARKED = "BRAYX_TEST_TERMINAL", str(os.getpid())
AGENT = """
from pathlib import Path
from gym_agent import GymAgent

class Stops(GymAgent):
    async def on_tick(self, state):
        await super().on_tick(state)
        has_learned = state.step.policy_version > 2  # the first update made 2, and its numbers came before 3
        if has_learned and state.tick == 3 and not Path("stopped").exists():
            Path("stopped").touch()
            answer = 6 * 7000
            breakpoint()
"""
OPTIONS = (
    "agent.module=stops",
    "agent.class=Stops",
    "actor.gamecores.0.num=2",
    "actor.tick_timeout_s=8",
    "actor.idle_timeout_s=8",
    "model.deadline_s=8",
    "trainer.num_steps=4000",
    "trainer.target_return=null",
)
LIMITS_PASS = "import time; time.sleep(16)"


class Terminal:
    """A command on a separate terminal."""

    def __init__(self, words: list[str], folder: Path) -> None:
        self.end, end = pty.openpty()
        # Ray in the process of the tests sets its own debugger, which a child would inherit.
        terminal = {"TERM": "xterm", "COLUMNS": "120", "LINES": "40", "PYTHONBREAKPOINT": None}
        variables = {**os.environ, **without_ray(folder), **terminal}
        self.process = subprocess.Popen(
            [str(BIN / words[0]), *words[1:]],
            cwd=folder,
            env={**{name: value for name, value in variables.items() if value is not None}, MARK: MARKED},
            stdin=end,
            stdout=end,
            stderr=end,
            start_new_session=True,
        )
        os.close(end)
        self.text = ""

    def read(self, timeout_s: float) -> bool:
        """Reads what comes within ``timeout_s``; False: the command has closed the terminal."""
        if not select.select([self.end], [], [], timeout_s)[0]:
            return True
        try:
            self.text += os.read(self.end, 65536).decode(errors="replace")
        except OSError:  # no process has the terminal open any more
            return False
        return True

    def until(self, text: str) -> str:
        """Waits for ``text``; gives all that came since the last wait, up to it."""
        deadline = time.monotonic() + START_S
        while text not in self.text:
            is_open = self.read(1.0)
            if not is_open or time.monotonic() > deadline:
                raise AssertionError(f"{text!r} did not come; the terminal says:\n{self.text[-6000:]}")
        before, self.text = self.text.split(text, 1)
        return before

    def type(self, line: str) -> None:
        os.write(self.end, f"{line}\n".encode())

    def ended(self) -> int:
        deadline = time.monotonic() + START_S
        while self.read(1.0):
            assert time.monotonic() < deadline, self.text[-6000:]
        return self.process.wait(30)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """A training, from its start to its breakpoint."""
    job_folder(tmp_path, stops=AGENT)
    terminal = Terminal(["brayx", "train", "cartpole.yaml", *setting(*FREE_PORTS, *OPTIONS)], tmp_path)
    try:
        terminal.until("-> breakpoint()")
        yield terminal
    finally:
        for process in marked(MARK, MARKED):
            process.send_signal(signal.SIGKILL)
        terminal.process.wait(30)
        os.close(terminal.end)


def test_a_breakpoint_shows_a_prompt_and_the_training_goes_on_after_it(terminal: Terminal, tmp_path: Path) -> None:
    terminal.until("(Pdb) ")
    terminal.type("p answer, state.tick")
    assert "(42000, 3)" in terminal.until("(Pdb) ")
    terminal.type(LIMITS_PASS)
    drawn = terminal.until("(Pdb) ")
    assert "ticks/s" not in drawn
    assert "env steps" not in drawn
    terminal.type("c")
    assert "ticks/s" in terminal.until("finished after")
    assert terminal.ended() == 0
    numbers = numbers_of(trials(tmp_path)["main"][0])
    assert numbers["env_steps"] >= 4000
    failed = ("agent_errors", "gamecores_failed", "sessions_ended.idle", "sessions_ended.error", "requests_refused")
    assert not {name: value for name, value in numbers.items() if name.startswith(failed)}


def test_q_at_the_prompt_ends_the_job_as_control_c_does(terminal: Terminal) -> None:
    terminal.until("(Pdb) ")
    terminal.type("q")
    terminal.until("interrupted: the learner saves a last checkpoint")
    assert terminal.ended() == 130
    assert not re.search("Traceback|BdbQuit", terminal.text)
