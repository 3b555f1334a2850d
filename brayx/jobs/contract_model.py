"""The network for a job's contract: ``module: brayx.jobs.contract_model``.

Its options are the job's ``network`` (`kind: config`), those of `ContractNetworkConfig`. The encoders of observations
are chosen by kind, the heads by the actions: first the choices of every discrete action, then the numbers of all
continuous ones, both in the contract's order (`brayx.actions`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from brayx.algorithms.build import check_space
from brayx.errors import BadBody, ConfigError
from brayx.gamecore.contract import Contract, ObservationSpec
from brayx.jobs.models import learned_by, network_options, parts_of
from brayx.nets.central import GroupedPolicy
from brayx.nets.encoders import Embedding, Numbers, OneHot, Spatial, Text, convolutions_for, features_of
from brayx.nets.normaliser import Normalised
from brayx.nets.policy import Encoders, NetworkConfig, example_of, policy_for
from brayx.nets.soft import soft_policy_for
from brayx.nets.transformer import Entities

if TYPE_CHECKING:
    from torch import nn

    from brayx.algorithms.config import AlgorithmConfig

_ONE_HOT = 64
"""Largest number of categories that are encoded one-hot; more are embedded."""
_EMBEDDED = 32
MAX_PARAMETERS = 2**28
"""Maximum number of parameters up to the first hidden layer, for a contract that a game says: 1 GiB of float32."""


class ContractNetworkConfig(NetworkConfig):
    """Options of the network for a contract."""

    normalise: bool = True
    """Normalise vectors and entities by the running mean and deviation of the observations learned from."""
    shared: bool | None = None
    """Policy and value share their hidden layers; null: only with a memory. They always share the encoders."""
    image_features: Annotated[int, Field(ge=1)] = 256
    """Features of each image. Version 0.2.0 had 512 with ``nature``, and 256 with the others."""


def build_model(name: str, config: Mapping[str, Any]) -> tuple[nn.Module, tuple[Any, ...]]:
    """The network for the job's contract and the algorithm of its trainer, and example arguments.

    Args:
        name: name of the model component.
        config: the whole job as plain dicts.

    Raises:
        ConfigError: the job has no contract, or there is no network for it, the options and the algorithm.
    """
    document = config.get("contract")
    if not isinstance(document, Mapping):
        raise ConfigError(
            f"contract is {document!r}, and model {name!r} is built from it: expected a contract, the path of its "
            "file, or a game that says it",
            key="contract",
        )
    network = network_options(config, ContractNetworkConfig)
    return network_of(Contract.parse(document), network, learned_by(name, config))


def network_to_build(config: Mapping[str, Any]) -> ContractNetworkConfig | None:
    """The options of a job's network for contracts, which can be read before there is one; None: it builds none.

    Args:
        config: the whole job as plain dicts.

    Raises:
        ConfigError: an option is unknown or wrong.
    """
    if all(model["module"] != __name__ for model in parts_of(config, "model").values()):
        return None
    return network_options(config, ContractNetworkConfig) or ContractNetworkConfig()


def check_parameters(contract: Contract, config: Mapping[str, Any]) -> None:
    """Refuses a contract of a game whose network would fill the memory; builds nothing.

    Counts each observation's encoder and its part of the first hidden layers of policy and value. A job whose model
    comes from another module is not checked.

    Args:
        contract: the game's.
        config: the whole job as plain dicts.

    Raises:
        BadBody: there are more than `MAX_PARAMETERS`, or an observation has no encoder; names the field.
    """
    network = network_to_build(config)
    if network is None:
        return
    import torch

    choices = sum(part.size for part in contract.actions)
    width = network.hidden[0] if network.hidden else max(4 * network.lstm, choices)
    total = 0
    for spec in contract.observations:
        field = f"observations.{spec.name}"
        try:
            with torch.device("meta"):  # its tensors have shapes and no memory
                encoder = _encoder(spec, network)
        except ValueError as error:
            raise BadBody(f"{field}: {error}", field=field) from error
        total += sum(weights.numel() for weights in encoder.parameters()) + 2 * width * features_of(encoder)
        if total > MAX_PARAMETERS:
            raise BadBody(
                f"{field} takes the network to {total} parameters, expected at most {MAX_PARAMETERS}", field=field
            )


def network_of(
    contract: Contract, network: ContractNetworkConfig | None = None, algorithm: AlgorithmConfig | None = None
) -> tuple[nn.Module, tuple[Any, ...]]:
    """A network for a contract, and example arguments with a batch axis.

    The network takes a dict like `Contract.example`. Actions have one head for each discrete action and a Gaussian for
    all continuous ones. An algorithm that values states gets the value of an agent's group (`GroupedPolicy`).

    Args:
        contract: the game's.
        network: options.
        algorithm: learns it; None: not known.

    Raises:
        ConfigError: there is no network for the contract, these options and the algorithm.
    """
    network = network or ContractNetworkConfig()
    if network.shared is None and not network.lstm:  # `policy_for` would share with images, too
        network = network.model_copy(update={"shared": False})
    sizes, size = contract.sizes, contract.dimensions or None
    discrete = "discrete" if len(sizes) == 1 else "multi_discrete"
    takes = algorithm.critic.takes if algorithm is not None and algorithm.critic is not None else ()
    if algorithm is not None:
        check_space(algorithm, "hybrid" if sizes and size else discrete if sizes else "box")
    shared: dict[str, Any] = {
        "network": network,
        "categories": {spec.name: spec.size for spec in contract.observations if spec.kind == "category"},
        "encoders": _encoders(contract, network),
    }
    try:
        if "action" in takes:
            assert size is not None
            return soft_policy_for(contract.example(), action_size=size, **shared)
        actions: dict[str, Any] = {"num_actions": sizes[0] if len(sizes) == 1 else sizes or None, "action_size": size}
        if "state" in takes:
            example = contract.example()
            return GroupedPolicy(example, **actions, **shared), (example_of(example),)
        return policy_for(contract.example(), **actions, **shared)
    except ValueError as error:
        raise ConfigError(f"no network for the contract: {error}", key="contract") from error


def _encoders(contract: Contract, network: ContractNetworkConfig) -> Encoders:
    specs = {spec.name: spec for spec in contract.observations}
    return lambda name: _encoder(specs[name], network)


def _encoder(spec: ObservationSpec, network: ContractNetworkConfig) -> nn.Module:
    shape = spec.shape
    if spec.kind == "text":
        return Text()
    if spec.kind == "category":
        return OneHot(spec.size, shape) if spec.size <= _ONE_HOT else Embedding(spec.size, _EMBEDDED, shape)
    if spec.kind == "image":
        height, width = shape[:2] if spec.layout == "HWC" else shape[1:]
        given = "convolutions" in network.model_fields_set
        convolutions = network.convolutions if given else convolutions_for(height, width)
        return Spatial(shape, convolutions, network.image_features, last=spec.layout == "HWC")
    encoder = Entities(shape) if spec.kind == "entities" else Numbers(shape)
    return Normalised(encoder, shape, spec.name) if network.normalise else encoder
