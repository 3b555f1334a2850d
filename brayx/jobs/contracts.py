"""A job's contract: read from a file, described in words.

Knows nothing of sessions; `brayx.actor.contracts` compares a game's contract with the job's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brayx.actor.limits import ActionLimits
from brayx.errors import BadBody, ConfigError
from brayx.gamecore.contract import ActionPart, Contract, ObservationSpec
from brayx.jobs.document import nearest
from brayx.text_files import read_text
from brayx.yaml_text import value_of

if TYPE_CHECKING:
    from brayx.jobs.config import JobConfig

SELF_PLAY_TAG = "brayx.self_play"
"""Tag of a trial whose behaviour has played against itself: the name under which its versions are registered."""
RIVALS_TAG = "brayx.rivals"
"""Tag of such a trial if behaviours play against each other: the run with the books of all of them."""
CONTRACT_TAG = "brayx.contract"
"""Tag of a trial and of its registered versions: the contract's id."""
BEHAVIOUR_TAG = "brayx.behaviour"
"""Tag of the same: the behaviour that was learned."""


def plain_name(behaviour: str) -> str:
    """A behaviour's name as trials and registered models may have it."""
    return re.sub(r"^\W|[^\w .+=,-]", "_", behaviour)


def contracts_of(value: Any, folder: str) -> list[dict[str, Any]]:
    """The contracts of a job, one or more, by the value of its ``contract``.

    Args:
        value: a contract or a list of them; or the path of a file, from the folder or from where the command runs.
        folder: the job's folder.

    Raises:
        ConfigError: as `read_contracts` and `parse_contracts`.
    """
    if not isinstance(value, str):
        return [contract.as_dict() for contract in parse_contracts(value)]
    beside = Path(folder, value)
    return [contract.as_dict() for contract in read_contracts(beside if beside.exists() else Path(value))]


def by_contract(job: JobConfig) -> list[JobConfig]:
    """The job of the behaviour of each of a job's contracts, with that contract."""
    return [
        job.of_behaviour(parse_contract(contract).behaviour).model_copy(update={"contract": contract})
        for contract in job.contracts
    ]


def read_contracts(path: str | Path) -> list[Contract]:
    """The contract, or list of contracts, in a JSON or YAML file; or that of ML-Agents' demonstrations, ``.demo``.

    Raises:
        ConfigError: the file cannot be read, or has no contract.
    """
    if Path(path).suffix == ".demo":
        from brayx.bridges.unity_demo import UnityDemo  # imports protobuf and Pillow, which are slow

        return [UnityDemo(Path(path).expanduser()).behaviour.contract]
    try:
        text = read_text(Path(path).expanduser())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", file=str(path)) from None
    try:
        return parse_contracts(value_of(text))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", file=str(path)) from None


def parse_contracts(document: Any) -> list[Contract]:
    """The contract, or the list of contracts, one for each behaviour, in JSON values.

    Raises:
        ConfigError: one of them is no contract, there is none, or two are of the same behaviour.
    """
    contracts = [parse_contract(part) for part in (document if isinstance(document, list) else [document])]
    names = [contract.behaviour for contract in contracts]
    if not names:
        raise ConfigError("the list has no contract")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two contracts are of behaviour {twice!r}, expected one of each")
    return contracts


def parse_contract(document: Any) -> Contract:
    """A contract from its JSON values.

    Raises:
        ConfigError: it is no contract; names the field.
    """
    try:
        return Contract.parse(document)
    except BadBody as error:
        raise ConfigError(error.message, **error.details) from None


def contract_lines(job: JobConfig) -> list[str]:
    """What the games of a job with one contract observe and do, one line for each of the two; and the job's limits."""
    contract = parse_contract(job.contract)
    observations = "; ".join(f"{spec.name}: {_observation(spec)}" for spec in contract.observations)
    actions = "; ".join(f"{part.name}: {_action(part)}" for part in contract.actions)
    names = {part.name for part in contract.actions}
    limits = [
        f"{name} {'never' if '.forbidden.' in option else 'always'} {', '.join(map(str, value))}"
        for option, name, value in _limit_options(job)
        if name in names
    ]
    lines = [f"observations: {observations}", f"actions: {actions}"]
    return [*lines, f"limits: {'; '.join(limits)}"] if limits else lines


