"""An interrupt ends a command wherever it comes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

DROPPED = """
import os, signal, sys, time
from pipelines import cli

class Finalised:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)  # Python drops what is raised here

def work(arguments):
    Finalised()
    print("went on", flush=True)
    time.sleep(60)
    return 0

cli._check = work
sys.exit(cli.main(["check", "job.yaml"]))
"""


def test_an_interrupt_that_python_drops_comes_again() -> None:
    command = [sys.executable, "-c", DROPPED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert done.stdout == "went on\n"
    assert done.returncode == 130
    assert done.stderr == ""
