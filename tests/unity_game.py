"""A game that speaks the wire of Unity's package ML-Agents, as an unmodified project does: for tests and benchmarks.

    python -m tests.unity_game --mlagents-port 5004 --agents 8 --runners 8 --picture

Each agent chases a point on a square. It observes where the point is, and with ``--picture`` an 84 x 84 picture as a
PNG; steers by two numbers, and may dash unless it just did. An episode ends when the point is caught, or at Max Step,
and the agent starts anew under another id in the same message. A runner has another behaviour: it flees the point, and
an episode ends only at Max Step. With ``--teams`` two agents chase the same point, one of each team: who catches it
earns 1, the other loses 1, and both start anew. With ``--pairs`` two runners are a group, whose reward is the mean of
both. Flags of Unity itself are ignored.
"""

from __future__ import annotations

import argparse
import io
import random
import struct
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Self

import grpc
import numpy as np
from PIL import Image

from brayx.bridges.v1 import unity_pb2 as pb

PATH = "/communicator_objects.UnityToExternalProto/Exchange"
BEHAVIOUR = "Chaser"
FLEEING = "Runner"
SIDE = 84
"""Height and width of the picture."""
DEADLINE_S = 120.0
STATISTICS = uuid.UUID("a1d8f7b7-cec8-50f9-b78b-d3e165a78520")


class Caller:
    """The game's end of the connection; a context."""

    def __init__(self, port: int) -> None:
        # As each game in a process of its own: no connection is shared.
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1))
        self._channel = grpc.insecure_channel(f"localhost:{port}", options)
        self._exchange = self._channel.unary_unary(PATH)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def call(self, message: pb.Message) -> pb.Message:
        """One call."""
        return pb.Message.FromString(self.call_bytes(message.SerializeToString()))

    def call_bytes(self, data: bytes) -> bytes:
        """One call with any bytes."""
        return self._exchange(data, timeout=DEADLINE_S, wait_for_ready=True)


def hello(version: str = "1.5.0") -> pb.Message:
    """The first call."""
    can = pb.Capabilities(base=True, concatenated_pngs=True, channel_mapping=True, hybrid_actions=True, groups=True)
    greeting = pb.Hello(name="stand-in", communicator_version=version, package_version="3.0.0", capabilities=can)
    return pb.Message(header=pb.Header(status=200), output=pb.Output(hello=greeting))


def empty() -> pb.Message:
    """The second call."""
    return pb.Message(header=pb.Header(status=200))


def leaving() -> pb.Message:
    """The last call."""
    return pb.Message(header=pb.Header(status=400))


def behaviour(name: str = BEHAVIOUR, continuous: int = 2, branches: Sequence[int] = (2,)) -> pb.Behaviour:
    """A behaviour as it is announced."""
    spec = pb.ActionSpec(num_continuous=continuous, num_discrete=len(branches), branch_sizes=branches)
    return pb.Behaviour(name=name, actions=spec)


def agents_message(
    agents: Mapping[str, Sequence[pb.Agent]], new: Sequence[pb.Behaviour] = (), side_channel: bytes = b""
) -> pb.Message:
    """A call with agents by behaviour."""
    by_behaviour = {name: pb.Agents.List(agents=listed) for name, listed in agents.items()}
    output = pb.Output(agents=pb.Agents(by_behaviour=by_behaviour, side_channel=side_channel))
    if new:
        output.hello.CopyFrom(pb.Hello(behaviours=new))
    return pb.Message(header=pb.Header(status=200), output=output)


def vector(values: Sequence[float], name: str = "VectorSensor") -> pb.Observation:
    """An observation of numbers."""
    floats = pb.Observation.Floats(data=values)
    return pb.Observation(shape=[len(values)], floats=floats, dimensions=[1], name=name)


def picture(
    pngs: Sequence[np.ndarray], channels: int, mapping: Sequence[int] = (), name: str = "CameraSensor"
) -> pb.Observation:
    """An observation of PNGs, each of an array uint8 ``[height, width, 3]``."""
    data = b"".join(map(png, pngs))
    height, width, _ = pngs[0].shape
    return pb.Observation(
        shape=[channels, height, width],
        compression=pb.Observation.PNG,
        compressed=data,
        channel_mapping=mapping,
        dimensions=[1, 2, 2],
        name=name,
    )


def png(array: np.ndarray) -> bytes:
    """The PNG of an array uint8 ``[height, width, 3]``."""
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return file.getvalue()


