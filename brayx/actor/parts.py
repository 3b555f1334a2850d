"""Makes an actor's parts from its options: agent classes, message classes, and the factory of its sessions' actors.

Imports the user's modules. Knows nothing of hosts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from brayx.actor.agent import Agent, Services
from brayx.actor.agent_actor import AgentActorFactory
from brayx.actor.codec import Codec
from brayx.actor.config import ActorConfig, AgentConfig, MessageConfig
from brayx.actor.games import Games
from brayx.actor.logs import SessionRecorder
from brayx.actor.models import Arms
from brayx.actor.players import Players, RequestedOpponents
from brayx.components import load


def agents_of(agents: Mapping[str, AgentConfig], folder: str) -> dict[str, type[Agent]]:
    """The class of each agent, by component name.

    Args:
        agents: their options.
        folder: where modules are looked up first.

    Raises:
        ConfigError: a module or class does not exist.
    """
    return {name: load(agent.module, agent.class_name, folder) for name, agent in agents.items()}


def codec_of(config: ActorConfig, folder: str) -> Codec:
    """The format of tick bodies; arguments and errors as `agents_of`."""

    def message(config: MessageConfig | None) -> Any:
        return load(config.module, config.message, folder) if config is not None else None

    return Codec(config.serialize, message(config.tick_input_proto), message(config.tick_output_proto))


def actor_factory(
    config: ActorConfig,
    agents: Mapping[str, AgentConfig],
    folder: str,
    job: Mapping[str, Any],
    services: Services,
    *,
    recorders: Sequence[SessionRecorder] = (),
    arms: Arms | None = None,
    players: Players | None = None,
    opponents: RequestedOpponents | None = None,
) -> AgentActorFactory:
    """The factory of an actor's sessions, on every host.

    Args:
        config: the actor's options.
        agents: options of the job's agents by name; the actor's own are among them.
        folder: where modules are looked up first.
        job: the job as plain dicts; each agent gets it.
        services, recorders, arms, players, opponents: as in `AgentActorFactory`.

    Raises:
        ConfigError: a module or class does not exist.
    """
    return AgentActorFactory(
        agents=agents_of({name: agents[name] for name in config.agents}, folder),
        config=job,
        services=services,
        codec=codec_of(config, folder),
        episode_length=config.episode_length,
        recorders=recorders,
        games=Games() if config.share == "game" else None,
        arms=arms,
        players=players,
        opponents=opponents,
    )
