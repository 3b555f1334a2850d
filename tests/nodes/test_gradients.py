"""Gradients of ranks on several machines add up, and what their exchange takes over the network.

It prints the time of an all-reduce of the CartPole network's gradients: `make test-nodes ARGS="-k gradients -s"`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from time import perf_counter

import pytest

from tests.nodes.machines import machines, on_machines

pytestmark = on_machines

PORT = 29_500
FLOATS = 9_155
"""Weights of two networks of 64x64 for CartPole."""
ROUNDS = 200


def exchange(rank: int, size: int, head: str, own: str) -> None:
    """Adds gradients up with the other ranks; rank 0 prints the median time, in milliseconds."""
    import torch
    from torch import distributed

    from brayx.cluster.ray_train import interface_of

    os.environ["GLOO_SOCKET_IFNAME"] = interface_of(own)
    distributed.init_process_group("gloo", init_method=f"tcp://{head}:{PORT}", rank=rank, world_size=size)
    times = []
    for _ in range(ROUNDS):
        gradients = torch.full((FLOATS,), float(rank))
        began = perf_counter()
        distributed.all_reduce(gradients)
        times.append(perf_counter() - began)
        assert gradients.eq(size * (size - 1) / 2).all()
    if rank == 0:
        print(f"{1e3 * sorted(times)[ROUNDS // 2]:.2f}")
    distributed.destroy_process_group()


@pytest.mark.parametrize("size", [2, 3, 5])
def test_gradients_of_ranks_on_several_machines_add_up(size: int, tmp_path: Path) -> None:
    with machines(tmp_path, *map(str, range(size))) as hosts, contextlib.ExitStack() as stack:
        words = ["python", "-m", "tests.nodes.test_gradients"]
        commands = [
            stack.enter_context(host.start(*words, str(rank), str(size), hosts[0].address, host.address))
            for rank, host in enumerate(hosts)
        ]
        for command in commands:
            assert command.ended() == 0, command.err
        print(f"all-reduce of {4 * FLOATS} bytes by {size} ranks: {commands[0].out.strip()} ms in the median")


if __name__ == "__main__":
    exchange(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
