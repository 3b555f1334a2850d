"""A TLS proxy in front of a door, as a trainer on another machine has, with a certificate that nobody knows."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import ssl
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


def certificate(folder: Path) -> Path:
    """A self-signed certificate of 127.0.0.1 for an hour, and its key in the same file."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "trainer")])
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(hours=1)).add_extension(address, critical=False)
    signed = builder.not_valid_after(now + datetime.timedelta(hours=1)).sign(key, hashes.SHA256())
    pem, no_password = serialization.Encoding.PEM, serialization.NoEncryption()
    (folder / "trainer.pem").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, no_password) + signed.public_bytes(pem)
    )
    return folder / "trainer.pem"


class TlsProxy:
    """Passes bytes on to a service.

    Args:
        service: ``host:port``.
        pem: its certificate and key.
        cuts: each connection is cut after so many pieces from the client, before their reply; further ones are not.

    Attributes:
        connections: how many were taken.
    """

    def __init__(self, service: str, pem: Path, cuts: Sequence[int]) -> None:
        self.connections = 0
        self._host, _, self._port = service.rpartition(":")
        self._context, self._cuts = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), list(cuts)
        self._context.load_cert_chain(pem)

    async def open(self) -> str:
        """Listens; returns the address."""
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0, ssl=self._context)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Ends all connections."""
        self._server.close()
        relays = asyncio.all_tasks() - {asyncio.current_task()}
        for relay in relays:
            relay.cancel()
        await asyncio.gather(*relays, return_exceptions=True)

    async def _relay(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        self.connections += 1
        service, to_service = await asyncio.open_connection(self._host, int(self._port))
        cut = self._cuts.pop(0) if self._cuts else None
        replies = asyncio.create_task(_pass(service, to_client, None))
        await _pass(client, to_service, cut)
        replies.cancel()
        for writer in (to_client, to_service):
            writer.transport.abort()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pieces: int | None) -> None:
    with contextlib.suppress(OSError):
        while pieces != 0 and (data := await reader.read(1 << 16)):
            writer.write(data)
            pieces = pieces and pieces - 1


@contextlib.contextmanager
def tls_proxy(service: str, pem: Path, cuts: Sequence[int] = ()) -> Iterator[tuple[TlsProxy, str]]:
    """A proxy, and its ``host:port``; arguments are those of `TlsProxy`."""
    proxy, loop = TlsProxy(service, pem, cuts), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield proxy, asyncio.run_coroutine_threadsafe(proxy.open(), loop).result(60)
    finally:
        asyncio.run_coroutine_threadsafe(proxy.close(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
