"""Options of the ``agent`` and ``actor`` components."""

from __future__ import annotations

import shlex
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from brayx.components import is_named
from brayx.gamecore.browser import are_origins
from brayx.gamecore.doors import DOORS, PORT_OPTIONS
from brayx.gamecore.protocol import DEFAULT_MAX_BODY_BYTES


class AgentConfig(BaseModel):
    """One decision maker: a subclass of `brayx.Agent`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)

    kind: Literal["agent"] = "agent"
    module: str
    """Import path of the module, searched in the YAML file's folder first."""
    class_name: str = Field(alias="class")
    """Name of the agent class in that module."""
    options: dict[str, object] = {}
    """Options that the agent reads as ``config[name]["options"]``."""


class MessageConfig(BaseModel):
    """A protobuf message class."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    module: str
    """Import path of the generated module."""
    message: str
    """Name of the message class in it."""


def _is_door(name: str) -> str:
    if name not in DOORS:
        raise ValueError(f"one of {', '.join(DOORS)}")
    return name


_LONGEST_WAIT_S = 5.0
"""Longest time that a game waits for the learner once."""
_BRIDGES = [[command, engine] for command in ("bridge", "gamecore") for engine in ("godot", "unity")]


class GamecoreConfig(BaseModel):
    """Game processes that a training job starts, watches and stops itself."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    command: str
    """Command line; ``{index}`` becomes the process's number, ``{http_url}``, ``{ws_url}``, ``{tcp_url}`` and
    ``{grpc_url}`` the URL of that door, which must be open, and ``{url}`` that of ``door``."""
    num: Annotated[int, Field(ge=1, le=4096)] = 1
    """Number of processes."""
    door: Annotated[str, AfterValidator(_is_door)] = "ws"
    """Door whose URL replaces ``{url}``."""
    restarts: Annotated[int, Field(ge=0)] | None = None
    """Most restarts of one process within ``restarts_within_s``; one more ends the job; null: any number."""
    restarts_within_s: Annotated[float, Field(ge=0)] = 60.0
    """Time for which a restart counts towards ``restarts``."""

    @field_validator("command")
    @classmethod
    def _splits(cls, command: str) -> str:
        try:
            shlex.split(command)
        except ValueError as error:  # an open quote, or a backslash at the end
            raise ValueError(f"a command line: {error}") from None
        return command

    @property
    def engine(self) -> str:
        """The engine that it is a bridge to; empty: it is none."""
        words = shlex.split(self.command)
        return words[2] if words[:1] == ["brayx"] and words[1:3] in _BRIDGES else ""

    @property
    def by_hand(self) -> bool:
        """Whether a person starts its games: it is a bridge to an engine that starts no builds."""
        return bool(self.engine) and not any(word.startswith("--command") for word in shlex.split(self.command))


class SessionConfig(BaseModel):
    """Limits and deadlines of an actor's sessions."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    actors_per_worker: Annotated[int, Field(ge=1)] = 256
    """Sessions a replica takes; further starts are refused."""
    idle_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """A session without a request for this long ends with reason ``idle``. A native port closes an idle connection
    after the same time, but after 300 s at least."""
    tick_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """Deadline of one tick inside the actor; past it the session ends."""
    tick_deadline_ms: Annotated[float, Field(gt=0)] | None = None
    """A tick without a reply this long after its arrival gets the fallback's; null: its client waits."""
    fallback: Literal["last", "default", "agent"] = "last"
    """Reply to a late tick: the session's last reply, ``fallback_body``, or the agents' `on_deadline`."""
    fallback_body: str = ""
    """Reply of ``fallback: default``."""
    reconnect_timeout_s: Annotated[float, Field(ge=0)] = 10.0
    """Time that a session with numbered ticks waits for its client after a broken connection; 0: it ends at once."""
    snapshot_every: Annotated[int, Field(ge=0)] = 0
    """Ticks between two snapshots of a session whose agents support them; 0: no snapshots."""
    show_errors: bool | None = None
    """Clients get the text of an agent's exception; null: only while all doors listen on loopback."""

    @property
    def longest_wait_s(self) -> float:
        """Longest time that a game waits for the learner; 0: it has a tick deadline, so it cannot wait."""
        return 0.0 if self.tick_deadline_ms is not None else min(_LONGEST_WAIT_S, self.tick_timeout_s / 2)