def statistic(name: str, value: float, kind: int = 0) -> bytes:
    """A side channel's message with a statistic."""
    text = name.encode()
    payload = struct.pack("<i", len(text)) + text + struct.pack("<fi", value, kind)
    return STATISTICS.bytes_le + struct.pack("<i", len(payload)) + payload


def delimited(message: Any) -> bytes:
    """A message after its length, as `DemonstrationRecorder` writes it."""
    data = message.SerializeToString()
    length, head = len(data), b""
    while True:
        head += bytes([length & 0x7F | (0x80 if length > 0x7F else 0)])
        length >>= 7
        if not length:
            return head + data


def demo_bytes(pairs: list[pb.Demonstrated], num_steps: int | None = None, announced: Any = None) -> bytes:
    """The file of a Demonstration Recorder."""
    head = delimited(pb.Demonstration(api_version=1, num_steps=len(pairs) if num_steps is None else num_steps))
    body = b"".join(map(delimited, [announced or behaviour("Chaser", 0, [2]), *pairs]))
    return head.ljust(33, b"\0") + body


class Chaser:
    """One agent: a point that it steers, and one that it is to catch or to flee, both within [-1, 1]."""

    def __init__(self, game: UnityGame, rng: random.Random, *, flees: bool = False, team: int | None = None) -> None:
        self._game, self._rng, self.flees = game, rng, flees
        self.rival: Chaser | None = None
        self.group = 0
        self.behaviour = FLEEING if flees else BEHAVIOUR if team is None else f"{BEHAVIOUR}?team={team}"
        self.restart()

    def restart(self) -> None:
        """Begins an episode, under a new id."""
        self.id = self._game.new_id()
        self.x, self.y, self.target_x, self.target_y = (self._rng.uniform(-1, 1) for _ in range(4))
        self.length, self.reward, self.dashed, self.caught, self.lost = 0, 0.0, False, False, False
        if self.rival is not None and self.rival.length == 0:  # which has started anew just before
            self.target_x, self.target_y = self.rival.target_x, self.rival.target_y

    def step(self, steer: Sequence[float], dash: int) -> None:
        """Moves."""
        speed = 0.2 if dash and not self.dashed else 0.1
        self.dashed = bool(dash)
        before = self._distance
        self.x, self.y = (
            max(-1.0, min(1.0, place + speed * max(-1.0, min(1.0, number))))
            for place, number in zip((self.x, self.y), steer, strict=True)
        )
        self.length += 1
        self.caught = self._distance < 0.15 and not self.flees
        self.reward = self._distance - before if self.flees else before - self._distance + self.caught

    @property
    def has_ended(self) -> bool:
        """Whether the episode has."""
        return self.caught or self.lost or self.length >= self._game.limit

    def message(self, *, picture: bool) -> pb.Agent:
        """What the agent says now."""
        return pb.Agent(
            id=self.id,
            reward=0.0 if self.group else self.reward,
            group_id=self.group,
            group_reward=self.reward if self.group else 0.0,
            done=self.has_ended,
            max_step_reached=self.has_ended and not (self.caught or self.lost),
            action_mask=[] if self.flees else [False, self.dashed],
            observations=[
                vector([self.target_x - self.x, self.target_y - self.y, self.x, self.y]),
                *([self._picture()] if picture else []),
            ],
        )

    @property
    def _distance(self) -> float:
        return float(np.hypot(self.target_x - self.x, self.target_y - self.y))

    def _picture(self) -> pb.Observation:
        pixels = np.zeros((SIDE, SIDE, 3), np.uint8)
        for x, y, colour in ((self.x, self.y, 0), (self.target_x, self.target_y, 1)):
            row, column = (min(SIDE - 1, int((value + 1) / 2 * SIDE)) for value in (y, x))
            pixels[row, column, colour] = 255
        return picture([pixels], 3, [0, 1, 2])


