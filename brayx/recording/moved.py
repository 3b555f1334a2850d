"""Sessions that moved to another process: each process recorded its ticks as an episode, and these become one again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from brayx.errors import BadRecording
from brayx.recording.reader import Episode

MOVED = "moved"
"""Why a session ended here that another process continues without a loss."""
_RESUMED = "resumed"


def whole_sessions(episodes: Sequence[Episode]) -> Sequence[Episode]:
    """Joins episodes that ended as ``moved`` with those that continue them.

    A session that was resumed after its process had died stays in parts: what its game did in between is not known.

    Args:
        episodes: recorded sessions of one folder.

    Returns:
        The episodes; the same object if none moved. A joined one has the id and the place of its first part.
    """
    moved = {each.session for each in episodes if each.end == MOVED}
    if not moved:
        return episodes
    parts: dict[str, list[Episode]] = defaultdict(list)
    for each in episodes:
        if each.session in moved:
            parts[each.session].append(each)
    whole: dict[str, Episode] = {}
    continued = set()
    for own in parts.values():
        before, *others = sorted(own, key=lambda each: each.began)
        for each in others:
            if before.end == MOVED and is_resumed(each) and _number(each, 0) == _number(before, len(before) - 1) + 1:
                before = whole[before.id] = before.followed_by(each)
                continued.add(each.id)
            else:
                before = each
    return [whole.get(each.id, each) for each in episodes if each.id not in continued]


def is_resumed(episode: Episode) -> bool:
    """Whether an episode continues a session of another process. Reads its first tick."""
    try:
        return episode.read(0, 1, []).event[0].startswith(_RESUMED)
    except BadRecording:  # whoever reads its ticks is told
        return False


def _number(episode: Episode, tick: int) -> int:
    return int(episode.read(tick, 1, []).number[0])
