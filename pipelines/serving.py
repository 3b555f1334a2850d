"""A job's actor served in this process: its agents act with registered versions, behind the job's doors.

Ray is never imported. Knows nothing of training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from brayx.ports import check_ports
from deployments.job import JobConfig
from pipelines.checks import ports_of

if TYPE_CHECKING:
    from brayx.local.host import LocalHost


@contextlib.contextmanager
def serving(job: JobConfig, actor: str, uri: str, models: Mapping[str, str]) -> Iterator[LocalHost]:
    """A context in which an actor of a job is served by this process.

    Args:
        job: that was trained.
        actor: name of the component.
        uri: tracking URI of the registry.
        models: the version that each model acts with, ``models:/NAME/VERSION``.

    Raises:
        ConfigError: a port is taken.
        TrackingError: the registry cannot be read or has no such version.
    """
    from brayx.actor.actor import AgentActorFactory
    from brayx.actor.agent import Services
    from brayx.actor.games import Games
    from brayx.actor.parts import agents_of, codec_of
    from brayx.engines.base import load_weights
    from brayx.local.acting import ActingModel
    from brayx.local.host import LocalHost
    from brayx.metrics import Recorder
    from brayx.model.build import build_model
    from brayx.tracking import files_of, find

    config, as_dict, recorder = job.actors[actor], job.in_mode("serve").as_dict(), Recorder()
    check_ports(ports_of(job, actor))
    acting = {}
    for name, reference in models.items():
        module, example = build_model(job.folder, job.models[name].module, name, as_dict)
        acting[name] = ActingModel(job.models[name], module, example, recorder)
        with files_of(reference, uri) as folder:
            acting[name].load(find(reference, uri).version, load_weights(folder / "weights.npz"))
    make_actor = AgentActorFactory(
        agents=agents_of({name: job.agents[name] for name in config.agents}, job.folder),
        config=as_dict,
        services=Services({name: each.model for name, each in acting.items()}, {}, recorder),
        codec=codec_of(config, job.folder),
        episode_length=config.episode_length,
        games=Games() if config.share == "game" else None,
    )
    host = LocalHost(
        config,
        make_actor,
        recorder,
        name=actor,
        describe=lambda: {
            "mode": "serve",
            "policy_versions": {name: each.model.version for name, each in acting.items()},
            "registered": {name: [reference] for name, reference in models.items()},
        },
        close=[each.model.close for each in acting.values()],
    )
    try:
        host.open()
        yield host
    finally:
        host.close()