class UnityGame:
    """The game: agents, of whom each wants an action in one of ``period`` calls.

    Attributes:
        limit: Max Step of an episode.
        seed: what the trainer said.
        commands: of the trainer's answers, without those of steps.
        steps: number of agents' steps.
    """

    def __init__(
        self,
        agents: int = 8,
        *,
        picture: bool = False,
        limit: int = 50,
        period: int = 1,
        runners: int = 0,
        teams: bool = False,
        pairs: bool = False,
    ) -> None:
        self.limit, self._period, self._has_picture = limit, period, picture
        self._ids = 0
        self._chasers = [
            Chaser(self, random.Random(index), flees=index >= agents, team=index % 2 if teams else None)
            for index in range(agents + runners)
        ]
        for first, second in zip(self._chasers[::2], self._chasers[1::2], strict=False) if teams else ():
            first.rival, second.rival = second, first
            second.restart()
        fleeing = [chaser for chaser in self._chasers if chaser.flees]
        self._pairs = [*zip(fleeing[::2], fleeing[1::2], strict=True)] if pairs else []
        for number, pair in enumerate(self._pairs, 1):
            for chaser in pair:
                chaser.group = number
        self.seed = 0
        self.commands: list[int] = []
        self.steps = 0

    def new_id(self) -> int:
        """The id of an agent that starts."""
        self._ids += 1
        return self._ids

    def play(self, caller: Caller, calls: int | None = None) -> None:
        """Plays until the trainer ends the game, or for so many calls, after which it leaves."""
        self.seed = caller.call(hello()).input.welcome.seed
        answer = caller.call(empty())
        self.commands.append(answer.input.actions.command)
        new: Sequence[pb.Behaviour] = [
            behaviour(name, branches=() if name == FLEEING else (2,))
            for name in dict.fromkeys(chaser.behaviour for chaser in self._chasers)
        ]
        done = 0
        while calls is None or done < calls:
            asking = [chaser for index, chaser in enumerate(self._chasers) if (done + index) % self._period == 0]
            message, asking = self._message(asking, new)
            answer, new = caller.call(message), ()
            if answer.header.status != 200:
                self.commands.append(answer.input.actions.command)
                return
            by_behaviour = answer.input.actions.by_behaviour
            actions = {name: iter(listed.actions) for name, listed in by_behaviour.items()}
            self._act(asking, [next(actions[chaser.behaviour]) for chaser in asking])
            done += 1
        caller.call(leaving())

    def _message(self, asking: Sequence[Chaser], new: Sequence[pb.Behaviour]) -> tuple[pb.Message, list[Chaser]]:
        agents: dict[str, list[pb.Agent]] = {}
        for chaser in asking:
            listed = agents.setdefault(chaser.behaviour, [])
            if chaser.has_ended:
                listed.append(chaser.message(picture=self._has_picture))
                chaser.restart()
            listed.append(chaser.message(picture=self._has_picture))
        return agents_message(agents, new, statistic("Chaser/agents", len(self._chasers))), [*asking]

    def _act(self, asking: Sequence[Chaser], actions: Sequence[Any]) -> None:
        for chaser, action in zip(asking, actions, strict=True):
            chaser.step(action.continuous, 0 if chaser.flees else action.discrete[0])
            self.steps += 1
        for chaser in asking:
            if chaser.rival is not None and chaser.caught and not chaser.rival.caught:
                chaser.rival.lost, chaser.rival.reward = True, -1.0
        for first, second in self._pairs:
            first.reward = second.reward = (first.reward + second.reward) / 2


def expert_demo(episodes: int = 10) -> bytes:
    """Demonstrations of an agent that goes straight to its point."""
    game, pairs = UnityGame(), list[pb.Demonstrated]()
    for seed in range(episodes):
        chaser = Chaser(game, random.Random(seed))
        while True:
            way = [5 * (target - place) for target, place in ((chaser.target_x, chaser.x), (chaser.target_y, chaser.y))]
            steer = [max(-1.0, min(1.0, number)) for number in way]
            agent, dash = chaser.message(picture=False), int(not chaser.dashed)
            pairs.append(pb.Demonstrated(agent=agent, action=pb.Action(continuous=steer, discrete=[dash])))
            if chaser.has_ended:
                break
            chaser.step(steer, dash)
    return demo_bytes(pairs, announced=behaviour())


def main() -> None:
    """Plays until the trainer ends the game."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mlagents-port", type=int, default=5004)
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--runners", type=int, default=0)
    parser.add_argument("--teams", action="store_true")
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--limit", type=int, default=50)
    parser.add_argument("--period", type=int, default=1)
    parser.add_argument("--picture", action="store_true")
    parser.add_argument("--rounds", type=int, default=0)
    options, _ = parser.parse_known_args()
    game = UnityGame(
        options.agents,
        picture=options.picture,
        limit=options.limit,
        period=options.period,
        runners=options.runners,
        teams=options.teams,
        pairs=options.pairs,
    )
    for _ in range(options.rounds):
        with Caller(options.mlagents_port) as caller:
            game.play(caller, calls=5)
    with Caller(options.mlagents_port) as caller:
        game.play(caller)


if __name__ == "__main__":
    main()
