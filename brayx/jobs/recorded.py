"""What a checkpoint says of the job that made it, in its ``meta.json``. Loads no torch.

Knows nothing of weights; `brayx.jobs.stored_models` builds the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brayx.errors import ConfigError, ModelError
from brayx.jobs.contracts import BEHAVIOUR_TAG, CONTRACT_TAG, parse_contract
from brayx.tracking import Trial, children_of

if TYPE_CHECKING:
    from brayx.jobs.config import JobConfig
    from brayx.model.arms import WeightSource

_CONTRACT_FILE = "contract.json"


def read_meta(folder: Path) -> Mapping[str, Any]:
    """The content of a checkpoint's ``meta.json``; empty if it has none.

    Raises:
        ModelError: it cannot be read.
    """
    try:
        meta: Mapping[str, Any] = json.loads((folder / "meta.json").read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / 'meta.json'} cannot be read: {error}") from error
    return meta


def recorded_contract(folder: Path) -> dict[str, Any] | None:
    """The contract of the job that made a checkpoint; None: it had none. Errors as for `read_meta`."""
    contract: dict[str, Any] | None = read_meta(folder).get("job", {}).get("contract")
    return contract


def record_contract(trial: Trial, contract: Mapping[str, Any]) -> None:
    """Keeps a job's contract in its trial: in tags and as a file."""
    parsed = parse_contract(contract)
    trial.set_tag(CONTRACT_TAG, parsed.id)
    trial.set_tag(BEHAVIOUR_TAG, parsed.behaviour)
    trial.log_dict(contract, _CONTRACT_FILE)


def with_contract(job: JobConfig, sources: Mapping[str, WeightSource]) -> JobConfig:
    """A job that is served, with the contract of the weights that it is served with, if it needs one.

    Args:
        job: the job.
        sources: source of each model's weights.

    Raises:
        ConfigError: the weights are for another contract than the job's, or neither has one.
        TrackingError, ModelError: a checkpoint cannot be read.
    """
    if job.contract is None and not job.needs_contract:
        return job
    from brayx.model.checkpoints import checkpoint_folder  # loads torch

    for name, source in sources.items():
        if not source.checkpoint:
            continue
        with checkpoint_folder(source.checkpoint, source.tracking) as folder:
            recorded = recorded_contract(folder)
        if recorded is None:
            continue
        if job.contract is None:
            return job.model_copy(update={"contract": recorded})
        if differences := parse_contract(job.contract).differences(parse_contract(recorded)):
            raise ConfigError(
                f"{job.file}: contract: it does not fit the weights of model {name!r}: {'; '.join(differences)}",
                key="contract",
            )
    if job.needs_contract:
        raise ConfigError(
            f"{job.file}: contract is null, and no model that is served has one: train the job first (an "
            "interrupted training registers no version), or name a file with --set contract=FILE",
            key="contract",
        )
    return job


def with_resumed_contract(job: JobConfig, name: str, recorded: Mapping[str, Any] | None) -> JobConfig:
    """A job that resumes a trial, with the trial's contract if it needs one.

    Args:
        job: the job.
        name: the trial's.
        recorded: from `contract_to_resume`.

    Raises:
        ConfigError: the trial learned another contract than the job's.
    """
    if recorded is None:
        return job
    if job.contract is None:
        return job.model_copy(update={"contract": dict(recorded)})
    if differences := parse_contract(job.contract).differences(parse_contract(recorded)):
        raise ConfigError(
            f"{job.file}: contract: the interrupted trial {name!r} learned another: {'; '.join(differences)}. To "
            "resume it, leave the contract out; to begin one with this contract, add --new, or --trial and a new name",
            key="contract",
        )
    return job


def contract_to_resume(project: str, name: str, uri: str) -> dict[str, Any] | None:
    """The contract of the trial that a training of that name resumes; None: it resumes none, or that has none yet."""
    trial = Trial.interrupted(project, name, uri)
    return None if trial is None else contract_of_trial(trial)


def contract_of_trial(trial: Trial) -> dict[str, Any] | None:
    """The contract of a trial's newest checkpoint; None: it has none yet."""
    newest = trial.latest_checkpoint()
    return None if newest is None else recorded_contract(newest)


def contracts_of_children(trial: Trial, but: str) -> list[dict[str, Any]]:
    """The contracts of a trial's children that have a checkpoint: of the behaviours that its training goes on with.

    Args:
        trial: the trial.
        but: the behaviour that it learns itself. A child may have this one, too: if the trial was interrupted before
            its first checkpoint, its first behaviour is that of the next first game.
    """
    contracts = (contract_of_trial(child) for child in children_of(trial))
    return [contract for contract in contracts if contract is not None and parse_contract(contract).behaviour != but]
