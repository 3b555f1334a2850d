"""PettingZoo gamecores: AEC and parallel games through real doors, one session for each agent of a game."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pettingzoo.test import api_test, parallel_api_test

from brayx.actor.actor import Actor
from brayx.actor.agent import Agent, Services, State
from brayx.actor.agent_actor import AgentActorFactory
from brayx.actor.config import SessionConfig
from brayx.actor.doors.asgi import DoorApp
from brayx.actor.table import SessionTable
from brayx.bridges import pettingzoo
from brayx.components import load
from brayx.errors import AgentError, BadBody, BrayxError, ConfigError, SessionResumed
from brayx.gamecore import AsyncClient, StepKind
from brayx.gamecore.contract import Contract
from brayx.gamecore.protocol import StepRequest
from brayx.jobs.shipped import TEMPLATES
from brayx.types import Forward, Fragment
from tests.unit.bridges.by_contract import ByContract, playing_by_contract
from tests.unit.bridges.zoo import Race, Secrets, Turns, Whispers
from tests.unit.gamecore.echo_server import EchoApp, serving
from tests.unit.gamecore.relay import relaying

TURNS = "tests.unit.bridges.zoo:turns"
RACE = "tests.unit.bridges.zoo:race"


@pytest.fixture
def app() -> EchoApp:
    return EchoApp(lambda body: b'{"action":1}')


@pytest.fixture
def address(app: EchoApp) -> Iterator[str]:
    with serving(app) as address:
        yield address


def play(env: Any, url: str, **options: Any) -> pettingzoo.MultiAgentResult:
    async def once() -> pettingzoo.MultiAgentResult:
        clients = pettingzoo.Clients(lambda: AsyncClient(url, timeout_s=10))
        try:
            return await pettingzoo.play_game(env, clients, **options)
        finally:
            await clients.close()

    return asyncio.run(once())


def sent_by(requests: list[StepRequest], agent: str) -> list[Any]:
    """The requests of an agent's sessions, each as its kind and its body; a start without its contract."""
    return [
        (request.kind.value, _without_contract(json.loads(request.body)) if request.body else None)
        for request in requests
        if request.session.endswith(f"-agent-{agent}")
    ]


def _without_contract(body: dict[str, Any]) -> dict[str, Any]:
    said = Contract().as_dict() if "contract" in body else {}
    return {name: value for name, value in body.items() if name not in said}


def test_the_environments_of_these_tests_follow_pettingzoos_rules() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for turns in (Turns(), Whispers()):
            api_test(turns, num_cycles=20)
        for together in (Race(), Secrets()):
            parallel_api_test(together, num_cycles=20)


@pytest.mark.parametrize("door", ["http", "ws"])
def test_an_aec_game(app: EchoApp, address: str, door: Literal["http", "ws"]) -> None:
    (result,) = pettingzoo.run_games(TURNS, f"http://{address}", games=1, door=door, seed=3)
    assert result == pettingzoo.MultiAgentResult({"red": 4.0, "blue": 4.0, "grey": 2.0}, 7, "truncated")
    assert not app.running
    games = {request.session.rpartition("-agent-")[0] for request in app.requests}
    assert len(games) == 1

    def obs(turn: int) -> dict[str, Any]:
        return {"observation": [float(turn)], "action_mask": [1, 1]}

    start = {"env_id": TURNS, "num_actions": 2, "agents": ["red", "blue", "grey"]}
    seed = json.loads(app.requests[0].body)["seed"]
    assert isinstance(seed, int)
    assert sent_by(app.requests, "red") == [
        ("start", {**start, "agent": "red", "seed": seed}),
        ("tick", {"obs": obs(0), "reward": 0.0}),
        ("tick", {"obs": obs(1), "reward": 2.0}),
        ("tick", {"obs": obs(2), "reward": 1.0}),
        ("stop", {"obs": obs(3), "reward": 1.0, "terminated": False, "truncated": True}),
    ]
    assert sent_by(app.requests, "blue") == [
        ("start", {**start, "agent": "blue", "seed": seed}),
        ("tick", {"obs": obs(0), "reward": 1.0}),
        ("tick", {"obs": obs(1), "reward": 2.0}),
        ("tick", {"obs": obs(2), "reward": 1.0}),
        ("stop", {"obs": obs(3), "reward": 0.0, "terminated": False, "truncated": True}),
    ]
    assert sent_by(app.requests, "grey") == [
        ("start", {**start, "agent": "grey", "seed": seed}),
        ("tick", {"obs": obs(0), "reward": 2.0}),
        ("stop", {"obs": obs(1), "reward": 0.0, "terminated": True, "truncated": False}),
    ]
    ticks = [request.session.rpartition("-")[2] for request in app.requests if request.kind is StepKind.TICK]
    assert ticks == ["red", "blue", "grey", "red", "blue", "red", "blue"]


