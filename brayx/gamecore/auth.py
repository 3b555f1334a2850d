"""Authentication: Bray's ``key``, ``time`` and ``token``, made by a client and checked by a service.

A token is the lower-case hex of HMAC-SHA256 over ``key``, ``session`` and ``time`` with the key's secret. So the secret
is never sent, and a token is valid for one session and a short time. It does not cover the body and encrypts nothing:
on an untrusted network, use TLS. Knows nothing of doors; standard library only.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import hmac
import logging
import os
import re
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from brayx.errors import ConfigError, Unauthorized
from brayx.gamecore.protocol import StepRequest
from brayx.text_files import read_text

logger = logging.getLogger(__name__)

DEFAULT_WINDOW_S = 300.0
"""Largest difference between a request's time and the service's clock, either way."""

MIN_SECRET_BYTES = 16
MAX_KEY_CHARS = 64

READING = ("read/", "control/")
"""How ids of keys begin that may read a console and metrics; `new_key` makes them."""

KEYS_FILE_VARIABLE = "BRAYX_KEYS_FILE"
KEYS_VARIABLE = "BRAYX_KEYS"

_KEY_ID = re.compile(rf"(?!#)[!-9;-~]{{1,{MAX_KEY_CHARS}}}")
_MAX_TIME_DIGITS = 19
_NEW_SECRET_BYTES = 32
_NOBODYS_SECRET = secrets.token_bytes(_NEW_SECRET_BYTES)
_PRIVATE = 0o600
_SIGN = "sign with a line of the service's keys file (of brayx's clients --keys-file FILE, --key ID)"


def sign(secret: bytes, key: str, session: str, time: str) -> str:
    """The token of a request.

    Args:
        secret: the key's secret, its characters as bytes.
        key: the key's id.
        session: the request's session id; empty for a stateless call without one.
        time: Unix seconds, decimal, as in the request.
    """
    return hmac.digest(secret, f"{key}\n{session}\n{time}".encode("utf-8", "replace"), "sha256").hex()


class Keys:
    """The secrets of a service by key id. There may be several, so that a key can be replaced without an interruption.

    Args:
        secrets: secrets by key id.
        window_s: largest difference between a request's time and the service's clock, either way.
        source: name of their source, for messages.

    Raises:
        ConfigError: no key, an invalid id, or a secret that is too short.
    """

    def __init__(
        self, secrets: Mapping[str, bytes], window_s: float = DEFAULT_WINDOW_S, source: str = "the keys"
    ) -> None:
        if not secrets:
            raise ConfigError(f"{source}: expected at least one key, got none; add one with `brayx keys new`")
        for key, secret in secrets.items():
            _check_key(key, source)
            _check_secret(key, secret, source)
        self._secrets = dict(secrets)
        self._window_s = window_s

    def __len__(self) -> int:
        return len(self._secrets)

    @classmethod
    def parse(cls, text: str, source: str, window_s: float = DEFAULT_WINDOW_S) -> Self:
        """Parses keys: ``id: secret`` on each line; empty lines and lines that start with ``#`` are ignored.

        Args:
            text: contents of a file.
            source: name of the source, for messages. Messages never quote a line, which may hold a secret.

        Raises:
            ConfigError: a malformed line, a repeated id, or a short secret; the message has the line's number.
        """
        return cls(_parse(text, source), window_s, source)

    @classmethod
    def load(cls, path: str | Path, window_s: float = DEFAULT_WINDOW_S) -> Self:
        """Reads the keys in a file; see `parse`. Warns if other users can read the file.

        Raises:
            ConfigError: it cannot be read, other users can write to it, or it has no keys.
        """
        return cls(_read(Path(path)), window_s, f"the keys in {path}")

    @classmethod
    def configured(
        cls, keys_file: str | None, window_s: float = DEFAULT_WINDOW_S, environment: Mapping[str, str] = os.environ
    ) -> Self | None:
        """The keys that a service requires; None if it is open to every client.

        Args:
            keys_file: path of the file; None: use the environment.
            environment: ``BRAYX_KEYS_FILE`` names a file, ``BRAYX_KEYS`` holds the contents of one. Not both.

        Raises:
            ConfigError: as for `load`, or the environment has both.
        """
        if keys_file is not None:
            return cls.load(keys_file, window_s)
        path, text = environment.get(KEYS_FILE_VARIABLE, ""), environment.get(KEYS_VARIABLE, "")
        if path and text:
            raise ConfigError(f"{KEYS_FILE_VARIABLE} and {KEYS_VARIABLE} are both set: set one of them")
        if path:
            return cls.load(path, window_s)
        return cls.parse(text, KEYS_VARIABLE, window_s) if text else None

    def secret(self, key: str) -> bytes:
        """The secret of a key, for a client that signs with it.

        Raises:
            ConfigError: there is no such key.
        """
        try:
            return self._secrets[key]
        except KeyError:
            raise ConfigError(f"there is no key {key!r}; there are: {', '.join(self._secrets)}") from None

    @property
    def ids(self) -> list[str]:
        """The ids of all keys."""
        return list(self._secrets)

    @property
    def first(self) -> str:
        """The id of the first key, a client's default."""
        return next(iter(self._secrets))

    def check(self, request: StepRequest, now: float) -> None:
        """Accepts a request whose token was made with one of these keys, for its session, at about ``now``.

        Args:
            request: the request.
            now: Unix seconds.

        Raises:
            Unauthorized: it is refused. The message gives the reason, but not whether the key exists.
        """
        key, time, token = request.key, request.time, request.token
        if not (key and time and token):
            absent = ", ".join(repr(name) for name in ("key", "time", "token") if not getattr(request, name))
            raise Unauthorized(f"this service requires keys: {absent} missing: {_SIGN}", missing=absent)
        if not (time.isascii() and time.isdigit() and len(time) <= _MAX_TIME_DIGITS):
            raise Unauthorized(f"'time' is {time[:40]!r}, expected Unix seconds, a decimal number", field="time")
        behind_s = now - int(time)
        if not -self._window_s <= behind_s <= self._window_s:
            raise Unauthorized(
                f"'time' is {abs(behind_s):.0f} s {'behind' if behind_s > 0 else 'ahead of'} this service's clock, at "
                f"most {self._window_s:g} s are allowed: set the clock, or sign again",
                field="time",
                behind_s=round(behind_s),
                window_s=self._window_s,
            )
        # An unknown key takes the same work, so that timing does not reveal which keys exist.
        secret = self._secrets.get(key, _NOBODYS_SECRET)
        expected = sign(secret, key, request.session, time)
        if not hmac.compare_digest(expected.encode(), token.encode("utf-8", "replace")):
            raise Unauthorized(
                "'key' is unknown, or 'token' is not the HMAC-SHA256 of key, session and time with that key's secret: "
                f"{_SIGN}",
                field="token",
            )

    def basic(self, authorization: str) -> str:
        """The id of the key in an ``Authorization`` header, which has it and its secret as HTTP Basic credentials.

        Raises:
            Unauthorized: there are none, or they are wrong.
        """
        kind, _, text = authorization.partition(" ")
        try:
            key, _, secret = base64.b64decode(text, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            key, secret = "", ""
        if kind.lower() != "basic" or not key:
            raise Unauthorized("a key is required: HTTP Basic credentials, the key's id and its secret")
        if not hmac.compare_digest(self._secrets.get(key, _NOBODYS_SECRET), secret.encode()):
            raise Unauthorized("the key is unknown, or its secret is wrong")
        return key

    def renewed(self, request: StepRequest, now: float) -> StepRequest:
        """``request`` signed again with its own key, at ``now``.

        For forwarding a tick to another replica, which checks it: the connection it came over may have been
        authenticated too long ago.

        Raises:
            Unauthorized: its key is not one of these.
        """
        secret = self._secrets.get(request.key)
        if secret is None:
            raise Unauthorized("'key' is unknown", field="key")
        time = str(int(now))
        return request._replace(time=time, token=sign(secret, request.key, request.session, time))


def variables(keys_file: str | None) -> dict[str, str]:
    """Environment variables by which another process finds the keys that this one's service requires.

    Args:
        keys_file: as for `Keys.configured`.
    """
    path = os.environ.get(KEYS_FILE_VARIABLE) if keys_file is None else keys_file
    return {KEYS_FILE_VARIABLE: os.path.abspath(path), KEYS_VARIABLE: ""} if path else {}


def credentials(keys_file: str | None = None, key: str | None = None) -> dict[str, Any]:
    """``key`` and ``secret`` for a client; empty if neither an option nor the environment names keys.

    Args:
        keys_file: path; None: the environment's (`Keys.configured`).
        key: id; None: the first key.

    Raises:
        ConfigError: the file cannot be used, lacks the key, or is missing.
    """
    keys = Keys.configured(keys_file)
    if keys is None:
        if key is not None:
            raise ConfigError(f"key {key!r} needs its secret: name the file with --keys-file")
        return {}
    chosen = keys.first if key is None else key
    return {"key": chosen, "secret": keys.secret(chosen)}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `credentials` reads."""
    parser.add_argument(
        "--keys-file", default=None,
        help="sign requests with a key from this file, lines of `id: secret` (default: the file that the environment "
        f"variable {KEYS_FILE_VARIABLE} names, or the lines in {KEYS_VARIABLE}, if there are any)",
    )  # fmt: skip
    parser.add_argument("--key", default=None, metavar="ID", help="id of the key to use (default: the first)")


def new_key(path: str | Path, key: str | None = None, scope: str = "") -> str:
    """Appends a key with a new secret to the file. A new file is readable by its owner only.

    Args:
        path: the file; created if absent.
        key: the key's id; None: a random one.
        scope: ``read`` or ``control`` for a key of the console, whose id then begins with it and a slash.

    Returns:
        The id.

    Raises:
        ConfigError: the id is invalid or taken, or the file cannot be read or written.
    """
    path = Path(path)
    known = _read(path) if path.exists() else {}
    key = key if key is not None else f"key-{secrets.token_hex(4)}"
    key = f"{scope}/{key}" if scope else key
    _check_key(key, str(path))
    if key in known:
        raise ConfigError(f"{path}: key {key!r} already exists; remove its line first, or choose another id")
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, _PRIVATE)
        with os.fdopen(handle, "r+b") as file:
            before = file.read()
            begin = b"" if not before or before.endswith(b"\n") else b"\n"
            file.write(begin + f"{key}: {secrets.token_hex(_NEW_SECRET_BYTES)}\n".encode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    return key


def _check_key(key: str, source: str) -> None:
    if not _KEY_ID.fullmatch(key):
        raise ConfigError(
            f"{source}: {key[:20]!r} cannot be the id of a key: 1 to {MAX_KEY_CHARS} printable ASCII characters, no "
            "space, no colon, no # at the beginning"
        )


def _check_secret(key: str, secret: bytes, source: str) -> None:
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"{source}: the secret of {key!r} has {len(secret)} bytes, at least {MIN_SECRET_BYTES} are needed"
        )


def _read(path: Path) -> dict[str, bytes]:
    try:
        mode = path.stat().st_mode
        text = read_text(path)
    except OSError as error:
        raise ConfigError(f"the keys in {path} cannot be read: {error.strerror}") from None
    if os.name == "posix" and mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"{path} can be written by others, who could add a key: chmod 600 {path}")
    if os.name == "posix" and mode & (stat.S_IRGRP | stat.S_IROTH):
        logger.warning("%s holds secrets and can be read by others: chmod 600 %s", path, path)
    return _parse(text, str(path))


def _parse(text: str, source: str) -> dict[str, bytes]:
    secrets: dict[str, bytes] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        where = f"{source}, line {number}"
        key, colon, secret = (part.strip() for part in line.partition(":"))
        if not colon:
            raise ConfigError(f"{where}: expected `id: secret`")
        _check_key(key, where)
        _check_secret(key, secret.encode(), where)
        if key in secrets:
            raise ConfigError(f"{where}: key {key!r} is given twice")
        secrets[key] = secret.encode()
    return secrets
