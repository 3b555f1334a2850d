"""The parts of Ray's private interface that brayx uses; each fails separately if a version has changed it.

They are Ray's key-value store, its address file and folders, its token check, and of Serve the controller, the address
and the mark of an ending replica. `brayx.cluster.housekeeping` has those of Ray Data, and warns instead of failing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

from brayx.ports import is_loopback

_log = logging.getLogger(__name__)

CHECKED_VERSIONS = ("2.59.", "2.60.")
"""Versions of Ray with which the parts used here were checked, as prefixes."""

_RETRY_S = 1.0
_SERVE_ANSWER_S = 5.0


def warn_if_unchecked() -> None:
    """Warns if brayx's use of private parts was not checked with this version of Ray."""
    import ray

    if not ray.__version__.startswith(CHECKED_VERSIONS):
        _log.warning(
            "Ray is %s; brayx uses private parts of Ray that were checked with %s",
            ray.__version__,
            ", ".join(f"{prefix}x" for prefix in CHECKED_VERSIONS),
        )


class KeyValueStore:
    """JSON values in the key-value store of Ray's control service, which live as long as the cluster.

    A thread writes and retries, so that no caller waits for a control service that does not answer. If several values
    wait for one key, only the newest is written.

    Args:
        namespace: namespace of the store.
        prefix: prefix of all keys.
    """

    def __init__(self, namespace: str, prefix: str = "") -> None:
        self._namespace = namespace
        self._prefix = prefix.encode()
        self._waiting: dict[str, Any] = {}
        self._unwritten = 0
        self._changed = threading.Condition()
        self._writer: threading.Thread | None = None

    def write(self, key: str, value: Any) -> None:
        """Replaces a value; an empty one removes the key. Returns at once."""
        with self._changed:
            self._unwritten += key not in self._waiting
            self._waiting[key] = value
            self._changed.notify_all()
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_waiting, name="brayx-key-values", daemon=True)
            self._writer.start()

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything is written; False after ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._unwritten, timeout_s)

    def read(self, key: str) -> Any:
        """A value; None if there is none.

        Raises:
            Exception: an error of Ray's, if the control service cannot be reached.
        """
        from ray.experimental.internal_kv import _internal_kv_get

        stored = _internal_kv_get(self._prefix + key.encode(), namespace=self._namespace)
        return json.loads(stored) if stored else None

    def read_all(self) -> dict[str, Any]:
        """All values by key; errors as `read`."""
        from ray.experimental.internal_kv import _internal_kv_list

        keys = _internal_kv_list(self._prefix, namespace=self._namespace)
        values = {key: self.read(key) for key in (key.removeprefix(self._prefix).decode() for key in keys)}
        return {key: value for key, value in values.items() if value}

    def put(self, key: str, value: Any) -> None:
        """As `write`, at once and in this thread; errors as `read`."""
        from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_put

        name = self._prefix + key.encode()
        if value:
            _internal_kv_put(name, json.dumps(value).encode(), overwrite=True, namespace=self._namespace)
        else:
            _internal_kv_del(name, namespace=self._namespace)

    def _write_waiting(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                key, value = self._waiting.popitem()
            written = True
            try:
                self.put(key, value)
            except Exception as error:  # any error of Ray's; the next try is in a second
                _log.warning("%r was not written to Ray's key-value store: %s: %s", key, type(error).__name__, error)
                written = False
            with self._changed:
                if written or key in self._waiting:
                    self._unwritten -= 1
                    self._changed.notify_all()
                else:
                    self._waiting[key] = value
            if not written:
                time.sleep(_RETRY_S)


def address_of_ray(address: str | None) -> str | None:
    """``host:port`` that ``ray.init`` would join for an address; None: it would start a new cluster."""
    from ray._private.services import canonicalize_bootstrap_address

    bootstrap: str | None = canonicalize_bootstrap_address(address)  # type: ignore[arg-type]  # None is allowed
    return bootstrap


def address_file() -> Path:
    """The file in which the last ``ray start`` on this machine left its address."""
    from ray._common.utils import get_ray_address_file

    return Path(get_ray_address_file(None))


def warn_if_open(log: logging.Logger) -> None:
    """Warns if this process's Ray requires no token from clients.

    Ray and each replica of Serve listen on every interface and accept pickles, so any host that reaches them can run
    code here. It is a warning, not an error, since a firewall may block other hosts.
    """
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    if not is_token_auth_enabled():
        log.warning(
            "Ray requires no token: anyone who reaches its ports, or those of Serve's replicas, can run code on this "
            "machine. Keep others out, or set RAY_AUTH_MODE=token in the environment (docs/guide-serve.md)"
        )


def sessions_folder() -> str:
    """The folder of Ray's sessions on this machine."""
    from ray._common.utils import get_default_ray_temp_dir

    folder: str = get_default_ray_temp_dir()  # type: ignore[no-untyped-call]
    return folder


def replica_is_ending() -> bool:
    """Whether Serve is ending the replica in this process; only a private mark of Serve's shows that."""
    from ray._private.worker import global_worker

    for actor in list(getattr(global_worker, "actors", {}).values()):
        if getattr(getattr(actor, "_replica_impl", None), "_shutting_down", False):
            return True
    return False


def serve_http_address() -> tuple[str | None, int]:
    """Host and port of the running Serve's HTTP ingress; the host is None if Serve has no ingress."""
    from ray import serve

    client = serve.context._get_global_client()
    assert client is not None, "serve.start has connected it"
    return client.http_config.host, client.http_config.port


def serve_controller() -> Any | None:
    """Serve's controller, for the functions below; None: Serve does not run."""
    from brayx.cluster.named import find_actor

    return find_actor("SERVE_CONTROLLER_ACTOR", "serve")


async def serve_is_on_loopback() -> bool:
    """Whether only this machine reaches Serve's ingress; False if Serve does not answer.

    A client's address would not do: behind Serve's proxy every client has an address of this machine.
    """

    def ask() -> bool:
        import ray

        host, _ = serve_http_address()
        controller = serve_controller()
        assert controller is not None, "this is a replica of Serve"
        grpc: Any = ray.get(controller.get_grpc_config.remote(), timeout=_SERVE_ANSWER_S)
        # Serve's gRPC proxy listens on every address, and no option changes that.
        return is_loopback(host) and not grpc.grpc_servicer_functions

    try:
        async with asyncio.timeout(_SERVE_ANSWER_S):
            return await asyncio.to_thread(ask)
    except Exception as error:
        _log.warning("could not find out where Serve listens: %s: %s", type(error).__name__, error)
        return False


def serve_route(controller: Any, application: str, timeout_s: float) -> str | None:
    """Path of an application at Serve's ingress; None: it has none."""
    import ray

    endpoints: Any = ray.get(controller.get_all_endpoints.remote(), timeout=timeout_s)
    return next((endpoint["route"] for name, endpoint in endpoints.items() if name.app_name == application), None)


def calls_to_proxies(controller: Any, timeout_s: float) -> list[Any]:
    """A call to each proxy of Serve's ingress, which answers once the proxy knows all running applications."""
    import ray

    proxies: Any = ray.get(controller.get_proxies.remote(), timeout=timeout_s)
    return [proxy.serving.remote(wait_for_applications_running=True) for proxy in proxies.values()]


def start_to_delete(controller: Any, application: str) -> None:
    """Deletes an application of Serve as `serve.delete` does, without its wait, which has no deadline."""
    controller.delete_apps.remote([application])


def serve_has(controller: Any, application: str, timeout_s: float) -> bool:
    """Whether Serve has an application; it has one that is being deleted until its replicas have ended."""
    import ray

    details: Any = ray.get(controller.get_serve_instance_details.remote(), timeout=timeout_s)
    return application in details["applications"]
