"""The model pool in MLflow's registry: registers checkpoints as versions, and finds them by alias or number."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from brayx.engines.base import LeafSpec, ModelSpec, check_finite, load_weights
from brayx.errors import BadWeights, ConfigError, ModelNotFound, nearest_version
from brayx.temporary import temporary_folder
from brayx.tracking.artifacts import files_at, local_folder
from brayx.tracking.checkpoints import Checkpoint
from brayx.tracking.lineage import LINEAGE_TAG, origins_in
from brayx.tracking.store import client_of, get_or_none, telling
from brayx.tracking.trial import Trial
from brayx.urls import missing_database

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

STEP_TAG = "brayx.step"
"""Tag of a version: the step of its checkpoint."""

CONTENT_TAG = "brayx.content"
"""Tag of a version: a digest of its weights. A trial resumed after a kill may save others at the same step."""

REPLACED_TAG = "brayx.replaced."
"""Prefix of the tags of a version that name, by alias, the version that the alias pointed to before it."""

CHECKPOINT_TAG = "brayx.checkpoint"
"""Tag of a version: where and when its checkpoint was saved. It identifies the checkpoint without reading its files."""

_ADVICE = "train one to its end with `brayx train CONFIG.yaml`, or `make demo`"


@dataclass(frozen=True)
class PoolEntry:
    """One registered version of a model.

    Attributes:
        name: name of the registered model.
        version: number of the version, from 1.
        source: location of its files, as MLflow stores it.
        run_id: the trial it came from.
        tags: its tags.
    """

    name: str
    version: int
    source: str
    run_id: str
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def reference(self) -> str:
        """``models:/NAME/VERSION``."""
        return f"models:/{self.name}/{self.version}"


def register(
    trial: Trial,
    checkpoint: Checkpoint,
    model_name: str,
    *,
    alias: str | None = "champion",
    tags: Mapping[str, str] | None = None,
    onnx: bytes | None = None,
    spec: ModelSpec | None = None,
    description: str = "",
) -> PoolEntry:
    """Puts a checkpoint into the pool as a version of ``model_name`` and points ``alias`` at it.

    Registering the same checkpoint again returns the same version and only moves the alias. A checkpoint of the same
    step with other weights is another version.

    Args:
        trial: trial with the checkpoint.
        checkpoint: the checkpoint; its files are copied, so that deleting checkpoints never affects the pool.
        model_name: name of the registered model, created if absent.
        alias: moved to this version; None moves none.
        tags: further tags of the version, besides its lineage: where the trial started from another model, ``parent``,
            ``parent_version`` and ``parent_step`` name that, and ``lineage`` that and all before it, as `lineage_text`.
        onnx: the model as an ONNX file; with it ``mlflow.onnx.load_model("models:/name@alias")`` works too.
        spec: inputs and outputs, which MLflow shows as the version's signature.
        description: a sentence or two about the version.

    Raises:
        TrackingError: the registry or the artifact store failed.
    """
    client = client_of(trial.uri)
    with telling(f"cannot register a checkpoint of trial {trial.name!r} as {model_name!r}"):
        known = _known(client, trial, model_name)
        saved = {CHECKPOINT_TAG: f"{checkpoint.artifact_path}@{checkpoint.saved_at_s!r}"}
        version = _having(known, saved)
        if version is None:
            files = trial.local(checkpoint)
            tags = {**{k: str(v) for k, v in (tags or {}).items()}, **saved}
            version = _register(client, trial, known, files, model_name, checkpoint.step, tags, onnx, spec, description)
        if alias is not None:
            _point(client, model_name, alias, int(version.version))
    return _entry(version)


def register_files(
    trial: Trial, files: Path, model_name: str, step: int, *, tags: Mapping[str, str], description: str = ""
) -> PoolEntry:
    """Puts a folder with ``weights.npz`` into the pool, as `register` does a checkpoint, without an alias.

    The same weights of the same trial and step are one version, however often they are registered.

    Raises:
        TrackingError: the registry or the artifact store failed.
    """
    client = client_of(trial.uri)
    with telling(f"cannot register weights of trial {trial.name!r} as {model_name!r}"):
        known = _known(client, trial, model_name)
        return _entry(_register(client, trial, known, files, model_name, step, tags, None, None, description))


def _known(client: MlflowClient, trial: Trial, model_name: str) -> list[ModelVersion]:
    """The trial's versions of a model; creates the model if it is absent."""
    if get_or_none(client.get_registered_model, model_name) is None:
        about = f"Policies of brayx's project {trial.project!r}. Alias `champion`: the one with the highest return."
        client.create_registered_model(model_name, description=about)
    all_versions = _versions(client, model_name)
    return [version for version in all_versions if version.run_id == trial.run_id]