@pytest.mark.parametrize("door", ["http", "ws"])
def test_a_parallel_game(app: EchoApp, address: str, door: Literal["http", "ws"]) -> None:
    app.answer = lambda body: b'{"action":2}'
    (result,) = pettingzoo.run_games(RACE, f"http://{address}", games=1, door=door)
    assert result == pettingzoo.MultiAgentResult({"x": 4.0, "y": 8.0, "z": 4.0}, 8, "truncated")
    assert not app.running
    assert sent_by(app.requests, "x") == [
        ("start", {"env_id": RACE, "seed": None, "num_actions": 3, "agent": "x", "agents": ["x", "y"]}),
        ("tick", {"obs": [0.0, 0.0], "reward": 0.0}),
        ("tick", {"obs": [1.0, 0.0], "reward": 2.0}),
        ("stop", {"obs": [2.0, 0.0], "reward": 2.0, "terminated": True, "truncated": False}),
    ]
    assert sent_by(app.requests, "z") == [
        ("start", {"env_id": RACE, "seed": None, "num_actions": 3, "agent": "z", "agents": ["y", "z"]}),
        ("tick", {"obs": [2.0, 2.0], "reward": 0.0, "action_mask": [1, 0, 1]}),
        ("tick", {"obs": [3.0, 2.0], "reward": 2.0, "action_mask": [1, 0, 1]}),
        ("stop", {"obs": [4.0, 2.0], "reward": 2.0, "terminated": False, "truncated": True}),
    ]


class Watched(Race):
    """Its state is the number of steps taken."""

    def state(self) -> np.ndarray:
        return np.array([self.steps])


class Counted(Turns):
    """Its state is the number of turns of each agent."""

    def state(self) -> np.ndarray:
        return np.array(list(self.turns.values()))


def test_every_agent_of_a_parallel_game_gets_the_state_that_it_acts_in(app: EchoApp, address: str) -> None:
    play(Watched(), f"http://{address}", state=True)
    assert [body.get("state") for _, body in sent_by(app.requests, "x")] == [None, [0], [1], [2]]
    assert [body.get("state") for _, body in sent_by(app.requests, "y")] == [None, [0], [1], [2], [3], [4]]
    assert [body.get("state") for _, body in sent_by(app.requests, "z")] == [None, [2], [3], [4]]


def test_agents_that_take_turns_get_the_state_at_their_turn(app: EchoApp, address: str) -> None:
    play(Counted(), f"http://{address}", state=True)
    assert [body.get("state") for _, body in sent_by(app.requests, "red")][1:4] == [[0, 0, 0], [1, 1, 1], [2, 2, 1]]
    assert [body.get("state") for _, body in sent_by(app.requests, "blue")][1:4] == [[1, 0, 0], [2, 1, 1], [3, 2, 1]]


def test_an_environment_without_a_state_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"has no state\(\)"):
        pettingzoo.run_games(RACE, f"http://{address}", games=1, state=True)


@pytest.mark.parametrize("env", [Turns(), Race()], ids=["aec", "parallel"])
def test_a_game_is_cut_off_for_all_its_agents(app: EchoApp, address: str, env: Any) -> None:
    result = play(env, f"http://{address}", max_ticks=1)
    assert result.ended == "truncated"
    assert not app.running
    stops = [json.loads(request.body) for request in app.requests if request.kind is StepKind.STOP]
    starts = [request for request in app.requests if request.kind is StepKind.START]
    assert len(stops) == len(starts)
    assert all(stop["truncated"] and not stop["terminated"] for stop in stops)
    assert sum(stop["reward"] for stop in stops) == sum(result.returns.values()) == 2.0


@pytest.mark.parametrize("env", [Turns(), Race()], ids=["aec", "parallel"])
def test_a_stopped_game_is_neither_terminated_nor_truncated(app: EchoApp, address: str, env: Any) -> None:
    assert play(env, f"http://{address}", should_stop=lambda: True).ended == "stopped"
    assert not app.running
    stops = [json.loads(request.body) for request in app.requests if request.kind is StepKind.STOP]
    assert stops
    assert not any(stop["truncated"] or stop["terminated"] for stop in stops)


