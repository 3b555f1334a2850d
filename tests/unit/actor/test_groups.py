"""Groups of agents: what a group's value sees of its members, and how their ends count."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from brayx.actor.groups import MEMBERS, PRESENT
from brayx.algorithms.mappo import MAPPO, MAPPOConfig
from brayx.errors import BadBody
from brayx.replay.packing import BatchPacker
from brayx.types import Fragment
from tests.unit.actor.test_contract_agent import DISCRETE, Game
from tests.unit.actor.test_contract_agent_rows import SeeingRows, start_rows

Script = list[list[tuple[int, int, float, float, str]]]
"""Agent, group, observation, reward and end of each row of each tick."""
SIZE = 3


async def fragments_of(script: Script, **options: Any) -> dict[float, Fragment]:
    """The fragments of a session by their first observation, which no other has."""
    game = grouped_game(**options)
    await start_rows(game)
    for rows in script:
        await tick(game, rows)
    await game.actor.stop(b"")
    await game.actor.on_end("stop")
    return {float(fragment.obs["side"][0, 0]): fragment for fragment in game.buffer.fragments}


def grouped_game(algorithm: str = "mappo", **options: Any) -> Game:
    size = {"group_size": SIZE} if algorithm == "mappo" else {}
    trainer = {"kind": "trainer", "model": "model", "algorithm": {"name": algorithm, **size}}
    return Game(DISCRETE, SeeingRows("discrete"), parts={"trainer": trainer}, **options)


async def tick(game: Game, rows: list[tuple[int, int, float, float, str]]) -> None:
    body = {
        "agent": [agent for agent, *_ in rows],
        "group": [group for _, group, *_ in rows],
        "obs": [[obs, 0] for _, _, obs, *_ in rows],
        "reward": [reward for *_, reward, _ in rows],
        "terminated": [end == "terminated" for *_, end in rows],
        "truncated": [end == "truncated" for *_, end in rows],
    }
    await game.actor.tick(json.dumps(body).encode())


def seen(fragment: Fragment) -> list[list[float]]:
    """What the value sees at each step, of the members that are present."""
    members, present = fragment.obs[MEMBERS.format("side")], fragment.obs[PRESENT]
    assert members.shape == (len(fragment) + 1, SIZE, 2)
    assert not members[present == 0].any()
    return [row[: int(count), 0].tolist() for row, count in zip(members, present.sum(-1), strict=True)]


ONE_DIES: Script = [
    [(1, 5, 1, 0, ""), (2, 5, 2, 0, "")],
    [(1, 5, 9, 0, "terminated"), (2, 5, 4, 0, "")],
    [(2, 5, 6, 0, "")],
    [(2, 5, 9, 8, "terminated")],
]
"""The first agent dies before the group earns 8."""


async def test_a_member_that_dies_bootstraps_from_the_group_that_goes_on() -> None:
    fragments = await fragments_of(ONE_DIES)
    dead, survivor = fragments[1], fragments[2]
    assert (dead.terminated, dead.truncated, seen(dead)) == (False, True, [[1, 2], [4]])
    assert (survivor.terminated, survivor.truncated) == (True, False)
    assert seen(survivor)[:-1] == [[2, 1], [4], [6]], "its own observation comes first"


class SumOfMembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, state: dict[str, Any]) -> Tensor:
        return self.factor * (state["obs"]["side"].sum(-1) * state["present"]).sum(-1)


class Uniform(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(3))
        self.critic = SumOfMembers()

    def forward(self, obs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"logits": self.logits.expand(len(obs["side"]), 3)}


async def test_the_group_s_reward_counts_for_a_member_that_died_before() -> None:
    """By hand, with gamma 0.5 and lambda 1: values are 3 at first, 4 without the dead one, and then 6."""
    packer = BatchPacker(1, 8)
    for _, fragment in sorted((await fragments_of(ONE_DIES)).items()):
        assert not list(packer.add(fragment))
    batch: dict[str, Any] = {key: torch.from_numpy(array) for key, array in (packer.flush() or {}).items()}
    batch["obs"] = {"side": batch["obs/side"]}
    module = Uniform()
    config = MAPPOConfig(gamma=0.5, gae_lambda=1.0, epochs=1)
    mappo = MAPPO(module, torch.optim.SGD(module.parameters(), lr=0.0), config)
    mappo.update(batch, 0.0)
    assert mappo.advantages is not None
    advantages, mask = mappo.advantages
    assert advantages[mask > 0].tolist() == [
        0.5 * 4 - 3,  # of the dead one, from what the others will earn
        -1.0 + 0.5 * 0.0,
        -1.0 + 0.5 * 2.0,
        8.0 - 6.0,
    ]


async def test_a_group_ends_with_its_last_members() -> None:
    """Those that begin an episode in the same tick are of the group's next one."""
    fragments = await fragments_of(
        [
            [(1, 5, 1, 0, ""), (2, 5, 2, 0, "")],
            [(1, 5, 9, 1, "terminated"), (2, 5, 9, 1, "terminated"), (3, 5, 3, 0, ""), (1, 5, 4, 0, "")],
            [(3, 5, 5, 0, ""), (1, 5, 6, 0, "")],
        ]
    )
    assert [fragments[obs].terminated for obs in (1, 2, 3, 4)] == [True, True, False, False]
    assert seen(fragments[3]) == [[3, 4], [5, 6]]


