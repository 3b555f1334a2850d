"""The wire and its clients: what a game process needs, and nothing of Ray or torch.

Public names: `Client`, `AsyncClient`, `ServiceThread`, `StepKind`, `StepRequest`. ``brayx.gamecore.gym`` plays
Gymnasium environments, ``brayx.gamecore.compliance`` tests a service; both are imported by their own names.
"""

from __future__ import annotations

from brayx.gamecore.client import AsyncClient, Client
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.gamecore.transports.local import ServiceThread

__all__ = ["AsyncClient", "Client", "ServiceThread", "StepKind", "StepRequest"]