class Gathering(Agent):
    """Answers once all sessions of its game have sent a tick, so that only concurrent ticks are answered."""

    waiting: dict[str, list[asyncio.Event]] = {}
    seen: set[tuple[str, str]] = set()

    async def on_tick(self, state: State) -> None:
        self.seen.add((state.game, state.agent))
        event = asyncio.Event()
        here = self.waiting.setdefault(state.game, [])
        here.append(event)
        if len(here) == 2:
            for waiter in self.waiting.pop(state.game):
                waiter.set()
        await event.wait()
        state.output = {"action": 0}


def served(agent: type[Agent]) -> DoorApp:
    return DoorApp(SessionTable(AgentActorFactory({"agent": agent}, {}, Services()), SessionConfig(tick_timeout_s=5.0)))


@pytest.mark.parametrize("door", ["http", "ws"])
def test_agents_of_a_parallel_game_tick_at_the_same_time(door: Literal["http", "ws"]) -> None:
    Gathering.seen.clear()
    with serving(served(Gathering)) as address:
        (result,) = pettingzoo.run_games(RACE, f"http://{address}", games=1, door=door, max_ticks=4)
    assert result.length == 8
    assert {agent for _, agent in Gathering.seen} == {"x", "y", "z"}
    assert len({game for game, _ in Gathering.seen}) == 1


class Failing(Agent):
    ended: list[tuple[str, str]] = []
    fail = False

    def __init__(self, name: str, config: Any, state: State) -> None:
        super().__init__(name, config, state)
        self.agent = state.agent

    async def on_tick(self, state: State) -> None:
        if self.agent == "y" and Failing.fail:
            Failing.fail = False
            raise ValueError("y cannot go on")
        state.output = {"action": 0}

    async def on_session_end(self, reason: str) -> None:
        self.ended.append((self.agent, reason))


@pytest.mark.parametrize("door", ["http", "ws"])
def test_a_session_that_fails_ends_its_game_and_no_other(
    door: Literal["http", "ws"], capsys: pytest.CaptureFixture[str]
) -> None:
    Failing.fail = True
    Failing.ended.clear()
    app = served(Failing)
    with serving(app) as address:
        results = pettingzoo.run_games(RACE, f"http://{address}", games=2, door=door)
    assert len(results) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "agent_error" in line
    assert sorted(Failing.ended[:2]) == [("x", "stop"), ("y", "error")]  # not left to idle
    assert len(Failing.ended) == 8


class TwoActions:
    """A model with two actions."""

    async def forward(self, *args: Any) -> Forward:
        return Forward({"logits": np.zeros(2, np.float32), "value": np.float32(0)}, 1)


class Ignored:
    """A buffer that drops everything."""

    def push(self, *fragments: Fragment) -> None:
        pass


class Uneven(Race):
    """One of its agents may have more actions than the others."""

    def __init__(self, actions_of_y: int) -> None:
        self.actions_of_y = actions_of_y

    def action_space(self, agent: str) -> gymnasium.Space[Any]:
        return gymnasium.spaces.Discrete(self.actions_of_y if agent == "y" else 2)


def test_the_shipped_agent_refuses_a_model_with_too_few_actions_for_one_of_the_agents(
    caplog: pytest.LogCaptureFixture,
) -> None:
    agents = {"agent": load("gym_agent", "GymAgent", str(TEMPLATES))}
    config = {"mode": "train", "seed": 0, "agent": {"options": {}}}
    services = Services(models={"model": TwoActions()}, buffers={"buffer": Ignored()})
    table = SessionTable(AgentActorFactory(agents, config, services), SessionConfig(tick_timeout_s=5.0))
    with serving(DoorApp(table)) as address:
        with pytest.raises(AgentError, match="at tick 0: ValueError"):
            play(Uneven(3), f"http://{address}")
        (fault,) = caplog.messages
        assert "-agent-y: " in fault
        assert "the model has 2 actions, the game 3" in fault
        assert play(Uneven(2), f"http://{address}").ended == "truncated"


class Refusing(Actor):
    """Refuses to start for some agents."""

    async def start(self, session: str, body: bytes) -> bytes:
        if session.endswith("-agent-y"):
            raise AgentError("no y here")
        return b""

    async def tick(self, body: bytes) -> bytes:
        return b'{"action":0}'

    async def stop(self, body: bytes) -> bytes:
        return b""


def test_a_refused_start_leaves_no_session() -> None:
    table = SessionTable(Refusing)
    with serving(DoorApp(table)) as address:
        with pytest.raises(AgentError, match="no y here"):
            play(Race(), f"http://{address}")
        assert len(table) == 0


