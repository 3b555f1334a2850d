"""Writes an evaluation's mean return to the registered version that played the games.

Knows nothing of how games are played.
"""

from __future__ import annotations

from brayx.errors import ConfigError, StartupError
from brayx.gamecore.status import read_status
from brayx.gamecore.transports.base import Endpoint
from brayx.jobs.evaluate import Evaluation
from brayx.tracking import PoolEntry, find, tag

_STATUS_S = 10.0


def registered_versions(url: str) -> dict[str, list[str]]:
    """The registered versions that a new session may get, by model, as reported by one replica (the door picks it).

    Args:
        url: URL of the service's HTTP or WebSocket door.

    Raises:
        StartupError: the service's status page does not list them.
    """
    page = read_status(Endpoint.parse(url), _STATUS_S)
    registered = None if page is None else page.get("registered")
    if not isinstance(registered, dict):
        raise StartupError(f"{url} has no status page that names registered versions, so there is nothing to rate")
    return {model: list(references or []) for model, references in registered.items()}


def served(url: str, uri: str) -> PoolEntry:
    """The registered version that all new sessions of a service get, as reported by one replica.

    Args:
        url: URL of its HTTP or WebSocket door.
        uri: tracking URI of the registry it serves from.

    Raises:
        ConfigError: there is not exactly one: no version is registered, a canary has another, or the service has
            several models.
        StartupError: the service's status page does not list them.
        ModelNotFound: the registry does not have the version.
        TrackingError: the registry cannot be read.
    """
    registered = registered_versions(url)
    references = {reference for versions in registered.values() for reference in versions or [""]}
    if len(references) != 1 or "" in references:
        served = [f"{model}: {', '.join(versions) or 'none'}" for model, versions in registered.items()]
        what = "; ".join(served) or "none"
        raise ConfigError(f"a rating is of one registered version, and sessions of {url} get {what}")
    return find(references.pop(), uri)


def rate(name: str, version: int, env_id: str, result: Evaluation, uri: str) -> None:
    """Tags a version with its mean return (``rating``) and that mean's standard error (``rating_error``), the number of
    games (``rating_games``) and their environment (``rating_env``).

    Raises:
        ConfigError: some games did not finish; the others would bias the rating, because short games end first.
        TrackingError: the registry failed.
    """
    if result.missing:
        raise ConfigError(f"{result.missing} games did not end: the finished ones alone give no rating")
    tag(name, version, rating_tags(env_id, result), uri)


def rating_tags(env_id: str, result: Evaluation) -> dict[str, str]:
    """The tags of a version that these games rate, see `rate`."""
    games = str(len(result.returns))
    tags = {"rating": f"{result.mean:g}", "rating_games": games, "rating_env": env_id, "rating_error": ""}
    if len(result.returns) > 1:
        tags["rating_error"] = f"{result.error:.4g}"
    return tags
