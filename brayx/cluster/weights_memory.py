"""What a weight store finds after its restart: the version and the step of the last publish, so that it counts on.

In the key-value store of Ray's control service, which lives as long as the cluster and which nothing public of Ray
reaches. Knows nothing of weights.
"""

from __future__ import annotations

import asyncio
import json
import logging
from concurrent.futures import ThreadPoolExecutor

_log = logging.getLogger(__name__)

_NAMESPACE = "brayx-weights"
_WRITTEN_S = 2.0
"""How long a publish waits for a control service that does not answer."""


class Memory:
    """Version and step of one store's last publish.

    Args:
        actor_id: Ray's of the store, which stays through restarts and is never that of another store.
    """

    def __init__(self, actor_id: str) -> None:
        self._key = actor_id
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="brayx-memory")  # one: in the order of publishes

    def read(self) -> tuple[int, int]:
        """Version and step; zeros before the first publish, or if nothing can be read."""
        from ray.experimental.internal_kv import _internal_kv_get

        try:
            kept = _internal_kv_get(self._key, namespace=_NAMESPACE)
            version, step = json.loads(kept) if kept else (0, 0)
            return int(version), int(step)
        except Exception as error:
            _log.warning("the last version that was published cannot be read: %s: %s", type(error).__name__, error)
            return 0, 0

    async def write(self, version: int, step: int) -> None:
        """Replaces them; without an answer of the control service it returns all the same, after a warning."""
        from ray.experimental.internal_kv import _internal_kv_put

        put = asyncio.get_running_loop().run_in_executor(
            self._writer,
            lambda: _internal_kv_put(self._key, json.dumps([version, step]), overwrite=True, namespace=_NAMESPACE),
        )
        try:
            async with asyncio.timeout(_WRITTEN_S):
                await put
        except Exception as error:
            _log.warning("version %d could not be written down: %s: %s", version, type(error).__name__, error)


def forget(actor_id: str) -> None:
    """Removes what a store has left that has ended."""
    from ray.experimental.internal_kv import _internal_kv_del

    try:
        _internal_kv_del(actor_id, namespace=_NAMESPACE)
    except Exception as error:
        _log.warning("what weight store %s left stays: %s: %s", actor_id, type(error).__name__, error)