@pytest.mark.parametrize("env", [TURNS, RACE])
def test_an_action_of_another_space_ends_the_run(app: EchoApp, address: str, env: str) -> None:
    app.answer = lambda body: b'{"action":7}'
    with pytest.raises(BadBody, match="not an integer from 0 to"):
        pettingzoo.run_games(env, f"http://{address}", games=1)
    assert not app.running


@pytest.fixture
def by_contract() -> Iterator[str]:
    with playing_by_contract() as url:
        yield url


def test_an_aec_game_by_contract(by_contract: str) -> None:
    result = play(Turns(), by_contract)
    assert result == pettingzoo.MultiAgentResult({"red": 4.0, "blue": 4.0, "grey": 2.0}, 7, "truncated")
    assert {contract.behaviour for contract in ByContract.contracts.values()} == {"agent"}
    assert {contract.encoding for contract in ByContract.contracts.values()} == {"packed"}
    (contract,) = {contract.id: contract for contract in ByContract.contracts.values()}.values()
    assert [spec.name for spec in contract.observations] == ["observation"], "the mask is the action's"
    assert contract.has_mask
    assert [tick.obs["observation"].tolist() for tick in ByContract.ticks["red"]] == [[0], [1], [2], [3]]
    assert [tick.reward for tick in ByContract.ticks["red"]] == [0, 2, 1, 1]
    ends = {agent: (ticks[-1].terminated, ticks[-1].truncated) for agent, ticks in ByContract.ticks.items()}
    assert ends == {"red": (False, True), "blue": (False, True), "grey": (True, False)}


