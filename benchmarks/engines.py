"""Cost of one call of each engine, in this process, on one thread: a 64x64 MLP and Nature's CNN.

    python -m benchmarks.engines

Engines alternate within each round, so that disturbances of the machine affect all of them. Figures are medians over
rounds of the median call. int8 is calibrated on noise, like any model without samples, since only its time matters
here.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.forward import calls, cnn, mlp
from benchmarks.tables import Table, machine, median, show
from brayx.engines import build_engine

ENGINES = ("onnx", "onnx-frozen", "int8", "torch")
SIZES = (1, 16, 64)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.2, help="of each measurement (default: %(default)s)")
    parser.add_argument("--markdown", action="store_true", help="print plain markdown")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    table = Table(["model", "engine", *(f">batch {size}, µs" for size in SIZES)])
    for name, build in (("64x64 MLP", mlp), ("Nature CNN", cnn)):
        module, example = build()
        shape = example[0].shape[1:]
        rng = np.random.default_rng(0)
        engines = {kind: build_engine(kind, module, example) for kind in ENGINES}
        bound = {kind: engine.bind(engine.initial) for kind, engine in engines.items()}
        took: dict[tuple[str, int], list[float]] = {(kind, size): [] for kind in ENGINES for size in SIZES}
        for _ in range(options.rounds):
            for size in SIZES:
                batch = rng.standard_normal((size, *shape)).astype(np.float32)
                for kind, engine in engines.items():
                    run = functools.partial(engine.run, bound[kind], [batch])
                    run()
                    took[kind, size].append(median(calls(run, options.seconds)) or 0.0)
        for kind in ENGINES:
            table.add(name, kind, *(1e6 * (median(took[kind, size]) or 0.0) for size in SIZES))
    about = f"{machine()}; {options.rounds} rounds of {options.seconds:g} s, medians"
    show(about, table.markdown(), markdown=options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
