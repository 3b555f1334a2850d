"""`brayx.trainer.loop` in process, with small real parts: a chain to learn, lists and folders for the rest."""

from __future__ import annotations

import itertools
import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from brayx.algorithms.impala import ImpalaConfig
from brayx.algorithms.mixed import MixedConfig
from brayx.algorithms.ppo import PPOConfig
from brayx.engines.base import load_weights
from brayx.errors import ConfigError, Diverged
from brayx.nets.mlp import ActorCritic
from brayx.replay.packing import READY_KEY
from brayx.trainer import checkpoint
from brayx.trainer.config import TrainerConfig
from brayx.trainer.loop import LearnerLoop, record_waiting
from brayx.trainer.prefetch import Ready
from brayx.trainer.ranks import Alone
from brayx.types import DEMONSTRATION
from tests.unit.trainer.parts import BATCH_STEPS, Folders, Numbers, Weights, batches, run


def test_it_learns_publishes_records_and_saves(tmp_path):
    summary, weights, numbers, keeper, batches_taken = run(tmp_path, count=30, learning_rate=1e-2)
    assert (summary.reason, summary.env_steps, summary.updates) == ("stream_ended", 30 * BATCH_STEPS, 30)
    assert not summary.resumed
    assert len(batches_taken) == 30
    assert [version for version, _, _ in weights.published] == list(range(1, 32))
    assert weights.published[0][1] == 0, "acting starts from the initial weights"
    assert len(numbers.samples["loss"]) == 30
    assert numbers.samples["lag_versions"][:3] == [0, 1, 2]
    first, last = (
        torch.func.functional_call(
            ActorCritic(3, 2, hidden=(16,)),
            {key: torch.from_numpy(array) for key, array in published.items()},
            (torch.ones(1, 3),),
        )["logits"].softmax(-1)[0, 1]
        for published in (weights.published[0][2], weights.published[-1][2])
    )
    assert last > first + 0.2
    (step, metrics, folder) = keeper.saved[-1]
    assert (step, metrics) == (summary.env_steps, {})
    assert {path.name for path in folder.iterdir()} == {"weights.npz", "trainer.pt", "meta.json", "samples.npz"}
    samples = load_weights(folder / "samples.npz")
    assert list(samples) == ["obs"]
    np.testing.assert_array_equal(samples["obs"], np.ones((BATCH_STEPS, 3), np.float32))
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["project"] == "test"
    assert meta["counters"]["policy_version"] == summary.policy_version


@pytest.mark.parametrize("own", ["none", "some", "all"])
def test_turns_of_a_fragment_reach_the_algorithm(tmp_path, own):
    """In a turn-based game the policy learns where the agent moves, and the value everywhere."""
    turn = {"none": np.zeros(16, bool), "some": np.arange(16) % 2 == 0, "all": np.ones(16, bool)}[own]
    seen = []

    def stream():
        for batch in batches(3, extras={"turn": turn}):
            seen.append(np.array(batch["turn"]))
            yield batch

    _, weights, _, _, _ = run(tmp_path, stream=stream(), algorithm=ImpalaConfig(entropy_coef=0.1), learning_rate=1e-2)
    assert len(seen) == 3
    assert all((columns[:, :16] == turn).all() for columns in seen)
    first, last = weights.published[0][2], weights.published[-1][2]
    moved = {name.split(".")[0] for name in first if np.abs(last[name] - first[name]).max() > 1e-6}
    assert moved == ({"value"} if own == "none" else {"policy", "value"})


def test_it_stops_at_num_steps_and_leaves_the_rest_of_the_stream(tmp_path):
    stream = batches(6)
    enough = {"episode_return.last100": 20.0, "games": 20, "games_in_window": 20}
    summary, *_ = run(tmp_path, stream=stream, newest=enough, num_steps=3 * BATCH_STEPS)
    assert (summary.reason, summary.updates) == ("num_steps", 3)
    assert len(list(stream)) == 3


def test_it_stops_at_the_target_return_after_enough_games(tmp_path):
    good = {"episode_return.last100": 480.0, "games": 19, "games_in_window": 19}
    summary, *_ = run(tmp_path, newest=good, target_return=475.0)
    assert summary.reason == "stream_ended"
    assert np.isnan(summary.return_mean)
    summary, _, _, keeper, _ = run(
        tmp_path / "b", newest={**good, "games": 20, "games_in_window": 20}, target_return=475.0
    )
    assert (summary.reason, summary.updates, summary.return_mean) == ("target_return", 1, 480.0)
    assert keeper.saved[-1][1] == {"episode_return": 480.0, "games": 20}