async def test_a_group_that_is_cut_is_valued_by_its_last_observations() -> None:
    fragments = await fragments_of(
        [
            [(1, 5, 1, 0, ""), (2, 5, 2, 0, ""), (3, 5, 3, 0, "")],
            [(1, 5, 4, 0, "truncated"), (2, 5, 5, 0, "truncated"), (3, 5, 9, 0, "terminated"), (1, 5, 7, 0, "")],
        ]
    )
    assert [seen(fragments[obs])[1] for obs in (1, 2, 3)] == [[4, 5], [5, 4], [4, 5]]
    assert all(fragments[obs].truncated for obs in (1, 2, 3))


async def test_members_come_and_go_and_act_at_different_times() -> None:
    fragments = await fragments_of(
        [
            [(1, 5, 1, 0, "")],
            [(2, 5, 2, 0, ""), (3, 0, 3, 0, ""), (4, 6, 4, 0, "")],  # others are in no group, or in another
            [(1, 5, 10, 0, ""), (3, 0, 30, 0, "")],
            [(2, 5, 20, 0, ""), (4, 5, 40, 0, "")],  # 4 changes its group
            [(1, 5, 11, 0, ""), (5, 5, 5, 0, "")],  # one more than the value sees
        ]
    )
    assert seen(fragments[1]) == [[1], [10, 2], [11, 20, 40]]
    assert seen(fragments[2]) == [[2, 1], [20, 10, 40]]
    assert seen(fragments[3]) == [[3], [30]]
    assert seen(fragments[4]) == [[4], [40, 10, 20]]


@pytest.mark.parametrize("length", [1, 2])
async def test_episodes_that_are_cut_see_the_same(length: int) -> None:
    """The members of a fragment's first tick are known from the fragment before."""
    whole = await fragments_of(ONE_DIES)
    for obs, fragment in (await fragments_of(ONE_DIES, episode_length=length)).items():
        origin = next(one for one in whole.values() if obs in one.obs["side"][:-1, 0])
        first = int(np.flatnonzero(origin.obs["side"][:, 0] == obs)[0])
        steps = slice(first, first + len(fragment) + (not fragment.terminated))
        assert seen(fragment)[: len(seen(origin)[steps])] == seen(origin)[steps]


async def test_an_agent_without_rows_is_alone() -> None:
    game = grouped_game()
    await game.start()
    await game.tick(obs=[1, 0])
    await game.end(obs=[2, 0], truncated=True)
    (fragment,) = game.buffer.fragments
    assert seen(fragment) == [[1], [2]]


async def test_more_members_than_the_value_sees_are_refused() -> None:
    game = grouped_game()
    await start_rows(game)
    with pytest.raises(BadBody, match="group 5 has 4 agents that act, expected at most 3"):
        await tick(game, [(agent, 5, agent, 0, "") for agent in range(4)])


async def test_without_a_value_of_groups_a_member_s_end_is_its_own() -> None:
    dead = (await fragments_of(ONE_DIES, algorithm="ppo"))[1]
    assert (dead.terminated, dead.truncated, list(dead.obs)) == (True, False, ["side", "action_mask"])
