"""The registered models: their versions, promotions, rollbacks, and shares of canaries."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter

from brayx import tracking
from brayx.console.documents import Document, DoneDocument
from brayx.console.source import Source
from brayx.league.files import PLAYER_TAG
from brayx.league.member import Member
from brayx.tracking.registry import STEP_TAG, PoolModel


class VersionDocument(Document):
    """A registered version of a model."""

    version: int
    aliases: list[str]
    step: int | None
    """Env steps of its checkpoint."""
    created_s: float
    trial: str
    """Id of the trial that it came from."""
    tags: dict[str, str]
    """Tags such as the return, the rating, results of serving, and the lineage."""

    @property
    def label(self) -> str:
        """Its name on the page: in a league that of the member, such as ``main:7``, else its number."""
        return member_of(self.version, self.tags) or str(self.version)


class ModelDocument(Document):
    """A registered model."""

    name: str
    aliases: dict[str, int]
    versions: list[VersionDocument]
    """The newest first."""
    before: int | None = None
    """Version of the previous champion, which a rollback restores; null: not known."""


class MoveDocument(Document):
    """The move of an alias from version ``before`` to ``version``."""

    name: str
    alias: str
    version: int
    before: int | None


class ReferenceDocument(Document):
    """Body of a promotion."""

    version: int
    alias: str = "champion"


class ShareDocument(Document):
    """Body of a change of a canary's share."""

    share: float


def routes(source: Source) -> APIRouter:
    """The API's calls about models."""
    router = APIRouter(prefix="/api", tags=["models"])

    @router.get("/models")
    def models() -> list[ModelDocument]:
        """The registered models and their versions."""
        registered = map(_model, tracking.registered_models(source.uri))
        return sorted(registered, key=lambda model: not model.name.startswith(source.project or "\0"))

    @router.post("/models/{name}/promote")
    def promote(name: str, reference: ReferenceDocument) -> MoveDocument:
        """Points an alias at a version, whose weights are checked first."""
        alias = reference.alias
        entry, before = tracking.promote(f"models:/{name}/{reference.version}", source.uri, to=alias)
        return MoveDocument(name=name, alias=alias, version=entry.version, before=before)

    @router.post("/models/{name}/roll-back")
    def roll_back(name: str) -> MoveDocument:
        """Restores the previous champion."""
        entry, before = tracking.roll_back(name, source.uri)
        return MoveDocument(name=name, alias="champion", version=entry.version, before=before)

    @router.post("/canaries/{component}")
    def set_share(component: str, share: ShareDocument) -> DoneDocument:
        """Sets the share of new sessions that get the canary, until the service ends."""
        source.ask("set_share", component, share.share)
        return DoneDocument(
            done=f"{share.share:.0%} of new sessions of {component} get the canary, until the service ends"
        )

    return router


def member_of(version: int, tags: Mapping[str, str]) -> str:
    """The member of a league that a registered version is, such as ``main:7``; empty: it is none."""
    return Member(tags[PLAYER_TAG], version).label if PLAYER_TAG in tags else ""


def _model(model: PoolModel) -> ModelDocument:
    versions = []
    before = None
    for entry, created_s in model.versions:
        aliases = sorted(alias for alias, version in model.aliases.items() if version == entry.version)
        played = entry.tags.get("env_steps") or entry.tags.get(STEP_TAG, "")
        if "champion" in aliases:
            before = tracking.replaced(entry)
        versions.append(
            VersionDocument(
                version=entry.version,
                aliases=aliases,
                step=int(played) if played.isdigit() else None,
                created_s=created_s,
                trial=entry.run_id,
                tags=dict(entry.tags),
            )
        )
    return ModelDocument(name=model.name, aliases=dict(model.aliases), versions=versions, before=before)
