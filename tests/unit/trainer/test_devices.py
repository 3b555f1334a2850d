"""Learning on a GPU: as on the CPU for every algorithm, across checkpoints, in half precision, and with two ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from brayx.algorithms.ppo import PPOConfig
from brayx.engines.torch import module_weights
from brayx.nets.policy import NetworkConfig, policy_for
from brayx.trainer.config import TrainerConfig
from brayx.trainer.loop import LearnerLoop
from tests.unit.trainer.parts import Folders, Numbers, Weights
from tests.unit.trainer.test_loop import OnDevice
from tests.unit.trainer.test_ranks import (
    COLUMNS,
    IN_ONE_RANK,
    PPO_ONCE,
    ROOT,
    UPDATES,
    VARIANTS,
    batch,
    joined,
    model,
    with_extra_keys,
)
from tests.unit.trainer.test_ranks import learned as learned_in_rank

pytestmark = pytest.mark.gpu

CASES = {
    **VARIANTS,
    **IN_ONE_RANK,
    "ppo in parts": PPOConfig(**PPO_ONCE, accumulate=3),
    "ppo with a memory": PPOConfig(**PPO_ONCE | {"epochs": 2}),
}
MEMORY = "ppo with a memory"
TOLERANCE = 1e-4
"""The weights move by more than 0.01; sums in another order move them by 1e-6, and Adam enlarges that."""


def made(name):
    """The model of a case, and example arguments."""
    torch.manual_seed(0)
    if name == MEMORY:
        return policy_for(np.zeros(3, np.float32), num_actions=2, network=NetworkConfig(hidden=[16], lstm=8))
    return model(CASES[name])


def stream(name, numbers):
    """Learner batches; random numbers are seeded for each."""
    for number in numbers:
        torch.manual_seed(number)
        batch = with_extra_keys(joined(number), CASES[name])
        if name == MEMORY:
            shape = (*batch["mask"].shape, 8)
            batch |= {f"state/{part}": np.zeros(shape, np.float32) for part in ("h", "c")}
        if CASES[name].name == "mixed" and number % 3 == 0:
            batch["demonstration"] = batch["mask"]
        yield batch


def learned(name, device, numbers, keeper, options=None, prefetch=0):
    """The weights after these batches, on the CPU, and the loop's numbers."""
    module, forward_args = made(name)
    numbers_kept = Numbers()
    LearnerLoop(
        TrainerConfig(
            model="model",
            buffers=["buffer"],
            algorithm=CASES[name].model_copy(update=options or {}),
            learning_rate=1e-2,
            num_steps=10**4,
            prefetch=prefetch,
        ),
        module,
        forward_args,
        batches=stream(name, numbers),
        publisher=lambda newest: Weights(newest),
        numbers=numbers_kept,
        keeper=keeper,
        ranks=OnDevice(device),
    ).run()
    assert {parameter.device.type for parameter in module.parameters()} == {device}
    return module_weights(module), numbers_kept


def close(got, expected, tolerance=TOLERANCE):
    assert set(got) == set(expected)
    for key, array in expected.items():
        np.testing.assert_allclose(got[key], array, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_every_algorithm_learns_on_a_gpu_as_on_the_cpu(tmp_path, name):
    on_cpu, measured_here = learned(name, "cpu", range(UPDATES), Folders(tmp_path / "cpu"))
    on_gpu, measured_there = learned(name, "cuda", range(UPDATES), Folders(tmp_path / "there"))
    close(on_gpu, on_cpu)
    for metric in {"loss", "imitation_loss", "grad_norm", "entropy"} & measured_here.samples.keys():
        np.testing.assert_allclose(
            measured_there.samples[metric], measured_here.samples[metric], rtol=1e-2, atol=1e-3, err_msg=metric
        )
    initial = module_weights(made(name)[0])
    assert max(np.abs(on_cpu[key] - initial[key]).max() for key in on_cpu) > 0.01, "training changed the weights"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("first", "then"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_every_algorithms_checkpoint_continues_on_the_other_device(tmp_path, name, first, then):
    """Its own state, such as slow critics, a temperature, moments or a magnet, comes along."""
    if CASES[name].name == "mixed":
        pytest.skip("its demonstrations are not in the checkpoint")
    whole, _ = learned(name, "cpu", range(UPDATES), Folders(tmp_path / "whole"))
    keeper = Folders(tmp_path / "parts")
    learned(name, first, range(UPDATES // 2), keeper)
    parts, _ = learned(name, then, range(UPDATES // 2, UPDATES), keeper)
    close(parts, whole)


@pytest.mark.parametrize("name", ["ppo", "ppo with a memory", "impala", "bc", "sac", "mappo"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns_almost_the_same_and_its_scale_is_in_the_checkpoint(tmp_path, name, precision):
    exact, _ = learned(name, "cuda", range(UPDATES), Folders(tmp_path / "fp32"))
    keeper = Folders(tmp_path / precision)
    learned(name, "cuda", range(UPDATES // 2), keeper, {"precision": precision})
    half, numbers = learned(name, "cuda", range(UPDATES // 2, UPDATES), keeper, {"precision": precision})
    initial = module_weights(made(name)[0])
    assert np.isfinite(numbers.samples["loss"]).all()
    moved, apart = ({key: array - other[key] for key, array in half.items()} for other in (initial, exact))
    norms = [np.sqrt(sum(np.square(array).sum() for array in part.values())) for part in (moved, apart)]
    assert norms[1] < norms[0], f"{norms[1]:.3g} from fp32 after a way of {norms[0]:.3g}"
    saved = torch.load(keeper.saved[-1][2] / "trainer.pt", weights_only=True)
    assert bool(saved["algorithm"]["optimise"]["scaler"]) == (precision == "fp16")
    learned(name, "cpu", range(1), keeper)  # the scale means nothing to fp32 on the CPU


@pytest.mark.parametrize("name", ["ppo", "ppo with a memory", "impala", "bc"])  # these draw nothing
def test_batches_prefetched_from_pinned_memory_do_not_change_learning(tmp_path, name):
    plain, _ = learned(name, "cuda", range(UPDATES), Folders(tmp_path / "plain"))
    ahead, _ = learned(name, "cuda", range(UPDATES), Folders(tmp_path / "ahead"), prefetch=3)
    close(ahead, plain)


def rank_of_two(rank, folder):
    """One of two processes that learn on one GPU; gloo, since NCCL allows a single rank for each GPU."""
    from brayx.trainer.ranks import Processes

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        for name in ("ppo", "sac"):
            of_rank = [batch(seed + 1000 * rank, COLUMNS) for seed in range(UPDATES)]
            ranks = Processes(torch.device("cuda"))
            weights, _ = learned_in_rank(Path(folder, f"rank-{name}{rank}"), CASES[name], of_rank, ranks)
            np.savez(f"{folder}/{name}{rank}.npz", **weights)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_on_one_gpu_learn_the_same_as_one_with_twice_the_batch_on_the_cpu(tmp_path):
    call = "from tests.unit.trainer.test_devices import rank_of_two; rank_of_two({}, {!r})"
    ranks = [subprocess.Popen([sys.executable, "-c", call.format(rank, str(tmp_path))], cwd=ROOT) for rank in range(2)]
    try:
        assert [rank.wait(100) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for name in ("ppo", "sac"):
        whole, _ = learned_in_rank(tmp_path / name, CASES[name], [joined(seed) for seed in range(UPDATES)])
        close(np.load(tmp_path / f"{name}1.npz"), np.load(tmp_path / f"{name}0.npz"), 1e-6)
        close(np.load(tmp_path / f"{name}0.npz"), whole)
