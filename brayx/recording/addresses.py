"""Addresses of recordings: a path, an fsspec address such as ``s3://bucket/recordings``, or ``runs:/TRIAL/recordings``
for those among the artifacts of a trial."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from brayx.errors import BadRecording

OF_TRIAL = "runs:/"


def absolute(address: str) -> str:
    """The address with an absolute path, for processes in other folders."""
    if "://" in address or address.startswith(OF_TRIAL) or not address:
        return address
    return str(Path(address).expanduser().absolute())


def files_of(address: str) -> tuple[Any, str]:
    """The file system of an address, and the path in it. Does not connect yet.

    Raises:
        BadRecording: the address is empty, or its protocol is unknown or lacks its package.
    """
    import fsspec  # takes 0.2 s, and a process that records to a path does not need it

    if not address:
        raise BadRecording("the address of recordings is empty: expected a folder", file=address)
    try:
        files, path = fsspec.core.url_to_fs(address)
    except ImportError as error:  # the protocol's package is missing; fsspec names it
        raise BadRecording(f"recordings at {address} cannot be reached: {error}", file=address) from None
    except ValueError as error:
        raise BadRecording(f"{address!r} is not an address of recordings: {error}", file=address) from None
    files.invalidate_cache(path)  # fsspec caches listings of cloud stores, which other processes write to
    return files, str(path)