@pytest.mark.parametrize(("reason", "steps", "early"), [("num_steps", 2 * BATCH_STEPS, 4), ("stream_ended", 10**6, 2)])
def test_returns_that_arrive_after_a_short_training_still_count(tmp_path, reason, steps, early):
    calls = []

    def newest():
        calls.append(1)
        return {"episode_return.last100": 21.0, "games": 20, "games_in_window": 20} if len(calls) > early else {}

    summary, _, _, keeper, _ = run(tmp_path, count=2, newest=newest, num_steps=steps)
    assert (summary.reason, summary.return_mean) == (reason, 21.0)
    assert keeper.saved[-1][1] == {"episode_return": 21.0, "games": 20}


def test_one_lucky_game_after_a_resume_neither_stops_training_nor_is_best(tmp_path):
    lucky = {"episode_return.last100": 480.0, "games": 5000, "games_in_window": 1}
    summary, _, _, keeper, _ = run(tmp_path / "few", newest=lucky, target_return=475.0, target_games=300)
    assert (summary.reason, keeper.saved[-1][1]) == ("stream_ended", {})
    assert np.isnan(summary.return_mean)
    some = {**lucky, "games_in_window": 25}
    summary, *_ = run(tmp_path / "some", newest=some, target_return=475.0, target_games=20)
    assert summary.reason == "stream_ended"
    few = {**some, "games": 50}  # as many as before the resume
    summary, *_ = run(tmp_path / "as many", newest=few, target_return=475.0, target_games=20)
    assert summary.reason == "target_return"
    failing = {**some, "games_failed_in_window": 75}
    summary, *_ = run(tmp_path / "failing", newest=failing, target_return=475.0, target_games=20)
    assert summary.reason == "target_return"
    many = {**lucky, "games_in_window": 100}  # no window holds 300
    summary, *_ = run(tmp_path / "many", newest=many, target_return=475.0, target_games=300)
    assert summary.reason == "target_return"


def test_a_trial_that_is_resumed_to_be_finished_learns_nothing_and_keeps_its_last_return(tmp_path):
    good = {"episode_return.last100": 21.0, "games": 20, "games_in_window": 20}
    *_, keeper, _ = run(tmp_path, count=3, newest=good)
    saved, stream = list(keeper.saved), batches(2)
    summary, *_ = run(keeper, stream=stream, num_steps=1)
    assert (summary.reason, summary.updates, len(list(stream))) == ("num_steps", 3, 2)
    run(keeper, count=0)  # interrupted before its first update
    assert keeper.saved == saved


def test_updates_and_seconds_are_counted_also_after_a_resume(tmp_path):
    summary, _, numbers, keeper, _ = run(tmp_path, count=5)
    assert numbers.samples["updates"] == [1] * 5
    assert numbers.samples["seconds"] == sorted(numbers.samples["seconds"])
    assert numbers.samples["seconds"][-1] == summary.seconds
    _, _, numbers, *_ = run(keeper, count=1)
    assert numbers.samples["seconds"][0] > summary.seconds


def demonstrated(stream):
    for batch in stream:
        yield {**batch, DEMONSTRATION: batch["mask"]}


def one_played_among_nine_demonstrated(rounds):
    played, shown = batches(rounds), demonstrated(batches(9 * rounds, seed=1))
    for batch in played:
        yield batch
        yield from (next(shown) for _ in range(9))


