"""Where recordings are: a path, an fsspec address such as ``s3://bucket/recordings``, or ``runs:/TRIAL/recordings`` for
those among the artifacts of a trial."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from brayx.errors import BadRecording

OF_TRIAL = "runs:/"


def absolute(address: str) -> str:
    """The same address with an absolute path, for other processes and folders."""
    if "://" in address or address.startswith(OF_TRIAL) or not address:
        return address
    return str(Path(address).expanduser().absolute())


def files_of(address: str) -> tuple[Any, str]:
    """The file system of an address, and the path in it; connects to nothing yet.

    Raises:
        BadRecording: the address is empty, or its protocol is unknown or lacks its package.
    """
    import fsspec  # takes 0.2 s, so a process that records to a path does without

    if not address:
        raise BadRecording("the address of recordings is empty: expected a folder", file=address)
    try:
        files, path = fsspec.core.url_to_fs(address)
    except ImportError as error:  # of the protocol's package; fsspec names it
        raise BadRecording(f"recordings at {address} cannot be reached: {error}", file=address) from None
    except ValueError as error:
        raise BadRecording(f"{address!r} is no address of recordings: {error}", file=address) from None
    files.invalidate_cache(path)  # a store in the cloud remembers its folders, and other processes write to them
    return files, str(path)