def _register(
    client: MlflowClient,
    trial: Trial,
    known: list[ModelVersion],
    files: Path,
    model_name: str,
    step: int,
    tags: Mapping[str, str],
    onnx: bytes | None,
    spec: ModelSpec | None,
    description: str,
) -> ModelVersion:
    """The version with these files, made if it is not among ``known``."""
    content = {STEP_TAG: str(step), CONTENT_TAG: _content(files)}
    version = _having(known, content)
    if version is not None:
        return version
    artifact_path = f"models/{quote(model_name, safe='')}/{step:012d}-{content[CONTENT_TAG]}"
    with temporary_folder("register") as temporary:
        folder = temporary / "model"
        _save_for_mlflow(folder, onnx, spec)
        shutil.copytree(files, folder, dirs_exist_ok=True)
        client.log_artifacts(trial.run_id, str(folder), artifact_path)
    return client.create_model_version(
        model_name,
        source=f"runs:/{trial.run_id}/{artifact_path}",
        run_id=trial.run_id,
        tags={**_lineage(trial), **tags, **content},
        description=description or None,
    )


def find(reference: str, uri: str) -> PoolEntry:
    """The version that ``reference`` names.

    Args:
        reference: ``models:/name@alias``, ``models:/name/3``, or ``models:/name`` for the newest version.
        uri: tracking URI.

    Raises:
        ConfigError: ``reference`` has another form.
        ModelNotFound: no such model, alias or version; the message names the nearest, or what to run, and for a number
            ``details["known"]`` are those that there are, the 256 nearest at most.
        TrackingError: the registry could not be read.
    """
    match = re.fullmatch(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<version>\d+))?", reference)
    if match is None:
        raise ConfigError(f"model is {reference!r}, expected models:/name@alias, models:/name/version or models:/name")
    name, alias, number = match["name"], match["alias"], match["version"]
    if (path := missing_database(uri)) is not None:
        raise ModelNotFound(f"no model {name!r}: there is no MLflow database {path}; {_ADVICE}", reference=reference)
    with telling(f"cannot read the model registry of {uri}"):
        client = client_of(uri)
        model = get_or_none(client.get_registered_model, name)
        if model is None:
            # Only a hint, so one page of names will do.
            names = {other.name: other for other in client.search_registered_models()}
            raise ModelNotFound(
                f"no model {name!r} in the registry of {uri}{_nearest(name, names)}; {_ADVICE}", reference=reference
            )
        versions = sorted(_versions(client, name), key=lambda v: int(v.version))
        if alias is not None:
            aliases = {key: str(value) for key, value in model.aliases.items()}
            if alias not in aliases:
                raise ModelNotFound(
                    f"model {name!r} has no alias {alias!r}{_nearest(alias, aliases)}; {_ADVICE}", reference=reference
                )
            number = aliases[alias]
        chosen = [version for version in versions if number is None or str(version.version) == number]
        if not chosen:
            raise _no_version(reference, name, number, [int(version.version) for version in versions])
        return _entry(chosen[-1])


def versions(name: str, uri: str) -> list[PoolEntry]:
    """All versions of a model, the oldest first; empty: there is no such model.

    Raises:
        TrackingError: the registry could not be read.
    """
    with telling(f"cannot read the versions of model {name!r}"):
        entries = _versions(client_of(uri), name)
        return sorted(map(_entry, entries), key=lambda entry: entry.version)


def aliases(name: str, uri: str) -> dict[str, int]:
    """The versions of a model that its aliases point to; empty: there is no such model, or it has none.

    Raises:
        TrackingError: the registry could not be read.
    """
    if missing_database(uri) is not None:
        return {}
    with telling(f"cannot read the model registry of {uri}"):
        model = get_or_none(client_of(uri).get_registered_model, name)
        return {} if model is None else {alias: int(version) for alias, version in model.aliases.items()}


def aliased(prefix: str, alias: str, uri: str) -> list[PoolEntry]:
    """The versions that an alias points to, of all models whose names begin with ``prefix``.

    Raises:
        TrackingError: the registry could not be read.
    """
    if missing_database(uri) is not None:
        return []
    with telling(f"cannot read the model registry of {uri}"):
        client = client_of(uri)
        mark = '"' if "'" in prefix else "'"
        models = client.search_registered_models(f"name LIKE {mark}{prefix}%{mark}", max_results=1000)
        return [
            _entry(client.get_model_version(model.name, str(model.aliases[alias])))
            for model in models
            if model.name.startswith(prefix) and alias in model.aliases  # LIKE takes _ for any character
        ]


