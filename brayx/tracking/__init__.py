"""Trials in MLflow: projects, trials, their checkpoints, and the registry that the model pool uses.

The default store is one sqlite file. URIs are absolute, because Ray workers change directory. Knows nothing of Ray;
MLflow itself is imported when it is first used.
"""

from brayx.tracking.checkpoints import Checkpoint
from brayx.tracking.finding import children_of, find_trial
from brayx.tracking.registry import (
    PoolEntry,
    PoolModel,
    aliased,
    aliases,
    files_of,
    find,
    local_files,
    promote,
    register,
    registered_models,
    replaced,
    roll_back,
    tag,
)
from brayx.tracking.store import check_writable, initialise, tracking_uri
from brayx.tracking.trial import Status, Trial

__all__ = [
    "Checkpoint",
    "PoolEntry",
    "PoolModel",
    "Status",
    "Trial",
    "aliased",
    "aliases",
    "check_writable",
    "children_of",
    "files_of",
    "find",
    "find_trial",
    "initialise",
    "local_files",
    "promote",
    "register",
    "registered_models",
    "replaced",
    "roll_back",
    "tag",
    "tracking_uri",
]
