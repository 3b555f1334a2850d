"""A model in process on real engines: results, hot swaps without mixing, refusals."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
import time
import warnings

import numpy as np
import pytest
import torch

from brayx.engines.onnx import OnnxEngine
from brayx.engines.torch import TorchEngine, module_weights
from brayx.errors import (
    BadBody,
    BadWeights,
    BodyTooLarge,
    DeadlineExceeded,
    ModelError,
    QueueFull,
    ShapeMismatch,
    VersionUnknown,
)
from brayx.model.local import LocalModel
from brayx.model.snapshots import SnapshotFiles
from tests.waiting import WAIT_S, until_awaited


class Scale(torch.nn.Module):
    """Returns its one weight, so that a result shows which weights computed it."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(1))

    def forward(self, obs):
        return {"scaled": obs["x"] * self.factor, "factor": obs["x"][:, 0] * 0 + self.factor}


EXAMPLE = ({"x": np.zeros((1, 3), np.float32)},)
OBS = {"x": np.array([1, 2, 3], np.float32)}


@pytest.fixture(scope="module")
def onnx_scale():
    return OnnxEngine(Scale(), EXAMPLE)


@pytest.fixture(params=["onnx", "cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(request, onnx_scale):
    return onnx_scale if request.param == "onnx" else TorchEngine(Scale(), EXAMPLE, device=request.param)


@pytest.fixture
async def make():
    made = []

    def build(*args, **options):
        made.append(LocalModel(*args, **options))
        return made[-1]

    yield build
    for model in made:
        await model.close()


class Masked(torch.nn.Module):
    """Two heads whose masks are part of the observation, and a state."""

    is_recurrent = True

    def forward(self, obs, state):
        logits = torch.where(obs["action_mask"] > 0, obs["x"], torch.full_like(obs["x"], -3e4))
        return {"logits": (logits[:, :2], logits[:, 2:]), "state": {"h": state["h"] + 1}}


def masked(x=(0.0, 1.0, 2.0, 3.0, 4.0), mask=(1, 1, 1, 1, 1), h=0.0):
    obs = {"x": np.array(x, np.float32), "action_mask": np.array(mask, np.int8)}
    return obs, {"h": np.array([h], np.float32)}


def batched(args):
    obs, state = args
    return {name: leaf[None] for name, leaf in obs.items()}, {"h": state["h"][None]}


async def test_only_the_bad_observation_of_a_batch_is_refused(make):
    model = make(TorchEngine(Masked(), batched(masked())), max_batch_size=-8, inline_below_s=0.0)
    good = masked(mask=(0, 1, 1, 0, 0))
    rows = [
        good,
        masked(x=(0, 0, np.nan, 0, 0)),
        masked(x=(0, -np.inf, 0, 0, 0)),
        masked(mask=(1, 1, 0, 0, 0)),
        masked(mask=(0, 0, 0, 1, 0)),
        good,
    ]
    results = await asyncio.gather(*(model.forward(*row) for row in rows), return_exceptions=True)
    for result in (results[0], results[5]):
        assert [head.argmax() for head in result.outputs["logits"]] == [1, 0]
    assert [str(error) for error in results[1:5]] == [
        "obs/x[2] is nan, expected a finite number",
        "obs/x[1] is -inf, expected a finite number",
        "obs/action_mask allows none of the 3 actions of head 1, expected one or more",
        "obs/action_mask allows none of the 2 actions of head 0, expected one or more",
    ]
    assert {type(error) for error in results[1:5]} == {BadBody}
    alone = await asyncio.gather(model.forward(*rows[1]), model.forward(*rows[3]), return_exceptions=True)
    assert [str(error) for error in alone] == [str(results[1]), str(results[3])]
    state_of_model = await model.forward(*masked(h=np.inf))  # not the game's fault: training reports it
    assert np.isinf(state_of_model.outputs["state"]["h"])


@pytest.mark.parametrize("size", [4, 40])
async def test_large_finite_numbers_are_accepted(make, size):
    engine = TorchEngine(torch.nn.Identity(), (np.zeros((1, size), np.float32),))
    model = make(engine)
    largest = np.full(size, np.finfo(np.float32).max)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # their squares overflow
        assert ((await model.forward(largest)).outputs == largest).all()
        largest[-1] = np.nan
        with pytest.raises(BadBody, match=rf"\[{size - 1}\] is nan"):
            await model.forward(largest)


class Counting:
    """An engine that counts its runs."""

    def __init__(self, engine) -> None:
        self.runs, self._engine = 0, engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def run(self, bound, inputs):
        self.runs += 1
        return self._engine.run(bound, inputs)


def factor(value):
    return {"factor": np.array([value], np.float32)}


async def test_forward_of_one_and_of_many(make, engine):
    model = make(engine)
    alone = await model.forward(OBS)
    np.testing.assert_array_equal(alone.outputs["scaled"], [1, 2, 3])
    assert alone.policy_version == 0
    assert alone.outputs["factor"].shape == ()
    together = await asyncio.gather(*[model.forward({"x": np.full(3, i, np.float32)}) for i in range(10)])
    for i, forward in enumerate(together):
        np.testing.assert_array_equal(forward.outputs["scaled"], [i, i, i])


async def test_load_swaps_weights_and_version_together(make, engine):
    model = make(engine, weights=factor(5), version=3)
    assert (await model.forward(OBS)).policy_version == 3
    model.load(4, factor(7))
    forward = await model.forward(OBS)
    assert forward.policy_version == model.version == 4
    assert forward.outputs["factor"] == 7


async def test_a_refused_load_leaves_the_weights_in_use(make, engine):
    model = make(engine)
    with pytest.raises(BadWeights, match="factor"):
        model.load(1, {"factor": np.ones(2, np.float32)})
    assert (await model.forward(OBS)).policy_version == 0


@contextlib.asynccontextmanager
async def swapping(model):
    """Loads a new version in each turn of the event loop."""
    over = asyncio.Event()

    async def swap():
        for version in itertools.takewhile(lambda _: not over.is_set(), itertools.count(1)):
            model.load(version, factor(version))
            await asyncio.sleep(0)

    swapper = asyncio.create_task(swap())
    yield
    over.set()
    await swapper


async def test_results_never_mix_versions_under_swaps(make, engine):
    batches = []
    model = make(engine, max_batch_size=8, weights=factor(0), on_batch=lambda rows, *_: batches.append(rows))

    async def act():
        last = 0
        for _ in range(50):
            forward = await model.forward(OBS)
            assert forward.outputs["factor"] == forward.policy_version
            assert forward.policy_version >= last
            last = forward.policy_version

    async with swapping(model):
        await asyncio.gather(*[act() for _ in range(16)])
    assert max(batches) == 8
    assert model.version > 5


async def test_a_mismatch_is_refused_before_it_is_batched(make, engine):
    batches = []
    model = make(engine, on_batch=lambda rows, *_: batches.append(rows))
    results = await asyncio.gather(
        model.forward(OBS), model.forward({"x": np.zeros(4)}), model.forward(OBS), return_exceptions=True
    )
    assert isinstance(results[1], ShapeMismatch)
    assert "x: [4] float64" in results[1].message
    assert results[0].outputs["factor"] == results[2].outputs["factor"] == 1
    assert batches == [2]


async def test_closed_model_refuses(make, engine):
    model = make(engine)
    await model.forward(OBS)
    await model.close()
    with pytest.raises(ModelError, match="closed"):
        await model.forward(OBS)


def numbered(make, engine, newest, **options):
    """A model with versions 1 to ``newest``, whose factor is their number."""
    model = make(engine, weights=factor(0), **options)
    for version in range(1, newest + 1):
        model.load(version, factor(version))
    return model


async def test_each_forward_gets_the_version_it_asked_for(make, engine):
    batches = []
    model = numbered(make, engine, 64, max_versions=64, on_batch=lambda rows, *_: batches.append(rows))
    versions = [1 + i % 64 for i in range(256)]
    forwards = await asyncio.gather(*[model.forward(OBS, version=version) for version in versions])
    for version, forward in zip(versions, forwards, strict=True):
        assert forward.policy_version == forward.outputs["factor"] == version
    assert batches == [4] * 64, "one batch for each version"
    assert (await model.forward(OBS)).policy_version == 64


async def test_an_unknown_version_names_the_nearest(make, engine):
    model = numbered(make, engine, 3, max_versions=2)
    with pytest.raises(VersionUnknown, match="version 9") as unknown:
        await model.forward(OBS, version=9)
    assert unknown.value.details == {"version": 9, "nearest": 3, "known": [2, 3]}
    with pytest.raises(VersionUnknown) as unknown:
        model.pinned(1)
    assert unknown.value.details["nearest"] == 2


async def test_a_missing_version_is_fetched_once_and_kept(make, engine):
    fetched = []

    async def fetch(version):
        fetched.append(version)
        await asyncio.sleep(0)
        if version > 100:
            raise VersionUnknown("no", known=[50, 90])
        return factor(version)

    model = numbered(make, engine, 3, max_versions=2, fetch=fetch)
    forwards = await asyncio.gather(*[model.forward(OBS, version=50) for _ in range(8)])
    assert {(f.policy_version, float(f.outputs["factor"])) for f in forwards} == {(50, 50.0)}
    await model.forward(OBS, version=50)
    assert fetched == [50]
    assert model.version == 3, "the newest is the last one loaded"
    with pytest.raises(VersionUnknown, match="nearest is 90; there are 3, 50, 90"):
        await model.forward(OBS, version=101)


async def test_a_hanging_fetch_has_the_forwards_deadline_and_ends_with_the_model(make, engine):
    async def fetch(version):
        await asyncio.sleep(60)

    model = numbered(make, engine, 1, fetch=fetch, deadline_s=0.05)
    with pytest.raises(DeadlineExceeded, match="version 7 was not fetched"):
        await model.forward(OBS, version=7)
    waiting = asyncio.create_task(model.forward(OBS, version=7))
    await asyncio.sleep(0)
    await model.close()
    with pytest.raises(ModelError, match="closed"):
        await waiting


async def test_a_snapshot_that_is_being_read_holds_up_no_other_version(make, engine, tmp_path):
    files = SnapshotFiles(tmp_path)
    model = numbered(make, engine, 3, max_versions=2, fetch=files.get)
    os.mkfifo(files.path(7))  # reading it lasts until something is written
    missing = asyncio.create_task(model.forward(OBS, version=7))
    with await asyncio.to_thread(files.path(7).open, "wb") as pipe:  # opens once it is read
        for version in (2, 3, None):
            assert (await model.forward(OBS, version=version)).policy_version == (version or 3)
        files.put(8, factor(8.0))
        assert (await model.forward(OBS, version=8)).outputs["factor"] == 8.0
        assert not missing.done()
        pipe.write(files.path(8).read_bytes())
    assert (await missing).outputs["factor"] == 8.0


async def test_versions_that_are_not_ready_wait_for_each_other_and_not_forever(make, engine):
    running = most = 0
    go = asyncio.Event()

    async def fetch(version):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await go.wait()
        running -= 1
        return factor(version)

    model = numbered(make, engine, 1, max_versions=2, fetch=fetch, max_queue=50)
    forwards = [asyncio.create_task(model.forward(OBS, version=version)) for version in range(2, 52)]
    await until_awaited(lambda: running == 16, "as many are fetched as may be at the same time")
    with pytest.raises(QueueFull, match="50 policy versions"):
        await model.forward(OBS, version=52)
    with pytest.raises(DeadlineExceeded, match="version 51 was not fetched"):
        await model.forward(OBS, version=51, deadline_s=0.01)
    go.set()
    assert [float((await forward).outputs["factor"]) for forward in forwards] == list(range(2, 52))
    assert most == 16


async def test_a_pinned_handle_keeps_its_version(make, engine):
    model = numbered(make, engine, 1, max_versions=1)
    pinned = model.pinned()
    for version in range(2, 6):
        model.load(version, factor(version))
    mine, theirs = await asyncio.gather(pinned.forward(OBS), model.forward(OBS))
    assert pinned.version == mine.policy_version == mine.outputs["factor"] == 1
    assert theirs.policy_version == 5
    assert (await model.pinned(1).forward(OBS)).policy_version == 1, "another handle may pin the same version"


async def test_pinned_sessions_of_one_version_share_batches(make, engine):
    batches = []
    model = numbered(make, engine, 2, on_batch=lambda rows, *_: batches.append(rows))
    handles = [model.pinned() for _ in range(5)]
    await asyncio.gather(*[handle.forward(OBS) for handle in handles])
    assert batches == [5]


async def test_swaps_never_affect_running_batches_pinned_or_not(make, engine):
    model = make(engine, max_batch_size=4, weights=factor(0))

    async def session():
        for _ in range(10):
            pinned = model.pinned()
            for _ in range(5):
                forward = await pinned.forward(OBS)
                assert forward.policy_version == forward.outputs["factor"] == pinned.version
                forward = await model.forward(OBS)
                assert forward.policy_version == forward.outputs["factor"] >= pinned.version

    async with swapping(model):
        await asyncio.gather(*[session() for _ in range(8)])


async def test_a_fixed_batch_size_is_what_the_engine_sees(make, engine, monkeypatch):
    seen = []
    run = engine.run
    monkeypatch.setattr(engine, "run", lambda bound, inputs: (seen.append(len(inputs[0])), run(bound, inputs))[1])
    model = make(engine, max_batch_size=-8)
    await asyncio.gather(*[model.forward(OBS) for _ in range(11)])
    assert seen == [8, 8]


@pytest.mark.parametrize("count", [1, 3, 4, 8, 9, 20])
async def test_columns_give_the_same_results_as_rows(make, engine, count):
    """Half a batch or more is a call of its own, fewer rows join others, and more than a batch is several calls."""
    batches = []
    model = make(engine, max_batch_size=8, max_versions=3, on_batch=lambda rows, *_: batches.append(rows))
    model.load(1, factor(3))
    model.load(2, factor(5))
    x = np.arange(6 * count, dtype=np.float32).reshape(2 * count, 3)[::2]  # not contiguous
    others = [model.forward(OBS) for _ in range(4)]
    (outputs, versions), (older, old_versions), *rows = await asyncio.gather(
        model.forward_columns([x]), model.forward_columns([x], version=1), *others
    )
    named = dict(zip([leaf.path for leaf in model.spec.outputs], outputs, strict=True))
    np.testing.assert_array_equal(named["scaled"], x * 5)
    named = dict(zip([leaf.path for leaf in model.spec.outputs], older, strict=True))
    np.testing.assert_array_equal(named["scaled"], x * 3)
    assert (versions.tolist(), old_versions.tolist()) == ([2] * count, [1] * count)
    assert all((row.outputs["scaled"] == [5, 10, 15]).all() for row in rows)
    assert sum(batches) == 2 * count + 4
    assert max(batches) <= 8
    if 4 <= count <= 8:
        assert sorted(batches) == sorted([count, count, 4])


@pytest.mark.parametrize(("count", "calls"), [(64, [64]), (65, [64, 1]), (1025, [64] * 16 + [1])])
async def test_a_batch_of_any_size_is_few_calls_of_the_engine(make, engine, count, calls):
    """With default options: the queue holds 1024 rows, and it is empty."""
    batches = []
    model = make(engine, on_batch=lambda rows, *_: batches.append(rows))
    x = np.arange(3 * count, dtype=np.float32).reshape(count, 3)
    outputs, versions = await model.forward_columns([x])
    np.testing.assert_array_equal(outputs[1], x)
    assert (batches, versions.tolist()) == (calls, [0] * count)


async def test_a_batch_does_not_wait_for_others_between_its_calls(make, engine):
    model = make(engine, max_wait_s=30)
    async with asyncio.timeout(60):
        outputs, _ = await model.forward_columns([np.ones((200, 3), np.float32)])
    assert len(outputs[0]) == 200


async def test_a_batch_that_never_fits_is_not_reported_as_overload(make, engine):
    model = make(engine, max_batch_size=4, max_queue=3)
    outputs, _ = await model.forward_columns([np.ones((12, 3), np.float32)])
    assert len(outputs[0]) == 12
    with pytest.raises(BodyTooLarge, match="13 observations") as refused:
        await model.forward_columns([np.ones((13, 3), np.float32)])
    assert refused.value.details == {"max_rows": 12}


async def test_a_batch_may_be_larger_than_the_queue(make, engine):
    """Fewer rows than half a batch, but more than the queue holds."""
    outputs, _ = await make(engine, max_queue=1).forward_columns([np.ones((3, 3), np.float32)])
    assert len(outputs[0]) == 3


class Gated:
    """Runs the newest weights only as often as the test releases it."""

    def __init__(self, model, slow_s=0.0) -> None:
        self._run, self._slow_s = model._versions.newest.run, slow_s
        self.sizes = []
        self.turns = threading.Semaphore(0)
        model._versions.newest.run = self

    def __call__(self, inputs):
        time.sleep(self._slow_s)
        assert self.turns.acquire(timeout=30)
        self.sizes.append(len(inputs[0]))
        return self._run(inputs)


@pytest.fixture
async def gated(make, onnx_scale):
    model = make(onnx_scale, max_batch_size=4, max_queue=3, inline_below_s=0)
    gate = Gated(model)
    yield model, gate
    gate.turns.release(1000)


async def test_others_are_served_between_the_calls_of_a_batch(gated):
    model, gate = gated
    large = asyncio.create_task(model.forward_columns([np.ones((12, 3), np.float32)]))
    await asyncio.sleep(0)
    others = [asyncio.create_task(model.forward(OBS)) for _ in range(2)]
    gate.turns.release(2)
    for forward in await asyncio.gather(*others):
        np.testing.assert_array_equal(forward.outputs["scaled"], [1, 2, 3])
    assert not large.done()
    gate.turns.release(2)
    assert len((await large)[0][0]) == 12
    assert gate.sizes == [4, 2, 4, 4] or gate.sizes == [4, 4, 2, 4], "others run before the batch's last call"


async def test_a_batch_has_one_deadline(gated):
    model, gate = gated
    gate.turns.release(2)
    with pytest.raises(DeadlineExceeded):
        await model.forward_columns([np.ones((12, 3), np.float32)], deadline_s=0.2)


async def test_a_batch_has_one_deadline_even_if_its_calls_block_the_event_loop(make, onnx_scale):
    model = make(onnx_scale, max_batch_size=4, inline_below_s=1e9)
    gate = Gated(model, slow_s=0.03)
    gate.turns.release(10)
    with pytest.raises(DeadlineExceeded):
        await model.forward_columns([np.ones((40, 3), np.float32)], deadline_s=0.05)
    assert len(gate.sizes) < 10


async def test_a_full_queue_refuses_a_batch(gated):
    model, _ = gated
    waiting = [asyncio.create_task(model.forward_columns([np.ones((4, 3), np.float32)])) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await model.forward_columns([np.ones((12, 3), np.float32)])
    for task in waiting:
        task.cancel()


@pytest.mark.parametrize("batch_size", [8, -8])
async def test_rows_of_one_caller_are_one_call_of_the_newest_version(make, engine, batch_size):
    batches = []
    options = {"max_batch_size": batch_size, "inline_below_s": 10.0}
    model = make(engine, on_batch=lambda rows, *_: batches.append(rows), **options)
    x = np.arange(9, dtype=np.float32).reshape(3, 3)
    for version in (1, 2, 3):  # the first call is timed, so it runs in the thread
        model.load(version, factor(version))
        outputs, versions = await model.as_caller().forward_rows({"x": x.astype(np.float64)})
        np.testing.assert_array_equal(outputs["scaled"], x * version)
        assert versions.tolist() == [version] * 3
    many, _ = await model.forward_rows({"x": np.tile(x, (4, 1))})
    np.testing.assert_array_equal(many["scaled"], np.tile(x * 3, (4, 1)))
    together = await asyncio.gather(model.forward(OBS), model.forward_rows({"x": x}), model.forward(OBS))
    np.testing.assert_array_equal(together[1].outputs["scaled"], x * 3)
    assert sum(batches) == 3 * 3 + 12 + 5, "metrics count requested rows"
    with pytest.raises(BadBody, match=r"obs/x\[1, 0\] is nan"):
        await model.forward_rows({"x": np.array([[0, 0, 0], [np.nan, 0, 0]], np.float32)})
    with pytest.raises(ShapeMismatch):
        await model.forward_rows({"x": np.zeros((2, 4), np.float32)})


@pytest.mark.parametrize(
    ("count", "options", "seen"),
    [
        (6, {"max_batch_size": -8}, [8]),
        (8, {"max_batch_size": -8}, [8]),
        (17, {"max_batch_size": -8}, [8, 8, 8]),
        (1025, {"max_batch_size": -512}, [512, 512, 512]),
    ],
)
async def test_columns_are_padded_like_batches(make, engine, count, options, seen):
    sizes, batches = [], []
    model = make(engine, on_batch=lambda rows, *_: batches.append(rows), **options)
    whole = model._versions.newest.run
    model._versions.newest.run = lambda leaves: sizes.append(len(leaves[0])) or whole(leaves)
    x = np.arange(3 * count, dtype=np.float32).reshape(count, 3)
    outputs, _ = await model.forward_columns([x])
    assert sizes == seen
    np.testing.assert_array_equal(outputs[1], x)
    assert sum(batches) == count, "metrics count requested rows"


async def test_columns_of_a_slow_model_do_not_block_the_event_loop(make):
    """Calls of one row are fast enough for the loop; calls with many rows are timed separately."""
    threads = []

    class Who(Scale):
        def forward(self, obs):
            threads.append(threading.current_thread())
            return super().forward(obs)

    model = make(TorchEngine(Who(), EXAMPLE), inline_below_s=1e-2)
    async with asyncio.timeout(WAIT_S):
        while threading.current_thread() not in threads:  # the first calls may be slow
            await model.forward(OBS)
    await model.forward_columns([np.ones((64, 3), np.float32)])
    assert threads[-1] is not threading.current_thread()


async def test_a_swapped_engine_serves_every_version_from_the_next_batch_on(make, onnx_scale):
    first, second = Counting(TorchEngine(Scale(), EXAMPLE)), Counting(onnx_scale)
    model = make(first, max_versions=2)
    model.load(1, factor(3.0))
    pinned = model.pinned(1)
    for version in (2, 3, 4):
        model.load(version, factor(version))
    assert (await pinned.forward(OBS)).outputs["factor"] == 3.0
    assert (first.runs, second.runs) == (1, 0)
    model.swap(second, module_weights)
    assert model.version == 4
    for handle, value, version in ((model, 4.0, 4), (model.pinned(3), 3.0, 3), (pinned, 3.0, 1)):
        made = await handle.forward(OBS)
        assert (made.outputs["factor"], made.policy_version) == (value, version)
    model.load(5, factor(5.0))
    assert (await model.forward(OBS)).outputs["factor"] == 5.0
    assert (first.runs, second.runs) == (1, 4)


async def test_a_version_fetched_during_a_swap_is_bound_to_the_new_engine(make, onnx_scale):
    """Binding does not block forwards, so a fetch and a swap may bind at the same time."""
    first, second = Counting(TorchEngine(Scale(), EXAMPLE)), Counting(onnx_scale)

    async def fetch(version):
        fetched.set()
        return factor(version)

    def weights_of(bound):
        assert may_swap.wait(WAIT_S)
        return module_weights(bound)

    fetched, may_swap = asyncio.Event(), threading.Event()
    model = make(first, fetch=fetch)
    swap = asyncio.create_task(asyncio.to_thread(model.swap, second, weights_of))
    await until_awaited(model._versions._binding.locked, "it is being swapped")
    pin = asyncio.create_task(model.pin(7))
    await fetched.wait()
    assert (await model.forward(OBS)).outputs["factor"] == 1.0
    may_swap.set()
    await swap
    assert (await (await pin).forward(OBS)).outputs["factor"] == 7.0
    assert (first.runs, second.runs) == (1, 1)


async def test_a_swap_to_another_model_or_mismatched_weights_changes_nothing(make, engine):
    model = make(engine)
    other = TorchEngine(torch.nn.Linear(2, 2), (np.zeros((1, 2), np.float32),))
    with pytest.raises(ModelError, match="cannot replace the engine"):
        model.swap(other, module_weights)
    with pytest.raises(BadWeights):
        model.swap(Counting(engine), lambda bound: {"factor": np.zeros(2, np.float32)})
    model.load(1, factor(2.0))
    outputs, version = await model.forward(OBS)
    assert (outputs["factor"], version, model._versions._engine) == (2.0, 1, engine)
