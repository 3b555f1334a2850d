"""Distributions of a learner's batches: what is taken, how it is divided, and how rarely."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from brayx.algorithms.base import Algorithm
from brayx.algorithms.impala import ImpalaConfig
from brayx.nets.mlp import ActorCritic
from brayx.trainer.shapes import Shapes, bars_of
from tests.clocks import Clock
from tests.unit.trainer.parts import Numbers, batches, run


class Untaught(Algorithm):
    """An algorithm that was never updated."""

    def __init__(self):
        pass


def test_a_few_integers_get_a_bar_each_and_other_numbers_bars_of_equal_width():
    values = np.array([3, 0, 3, 1, 3])
    assert bars_of(values) == ((-0.5, 0.5, 1.5, 2.5, 3.5), (1.0, 1.0, 0.0, 3.0))
    many = bars_of(np.arange(0, 4800, 10))
    assert (len(many.edges), set(many.counts)) == (49, {10.0})
    spread = np.random.default_rng(0).normal(size=(40, 50))
    bars = bars_of(spread)
    assert (bars.edges[0], bars.edges[-1], sum(bars.counts)) == (spread.min(), spread.max(), 2000)


def test_numbers_that_are_not_finite_are_left_out():
    bars = bars_of(np.array([np.nan, 1.0, np.inf, 2.0, -np.inf]))
    assert (bars.edges[0], bars.edges[-1], sum(bars.counts)) == (1.0, 2.0, 2.0)
    assert bars_of(np.array([np.nan])) is None
    assert bars_of(np.array([0.0, 5e-324])) is None  # no number lies between the two


def test_of_very_many_numbers_some_thousands_stand_for_all():
    bars = bars_of(np.arange(10_000_000) % 7)
    assert 8192 <= sum(bars.counts) <= 8200
    assert bars.edges == (-0.5, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5)


def test_steps_that_do_not_count_are_in_no_distribution_and_components_of_an_action_are_apart():
    numbers, algorithm = Numbers(), Untaught()
    algorithm.advantages = (torch.tensor([1.0, 2.0, 50.0]), torch.tensor([1.0, 0.5, 0.0]))
    action = np.array([[[0.0, 1.0], [2.0, 3.0], [99.0, 99.0]]], np.float32)
    batch = {"action": action, "mask": np.array([[1.0, 1.0, 0.0]], np.float32)}
    Shapes(numbers, 30.0).record_in_turn(batch, algorithm, torch.nn.Linear(2, 3))
    ends = {(name, label): (bars.edges[0], bars.edges[-1]) for name, label, bars in numbers.shapes}
    assert list(ends) == [("actions", "0"), ("actions", "1"), ("advantages", ""), ("weights", "weight")]
    assert ends["actions", "0"] == (0.0, 2.0)
    assert ends["actions", "1"] == (1.0, 3.0)
    assert ends["advantages", ""] == (1.0, 2.0)


def test_they_are_taken_at_the_interval_and_later_at_a_share_of_the_time():
    numbers, clock = Numbers(), Clock()
    shapes = Shapes(numbers, 30.0, clock)
    (batch,) = batches(1)
    seconds = []
    for second in range(20_000):
        clock.now = float(second)
        shapes.record_in_turn(batch, Untaught(), torch.nn.Linear(1, 1))
        if numbers.shapes:
            seconds.append(second)
            numbers.shapes.clear()
    assert seconds[:4] == [0, 30, 60, 90]
    assert seconds[-1] - seconds[-2] == pytest.approx(0.02 * 20_000, rel=0.05)
    assert len(seconds) == pytest.approx(50 + 50 * math.log(20_000 / 1500), abs=5)


def test_without_an_interval_there_are_none():
    numbers = Numbers()
    Shapes(numbers, None).record_in_turn({}, Untaught(), torch.nn.Linear(1, 1))
    assert not numbers.shapes


@pytest.mark.parametrize("algorithm", [{}, ImpalaConfig()], ids=["ppo", "impala"])
def test_a_training_records_them(tmp_path, algorithm):
    *_, numbers, _, _ = run(tmp_path, count=2, algorithm=algorithm)
    assert {name for name, _, _ in numbers.shapes} == {"actions", "advantages", "weights"}
    of_weights = {label for name, label, _ in numbers.shapes if name == "weights"}
    assert of_weights == {
        name for name, parameter in ActorCritic(3, 2, hidden=(16,)).named_parameters() if parameter.ndim > 1
    }