def test_demonstrations_that_are_only_kept_do_not_use_the_budget(tmp_path):
    """They are no update either: nothing is published, saved or evaluated after them, as nothing changed."""
    summary, weights, numbers, keeper, batches_taken = run(
        tmp_path,
        stream=one_played_among_nine_demonstrated(8),
        algorithm=MixedConfig(reinforcement=PPOConfig(epochs=1, minibatch_size=16)),
        num_steps=6 * BATCH_STEPS,
        checkpoint_interval=1,
    )
    assert (summary.reason, summary.updates, summary.env_steps) == ("num_steps", 6, 6 * BATCH_STEPS)
    assert len(batches_taken) == 5 * 10 + 1, "they are still taken from the stream"
    assert [step // BATCH_STEPS for _, step, _ in weights.published] == list(range(7))
    assert [step // BATCH_STEPS for step, _, _ in keeper.saved] == [1, 2, 3, 4, 5, 6]
    assert len(numbers.samples["policy_loss"]) == len(numbers.samples["update_seconds"]) == 6
    coefs = [1 - n / 3 if n < 3 else 0 for n in range(6)]
    np.testing.assert_allclose(numbers.samples["learner/imitation_coef"], coefs)
    assert len(numbers.samples["learner/imitation_loss"]) == 2, (
        "of the second and the third, as there were none at the first"
    )


def test_demonstrations_before_any_play_do_not_advance_the_schedule(tmp_path):
    """However many there are, the weight of imitation, the learning rate and the budget stay."""
    reinforcement = PPOConfig(epochs=1, minibatch_size=16, learning_rate_schedule="linear")
    algorithm = MixedConfig(reinforcement=reinforcement, imitation_until=1.0)
    summary, weights, numbers, *_ = run(
        tmp_path,
        stream=itertools.chain(demonstrated(batches(4, seed=1)), batches(4)),
        algorithm=algorithm,
        num_steps=2 * BATCH_STEPS,
    )
    assert (summary.reason, summary.updates, summary.env_steps) == ("num_steps", 4 + 2, 2 * BATCH_STEPS)
    assert [step // BATCH_STEPS for _, step, _ in weights.published] == [0, 0, 0, 0, 0, 1, 2]
    assert len(set(numbers.samples["learner/imitation_learning_rate"])) == 1
    assert numbers.samples["learner/imitation_coef"] == [1.0, 0.5]
    assert numbers.samples["learning_rate"] == [pytest.approx(1e-3), pytest.approx(0.5e-3)]


def test_play_during_initial_imitation_does_not_advance_the_schedule(tmp_path):
    """Schedules begin with the first play that is learned; demonstrations do not count either."""
    summary, weights, numbers, *_ = run(
        tmp_path,
        stream=one_played_among_nine_demonstrated(8),
        algorithm=MixedConfig(
            reinforcement=PPOConfig(epochs=1, minibatch_size=16), imitation_updates=250, imitation_until=1.0
        ),
        num_steps=2 * BATCH_STEPS,
    )
    assert (summary.reason, summary.env_steps) == ("num_steps", 2 * BATCH_STEPS)
    assert [step // BATCH_STEPS for _, step, _ in weights.published] == [0, 0, 0, 0, 1, 2]
    assert numbers.samples["learner/imitation_coef"] == [1.0, 0.5]


def test_publish_interval(tmp_path):
    _, weights, *_ = run(tmp_path / "whole", count=6, weights_publish_interval=3)
    assert [step for _, step, _ in weights.published] == [0, 3 * BATCH_STEPS, 6 * BATCH_STEPS]
    _, weights, *_ = run(tmp_path / "broken", count=5, weights_publish_interval=3)
    assert [step for _, step, _ in weights.published] == [0, 3 * BATCH_STEPS, 5 * BATCH_STEPS]


def test_a_rank_frees_its_batch_before_it_waits_for_the_others(tmp_path):
    """If only one batch may be in flight, the second rank's would otherwise never arrive."""
    order = []

    class Two(Alone):
        size = 2

        def sum(self, x):
            order.append("waits")
            return 2 * x.detach()

    run(tmp_path, count=3, ranks=Two(), took=lambda: order.append("took"))
    assert order[0] == "took"
    assert order.count("took") == 3


def test_a_resumed_trial_equals_an_uninterrupted_one(tmp_path):
    """Weights, optimiser, random state and schedule: to the last bit."""
    whole, whole_weights, *_ = run(tmp_path / "whole", count=6, num_steps=10 * BATCH_STEPS)
    stream, keeper = list(batches(6)), Folders(tmp_path / "parts")
    run(keeper, stream=iter(stream[:3]), num_steps=10 * BATCH_STEPS)
    summary, weights, numbers, *_ = run(keeper, stream=iter(stream[3:]), num_steps=10 * BATCH_STEPS, seed=99)
    assert summary.resumed
    assert (summary.env_steps, summary.updates) == (whole.env_steps, whole.updates)
    assert weights.published[0][0] == 5, "versions continue: 1 + 3 were published before"
    for key, array in whole_weights.published[-1][2].items():
        np.testing.assert_array_equal(weights.published[-1][2][key], array)
    assert numbers.samples["learning_rate"][0] == pytest.approx(0.7e-3)


def test_a_resume_reports_the_earlier_batches_before_it_asks_for_one(tmp_path):
    resumed, keeper = [], Folders(tmp_path)
    run(keeper, count=3, parts={"resumed": resumed.append})
    assert not resumed

    def stream():
        assert resumed == [3]
        yield from batches(2)

    assert run(keeper, stream=stream(), parts={"resumed": resumed.append})[0].updates == 5


@pytest.mark.parametrize(
    ("ready_at", "idle", "not_empty_s"),
    [
        (100.0, 4 / 10, 10.0),  # ready before it was requested: all the waiting is idle
        (1002.0, 2 / 8, 8.0),  # ready half-way: the wait before that does not count
        (1004.0, 0.0, 6.0),  # ready just when it arrived
        (1009.0, 0.0, 6.0),  # by the clock of another node
    ],
)
def test_idle_is_waiting_for_a_batch_that_was_ready(ready_at, idle, not_empty_s):
    numbers = Numbers()
    ready = Ready({}, {}, ready_at_s=ready_at)
    record_waiting(numbers, ready, requested=1000.0, came=1004.0, waited_s=4.0, total_s=10.0)
    assert (numbers.samples["learner_wait_fraction"], numbers.weights["learner_wait_fraction"]) == ([0.4], [10.0])
    assert numbers.samples["learner_idle_fraction"] == [pytest.approx(idle)]
    assert numbers.weights["learner_idle_fraction"] == [pytest.approx(not_empty_s)]


def test_waiting_is_measured_and_idle_if_batches_say_when_they_were_ready(tmp_path):
    *_, silent, _, _ = run(tmp_path / "silent", count=3)
    assert len(silent.samples["learner_wait_fraction"]) == 3
    assert "learner_idle_fraction" not in silent.samples
    stream = ({**batch, READY_KEY: np.asarray(0.0)} for batch in batches(3))
    *_, telling, _, _ = run(tmp_path / "telling", stream=stream)
    shares = (telling.samples[f"learner_{name}_fraction"] for name in ("wait", "idle"))
    for waited, idle in zip(*shares, strict=True):
        assert 0 < idle <= waited + 1e-9


def test_a_nan_in_a_batch_is_named(tmp_path):
    def poisoned():
        for batch in batches(1):
            batch["obs"][0, 0, 1] = np.nan
            yield batch

    with pytest.raises(Diverged) as caught:
        run(tmp_path, stream=poisoned())
    assert "update 1: loss is nan" in caught.value.message
    assert "loss" in caught.value.details["losses"]
    assert caught.value.details["fields"] == ["obs"]


def test_a_resumed_trial_takes_a_new_learning_rate(tmp_path):
    keeper = Folders(tmp_path)
    run(keeper, count=1)
    *_, numbers, _, _ = run(keeper, count=1, learning_rate=5e-4, num_steps=10**9)
    assert numbers.samples["learning_rate"][0] == pytest.approx(5e-4, rel=1e-3)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [({}, "loss is inf"), ({"clip_value": 10.0}, "loss is nan; .*; .*8 weights")],
    ids=["closed form", "autograd"],
)
def test_divergence_is_an_error_and_the_previous_checkpoint_stays(tmp_path, algorithm, message):
    def poisoned():
        yield from batches(2)
        for batch in batches(1):
            batch["reward"][:] = np.float32(3e38)
            yield batch

    keeper = Folders(tmp_path)
    with pytest.raises(Diverged, match=f"update 3: {message}") as caught:
        run(keeper, stream=poisoned(), checkpoint_interval_s=1e-6, algorithm=algorithm)
    assert "rewards reach 3e+38" in caught.value.message
    assert [step for step, _, _ in keeper.saved] == [BATCH_STEPS, 2 * BATCH_STEPS]


def test_read_only_batches_are_accepted_and_not_changed(tmp_path):
    def frozen():
        for batch in batches(2):
            for array in batch.values():
                array.flags.writeable = False
            yield batch

    summary, *_ = run(tmp_path, stream=frozen())
    assert summary.updates == 2


class Threads(Alone):
    """Two ranks in threads; waiting for a rank that has ended fails."""

    size = 2

    def __init__(self, rank, barrier, flags):
        self.rank, self.barrier, self.given = rank, barrier, flags

    def sum(self, x):
        self.given[self.rank] = x.detach()
        self.barrier.wait(20)
        total = sum(self.given.values())
        self.barrier.wait(20)
        return total


def test_ranks_end_together_if_one_has_no_batch(tmp_path):
    barrier, flags = threading.Barrier(2), {}

    def rank(number):
        config = TrainerConfig(model="model", buffers=["buffer"], algorithm=PPOConfig(epochs=1, minibatch_size=16))
        return LearnerLoop(
            config,
            ActorCritic(3, 2, hidden=(16,)),
            (np.zeros((1, 3), np.float32),),
            batches=batches(3 - number),
            publisher=Weights,
            numbers=Numbers(),
            keeper=Folders(tmp_path / str(number)),
            ranks=Threads(number, barrier, flags),
        ).run()

    with ThreadPoolExecutor(2) as pool:
        summaries = list(pool.map(rank, range(2)))
    assert [(summary.reason, summary.updates) for summary in summaries] == [("stream_ended", 2)] * 2
    assert [summary.env_steps for summary in summaries] == [4 * BATCH_STEPS] * 2


class OnDevice(Alone):
    """A single rank on the named device."""

    def __init__(self, device):
        self.device = torch.device(device)


ELSEWHERE = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", ELSEWHERE)
def test_learning_on_a_device_equals_learning_on_the_cpu(tmp_path, device):
    """Weights, minibatches and metrics agree; published weights are always NumPy arrays."""
    _, on_cpu, numbers_here, *_ = run(tmp_path / "here")
    summary, on_device, numbers_there, *_ = run(tmp_path / "there", ranks=OnDevice(device))
    assert summary.updates == 6
    for key, array in on_device.published[-1][2].items():
        assert type(array) is np.ndarray
        np.testing.assert_allclose(array, on_cpu.published[-1][2][key], rtol=1e-3, atol=1e-5)
    for name in ("loss", "entropy", "grad_norm"):
        np.testing.assert_allclose(numbers_there.samples[name], numbers_here.samples[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("first", "then"), [("cpu", "cpu"), *(
    pytest.param(*pair, marks=pytest.mark.gpu) for pair in (("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda"))
)])  # fmt: skip
def test_a_trial_continues_on_another_device(tmp_path, first, then):
    """With the optimiser's state, without which Adam's next steps would differ."""
    _, whole, *_ = run(tmp_path / "whole", count=6, num_steps=10 * BATCH_STEPS)
    stream, keeper = list(batches(6)), Folders(tmp_path / "parts")
    run(keeper, stream=iter(stream[:3]), num_steps=10 * BATCH_STEPS, ranks=OnDevice(first))
    summary, weights, *_ = run(
        keeper, stream=iter(stream[3:]), num_steps=10 * BATCH_STEPS, seed=99, ranks=OnDevice(then)
    )
    assert (summary.resumed, summary.updates) == (True, 6)
    for key, array in whole.published[-1][2].items():
        np.testing.assert_allclose(weights.published[-1][2][key], array, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("device", ELSEWHERE)
def test_random_state_of_the_device_is_restored(tmp_path, device):
    """Dropout draws from it."""
    module = ActorCritic(3, 2, hidden=(16,)).to(device)
    optimizer = torch.optim.Adam(module.parameters(), fused=True)
    checkpoint.save(tmp_path, module, optimizer, checkpoint.Counters(), {})
    drawn = torch.rand(8, device=device)
    checkpoint.restore(tmp_path, module, optimizer).go_on(None)
    assert torch.equal(torch.rand(8, device=device), drawn)


def test_resumed_ranks_draw_different_numbers_and_the_same_after_each_resume(tmp_path):
    """All ranks restore the one checkpoint, which rank 0 saved."""
    module = ActorCritic(3, 2, hidden=(16,))
    optimizer = torch.optim.Adam(module.parameters(), fused=True)
    checkpoint.save(tmp_path, module, optimizer, checkpoint.Counters(), {})

    def drawn(rank):
        checkpoint.restore(tmp_path, module, optimizer).go_on(None, rank)
        return float(torch.rand(())), np.random.random(), random.random()

    first = [drawn(rank) for rank in range(3)]
    assert all(len(set(numbers)) == 3 for numbers in zip(*first, strict=True))
    assert [drawn(rank) for rank in range(3)] == first


@pytest.mark.gpu
def test_with_use_gpu_a_learner_in_the_jobs_process_is_on_the_gpu():
    assert Alone(use_gpu=True).device.type == "cuda"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_use_gpu_is_refused():
    with pytest.raises(ConfigError, match="use_gpu"):
        Alone(use_gpu=True)
