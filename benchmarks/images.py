"""Acting on images through a door of the local host: each tick is a raw 64x64x3 uint8 image, the reply one byte.

    python -m benchmarks.images --markdown

The agent uses the body's bytes as the observation; images are never JSON. *small* is a policy with the network of Mnih
et al. 2013, on ONNX Runtime with one thread, batched as in a training. *stub* is a model that answers at once, so that
only the door, the session and the agent are measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tables import Table, machine, median, show
from benchmarks.ticks import compiled
from brayx.actor.agent import Agent, State, forward
from brayx.actor.decode import sample_categorical
from brayx.types import Forward

MODELS = ("small", "stub")
_SHAPE = (64, 64, 3)
_ACTIONS = 6


class ImageAgent(Agent):
    """Acts on the bytes of an image."""

    def __init__(self, name: str, config: Any, state: State) -> None:
        super().__init__(name, config, state)
        self._rng = random.Random(0)

    async def on_tick(self, state: State) -> None:
        outputs, _ = await forward("model", np.frombuffer(state.input, np.uint8).reshape(_SHAPE))
        action, _ = sample_categorical(outputs["logits"], self._rng)
        state.output = bytes([action])


class _Stub:
    """A model that answers at once."""

    def __init__(self) -> None:
        self._outputs = {"logits": np.zeros(_ACTIONS, np.float32)}

    async def forward(self, *args: Any, deadline_s: float | None = None) -> Forward:
        return Forward(self._outputs, 1)


def _small() -> Any:
    import torch

    from brayx.engines.onnx import OnnxEngine
    from brayx.model.local import LocalModel
    from brayx.nets.policy import NetworkConfig, policy_for

    torch.set_num_threads(1)
    network = NetworkConfig(convolutions="small", hidden=[256])
    module, example = policy_for(np.zeros(_SHAPE, np.uint8), num_actions=_ACTIONS, network=network)
    return LocalModel(OnnxEngine(module, example, threads=1, traced=True))


def serve(model: str) -> None:
    """Serves until standard input ends; prints the URLs."""
    from brayx.actor.agent import Services
    from brayx.actor.agent_actor import AgentActorFactory
    from brayx.actor.codec import Codec
    from brayx.actor.config import ActorConfig
    from brayx.actor.host import LocalHost
    from brayx.actor.serving import Runtime
    from brayx.metrics import Recorder

    recorder = Recorder()
    services = Services({"model": _Stub() if model == "stub" else _small()}, {}, recorder)
    factory = AgentActorFactory({"agent": ImageAgent}, {}, services, Codec(None), episode_length=64)
    config = ActorConfig(agents=["agent"], port=0, native_port=None, tcp_port=0, actors_per_worker=1024)
    host = LocalHost(config, Runtime(factory, recorder))
    host.open()
    print(json.dumps(host.urls), flush=True)
    sys.stdin.read()
    host.close()


@contextlib.contextmanager
def served(model: str) -> Iterator[dict[str, str]]:
    """A host in another process; the value is its URL by door."""
    words = [sys.executable, "-m", "benchmarks.images", "--serve", model]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield json.loads(process.stdout.readline())
        process.stdin.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", choices=MODELS, help="serve one of them (what this starts itself)")
    parser.add_argument("--sessions", type=int, default=16, help="at once (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement (default: %(default)s)")
    parser.add_argument("--markdown", action="store_true", help="print plain markdown")
    options = parser.parse_args(argv)
    if options.serve:
        serve(options.serve)
        return 0
    about = f"{machine()}; {options.sessions} sessions, {options.rounds} rounds of {options.seconds:g} s, medians"
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    with contextlib.ExitStack() as stack:
        command = compiled(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="brayx-load-"))))
        urls = {model: stack.enter_context(served(model)) for model in MODELS}
        for _ in range(options.rounds):
            for model in MODELS:
                for door in ("ws", "tcp"):
                    words = [*command, "--url", urls[model][door], "--sessions", str(options.sessions)]
                    words += ["--seconds", str(options.seconds), "--body", "image"]
                    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
                    found.setdefault((model, door), []).append(json.loads(done))
    table = Table(["model", "door", ">ticks/s", ">p50 ms", ">p99 ms"])
    for (model, door), rounds in found.items():
        rate, p50_s, p99_s = (median([done[name] for done in rounds]) for name in ("ticks_per_s", "p50_s", "p99_s"))
        table.add(model, door, rate, *(None if seconds is None else 1e3 * seconds for seconds in (p50_s, p99_s)))
    show(about, table.markdown(), markdown=options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
