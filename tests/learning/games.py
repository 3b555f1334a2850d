"""Two-player games from OpenSpiel as arrays, played by one policy in both seats, thousands of games at a time.

OpenSpiel gives the rules and measures the policy; it trains nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyspiel
import torch
from open_spiel.python.algorithms import exploitability
from open_spiel.python.policy import TabularPolicy

_CHANCE, _OVER = -1, -2


class Tree:
    """The tree of a game.

    Args:
        name: of the game in OpenSpiel.

    Attributes:
        obs: ``[I, D]`` float32, what a player knows at each of its ``I`` decision points.
        legal: ``[I, A]`` bool.
    """

    def __init__(self, name: str) -> None:
        self.game = pyspiel.load_game(name)
        self._keys: dict[str, int] = {}
        obs: list[Any] = []
        legal: list[Any] = []
        rows: list[tuple[int, int, dict[int, int], dict[int, float], list[float]]] = []
        todo = [(self.game.new_initial_state(), -1, 0)]
        while todo:
            state, parent, action = todo.pop()
            at = len(rows)
            if parent >= 0:
                rows[parent][2][action] = at
            if state.is_terminal():
                rows.append((_OVER, 0, {}, {}, state.returns()))
                continue
            chances = dict(state.chance_outcomes()) if state.is_chance_node() else {}
            player, key = _CHANCE, 0
            if not chances:
                player = state.current_player()
                text = state.information_state_string(player)
                if text not in self._keys:
                    self._keys[text] = len(obs)
                    obs.append(state.information_state_tensor(player))
                    legal.append(state.legal_actions_mask(player))
                key = self._keys[text]
            rows.append((player, key, {}, chances, [0.0, 0.0]))
            todo += [(state.child(a), at, a) for a in state.legal_actions()]
        self.obs, self.legal = np.array(obs, np.float32), np.array(legal, bool)
        self.max_steps = 1 + max(self._depth(rows, 0, player) for player in (0, 1))
        width = 1 + max(max(row[2]) for row in rows if row[2])
        self._player, self._point = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
        self._child, self._chance = np.zeros((len(rows), width), int), np.zeros((len(rows), width))
        self._returns = np.array([row[4] for row in rows])
        for at, (_, _, children, chances, _) in enumerate(rows):
            self._child[at, list(children)] = list(children.values())
            self._chance[at, list(chances)] = list(chances.values())

    def _depth(self, rows: list[Any], at: int, player: int) -> int:
        """Most decisions of a player below a node, less one."""
        below = max((self._depth(rows, child, player) for child in rows[at][2].values()), default=-1)
        return below + (rows[at][0] == player)

    def play(self, probs: np.ndarray, games: int, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        """Plays games and returns a learner batch whose columns are one seat of one game each.

        Args:
            probs: ``[I, A]`` of both seats.
            games: number of games.
            rng: draws everything.
        """
        shape = (games, 2, self.max_steps + 1)
        point, action, mask = np.zeros(shape, int), np.zeros(shape, int), np.zeros(shape, np.float32)
        count = np.zeros((games, 2), int)
        weights = np.zeros((len(probs), self._child.shape[1]))
        weights[:, : probs.shape[1]] = probs
        at, every = np.zeros(games, int), np.arange(games)
        while (going := self._player[at] != _OVER).any():
            chance = (self._player[at] == _CHANCE)[:, None]
            likely = np.where(chance, self._chance[at], weights[self._point[at]]).cumsum(-1)
            drawn = (rng.random((games, 1)) * likely[:, -1:] >= likely).sum(-1)
            acts = every[self._player[at] >= 0]
            seat = self._player[at[acts]]
            where = (acts, seat, count[acts, seat])
            point[where], action[where], mask[where] = self._point[at[acts]], drawn[acts], 1
            count[acts, seat] += 1
            at = np.where(going, self._child[at, np.minimum(drawn, self._child.shape[1] - 1)], at)
        reward = np.zeros(shape, np.float32)
        last = np.arange(shape[-1]) == count[:, :, None] - 1
        reward[last] = np.broadcast_to(self._returns[at][:, :, None], shape)[last]
        log_prob = np.log(np.maximum(probs[point, action], 1e-30)).astype(np.float32)
        arrays = {"action": action, "mask": mask, "reward": reward, "terminated": last, "log_prob": log_prob}
        batch = {name: torch.from_numpy(x.reshape(-1, shape[-1])) for name, x in arrays.items()}
        batch["truncated"] = torch.zeros_like(batch["terminated"])
        batch["obs"] = self.observed(point.reshape(-1, shape[-1]))
        return batch

    def observed(self, point: np.ndarray) -> Any:
        """Observations at decision points: an array, or with an action mask where some action is illegal somewhere."""
        x = torch.from_numpy(self.obs[point])
        return x if self.legal.all() else {"action_mask": torch.from_numpy(self.legal[point]), "x": x}

    def nash_conv(self, probs: np.ndarray) -> float:
        """What both players together gain by best responses to the policy, by OpenSpiel."""
        tabular = TabularPolicy(self.game)
        for text, at in self._keys.items():
            tabular.policy_for_key(text)[:] = probs[at] / probs[at].sum()
        return float(exploitability.nash_conv(self.game, tabular))


def probabilities(outputs: Mapping[str, Any]) -> np.ndarray:
    """``[N, A]`` float64 of a categorical policy's outputs."""
    return outputs["logits"].detach().double().softmax(-1).numpy()
