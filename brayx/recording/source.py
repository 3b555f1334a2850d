"""Recordings as training data. `dataset` opens selected sessions of a folder, or files of another format.

Knows nothing of buffers or models.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import optree
from pydantic import ValidationError

from brayx.actions import ActionSpec
from brayx.errors import BadRecording, ConfigError
from brayx.gamecore.contract import Contract
from brayx.gamecore.protocol import agent_of
from brayx.recording.addresses import absolute
from brayx.recording.config import Selection, is_named
from brayx.recording.fragments import INPUT, OUTPUT, Fields, fields_of, fragments
from brayx.recording.rows import has_rows, row_fragments
from brayx.replay.files import Dataset, Format
from brayx.replay.steps import BLOCK_ROWS, ActionsOf
from brayx.types import Fragment, flatten

if TYPE_CHECKING:
    from brayx.recording.reader import Recording, Recordings

logger = logging.getLogger(__name__)

_ARRAYS = ("action", "log_prob", "reward", "policy_version")


def dataset(
    path: str | Path,
    format: Format | Literal["recording"] | None = None,
    fields: Mapping[str, str] | None = None,
    demonstration: bool = False,
    only: Selection | Mapping[str, Any] | None = None,
    actions: ActionsOf | None = None,
    contract: Contract | None = None,
) -> Dataset:
    """Opens recordings as training data: a folder, one of its files with ``format="recording"``, or an fsspec address.

    Any other path is opened as a `Dataset` of files.

    Args:
        path: the folder, file or address.
        format: ``recording``, or as for `Dataset`; None: a folder holds recordings unless it is a Minari dataset.
        fields: origins of fields by name, see `brayx.recording.fragments`; for other files as for `Dataset`.
        demonstration: as for `Dataset`.
        only: which sessions to read; options of `Selection`.
        actions: whose actions the data has, as for `Dataset`.
        contract: as for `Dataset`.

    Raises:
        ConfigError: there is no such file, or ``only`` is not valid.
    """
    folder = Path(path).expanduser()
    is_minari = (folder / "data" / "main_data.hdf5").is_file()
    if format is None and ("://" in str(path) or (folder.is_dir() and not is_minari)):
        format = "recording"
    if format != "recording":
        if only:
            raise ConfigError(f"{path}: `only` selects recorded sessions, and this is not a folder of recordings")
        return Dataset(path, format, fields, demonstration, actions=actions, contract=contract)
    return Dataset(path, None, fields, demonstration, reader(path, only), actions)


def reader(
    path: str | Path,
    only: Selection | Mapping[str, Any] | None = None,
    opener: Callable[[str], Recordings] | None = None,
) -> RecordingsReader:
    """A reader of selected recordings; ``opener`` as for `RecordingsReader`, the rest as for `dataset`."""
    try:
        selection = only if isinstance(only, Selection) else Selection(**(only or {}))
    except ValidationError as error:
        wrong = error.errors()[0]
        raise ConfigError(f"only.{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}, got {wrong['input']!r}") from None
    return RecordingsReader(absolute(str(path)), selection, opener)


@dataclass(frozen=True)
class RecordingsReader:
    """Reads recordings as `brayx.replay.files.FormatReader` reads files. Pickles.

    Sessions that lack a field, such as those of another game, are left out, and a warning says how many and why. If
    sessions of another game have all fields, the buffer refuses those that do not fit.

    Attributes:
        address: address of the recordings.
        only: which sessions to read.
        opener: opens the address; None: `brayx.recording.reader.open`, which does not read from trials.
    """

    address: str
    only: Selection
    opener: Callable[[str], Recordings] | None = None

    def episodes(self, file: Path, fields: Mapping[str, str], most: int | None = BLOCK_ROWS) -> Iterator[Fragment]:
        """As `brayx.replay.files.FormatReader`: all fragments, in the order of `brayx.recording.open`.

        ``most`` is the maximum number of transitions in a fragment; a longer one continues in the next. None: no limit.
        """
        return (fragment for _, fragment in self._all(fields, most))

    def selected(self) -> Iterator[Recording]:
        """The selected sessions."""
        return (episode for episode in self.recordings() if selects(self.only, episode))

    def blank(self, file: Path, fields: Mapping[str, str]) -> tuple[Fragment | None, set[str]]:
        """As `brayx.replay.files.FormatReader`; reads the first fragment."""
        for origins, fragment in self._all(fields, 1):
            step = replace(
                fragment,
                obs=optree.tree_map(lambda leaf: np.zeros_like(leaf[:2]), fragment.obs),
                **{name: np.zeros_like(getattr(fragment, name)[:1]) for name in _ARRAYS},
                extras={name: np.zeros_like(extra[:1]) for name, extra in fragment.extras.items()},
            )
            return step, set(origins.names)
        return None, set()

    def declared(self, file: Path, fields: Mapping[str, str]) -> tuple[ActionsOf | None, ActionSpec | None]:
        """As `brayx.replay.files.FormatReader`. Arrays of agents hold the policy's actions, bodies the game's."""
        return "environment" if fields.get("action", "").startswith((INPUT, OUTPUT)) else "policy", None

    def recordings(self) -> Recordings:
        """Opens the recordings. Raises ConfigError if there are none, or none of the files can be read."""
        from brayx.recording.reader import open as open_recordings  # imports Arrow, which is slow

        try:
            recordings = (self.opener or open_recordings)(self.address)
        except BadRecording as error:
            raise ConfigError(error.message, path=self.address) from error
        if recordings.unreadable:
            file, why = next(iter(recordings.unreadable.items()))
            if not len(recordings):
                raise ConfigError(why, path=self.address)
            logger.warning("%d files cannot be read, the first is %s: %s", len(recordings.unreadable), file, why)
        return recordings

    def _all(self, fields: Mapping[str, str], most: int | None) -> Iterator[tuple[Fields, Fragment]]:
        recordings, known, refused, last = self.recordings(), None, 0, ""
        has_read = False
        for episode in recordings:
            try:
                if not selects(self.only, episode):
                    continue
                if has_rows(episode):
                    for fragment in row_fragments(episode):
                        paths = {path: path for path in flatten(fragment.obs, "obs")}
                        has_read = True
                        yield Fields(paths, "action", "reward", "terminated", "", ""), fragment
                    continue
                known = known or fields_of(episode, fields)
                has_read = True
                for fragment in fragments(episode, known, most):
                    yield known, fragment
            except BadRecording as error:
                refused, last = refused + 1, error.message
        if refused and not has_read:
            raise ConfigError(f"{self.address}: {last}", path=self.address)
        if refused:
            logger.warning(
                "%s: %d of %d sessions were left out, at least in part; the last: %s",
                self.address,
                refused,
                len(recordings),
                last,
            )


def selects(only: Selection, episode: Recording) -> bool:
    """Whether an episode is selected. Reads its ticks only to select by policy version."""
    if only.session is not None and not is_named(episode.session, only.session):
        return False
    if only.agent is not None and not fnmatchcase(agent_of(episode.session) or episode.session, only.agent):
        return False
    if only.player is not None and not fnmatchcase(episode.player, only.player):
        return False
    if only.reported is not None and episode.reported != only.reported:
        return False
    if only.human is not None and _is_human(episode.start) != only.human:
        return False
    if not _within(episode.result, episode.result, only.min_result, only.max_result):
        return False
    if only.min_version is None and only.max_version is None:
        return True
    if "policy_version" not in episode.columns:
        return False
    versions = episode["policy_version"]
    return _within(int(versions.min()), int(versions.max()), only.min_version, only.max_version)


def _within(low: float | None, high: float | None, least: float | None, most: float | None) -> bool:
    """Whether a range lies within bounds. A bound of None is no limit; a value of None is outside any limit."""
    if least is not None and (low is None or low < least):
        return False
    return most is None or (high is not None and high <= most)


def _is_human(start: str) -> bool:
    """Whether a start's body is JSON with a true ``human``."""
    try:
        document = json.loads(start)
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and document.get("human") is True
