"""The network for a job's contract: ``module: brayx.jobs.contract_model``.

Its options are the job's ``network`` (`kind: config`), those of `ContractNetworkConfig`. The encoders of observations
are chosen by kind or named by the user, the heads by the actions: first the choices of every discrete action, then the
numbers of all continuous ones, both in the contract's order (`brayx.actions`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import AfterValidator, Field
from torch import nn

from brayx.algorithms.build import check_space
from brayx.components import is_named, load_named
from brayx.errors import BadBody, ConfigError, ModelError, first_line
from brayx.gamecore.contract import Contract, ObservationSpec
from brayx.jobs.models import learned_by, network_options, parts_of
from brayx.nets.central import GroupedPolicy
from brayx.nets.encoders import Custom, Embedding, Numbers, OneHot, Spatial, Text, convolutions_for, features_of
from brayx.nets.normaliser import Normalised
from brayx.nets.policy import Encoders, NetworkConfig, example_of, policy_for
from brayx.nets.soft import soft_policy_for
from brayx.nets.transformer import Entities

if TYPE_CHECKING:
    from brayx.algorithms.config import AlgorithmConfig
    from brayx.jobs.config import JobConfig

_ONE_HOT = 64
"""Largest number of categories that are encoded one-hot; more are embedded."""
_EMBEDDED = 32
NORMALISED = ("vector", "entities")
"""The kinds of observations that ``normalise`` is for."""
MAX_PARAMETERS = 2**28
"""Maximum number of parameters up to the first hidden layer, for a contract that a game says: 1 GiB of float32."""


def _named(path: str) -> str:
    if not is_named(path):
        raise ValueError(f"is {path!r}, expected a class or function as module.Name")
    return path


class ContractNetworkConfig(NetworkConfig):
    """Options of the network for a contract."""

    normalise: bool = True
    """Normalise vectors and entities by the running mean and deviation of the observations learned from."""
    shared: bool | None = None
    """Policy and value share their hidden layers; null: only with a memory. They always share the encoders."""
    image_features: Annotated[int, Field(ge=1)] = 256
    """Features of each image. Version 0.2.0 had 512 with ``nature``, and 256 with the others."""
    encoders: dict[str, Annotated[str, AfterValidator(_named)]] = {}
    """The user's own encoders by name of the observation: ``module.Name``, the module searched in the YAML file's
    folder first. Each is called with the observation's `ObservationSpec`, and returns a torch module from ``[B, ...]``
    to ``[B, F]``, whose input is normalised as that of other encoders. Encoders not named here are chosen by kind."""


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


def check_network(job: JobConfig) -> None:
    """Checks what is known of a job's network for contracts before there is one: its options, and its own encoders.

    Raises:
        ConfigError: an option is unknown or wrong, or names no such class or function.
    """
    network = network_to_build(job.as_dict())
    for name, path in network.encoders.items() if network is not None else ():
        _loaded(name, path, job.folder)


def check_parameters(contract: Contract, config: Mapping[str, Any]) -> None:
    """Refuses a contract of a game whose network would fill the memory; builds nothing.

    Counts each observation's encoder and its part of the first hidden layers of policy and value. A job whose model
    comes from another module is not checked.

    Args:
        contract: the game's.
        config: the whole job as plain dicts.

    Raises:
        BadBody: there are more than `MAX_PARAMETERS`, or an observation has no encoder, or an encoder no observation;
            names the field.
    """
    network = network_to_build(config)
    if network is None:
        return
    try:
        _check_names(contract, network)
    except ValueError as error:
        raise BadBody(str(error), field="observations") from error
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
        except (ConfigError, ModelError):  # the user's own, which may need real tensors: building it will say
            continue
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
    all continuous ones, squashed if the algorithm has a critic of actions. An algorithm that values states gets the
    value of an agent's group (`GroupedPolicy`).

    Args:
        contract: the game's.
        network: options.
        algorithm: learns it; None: not known.

    Raises:
        ConfigError: there is no network for the contract, these options and the algorithm.
        ModelError: an encoder of the user's own raises, or gives something else.
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
        _check_names(contract, network)
        actions: dict[str, Any] = {"num_actions": sizes[0] if len(sizes) == 1 else sizes or None, "action_size": size}
        example = contract.example()
        if "state" in takes:
            return GroupedPolicy(example, **actions, **shared), (example_of(example),)
        build: Any = soft_policy_for if "action" in takes else policy_for
        module, args = build(example, **actions, **shared)
        return module, args
    except ValueError as error:
        raise ConfigError(f"no network for the contract: {error}", key="contract") from error


def _check_names(contract: Contract, network: ContractNetworkConfig) -> None:
    names = [spec.name for spec in contract.observations]
    for name in network.encoders:
        if name not in names:
            raise ValueError(
                f"network.encoders.{name}: behaviour {contract.behaviour!r} observes no {name!r}, expected one of "
                f"{', '.join(names)}; an encoder of one behaviour belongs in behaviours.NAME.network.encoders"
            )


def _encoders(contract: Contract, network: ContractNetworkConfig) -> Encoders:
    specs = {spec.name: spec for spec in contract.observations}
    return lambda name: _encoder(specs[name], network)


def _encoder(spec: ObservationSpec, network: ContractNetworkConfig) -> nn.Module:
    shape, own = spec.shape, network.encoders.get(spec.name)
    encoder = _custom(spec, own) if own is not None else _of_kind(spec, network)
    if spec.kind in NORMALISED and network.normalise:
        return Normalised(encoder, shape, spec.name, entities=spec.kind == "entities")
    return encoder


def _of_kind(spec: ObservationSpec, network: ContractNetworkConfig) -> nn.Module:
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
    return Entities(shape) if spec.kind == "entities" else Numbers(shape)


def _custom(spec: ObservationSpec, path: str) -> Custom:
    """The user's own encoder of an observation.

    Raises:
        ConfigError: there is no such class or function.
        ModelError: it raised, or gave something else.
    """
    place = f"network.encoders.{spec.name}: {path}"
    make = _loaded(spec.name, path)
    try:
        encoder = make(spec)
    except Exception as error:
        raise ModelError(f"{place} raised {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(encoder, nn.Module):
        raise ModelError(f"{place} returned {encoder!r:.80}, expected a torch module")
    try:
        return Custom(encoder, torch.zeros(spec.shape, dtype=getattr(torch, spec.model_dtype.name)), place)
    except ValueError as error:
        raise ModelError(f"{place}: {error}") from error


def _loaded(name: str, path: str, folder: str = "") -> Any:
    """An encoder's class or function; without a folder from ``sys.path``, which the job's leads since this module was
    loaded."""
    try:
        return load_named(path, folder)
    except ConfigError as error:
        raise ConfigError(f"network.encoders.{name}: {error.message}", **error.details) from error