def check_limits(job: JobConfig, *, learns: bool) -> None:
    """Checks the limits of a job's actors against its contract, but not whether that has all the actions.

    Args:
        job: the job of one behaviour, with its contract.
        learns: it trains its model.

    Raises:
        ConfigError: a limit does not fit, or the model would learn and not see it.
    """
    for name, actor in job.actors.items():
        ActionLimits.of_job(parse_contract(job.contract), actor.limits, learns=learns, actor=name)


def check_served_limits(jobs: Sequence[JobConfig]) -> None:
    """Checks the limits of jobs that are served, one for each behaviour, with its contract.

    Raises:
        ConfigError: a limit does not fit a contract, or none has its action.
    """
    for job in jobs:
        check_limits(job, learns=False)
    for option, line in unused_limits(jobs).items():
        raise ConfigError(line, key=option)


def unused_limits(jobs: Sequence[JobConfig], *, so_far: bool = False) -> dict[str, str]:
    """A line for each limit in the options of these jobs' actors whose action none of their contracts has, by option:
    ``actor.forced.dash``. With ``so_far``, games of further contracts may come."""
    actions: dict[str, str] = {}  # by option
    known: set[str] = set()
    used: set[str] = set()
    for job in jobs:
        names = {part.name for part in parse_contract(job.contract).actions}
        options = {option: name for option, name, _ in _limit_options(job)}
        used |= {option for option, name in options.items() if name in names}
        known, actions = known | names, actions | options
    return {
        option: f"{option} has no effect{' so far' * so_far}: no game has this action{nearest(name, sorted(known))}"
        for option, name in sorted(actions.items())
        if option not in used
    }


def _limit_options(job: JobConfig) -> list[tuple[str, str, list[Any]]]:
    """The limits of a job's actors: the option, as ``actor.forced.dash``, the action and the values of each."""
    return [
        (f"{actor}.{group}.{name}", name, value if isinstance(value, list) else [value])
        for actor, config in job.actors.items()
        for group, limits in config.limits.items()
        for name, value in limits.items()
    ]


def built(job: JobConfig) -> str:
    """What a job builds for each of its contracts: behaviour, algorithm, observations, actions, and the layers of each
    model with their parameters.

    Raises:
        ConfigError, ModelError: a model cannot be built.
    """
    from brayx.engines.layers import layer_table
    from brayx.jobs.contract_model import NORMALISED, network_to_build
    from brayx.model.build import build_model

    lines: list[str] = []
    for own in by_contract(job):
        as_dict = own.as_dict()
        contract, network = parse_contract(own.contract), network_to_build(as_dict)
        head = [f"behaviour {contract.behaviour}, team {contract.team}"]
        head += [f"learned by {trainer.algorithm.name}" for trainer in own.trainers.values()]
        if network is not None and any(spec.kind in NORMALISED for spec in contract.observations):
            head.append(f"vectors {'' if network.normalise else 'not '}normalised")
        lines += [*[""] * bool(lines), "; ".join(head), *contract_lines(own)]
        if network is not None and network.encoders:
            lines.append(f"encoders: {'; '.join(f'{name}: {path}' for name, path in network.encoders.items())}")
        for name, model in own.models.items():
            lines += ["", f"{name}:", layer_table(*build_model(own.folder, model.module, name, as_dict)).rstrip()]
    return "\n".join([*lines, ""])


def _observation(spec: ObservationSpec) -> str:
    shape = "x".join(map(str, spec.shape))
    match spec.kind:
        case "image":
            return f"image {shape} {spec.layout} {spec.dtype}"
        case "entities":
            return f"up to {spec.shape[0]} entities of {spec.shape[1]} {spec.dtype}"
        case "category":
            return f"{f'{shape} times ' if shape else ''}one of {spec.size} categories from {spec.start}"
        case "text":
            return f"text of up to {spec.size} bytes"
    return f"{shape} {spec.dtype}"


def _action(part: ActionPart) -> str:
    if part.kind == "discrete":
        return f"one of {part.size} choices from {part.start}{', masked' if part.mask else ''}"
    numbers = f"{part.size} number{'s' * (part.size != 1)}"
    bounds = sorted({*zip(part.low, part.high, strict=True)})
    return f"{numbers} from {bounds[0][0]:g} to {bounds[0][1]:g}" if len(bounds) == 1 else f"{numbers} within bounds"