class Numbered(Race):
    """Its agents have a number, and one of them other actions."""

    possible_agents = ["cat_0", "cat_1", "dog_0"]

    def action_space(self, agent: str) -> gymnasium.Space[Any]:
        return gymnasium.spaces.Discrete(3 if agent.startswith("cat") else 2)

    def _see(self, agents: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        return {agent: np.zeros(2, np.float32) for agent in agents}, {agent: {} for agent in agents}

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        self.steps = 0
        self.agents = list(self.possible_agents)
        return self._see(self.agents)


def test_a_parallel_game_by_contract_has_a_behaviour_for_each_kind_of_agent(by_contract: str) -> None:
    result = play(Numbered(), by_contract, max_ticks=1)
    assert result.returns == {"cat_0": 2.0, "cat_1": 2.0, "dog_0": 1.0}
    behaviours = {agent: contract.behaviour for agent, contract in ByContract.contracts.items()}
    assert behaviours == {"cat_0": "cat", "cat_1": "cat", "dog_0": "dog"}


def test_a_game_with_a_state_has_no_contract(app: EchoApp, address: str) -> None:
    play(Watched(), f"http://{address}", state=True, max_ticks=1)
    starts = [json.loads(request.body) for request in app.requests if request.kind is StepKind.START]
    assert all("contract" not in start for start in starts)


def test_giving_up_has_a_bound() -> None:
    with pytest.raises(BrayxError, match="is the service running"):
        pettingzoo.run_games(RACE, "http://127.0.0.1:1", games=1, give_up_after_s=0)


@given(st.text(max_size=30) | st.integers() | st.tuples(st.integers(), st.text(max_size=5)))
def test_every_agent_name_makes_an_id_that_can_be_split(agent: Any) -> None:
    state = State(pettingzoo.session_id("0123abcd", agent))
    assert state.game == "0123abcd"
    assert state.session.isascii()
    assert state.session.isprintable()
    assert " " not in state.session


def test_usual_names_stay_as_they_are() -> None:
    assert pettingzoo.session_id("g", "player_0") == "g-agent-player_0"
    assert pettingzoo.session_id("g", "agent-agent-1") == "g-agent-agent%2Dagent%2D1"


# Which environment


def test_a_pettingzoo_example_whose_agents_come_and_go(app: EchoApp, address: str) -> None:
    app.answer = lambda body: b'{"action":0}'
    module = "pettingzoo.test.example_envs.generated_agents_parallel_v0"
    for api in ("parallel", "aec"):
        env = pettingzoo.make_env(module, api)  # type: ignore[arg-type]
        result = play(env, f"http://{address}", seed=1, max_ticks=20)  # the game never ends by itself
        assert len(result.returns) > 5
        assert result.ended == "truncated"
        assert result.length > 80
    assert not app.running


@pytest.mark.parametrize(
    ("env_id", "api", "said"),
    [
        ("no_such_module", None, "'no_such_module' is neither in"),
        ("tests.unit.bridges.zoo", None, "has no function parallel_env or env"),
        ("tests.unit.bridges.zoo:reace", None, "has no function reace"),
        ("tests.unit.bridges.zoo:neither", None, "made a object, expected PettingZoo's AECEnv or ParallelEnv"),
        ("tests.unit.bridges.zoo:race", "aec", "made a Race, expected PettingZoo's AECEnv"),
        ("tests.unit.bridges.zoo:broken", None, "RuntimeError: no board today"),
        ("butterfly/pistonbal_v6", None, "nearest: butterfly/pistonball-v6"),
        ("classic/chess_v6", "parallel", "PettingZoo has no parallel 'classic/chess_v6'"),
        ("classic/chess_v6", None, r"pip install 'pettingzoo\[classic\]'"),
    ],
)
def test_an_environment_that_cannot_be_made_says_why(
    env_id: str, api: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "chess", None)  # as where it is not installed
    with pytest.raises(ConfigError, match=said):
        pettingzoo.make_env(env_id, api)


def test_a_registered_environment() -> None:
    from pettingzoo import aec_registry, parallel_registry, register

    register("aec", "brayx/turns_v0", entry_point=Turns)
    register("parallel", "brayx/race_v0", entry_point=Race)
    register("aec", "brayx/race_v0", entry_point=Turns)
    try:
        assert isinstance(pettingzoo.make_env("brayx/turns_v0"), Turns)
        assert isinstance(pettingzoo.make_env("brayx/race_v0"), Race)
        assert isinstance(pettingzoo.make_env("brayx/race_v0", "aec"), Turns)
    finally:
        del aec_registry["brayx/turns-v0"], aec_registry["brayx/race-v0"], parallel_registry["brayx/race-v0"]


def test_without_the_package() -> None:
    code = (
        "import sys; sys.modules['pettingzoo'] = None\n"
        "from brayx.bridges.pettingzoo import main\n"
        "sys.exit(main(['a:b', '--url', 'http://127.0.0.1:1']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2
    assert "pip install 'brayx[pettingzoo]'" in done.stderr


# The command


@pytest.mark.parametrize("env", [TURNS, RACE])
@pytest.mark.parametrize("scheme", ["http", "ws"])
def test_a_game_outlives_its_connection_and_a_resumed_session(
    app: EchoApp, address: str, env: str, scheme: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with relaying(address) as relay:
        resumed = False

        def answer(body: bytes) -> bytes:
            nonlocal resumed
            if len(app.applied) == 2:
                relay.break_next("after")
            if len(app.applied) == 4 and not resumed:
                resumed = True
                raise SessionResumed("it goes on from a snapshot", tick=app.requests[-1].seq)
            return b'{"action":1}'

        app.answer = answer
        command = [env, "--url", f"{scheme}://{relay.address}", "--games", "1", "--quiet"]
        assert pettingzoo.main([*command, "--reconnect", "20"]) == 0
        assert capsys.readouterr().err == ""
        assert resumed
        starts = [request.session for request in app.requests if request.kind is StepKind.START]
        assert len(starts) == len(set(starts)) == len({session for session, *_ in app.applied})
        for session in starts:
            numbers = [seq for applied_session, seq, _ in app.applied if applied_session == session]
            assert numbers == list(range(len(numbers)))
        assert not app.running


def test_the_command_plays_modules_of_the_working_directory(app: EchoApp, address: str, tmp_path: Path) -> None:
    (tmp_path / "my_zoo.py").write_text((Path(__file__).parent / "zoo.py").read_text())
    command = ["-m", "brayx", "gamecore", "pettingzoo", "my_zoo:turns", "--url", f"ws://{address}"]

    def run(*options: str) -> list[str]:
        return subprocess.run(
            [sys.executable, *command, "--games", "2", *options],
            cwd=tmp_path,
            env={"PYTHONPATH": str(Path(__file__).parents[3])},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout.splitlines()

    *games, summary = run()
    assert games == [f"game {number}: return red 4, blue 4, grey 2, 7 ticks, truncated" for number in (1, 2)]
    assert summary.startswith("2 games, mean return red 4, blue 4, grey 2, 14 ticks")
    returns = {"red": 4.0, "blue": 4.0, "grey": 2.0}
    assert [json.loads(line) for line in run("--json")] == [{"return": returns, "length": 7, "ended": "truncated"}] * 2
    assert not app.running


def test_the_command_without_a_service(capsys: pytest.CaptureFixture[str]) -> None:
    assert pettingzoo.main([TURNS, "--url", "http://127.0.0.1:1", "--give-up-after-s", "0"]) == 1
    assert "is the service running" in capsys.readouterr().err
    assert pettingzoo.main(["classic/nothing_v1", "--url", "http://127.0.0.1:1"]) == 2
