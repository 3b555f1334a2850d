"""The pool of weight sets: what is kept, dropped and refused; and the memory of a version."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch

from brayx.engines.torch import TorchEngine
from brayx.errors import BadWeights, Overloaded, VersionUnknown
from brayx.model.versions import Versions, version_unknown


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(request):
    return TorchEngine(torch.nn.Linear(2, 1), (np.zeros((1, 2), np.float32),), device=request.param)


def weights(value):
    return {"weight": np.full((1, 2), value, np.float32), "bias": np.zeros(1, np.float32)}


def filled(engine, newest, **options):
    versions = Versions(engine, **options)
    for version in range(1, newest + 1):
        versions.load(version, weights(version))
    return versions


def test_the_newest_is_first_and_few_are_kept(engine):
    versions = filled(engine, 5, keep=3)
    assert versions.newest.version == 5
    assert versions.known() == [3, 4, 5]
    with pytest.raises(VersionUnknown, match=r"version 2, .* 3; .*3, 4, 5") as unknown:
        versions.get(2)
    assert unknown.value.details == {"version": 2, "nearest": 3, "known": [3, 4, 5]}


def test_the_least_recently_used_is_dropped_and_never_the_newest(engine):
    versions = filled(engine, 3, keep=3)
    versions.get(1)
    versions.get(2)
    versions.get(1)
    versions.load(4, weights(4))
    assert versions.known() == [1, 3, 4]
    versions.add(2, weights(2))
    assert versions.known() == [2, 3, 4]
    for version in (7, 8, 9):
        versions.add(version, weights(version))
    assert versions.newest.version == 4
    assert 4 in versions.known()


def test_a_dropped_version_is_freed(engine):
    versions = filled(engine, 1, keep=1)
    first = weakref.ref(versions.newest)
    versions.load(2, weights(2))
    gc.collect()
    assert first() is None


def test_a_pinned_version_survives_until_its_holder_is_gone(engine):
    versions = filled(engine, 1, keep=2)
    pinned = versions.pin()
    for version in range(2, 9):
        versions.load(version, weights(version))
    assert versions.get(1) is pinned
    assert versions.pin(1) is pinned
    assert versions.known() == [1, 7, 8]
    del pinned
    gc.collect()
    assert versions.known() == [7, 8]


def test_pins_are_bounded(engine):
    versions = filled(engine, 1, keep=1, max_pinned=2)
    pins = []
    for version in (2, 3, 4):
        pins.append(versions.pin())
        versions.load(version, weights(version))
        if version == 3:
            assert versions.known() == [1, 2, 3]
            with pytest.raises(Overloaded, match="2 policy versions"):
                versions.pin()
            pins.pop()
            gc.collect()
    assert versions.known() == [1, 3, 4]


def test_adding_a_known_version_changes_nothing(engine):
    versions = filled(engine, 2, keep=2)
    assert versions.add(2, weights(9)) is versions.newest
    first = versions.get(1)
    assert versions.add(1, weights(9)) is first


def test_mismatched_weights_change_nothing(engine):
    versions = filled(engine, 1)
    with pytest.raises(BadWeights, match="weight"):
        versions.load(2, {"weight": np.zeros(3, np.float32), "bias": np.zeros(1, np.float32)})
    assert versions.known() == [0, 1]


def test_the_nearest_is_named():
    assert version_unknown(7, [1, 5, 9]).details["nearest"] == 9, "the newer of two equally near ones"
    assert version_unknown(6, [1, 5, 9]).details["nearest"] == 5
    assert "and no other" in version_unknown(6, []).message
    many = version_unknown(500, range(400))
    assert many.details["nearest"] == 399
    assert len(many.message) < 200
    known = version_unknown(3, {0, 1, *range(5, 400)}).details["known"]
    assert known[:4] == [0, 1, 5, 6], "only the nearest of many"
    assert len(known) == 256


GROWTH = """
import numpy as np, psutil, torch
from brayx.engines.onnx import OnnxEngine
from brayx.model.versions import Versions

module = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512))
example = np.zeros((1, 512), np.float32)
engine = OnnxEngine(module, (example,), verify_outputs=False)
versions = Versions(engine, keep=65)
size = sum(array.nbytes for array in engine.initial.values())

def use(version):
    for batch in (1, 16):
        versions.get(version).run([np.ones((batch, 512), np.float32)])

def fill(first, last):
    for version in range(first, last):
        versions.load(version, {name: array + version for name, array in engine.initial.items()})
        use(version)

fill(1, 5)
before = psutil.Process().memory_info().rss
fill(5, 65)
for version in range(1, 65):
    use(version)
assert versions.known() == list(range(65))
print((psutil.Process().memory_info().rss - before) / (60 * size))
"""


@pytest.mark.slow  # a process of its own, whose memory is measured
def test_a_version_takes_the_memory_of_its_weights():
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert 0.8 < float(done.stdout) < 1.15, "growth for a version, in weights (4 MB)"