def promote(
    reference: str, uri: str, *, to: str = "champion", version: int | None = None
) -> tuple[PoolEntry, int | None]:
    """Points an alias at a version: `set_registered_model_alias`, once it is sure that services can take the version.

    Args:
        reference: as for `find`; without ``version`` it names the version.
        uri: tracking URI.
        to: the alias.
        version: instead of the reference's, which names the model alone then.

    Returns:
        The version that the alias points to now, and the one before; None: there was none.

    Raises:
        ConfigError: ``reference`` has another form, or ``to`` cannot be an alias.
        ModelNotFound: no such model, alias or version.
        BadWeights: the version's weights hold NaN or infinity, or cannot be read; the alias stays.
        TrackingError: the registry failed.
    """
    if not re.fullmatch(r"(?![vV]\d+$|latest$)[A-Za-z][\w-]{0,199}", to):
        raise ConfigError(
            f"alias {to[:80]!r} is invalid: expected at most 200 letters, digits, _ and -, but not v1 or latest"
        )
    if version is not None:
        name = re.match(r"models:/([^/@]+)", reference)
        reference = f"models:/{name[1]}/{version}" if name else reference
    entry = find(reference, uri)
    try:
        with files_of(f"models:/{entry.name}/{entry.version}", uri) as folder:  # an alias may have moved meanwhile
            check_finite(load_weights(folder / "weights.npz"))
    except BadWeights as error:
        raise BadWeights(f"version {entry.version} of model {entry.name!r}: {error.message}", **error.details) from None
    with telling(f"cannot promote {reference}"):
        before = _point(client_of(uri), entry.name, to, entry.version)
    return entry, before


def replaced(entry: PoolEntry, alias: str = "champion") -> int | None:
    """The version that ``alias`` pointed to before it pointed to this one; None: there was none."""
    number = entry.tags.get(f"{REPLACED_TAG}{alias}", "")
    return int(number) if number.isdigit() else None


def roll_back(name: str, uri: str, *, alias: str = "champion") -> tuple[PoolEntry, int]:
    """Points an alias back at the version before; again, at the one before that.

    Returns:
        The version that the alias points to now, and the one before the call.

    Raises:
        ModelNotFound: no such model, or the alias has no version, or had none before.
        TrackingError: the registry failed.
    """
    now = find(f"models:/{name}@{alias}", uri)
    before = replaced(now, alias)
    if before is None:
        message = f"model {name!r} has had no {alias} before version {now.version}: promote a version instead"
        raise ModelNotFound(message, reference=f"models:/{name}@{alias}")
    entry = find(f"models:/{name}/{before}", uri)
    with telling(f"cannot roll back {alias} of model {name!r}"):
        client_of(uri).set_registered_model_alias(name, alias, str(before))
    return entry, now.version


@dataclass(frozen=True)
class PoolModel:
    """A registered model.

    Attributes:
        name: its name.
        aliases: version by alias.
        versions: its versions, the newest first, each with the Unix time of its registration.
    """

    name: str
    aliases: Mapping[str, int]
    versions: Sequence[tuple[PoolEntry, float]]


def registered_models(uri: str) -> list[PoolModel]:
    """All models of the registry, by name; a thousand versions of each at most.

    Raises:
        TrackingError: the registry could not be read.
    """
    if missing_database(uri) is not None:
        return []
    with telling(f"cannot read the model registry of {uri}"):
        client = client_of(uri)
        models = []
        for model in client.search_registered_models():
            newest = sorted(_versions(client, model.name, most=1000), key=lambda version: -int(version.version))
            aliases = {alias: int(version) for alias, version in model.aliases.items()}
            models.append(PoolModel(model.name, aliases, [(_entry(v), v.creation_timestamp / 1e3) for v in newest]))
        return sorted(models, key=lambda model: model.name)


def _versions(client: MlflowClient, name: str, most: int = 10_000) -> list[ModelVersion]:
    """The versions of a model."""
    mark = '"' if "'" in name else "'"  # MLflow's filters have no escapes
    return list(client.search_model_versions(f"name = {mark}{name}{mark}", max_results=most))


