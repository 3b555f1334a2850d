"""Models that lost parts before another process used them, on a real Ray and Serve."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from datetime import timedelta

import numpy as np
import pytest
import ray
import torch

from brayx import RemoteModel
from brayx.cluster import remote_model as remote
from brayx.cluster.named import call_with_retry
from brayx.errors import DeadlineExceeded, ModelNotFound, QueueFull

# Workers cannot import this file: what it defines travels by value.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Scale(torch.nn.Module):
    """Answers with its one weight, so that a result shows which weights made it."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor([float(factor)]))

    def forward(self, x):
        return x * self.factor


EXAMPLE = (np.zeros((1, 1), np.float32),)
ONE = np.ones(1, np.float32)


def factor(value):
    return {"factor": np.array([value], np.float32)}


@pytest.mark.cluster
def test_a_model_in_local_mode_continues_from_its_checkpoint_when_its_weights_are_gone(ray_cluster, tracking_db):
    model = RemoteModel(
        "left", Scale(1), EXAMPLE, local_mode=True, checkpoint_interval=timedelta.resolution, tracking=tracking_db,
        engine="torch",
    )  # fmt: skip
    assert model.publish_weights(factor(6), step=40) == 2
    model.close()
    os.kill(call_with_retry(model._store.pid), signal.SIGKILL)
    again = RemoteModel("left")
    assert again(ONE) == 6
    assert (again.version, again.step) == (2, 40)
    assert again.publish_weights(factor(7)) == 3
    again.delete()


@pytest.mark.parametrize("error", [KeyboardInterrupt, DeadlineExceeded])
def test_a_start_interrupted_at_once_leaves_the_name_free(ray_cluster, monkeypatch, error):
    def interrupted(store, timeout_s):
        raise error("while the store starts")

    with monkeypatch.context() as patched:
        patched.setattr(remote, "recipe_of", interrupted)
        with pytest.raises(error):
            RemoteModel("early", Scale(1), EXAMPLE, local_mode=True)
    with pytest.raises(ModelNotFound):
        RemoteModel("early")


def test_a_late_start_that_is_interrupted_ends_nothing_of_the_first(ray_cluster, monkeypatch):
    first = RemoteModel("first", Scale(3), EXAMPLE, local_mode=True, engine="torch")

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(remote, "find", lambda name: None)  # as it was when this one looked
        patched.setattr(remote, "process_model", interrupted)
        with pytest.raises(KeyboardInterrupt):
            RemoteModel("first", Scale(4), EXAMPLE, local_mode=True)
    assert RemoteModel("first")(ONE) == 3
    first.delete()


async def test_a_model_and_its_clones_have_its_batching_options(ray_cluster):
    options = {"max_wait_ms": 5, "max_queue": 2, "threads": 2}
    made = await RemoteModel.connect("batched", Scale(1), EXAMPLE, local_mode=True, **options)
    clone = await asyncio.to_thread(made.clone)
    for model in (made, clone):
        config = model._recipe.config
        assert (config.max_wait_ms, config.max_queue, config.threads) == (5, 2, 2)
        results = await asyncio.gather(*[model.forward(ONE) for _ in range(3)], return_exceptions=True)
        assert [isinstance(result, QueueFull) for result in results] == [False, False, True]
        await asyncio.to_thread(model.delete)
