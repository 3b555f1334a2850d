"""Loads what serving and Ray's own processes load, so that Python writes its caches: on a read-only disk they cannot.

Checks so, too, that an image has all that serving needs: it exports a network and asks MLflow's database.
"""

import tempfile

import mlflow
import numpy as np
import ray._private.log_monitor
import ray._private.runtime_env.agent.main
import ray.autoscaler._private.monitor
import ray.dashboard.agent
import ray.dashboard.dashboard
import ray.dashboard.modules.serve.serve_head
import ray.serve._private.controller
import ray.serve._private.proxy
import ray.serve.scripts  # noqa: F401
import torch

import brayx.cluster.actor_app
import brayx.cluster.console
import brayx.cluster.serving
import brayx.commands.cli
import brayx.console.serve
import brayx.local.serving  # noqa: F401
import deployments.actor  # noqa: F401
from brayx import build_engine

build_engine("onnx", torch.nn.Linear(2, 2), (np.ones((1, 2), np.float32),))
with tempfile.TemporaryDirectory() as folder:
    mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db").search_registered_models()
