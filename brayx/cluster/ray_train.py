"""What brayx adds to Ray Train's ranks: they find each other over the network, and the screen says when they fail.

Knows nothing of learners.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from typing import Any

import psutil
import ray
from ray.train import UserCallback
from ray.train.torch import TorchConfig

from brayx.cluster.hub import HubClient
from brayx.errors import BrayxError, first_line
from brayx.ports import is_loopback

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


class RankFailures(UserCallback):
    """Records ``ranks_failed`` when ranks die or raise; Ray Train then starts all of them again.

    Args:
        hub: name of the trial's hub.
    """

    def __init__(self, hub: str) -> None:
        self._hub = hub

    def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, Exception]) -> None:
        """Ray Train calls this in its controller with the errors by rank."""
        rank, error = min(worker_exceptions.items())
        with contextlib.suppress(BrayxError), contextlib.closing(HubClient.of(self._hub)) as numbers:
            note = f"rank {rank}: {first_line(error)}"
            numbers.add("ranks_failed", len(worker_exceptions), note=note)


class NodeNetwork(TorchConfig):
    """Ray Train's process group, in which gloo listens at the addresses of the ranks' nodes.

    By itself gloo listens at the address of the machine's name. That is often a loopback address, as in Debian's
    ``/etc/hosts``, or there is none, so ranks on different machines would not find each other.
    """

    @property
    def backend_cls(self) -> Any:
        """Ray's backend, which first chooses each rank's interface."""

        class Backend(super().backend_cls):  # type: ignore[misc]  # its class is private to Ray
            def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
                worker_group.execute(choose_interface)
                super().on_start(worker_group, backend_config)

        return Backend


def choose_interface() -> None:
    """Makes gloo use the interface of this node's address, unless that is loopback or the user has named one."""
    address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    if not is_loopback(address) and (interface := interface_of(address)):
        os.environ.setdefault(_GLOO_INTERFACE, interface)


def interface_of(address: str) -> str:
    """Name of the network interface with this IP address; empty: there is none."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.family in (socket.AF_INET, socket.AF_INET6) and entry.address == address for entry in entries):
            return name
    return ""