def _point(client: MlflowClient, name: str, alias: str, version: int) -> int | None:
    """Points an alias at a version; returns the version before, and notes it on the new one for `roll_back`."""
    model = get_or_none(client.get_registered_model, name)
    before = None if model is None or alias not in model.aliases else int(model.aliases[alias])
    if before not in (None, version):
        client.set_model_version_tag(name, str(version), f"{REPLACED_TAG}{alias}", str(before))
    client.set_registered_model_alias(name, alias, str(version))  # last: if the note fails, the alias has not moved
    return before


def tag(name: str, version: int, tags: Mapping[str, str], uri: str) -> None:
    """Writes facts on a version.

    Raises:
        TrackingError: the registry failed.
    """
    with telling(f"cannot tag version {version} of model {name!r}"):
        for key, value in tags.items():
            client_of(uri).set_model_version_tag(name, str(version), key, value)


@contextlib.contextmanager
def files_of(reference: str, uri: str) -> Iterator[Path]:
    """A folder with the files of the version that ``reference`` names, to read in a ``with`` block.

    Where artifacts are local it is their own; else it is a download, which goes with the block. Arguments and errors as
    `find`.
    """
    entry = find(reference, uri)
    description = f"the files of {reference} (version {entry.version}) at {entry.source}"
    with files_at(entry.source, uri, description) as folder:
        yield folder


def local_files(entry: PoolEntry, uri: str) -> Path | None:
    """The folder that a version's files are in; None: they are not local, and `files_of` downloads them.

    Args:
        entry: the version.
        uri: tracking URI.

    Raises:
        TrackingError: the store could not be read.
    """
    with telling(f"cannot find the files of version {entry.version} of model {entry.name!r} at {entry.source}"):
        return local_folder(entry.source, uri)


def _having(versions: Iterable[ModelVersion], tags: Mapping[str, str]) -> ModelVersion | None:
    """The first that has all of ``tags``."""
    return next((version for version in versions if tags.items() <= version.tags.items()), None)


def _content(folder: Path) -> str:
    """A digest of a checkpoint's weights, or of all its files if it has no ``weights.npz``."""
    weights = folder / "weights.npz"
    files = [weights] if weights.is_file() else sorted(path for path in folder.rglob("*") if path.is_file())
    digest = hashlib.blake2b(digest_size=8)
    for path in files:
        with path.open("rb") as file:
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()


def _lineage(trial: Trial) -> dict[str, str]:
    """The tags of a version with the origin of its trial."""
    lineage = trial.tags().get(LINEAGE_TAG, "")
    for parent in origins_in(lineage)[:1]:
        numbers = {"parent_version": str(parent.version), "parent_step": str(parent.step)}
        return {"parent": parent.name, **numbers, "lineage": lineage}
    return {}


def _nearest(word: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if near:
        return f", nearest is {near[0]!r}"
    return f"; it has {', '.join(sorted(known)) or 'none'}"


def _no_version(reference: str, name: str, number: str | None, numbers: list[int]) -> ModelNotFound:
    """The error of a version ``number`` that is not among those ``there``."""
    if number is None or not numbers:
        return ModelNotFound(f"model {name!r} has no versions; {_ADVICE}", reference=reference, known=numbers)
    hint, details = nearest_version(int(number), numbers)
    return ModelNotFound(f"model {name!r} has no version {int(number)}, {hint}", reference=reference, **details)


def _entry(version: ModelVersion) -> PoolEntry:
    return PoolEntry(version.name, int(version.version), version.source or "", version.run_id or "", dict(version.tags))


def _save_for_mlflow(folder: Path, model: bytes | None, spec: ModelSpec | None) -> None:
    """Writes a version's files for MLflow's own tools: its signature, and the ONNX model if there is one."""
    from mlflow.models import Model, ModelSignature
    from mlflow.types import Schema, TensorSpec

    def schema(leaves: Iterable[LeafSpec]) -> Schema:
        return Schema([TensorSpec(leaf.dtype, (-1, *leaf.shape), leaf.path) for leaf in leaves])

    signature = None if spec is None else ModelSignature(schema(spec.inputs), schema(spec.outputs))
    if model is not None:
        import mlflow.onnx
        import onnx
        import onnxruntime

        # Named here, because MLflow would otherwise infer them in another process.
        requirements = [f"onnx=={onnx.__version__}", f"onnxruntime=={onnxruntime.__version__}"]
        parsed = onnx.load_model_from_string(model)
        mlflow.onnx.save_model(
            parsed, str(folder), pip_requirements=requirements, signature=signature, save_as_external_data=False
        )
    elif signature is not None:
        folder.mkdir()
        Model(signature=signature).save(str(folder / "MLmodel"))
