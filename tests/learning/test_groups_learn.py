"""A group whose reward comes after the end of the member that earned it: what MAPPO with a value of groups is for.

Contract sessions, agent, fragments, packing and update are brayx's own; a process and doors are left out.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from brayx.algorithms.build import build, config_class
from brayx.gamecore.contract import Contract
from brayx.jobs.contract_model import ContractNetworkConfig, network_of
from brayx.replay.packing import BatchPacker
from brayx.types import Forward
from tests.learning.rows import Rows, printed
from tests.unit.actor.test_contract_agent import Fixed, Game

pytestmark = pytest.mark.learning

CONTRACT = {
    "contract": 1,
    "observations": {"seen": {"shape": [3]}},
    "actions": {"go": {"kind": "discrete", "size": 2}},
}
LENGTH, SIZE, GROUPS = 6, 3, 8
UPDATES = 30


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> Iterator[Rows]:
    yield from printed(request)


class Door:
    """A door that opens if the member with the key spends itself, at once, on the side where the lock is; only then do
    the others, who stay for five more steps, earn 1 in each of them as a group. No member has a reward of its own."""

    def __init__(self, rng: random.Random, group: int) -> None:
        self._rng, self._group = rng, group
        self.returns: list[float] = []
        self._begin()

    def _begin(self) -> None:
        self._step, self._earned, self._is_open = 0, 0.0, False
        self._lock = self._rng.randrange(2)
        self._here = [*range(SIZE)]

    def rows(self) -> list[tuple[int, list[float], float, bool]]:
        """Agent, observation, reward and end of each row, and of the next episode those with which it begins."""
        reward = float(self._is_open and self._step > 0)
        is_over = self._step == LENGTH
        given = []
        for agent in self._here:
            ends = is_over or (self._step == 1 and self._is_open and agent == 0)
            given.append((agent, self._seen(agent), 0.0 if self._step == 1 else reward, ends))
        if self._step > 1:
            self._earned += reward
        if self._step == 1 and self._is_open:
            self._here.remove(0)
        if is_over:
            self.returns.append(self._earned)
            self._begin()
            given += [(agent, self._seen(agent), 0.0, False) for agent in self._here]
        return [(self._group * SIZE + agent, *rest) for agent, *rest in given]

    def act(self, actions: Iterator[int]) -> None:
        """Takes the action of each member that is here."""
        for agent in self._here:
            action = next(actions)
            if agent == 0 and self._step == 0:
                self._is_open = action == self._lock
        self._step += 1

    def _seen(self, agent: int) -> list[float]:
        return [float(agent == 0), 2.0 * self._lock - 1, self._step / LENGTH]


class Acting(Fixed):
    """The module that learns, which also acts."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    async def forward_rows(self, obs: Any) -> Forward:
        with torch.inference_mode():
            outputs = self.module({name: torch.from_numpy(leaf) for name, leaf in obs.items()})
        return Forward({name: leaf.numpy() for name, leaf in outputs.items()}, np.zeros(len(obs["seen"]), np.int64))


async def score(algorithm: str, seed: int) -> float:
    """The mean of what the groups earned in their last hundred episodes; 5 at best, 2.5 at random."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    options = {"name": algorithm, "epochs": 4, "minibatch_size": 128, "entropy_coef": 0.01, "gamma": 0.95}
    if algorithm == "mappo":
        options["group_size"] = SIZE
    config = config_class(options).model_validate(options)
    module, _ = network_of(Contract.parse(CONTRACT), ContractNetworkConfig(hidden=[32]), config)
    learner = build(config, module, torch.optim.Adam(module.parameters(), lr=3e-3))
    trainer = {"kind": "trainer", "model": "model", "algorithm": config.model_dump()}
    game = Game(CONTRACT, Acting(module), parts={"seed": seed, "trainer": trainer}, episode_length=16)
    await game.start(rows=True)
    doors = [Door(random.Random(seed * GROUPS + number), number) for number in range(GROUPS)]
    packer, updates = BatchPacker(16, 32), 0
    while updates < UPDATES:
        agents, observations, rewards, ends = zip(*(row for door in doors for row in door.rows()), strict=True)
        body = {"agent": agents, "group": [1 + agent // SIZE for agent in agents], "obs": observations}
        reply = await game.actor.tick(json.dumps({**body, "reward": rewards, "terminated": ends}).encode())
        actions = iter(json.loads(reply)["go"])
        for door in doors:
            door.act(actions)
        while game.buffer.fragments:
            for packed in packer.add(game.buffer.fragments.pop(0)):
                batch: dict[str, Any] = {key: torch.from_numpy(array) for key, array in packed.items()}
                learner.update({**batch, "obs": {"seen": batch["obs/seen"]}}, updates / UPDATES)
                updates += 1
    return float(np.mean([earned for door in doors for earned in door.returns[-100 // GROUPS :]]))


async def test_a_member_learns_to_spend_itself_for_its_group(rows: Rows) -> None:
    for seed in range(1, 4):
        central, independent = await score("mappo", seed), await score("ppo", seed)
        rows.add(
            "A key that costs its bearer (best 5, at random 2.5)",
            seed=seed,
            mappo=f"{central:.2f}",
            ppo=f"{independent:.2f}",
        )
        assert central >= 4.5
