"""The wire protocol and its clients, for game processes. Imports neither Ray nor torch.

Public names: `Client`, `AsyncClient`, `ServiceThread`, `StepKind`, `StepRequest`. ``brayx.bridges.gym`` plays
Gymnasium environments, ``brayx.gamecore.compliance`` tests a service; import these two by name.
"""

from __future__ import annotations

from brayx.gamecore.client import AsyncClient, Client
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.gamecore.transports.local import ServiceThread

__all__ = ["AsyncClient", "Client", "ServiceThread", "StepKind", "StepRequest"]
