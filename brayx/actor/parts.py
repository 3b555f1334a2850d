"""Loads the parts that an actor's options name: agent classes and message classes.

Imports the user's modules. Knows nothing of hosts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from brayx.actor.agent import Agent
from brayx.actor.codec import Codec
from brayx.actor.config import ActorConfig, AgentConfig, MessageConfig
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
