"""Recordings among the artifacts of trials: copies chosen sessions there, and reads them."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from operator import itemgetter

from brayx.errors import BadRecording
from brayx.gamecore.protocol import game_of
from brayx.recording import forgetting, reader
from brayx.recording.addresses import OF_TRIAL
from brayx.recording.columns import ERROR, REFUSED
from brayx.recording.config import is_named
from brayx.recording.copying import copy
from brayx.recording.forgetting import Forgotten
from brayx.recording.reader import Recording, Recordings
from brayx.temporary import temporary_folder
from brayx.tracking import Trial, find_trial, tracking_uri
from brayx.tracking.artifacts import files_at, local_folder
from brayx.tracking.finding import all_runs
from brayx.tracking.store import client_of, telling

_FOLDER = "recordings"


def open(address: str, *, tracking: str | None = None) -> Recordings:
    """Opens recordings: a folder, one of its Parquet files, or those of a trial.

    Args:
        address: a path or fsspec address; or ``runs:/TRIAL/recordings`` for sessions that `log` copied to the trial
            with this id or name.
        tracking: for a trial, MLflow's URI or the path of its sqlite file; None: as for `brayx.tracking.tracking_uri`.

    Raises:
        BadRecording: there is no such folder or file, or it is not a recording.
        ConfigError: there is no such trial.
        TrackingError: MLflow failed, or the trial has no recordings.
    """
    trial, _, path = str(address).removeprefix(OF_TRIAL).partition("/")
    if not str(address).startswith(OF_TRIAL):
        return reader.open(str(address))
    uri = tracking_uri(tracking)
    files = files_at(f"{OF_TRIAL}{find_trial(trial, uri).run_id}/{path or _FOLDER}", uri)
    with contextlib.ExitStack() as stack:
        recordings = reader.open(str(stack.enter_context(files)))
        weakref.finalize(recordings, stack.pop_all().close)  # the episodes still read the downloaded files
    return recordings


def log(episodes: Iterable[Recording], trial: Trial) -> tuple[int, int, str]:
    """Copies sessions with their frames to a trial's artifacts, except those that the trial has.

    Args:
        episodes: recorded sessions.
        trial: any trial, also a finished one.

    Returns:
        The numbers of copied sessions and ticks, and the address of all sessions of the trial, for `open`.

    Raises:
        BadRecording: a file is broken, or there are no episodes.
        TrackingError: MLflow failed.
    """
    address = f"{OF_TRIAL}{trial.run_id}/{_FOLDER}"
    with telling(f"cannot read {address}"):
        has_some = bool(client_of(trial.uri).list_artifacts(trial.run_id, _FOLDER))
    known = [episode.id for episode in open(address, tracking=trial.uri)] if has_some else []
    chosen = iter(episodes)
    first = next(chosen, None)
    if first is None:
        raise BadRecording("no recorded session is selected")
    with temporary_folder("recordings") as folder:
        sessions, ticks = copy(itertools.chain([first], chosen), str(folder), known)
        for file in sorted(folder.iterdir()):  # a video sorts before its chunk, so no chunk lacks its video
            trial.log_file(file, _FOLDER)
    return sessions, ticks, address


def forget(names: Collection[str], uri: str) -> tuple[dict[str, Forgotten], list[str]]:
    """Removes sessions from the recordings of all trials, deleted trials included.

    Args:
        names: as for `brayx.recording.forgetting.forget`.
        uri: tracking URI.

    Returns:
        What was removed, by address; and the addresses that have such sessions in a store that is not a folder of this
        machine, where they stay.

    Raises:
        BadRecording: a file of a trial cannot be read.
        TrackingError: MLflow failed.
    """
    removed, left = {}, []
    runs = all_runs(uri)
    with telling(f"cannot read the artifacts of trials in {uri}"):
        client = client_of(uri)
        with_some = [run for run in runs if client.list_artifacts(run, _FOLDER)]
    for run in with_some:
        address = f"{OF_TRIAL}{run}/{_FOLDER}"
        if (folder := local_folder(address, uri)) is not None:
            forgotten = forgetting.forget(str(folder), names)
            if forgotten.files:
                removed[address] = forgotten
        elif any(is_named(episode.session, name) for episode in open(address, tracking=uri) for name in names):
            left.append(address)
    return removed, left


def log_extremes(
    trial: Trial, folder: str, count: int, since_s: float, until_s: float = math.inf
) -> tuple[int, int, str]:
    """Copies the sessions of a training that are most worth watching to its trial's artifacts.

    Args:
        trial: the trial.
        folder: path or address of the recordings.
        each: maximum number of sessions with the best result, with the worst, and with an error, of which the newest
            are taken. The other sessions of their games are copied, too.
        since_s: start of the training, in seconds since 1970.
        until_s: time, in seconds since 1970, from which on no further session is copied; the first one always is.

    Returns:
        The number of copied sessions, the number of those that were left out at ``until_s``, and the address of all
        sessions of the trial.

    Raises:
        BadRecording, TrackingError: as `open` and `log`.
    """
    recordings = reader.open(folder)
    # In one pass, and without the episodes: a training may have a million.
    rows = [
        (index, episode.result, episode.end, game_of(episode.session))
        for index, episode in enumerate(recordings)
        if episode.began >= since_s
    ]
    ranked = [row for row in rows if row[1] is not None]
    best = heapq.nlargest(count, ranked, key=itemgetter(1))
    worst = heapq.nsmallest(count, ranked, key=itemgetter(1))
    failed = [row for row in rows if row[2] in (ERROR, REFUSED)][-count:]
    chosen = dict.fromkeys((*best, *worst, *failed))
    games = {game for *_, game in chosen} - {""}
    chosen |= dict.fromkeys(row for row in rows if row[3] in games)
    left = deque(chosen)

    def in_time() -> Iterator[Recording]:
        while left:
            yield recordings[left.popleft()[0]]
            if time.time() >= until_s:
                return

    sessions, _, address = log(in_time(), trial)
    return sessions, len(left), address
