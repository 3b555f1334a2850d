"""A policy behind Triton's HTTP until standard input ends, for `benchmarks.peers`.

Triton runs in the system's Python, which has none of brayx's packages, so this imports none of brayx.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

PORT = 18402


def main() -> None:
    """Serves a network of 4, 64, 64 and 2."""
    random = np.random.default_rng(0)
    layers = [random.standard_normal(shape).astype(np.float32) for shape in ((4, 64), (64, 64), (64, 2))]

    @batch  # type: ignore[untyped-decorator]
    def infer(obs: Any) -> dict[str, Any]:
        for layer in layers[:-1]:
            obs = np.tanh(obs @ layer)
        return {"logits": obs @ layers[-1]}

    with Triton(config=TritonConfig(http_port=PORT, allow_grpc=False, allow_metrics=False)) as triton:
        triton.bind(
            model_name="policy",
            infer_func=infer,
            inputs=[Tensor(name="obs", dtype=np.float32, shape=(4,))],
            outputs=[Tensor(name="logits", dtype=np.float32, shape=(2,))],
            config=ModelConfig(max_batch_size=64, batcher=DynamicBatcher(max_queue_delay_microseconds=100)),
        )
        triton.run()
        print(json.dumps({"http": f"http://127.0.0.1:{PORT}/v2/models/policy/infer"}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
