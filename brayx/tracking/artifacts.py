"""Files in MLflow's artifact store, by reference."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from brayx.temporary import temporary_folder
from brayx.tracking.store import client_of, telling


def local_folder(reference: str, uri: str) -> Path | None:
    """The folder that a reference names, if it is local; None: it is not, or there is no such folder.

    Args:
        reference: ``runs:/ID/PATH``, or an artifact URI.
        uri: tracking URI.
    """
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
    from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

    path = ""
    if match := re.fullmatch("runs:/([^/]+)/(.+)", reference):
        # Not by the repository of such URIs, which also copies local files.
        path = match[2]
        reference = client_of(uri).get_run(match[1]).info.artifact_uri
    repository = get_artifact_repository(reference, tracking_uri=uri)
    if not isinstance(repository, LocalArtifactRepository):
        return None
    folder = Path(repository.artifact_dir, path)
    return folder if folder.is_dir() else None


@contextlib.contextmanager
def files_at(reference: str, uri: str, what: str = "") -> Iterator[Path]:
    """The folder that a reference names, to read in a ``with`` block; a download goes with the block.

    Args:
        reference, uri: as for `local_folder`.
        what: what the folder is, in errors; empty: the reference.

    Raises:
        TrackingError: there is no such folder, or it cannot be read.
    """
    with temporary_folder("artifacts") as temporary:
        with telling(f"cannot read {what or reference}"):
            folder = local_folder(reference, uri)
            if folder is None:
                from mlflow.artifacts import download_artifacts

                folder = Path(download_artifacts(artifact_uri=reference, dst_path=str(temporary), tracking_uri=uri))
        yield folder
