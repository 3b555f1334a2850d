"""The models that a job is served with: their weights, and the job that learned each.

These are the job's model components. If its project has learned several behaviours, their models replace the learned
component. Knows nothing of doors or sessions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from brayx.jobs.champion import champions
from brayx.jobs.config import JobConfig
from brayx.jobs.contracts import parse_contract
from brayx.jobs.recorded import with_contract
from brayx.jobs.weights import pooled, sources_of
from brayx.model.arms import WeightSource
from brayx.tracking import PoolEntry


@dataclass(frozen=True)
class ServedModel:
    """One model that is served.

    Attributes:
        source: its weights.
        job: the job, with the model's contract if it needs one.
        component: name of the model component.
        behaviour: the behaviour that it plays; empty: the project has not learned several.
    """

    source: WeightSource
    job: JobConfig
    component: str
    behaviour: str = ""


def served_models(job: JobConfig, uri: str, references: Mapping[str, str]) -> dict[str, ServedModel]:
    """The models that a job is served with, by name: that of the component, or of the behaviour.

    Args:
        job: the job.
        uri: tracking URI.
        references: registered version of some components, as for `sources_of`. If the learned component is among
            them, that version is served alone, without the project's other behaviours.

    Raises:
        ConfigError: weights are for another contract than the job's, or neither has one.
        TrackingError, ModelError: a version does not exist, or cannot be read.
    """
    learned = [trainer.model for trainer in job.trainers.values()]
    behaviours: Mapping[str, PoolEntry] = {}
    contracts = {parse_contract(contract).behaviour: contract for contract in job.contracts}
    if job.has_contract and not job.leagues and learned and learned[0] not in references:
        behaviours = champions(job.project, uri)
        if contracts:
            behaviours = {name: entry for name, entry in behaviours.items() if name in contracts}
    if not behaviours:
        sources = sources_of(job, uri, references)
        job = with_contract(job, sources)
        if job.contract is not None:
            job = job.of_behaviour(parse_contract(job.contract).behaviour)
        return {name: ServedModel(source, job, name) for name, source in sources.items()}
    served = {}
    for behaviour, champion in sorted(behaviours.items()):
        own = job.of_behaviour(behaviour).model_copy(update={"contract": contracts.get(behaviour)})
        source = pooled(own, learned[0], uri, f"models:/{champion.name}@champion")
        served[behaviour] = ServedModel(source, with_contract(own, {learned[0]: source}), learned[0], behaviour)
    first = next(iter(served.values())).job
    others = {name: pooled(job, name, uri, references.get(name, "")) for name in job.models if name != learned[0]}
    return {**{name: ServedModel(source, first, name) for name, source in others.items()}, **served}
