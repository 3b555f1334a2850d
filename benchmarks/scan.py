"""Algorithms for a backward recurrence, by steps and width of a row: microseconds on one thread.

    python -m benchmarks.scan

``rows`` and ``chunks`` are those of `brayx.algorithms.scan`; ``doubling`` is a scan of logarithmic depth (Hillis and
Steele 1986, "Data parallel algorithms"), which is slower and not used. ``chosen`` is the one that brayx uses.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.tables import Table, machine, median, show
from brayx.algorithms import scan

STEPS = (5, 16, 32, 64, 128, 256, 1024)
WIDTHS = (4, 32, 256, 2048)


def doubling(decay_t: Tensor, x_t: Tensor) -> Tensor:
    """The recurrence in log2(T) passes over everything."""
    reach = 1
    while reach < len(x_t):
        x_t = torch.cat([torch.addcmul(x_t[:-reach], decay_t[:-reach], x_t[reach:]), x_t[-reach:]])
        decay_t = torch.cat([decay_t[:-reach] * decay_t[reach:], torch.zeros_like(decay_t[-reach:])])
        reach *= 2
    return x_t


def chunks(decay_t: Tensor, x_t: Tensor) -> Tensor:
    """In chunks of the size that `scan.backward_recurrence` takes."""
    return scan.chunks(decay_t, x_t, math.isqrt(len(x_t)))


WAYS = {"rows": scan.rows, "chunks": chunks, "doubling": doubling, "chosen": scan.backward_recurrence}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--markdown", action="store_true", help="print plain markdown")
    options = parser.parse_args(argv)
    about = machine()
    torch.set_num_threads(1)
    table = Table([">steps", ">width", *(f">{name}" for name in WAYS)])
    for steps in STEPS:
        for width in WIDTHS:
            decay_t, x_t = torch.rand(steps, width), torch.randn(steps, width)
            took: dict[str, list[float | None]] = {name: [] for name in WAYS}
            for _ in range(options.rounds):
                for name, way in WAYS.items():
                    calls = 0
                    began = time.perf_counter()
                    while (spent := time.perf_counter() - began) < 0.01:
                        way(decay_t, x_t)
                        calls += 1
                    took[name].append(spent / calls * 1e6)
            table.add(steps, width, *(median(each) for each in took.values()))
    show(about, table.markdown(), markdown=options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