class ActorConfig(SessionConfig):
    """The actor that answers sessions with agents; on a cluster, a Serve deployment."""

    kind: Literal["actor"] = "actor"
    agents: Annotated[list[str], Field(min_length=1)]
    """Names of the agent components; they share a `State` each tick."""
    share: Literal["none", "game"] = "none"
    """Who shares a `State`: none, or all sessions ``GAME-agent-AGENT`` of a game."""
    host: str = "127.0.0.1"
    """Address of the door if a training job starts Serve; a Serve that runs already must have it."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port of the door if a training job starts Serve; 0: a free one, or that of a Serve that runs already."""
    num_workers: Annotated[int, Field(ge=1, le=1024)] = 1
    """Replicas of the deployment."""
    cpus_per_worker: Annotated[float, Field(ge=0)] = 0.0
    """CPUs that Ray reserves for a replica."""
    memory_per_worker: Annotated[int, Field(ge=0)] = 0
    """Memory in MiB that Ray reserves for a replica."""
    episode_length: Annotated[int, Field(ge=1)] | None = 128
    """Transitions after which an episode is cut and handed to ``on_episode``; null: only at the end."""
    serialize: Literal["json", "proto", "contract"] | None = "json"
    """Format of tick bodies; ``contract``: as the game's contract says; null: raw bytes."""
    missing: dict[str, Any] = {}
    """Observations that a game's contract may lack while the model is served, by name: a number, for all values, or a
    value as a tick has it."""
    forbidden: dict[str, list[int]] = {}
    """Choices that no session may take, by discrete action, as ``{dash: [1]}``; a start and a tick may add more. While
    a model learns, only actions with a mask can have them."""
    forced: dict[str, Any] = {}
    """Actions that each session must take, by name, as ``{dash: 0, steer: [0, 0]}``; a start's win over these, and a
    tick's over both. While a model learns, only actions with a mask can be forced."""
    reward: str | None = None
    """Function ``module.function`` with the reward of a tick by contract, ``(tick)``, the module searched in the YAML
    file's folder first; null: the tick's own, or its named rewards by their weights."""
    tick_input_proto: Annotated[MessageConfig | None, Field(validate_default=True)] = None
    """Message class of a tick's body, with ``serialize: proto``."""
    tick_output_proto: Annotated[MessageConfig | None, Field(validate_default=True)] = None
    """Message class of a tick's reply, with ``serialize: proto``."""
    native_host: str = "127.0.0.1"
    """Address of the replicas' own ports; ``0.0.0.0`` lets other machines in."""
    native_port: Annotated[int, Field(ge=0, le=65535)] | None = 8100
    """HTTP and WebSocket port of every replica of a node, in addition to Serve's ingress; 0: a free one; null: none."""
    tcp_port: Annotated[int, Field(ge=0, le=65535)] | None = 8101
    """Port for Bray's TCP framing; as `native_port`."""
    grpc_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """gRPC port of the local host, at `native_host`; 0: a free one; null: none. On a cluster the Serve config's
    ``grpc_options`` name it."""
    drain_timeout_s: Annotated[float, Field(ge=0)] = 10.0
    """Time for sessions to finish that cannot move when their replica ends; 0: they end at once."""
    max_body_bytes: Annotated[int, Field(ge=1)] = DEFAULT_MAX_BODY_BYTES
    """Limit on a request's body."""
    websocket_window_bits: Annotated[int, Field(ge=9, le=15)] | None = None
    """Compresses WebSockets of the native ports for clients that offer it: each message against the 2^this bytes before
    it, which should cover more than one message. 15 takes up to 300 kB per connection; null: no compression."""
    cors_origins: Annotated[list[str], AfterValidator(are_origins)] = []
    """Origins of web pages whose scripts may call the HTTP doors, like ``https://play.example.com``; ``*``: all; empty:
    none."""
    allowed_hosts: list[str] = []
    """Host names, besides localhost, that HTTP doors on loopback without keys answer to, for example behind a proxy
    that forwards the clients' ``Host``; ``*``: all."""
    keys_file: str | None = None
    """File of the keys that requests are signed with (`brayx keys new`), in a job relative to its YAML's folder; null:
    the environment's, if it has any. The gamecores that a training starts find it in their environment."""
    tracing: bool = False
    """Sends spans of the ticks of sampled traces by OpenTelemetry; needs the extra ``tracing``."""
    gamecores: list[GamecoreConfig] = []
    """Game processes that a training job starts."""

    @property
    def own_ports(self) -> dict[str, int]:
        """Ports that the service itself opens at `native_host`, by option; 0: any free port."""
        ports = {option: getattr(self, option) for option in PORT_OPTIONS}
        return {option: port for option, port in ports.items() if port is not None}

    def ports(self, actor: str) -> dict[str, tuple[str, int]]:
        """Host and number of each chosen port of an actor of this name, by its option in the job, as ``actor.port``."""
        native = {option: (self.native_host, port) for option, port in self.own_ports.items()}
        doors = {"port": (self.host, self.port), **native}
        return {f"{actor}.{option}": (host, port) for option, (host, port) in doors.items() if port}

    @property
    def limits(self) -> dict[str, dict[str, Any]]:
        """The options ``forbidden`` and ``forced``, as a start has them."""
        return {"forbidden": dict(self.forbidden), "forced": dict(self.forced)}

    @field_validator("forbidden", "forced")
    @classmethod
    def _limits_a_contract(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if value and info.data.get("serialize", "contract") != "contract":
            raise ValueError("{}, because serialize is not contract")
        return value

    @field_validator("reward")
    @classmethod
    def _names_a_function(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and not is_named(value):
            raise ValueError("a function as module.function")
        if value is not None and info.data.get("serialize", "contract") != "contract":
            raise ValueError("null, because serialize is not contract")
        return value

    @field_validator("tick_input_proto", "tick_output_proto")
    @classmethod
    def _goes_with_proto(cls, value: MessageConfig | None, info: ValidationInfo) -> MessageConfig | None:
        """Without its class a message would reach the agents as raw bytes; with another format it means nothing."""
        if "serialize" not in info.data:
            return value  # reported by its own validator
        serialize = info.data["serialize"]
        if serialize == "proto" and value is None:
            raise ValueError("{module: ..., message: ...}, because serialize is proto")
        if serialize != "proto" and value is not None:
            raise ValueError(f"null, because serialize is {serialize or 'null'}")
        return value
