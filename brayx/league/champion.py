"""The registry's alias ``champion`` and a league's own champion: the alias moves only to a version that earned it.

If the alias points to a version that a league has not met, that version is the champion that its candidates must beat.
A fresh project's alias goes to the league's first champion. Knows nothing of sessions or learners.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from brayx.engines.base import check_weights, layout_of, load_weights
from brayx.engines.torch import module_weights
from brayx.errors import BadWeights
from brayx.jobs.config import JobConfig, only, pool_name
from brayx.league.finding import books_of
from brayx.league.ledger import Ledger
from brayx.league.member import INCUMBENT, Member
from brayx.model.snapshots import SnapshotFiles, digest_of
from brayx.tracking import Trial, aliases, files_of, promote
from brayx.types import Weights

if TYPE_CHECKING:
    from torch import nn

    from brayx.league.training import RunningLeague

ALIAS = "champion"


def met(ledger: Ledger, rival: str = "") -> set[int]:
    """The versions that a league knows: its snapshots, and those that have played in it.

    Args:
        ledger: the league's books.
        rival: see `RunningLeague.rival`; the numbers of other rivals are those of other models.
    """
    return {member.version for member in ledger.ratings() if member.version and rival in ("", member.player)}


def set_champion(trial: Trial, pool: str, version: int, before: int | None = None, rival: str = "") -> str:
    """Points the pool's alias at a league's champion, unless it is at a version that the league has not met.

    Runs in the process that has the trial.

    Args:
        trial: the league's trial.
        pool: name of the registered model.
        version: the champion's version.
        before: version of the champion before it, where the alias is unless somebody moved it; None: unknown.
        rival: as for `met`.

    Returns:
        Why the alias stays, or from which other version it was moved; empty: neither.
    """
    holder = aliases(pool, trial.uri).get(ALIAS)
    if holder == version:
        return ""
    with contextlib.closing(Ledger(books_of(trial), read_only=True)) as ledger:
        if holder is not None and holder not in met(ledger, rival):
            return stays(pool, holder)
    promote(f"models:/{pool}/{version}", trial.uri)
    if holder in (None, before):
        return ""
    return (
        f"the alias {ALIAS} of {pool} was at version {holder}, and is at version {version} now, the league's champion"
    )


def stays(pool: str, holder: int) -> str:
    """Why an alias stays at a version that a league has not met."""
    return (
        f"the alias {ALIAS} of {pool} stays at version {holder}, which this league has not played; "
        f"`brayx promote models:/{pool}/VERSION` moves it without a game"
    )


def meet_champion(
    job: JobConfig,
    ledger: Ledger,
    files: SnapshotFiles,
    clerk: Any,
    module: nn.Module,
    say: Callable[[str], None],
) -> None:
    """Makes the version with the alias ``champion`` the league's champion, if the league has not met it.

    If its weights do not fit the model, it cannot play: the league has its own champions, and the alias stays. Also
    fetches the weights of such champions that were beaten, if their files are missing.

    Args:
        job: the job.
        ledger: the league's books.
        files: where the weights are put.
        clerk: runs functions where the league's trial is: ``clerk.call(function, *args)``.
        module: the model.
        say: called with a line that says what was done.

    Raises:
        BrayxError: the registry or the books failed.
    """
    config = job.leagues[only("league", job.leagues)]
    pool = pool_name(job, config.model)
    past = {player.version: name for name, player in config.players.items() if player.version is not None}
    holder = clerk.call(alias_of, pool)
    champion = ledger.champion()
    for incumbent in ledger.incumbents():  # beaten ones play the gate's games
        if incumbent != champion and not files.path(incumbent.version).exists():
            files.put(incumbent.version, clerk.call(registered_weights, pool, incumbent.version))
    if holder is None or holder in met(ledger):
        if champion is None or champion.player != INCUMBENT:
            return
        holder = champion.version
    member = Member(past.get(holder, INCUMBENT), holder)
    try:
        put_weights(files, clerk, pool, holder, module)
    except BadWeights as error:
        say(f"version {holder} of {pool}, its champion, does not fit this model: {error.message}; its alias stays")
        return
    if champion != member:
        ledger.crown(member)
        say(f"{member.label} is the champion to beat: the alias {ALIAS} of {pool} is at version {holder}")


def freeze_champion(
    league: RunningLeague,
    known: Collection[int],
    files: SnapshotFiles,
    clerk: Any,
    pool: str,
    module: nn.Module,
    say: Callable[[str], None],
) -> None:
    """As `meet_champion`, for one of several rivals: the version with the alias becomes a snapshot that can be met.

    Args:
        league: the league, in which the player is `RunningLeague.rival`.
        known: versions of the player that the league has met.
        files, clerk, module, say: as for `meet_champion`.
        pool: name of the registered model.
    """
    holder = clerk.call(alias_of, pool)
    if holder is None or holder in known:
        return
    try:
        weights = put_weights(files, clerk, pool, holder, module)
    except BadWeights as error:
        say(f"version {holder} of {pool}, its champion, does not fit this model: {error.message}")
    else:
        league.freeze(league.rival, holder, digest_of(weights), 0)


def put_weights(files: SnapshotFiles, clerk: Any, pool: str, version: int, module: nn.Module) -> Weights:
    """Puts the weights of a registered version into their file if they fit the model; returns them.

    They are fetched from the registry unless the file is there already.

    Args:
        files, clerk, module: as for `meet_champion`.
        pool: name of the registered model.
        version: the version.

    Raises:
        BadWeights: they do not fit the model; names the first leaf.
        BrayxError: the registry failed.
    """
    has_file = files.path(version).exists()
    weights = files.read(version) if has_file else clerk.call(registered_weights, pool, version)
    check_weights(layout_of(module_weights(module)), weights)
    files.put(version, weights)
    return weights


def alias_of(trial: Trial, pool: str) -> int | None:
    """The version with the pool's alias ``champion``. Runs in the process that has the trial."""
    return aliases(pool, trial.uri).get(ALIAS)


def registered_weights(trial: Trial, pool: str, version: int) -> Weights:
    """The weights of a registered version. Runs in the process that has the trial."""
    with files_of(f"models:/{pool}/{version}", trial.uri) as folder:
        return load_weights(folder / "weights.npz")
