"""A viewer's client of the control API."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from typing import Any

import httpx
from nicegui import Client
from pydantic import TypeAdapter

from brayx.errors import ConnectFailed, from_wire

_TIMEOUT_S = 10.0

Connect = Callable[[str], httpx.AsyncClient]
"""Makes an HTTP client of the API with the viewer's ``Authorization`` header, which may be empty."""


class ApiCaller:
    """Calls the API with the viewer's own credentials, so that the page can do no more than its viewer.

    If the viewer leaves before the answer comes, the call raises `asyncio.CancelledError`: its caller would otherwise
    go on with a page that NiceGUI has deleted.

    Args:
        client: an HTTP client of the API.
        viewer: the viewer's page.
    """

    def __init__(self, client: httpx.AsyncClient, viewer: Client) -> None:
        self._client, self._viewer = client, viewer

    async def get(self, kind: Any, path: str, **query: Any) -> Any:
        """Gets a document of the given type.

        Raises:
            BrayxError: the call was refused, or the console does not answer.
        """
        return await self._call(kind, "GET", path, params=query)

    async def image(self, path: str) -> str | None:
        """Gets a PNG as a data URL; None: there is none. Errors as for `get`."""
        png = await self._reply("GET", path)
        return "data:image/png;base64," + base64.b64encode(png).decode() if png else None

    async def post(self, kind: Any, path: str, body: Any = None) -> Any:
        """Makes a control call by POST; errors as for `get`."""
        return await self._call(kind, "POST", path, json=body)

    async def delete(self, kind: Any, path: str, **query: Any) -> Any:
        """Makes a control call by DELETE; errors as for `get`."""
        return await self._call(kind, "DELETE", path, params=query)

    async def _call(self, kind: Any, method: str, path: str, **options: Any) -> Any:
        return TypeAdapter(kind).validate_json(await self._reply(method, path, **options))

    async def _reply(self, method: str, path: str, **options: Any) -> bytes:
        try:
            reply = await self._client.request(method, path, timeout=_TIMEOUT_S, **options)
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise ConnectFailed(f"the job's console at {self._client.base_url} does not answer: {reason}") from None
        finally:
            if self._viewer.is_deleted:
                raise asyncio.CancelledError
        if reply.status_code not in (200, 204):
            raise from_wire(reply.content, http_status=reply.status_code)
        return reply.content
