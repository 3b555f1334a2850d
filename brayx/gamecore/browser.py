"""What HTTP doors do for browsers: allowed origins (CORS), allowed host names, and the layout of pages.

Knows nothing of the services behind doors.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import urlsplit

from brayx.errors import Forbidden
from brayx.ports import is_loopback

ANY = "*"
"""An origin that stands for all."""
_METHODS = b"GET, POST, OPTIONS"
_HEADERS = b"content-type, session, step_kind, step-kind, key, time, token, seq, opponent, record, traceparent"
_LOCAL = "localhost"
_LOCAL_ONLY = "this service has no keys and answers only to localhost and the names in 'allowed_hosts'"
_MAX_AGE_S = b"600"
"""Time that a browser may keep the answer to a preflight."""


class Cors:
    """The origins whose scripts may call the HTTP doors (CORS; the Fetch standard, 3.2).

    Args:
        origins: like ``https://play.example.com``; `ANY`: all; none: doors name no origin and take no ``OPTIONS``.

    Attributes:
        is_on: some origin may.
    """

    def __init__(self, origins: Iterable[str] = ()) -> None:
        self._origins = frozenset(origins)
        self.is_on = bool(self._origins)

    def headers(self, origin: str | None, method: str) -> list[tuple[bytes, bytes]]:
        """Headers of every answer to a request that came with ``origin``."""
        if not self._origins:
            return []
        allowed = ANY in self._origins or origin in self._origins
        headers = [] if ANY in self._origins else [(b"vary", b"origin")]
        if origin is not None and allowed:
            shown = ANY if ANY in self._origins else origin
            headers += [
                (b"access-control-allow-origin", shown.encode()),
                (b"access-control-expose-headers", b"retry-after"),
            ]
            if method == "OPTIONS":
                headers += [
                    (b"access-control-allow-methods", _METHODS),
                    (b"access-control-allow-headers", _HEADERS),
                    (b"access-control-max-age", _MAX_AGE_S),
                ]
        return headers


class Hosts:
    """The host names that a door on loopback answers to.

    If a web page's domain name resolves to this machine, the page can reach the door by that name, and the browser
    takes the door for a part of the page's site (DNS rebinding). Only the ``Host`` header shows this.

    Args:
        names: allowed names besides loopback's; `ANY` among them, or None: all names.
        message: start of the error.
    """

    def __init__(self, names: Iterable[str] | None = None, message: str = _LOCAL_ONLY) -> None:
        self._names = frozenset(() if names is None else map(str.lower, names))
        self._takes_all = names is None or ANY in self._names
        self._message = message

    def check(self, host: str | None) -> None:
        """Checks a request's ``Host``. A request without one passes, because browsers always send it.

        Raises:
            Forbidden: the name is not allowed.
        """
        if not self._takes_all and host and (name := _name_of(host)) != _LOCAL and name not in self._names:
            raise Forbidden(f"{self._message}: the request's 'Host' is {host[:80]!r}", header="host")


@lru_cache(64)
def _name_of(host: str) -> str | None:
    """The name in a ``Host``, without the port; `_LOCAL` for all of loopback's, None for a malformed one."""
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return None
    return _LOCAL if is_loopback(name) else name


def are_origins(value: list[str]) -> list[str]:
    """The option ``cors_origins``, checked. A browser would report a wrong origin only as a refusal.

    Raises:
        ValueError: one is not an origin; the message names it.
    """
    for origin in value:
        if origin != ANY and not re.fullmatch(r"https?://[^/\s?#@*]+", origin):
            raise ValueError(f"scheme, host and port like https://play.example.com:8443, or *, not {origin!r}")
    return value


def document(title: str, body: str) -> str:
    """An HTML page.

    Args:
        title: text.
        body: HTML.
    """
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>brayx: {html.escape(title)}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 46em; margin: 2em auto; padding: 0 1em }}
th {{ text-align: left; padding-right: 2em }}
pre {{ background: #8882; padding: 1em; white-space: pre-wrap; overflow-wrap: anywhere }}
</style>
<h1>brayx: {html.escape(title)}</h1>
{body}
<p>A program gets these facts as JSON: <code>curl URL</code></p>
</html>
"""
