"""Loads what serving loads, so that Python writes its caches: a replica on a read-only disk cannot.

Checks so, too, that an image has all that serving needs: it exports a network and asks MLflow's database.
"""

import tempfile

import mlflow
import numpy as np
import torch

import brayx.cluster.actor_app
import brayx.cluster.console
import brayx.cluster.serving
import brayx.commands.cli
import brayx.local.serving  # noqa: F401
import deployments.actor  # noqa: F401
from brayx import build_engine

build_engine("onnx", torch.nn.Linear(2, 2), (np.ones((1, 2), np.float32),))
with tempfile.TemporaryDirectory() as folder:
    mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db").search_registered_models()
