"""`brayx.replay.packing`: every transition once, in order, with its own next observation."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brayx.actions import ActionSpec
from brayx.errors import BadFragment
from brayx.replay.packing import BatchPacker, Layout, check, check_columns
from brayx.spaces import Limits
from brayx.types import Columns, Fragment

DISCRETE = ActionSpec("discrete", (4,), ())
HEADS = ActionSpec("multi_discrete", (2, 3), (2,))
GAUSSIAN = ActionSpec("box", (), (2,))
HYBRID = ActionSpec("hybrid", (2, 3), (4,))
SQUASHED = ActionSpec("box", (), (2,), -np.ones(2, np.float32), np.ones(2, np.float32))


def fragment(start: int, length: int, end: str = "neither", **changes) -> Fragment:
    """Transitions ``start .. start + length - 1``; observation, action and reward equal the number."""
    numbers = np.arange(start, start + length + 1)
    whole = Fragment(
        obs={"x": numbers.astype(np.float32)[:, None], "y": numbers.astype(np.int32)},
        action=numbers[:-1].astype(np.int64),
        log_prob=np.full(length, -0.5, np.float32),
        reward=numbers[:-1].astype(np.float32),
        terminated=end == "terminated",
        truncated=end == "truncated",
        policy_version=np.full(length, 3, np.int64),
    )
    return dataclasses.replace(whole, **changes)


def pack(fragments, batch_size=2, unroll_length=4):
    packer = BatchPacker(batch_size, unroll_length)
    batches = [batch for fragment in fragments for batch in packer.add(fragment)]
    last = packer.flush()
    return batches + ([last] if last is not None else [])


def steps(batches, key):
    return [batch[key][b, t] for batch in batches for b, t in zip(*np.nonzero(batch["mask"]), strict=True)]


def test_a_column_has_exactly_this_content():
    (batch,) = pack([fragment(1, 2, "terminated"), fragment(10, 3, "neither")], batch_size=2, unroll_length=4)
    assert batch["reward"].tolist() == [[1, 2, 10, 11, 0], [12, 0, 0, 0, 0]]
    assert batch["obs/y"].tolist() == [[1, 2, 10, 11, 12], [12, 13, 0, 0, 0]]
    assert batch["mask"].tolist() == [[1, 1, 1, 1, 0], [1, 0, 0, 0, 0]]
    assert batch["terminated"].tolist() == [[False, True, False, False, False], [False] * 5]
    assert batch["truncated"].tolist() == [[False] * 5, [True, False, False, False, False]]


def test_terminated_wins_if_both_flags_are_set():
    (batch,) = pack([fragment(1, 2, terminated=True, truncated=True)])
    assert batch["terminated"][0, 1]
    assert not batch["truncated"].any()


def test_keys_and_dtypes():
    (batch,) = pack([fragment(0, 3, extras={"advantage_of": np.ones((3, 2), np.float16)})])
    assert {key: (array.shape, array.dtype.name) for key, array in batch.items()} == {
        "obs/x": ((2, 5, 1), "float32"),
        "obs/y": ((2, 5), "int32"),
        "action": ((2, 5), "int64"),
        "log_prob": ((2, 5), "float32"),
        "reward": ((2, 5), "float32"),
        "terminated": ((2, 5), "bool"),
        "truncated": ((2, 5), "bool"),
        "mask": ((2, 5), "float32"),
        "policy_version": ((2, 5), "int64"),
        "advantage_of": ((2, 5, 2), "float16"),
    }


ENDS = st.sampled_from(["terminated", "truncated", "neither"])


@settings(max_examples=200)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), ENDS), min_size=1, max_size=5),
    unroll_length=st.integers(1, 9),
    rooms=st.lists(st.integers(0, 4), min_size=1).filter(any),
)
def test_a_fragment_packed_in_parts_equals_one_packed_whole(lengths, unroll_length, rooms):
    fragments = [fragment(100 * number, length, end) for number, (length, end) in enumerate(lengths)]
    packer, batches, turns = BatchPacker(1, unroll_length), [], itertools.cycle(rooms)
    for rest in fragments:
        while rest is not None:
            room = next(turns)
            fitting = packer.fitting(len(rest), room)
            completed = list(packer.add(rest, fitting)) if fitting else []
            assert len(completed) <= room
            batches += completed
            rest = rest.after(fitting) if fitting < len(rest) else None
    last = packer.flush()
    batches += [last] if last is not None else []
    whole = pack(fragments, 1, unroll_length)
    assert len(batches) == len(whole)
    for part, expected in zip(batches, whole, strict=True):
        assert all((part[key] == expected[key]).all() for key in expected)


@settings(max_examples=200)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 13), ENDS), min_size=1, max_size=20),
    unroll_length=st.integers(1, 9),
    batch_size=st.integers(1, 4),
)
def test_every_transition_is_packed_once_in_order_with_its_next_observation(lengths, unroll_length, batch_size):
    fragments, start = [], 1
    for length, end in lengths:
        fragments.append(fragment(start, length, end))
        start += length + 1
    batches = pack(fragments, batch_size, unroll_length)
    assert steps(batches, "action") == [int(a) for fragment in fragments for a in fragment.action]
    last_of = {int(fragment.action[-1]): fragment for fragment in fragments}
    for batch in batches:
        assert not batch["mask"][:, -1].any()
        assert not (batch["terminated"] & batch["truncated"]).any()
        for b, t in zip(*np.nonzero(batch["mask"]), strict=True):
            number = int(batch["action"][b, t])
            assert batch["obs/x"][b, t, 0] == number
            ended = last_of.get(number)
            assert batch["terminated"][b, t] == (ended is not None and ended.terminated)
            assert batch["truncated"][b, t] == (ended is not None and not ended.terminated)
            if not batch["terminated"][b, t]:
                assert batch["obs/x"][b, t + 1, 0] == number + 1
    assert len({sum(array.nbytes for array in batch.values()) for batch in batches}) == 1


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("reward", {"reward": np.zeros(0, np.float32)}),
        ("log_prob", {"log_prob": np.array([0, np.nan, 0], np.float32)}),
        ("obs/x", {"obs": {"x": np.full((4, 1), np.inf, np.float32), "y": np.zeros(4, np.int32)}}),
        ("obs/x", {"obs": {"x": np.zeros((3, 1), np.float32), "y": np.zeros(4, np.int32)}}),
        ("obs/x", {"obs": {"x": np.zeros((4, 2), np.float32), "y": np.zeros(4, np.int32)}}),
        ("obs/y", {"obs": {"x": np.zeros((4, 1), np.float32)}}),
        ("obs/z", {"obs": {"x": np.zeros((4, 1), np.float32), "y": np.zeros(4, np.int32), "z": np.zeros(4)}}),
        ("obs", {"obs": {}}),
        ("action", {"action": np.zeros(3, np.float32)}),
        ("action", {"action": np.zeros(2, np.int64)}),
        ("action", {"action": np.array(["a", "b", "c"])}),
        ("policy_version", {"policy_version": np.zeros(3, np.int32)}),
        ("policy_version: .*-7", {"policy_version": np.array([0, -7, 0])}),
        ("mask", {"extras": {"mask": np.zeros(3, np.float32)}}),
        ("more", {"extras": {"more": np.zeros(3, np.float32)}}),
    ],
)
def test_a_bad_fragment_is_refused_by_name_and_packs_nothing(field, changes):
    packer = BatchPacker(2, 4)
    list(packer.add(fragment(0, 3)))
    with pytest.raises(BadFragment, match=field):
        packer.add(fragment(0, 3, **changes))
    assert packer.waiting == 3


def test_the_message_shows_expected_and_got():
    with pytest.raises(BadFragment, match=r"obs/x: .*\(2,\) of float32.*\(1,\) of"):
        check(fragment(0, 3), Layout.of_example({"x": np.zeros(2, np.float32), "y": np.int32(0)}, np.int64(0)))


MODEL = Layout.of_model(({"x": np.zeros((2, 1), np.float32), "y": np.zeros(2, np.int64)},))


def test_an_observation_is_converted_for_the_model_as_in_forward():
    numbers = {"x": np.array([[1], [2], [3]]), "y": np.array([1, 2, 3], np.uint8), "seen": np.zeros(3)}
    packer = BatchPacker(1, 8, MODEL)
    list(packer.add(fragment(0, 2, obs={**numbers, "x": numbers["x"] * 1.5})))  # a list of JSON numbers is float64
    list(packer.add(fragment(0, 2, obs=numbers)))
    batch = packer.flush()
    assert (batch["obs/x"].dtype, batch["obs/y"].dtype) == (np.float32, np.int64)
    assert batch["obs/x"][0, :2, 0].tolist() == [1.5, 3.0]
    assert (batch["action"].dtype, batch["obs/seen"].dtype) == (np.int64, np.float64), "set by the first fragment"
    with pytest.raises(BadFragment, match="action"):
        packer.add(fragment(0, 2, obs=numbers, action=np.zeros(2, np.float32)))


@pytest.mark.parametrize(
    ("message", "obs"),
    [
        (r"obs/x: .*\(1,\) of float32.*\(2,\)", {"x": np.zeros((4, 2)), "y": np.zeros(4, int)}),
        ("obs/x: expected 4 steps", {"x": np.float64(3), "y": np.zeros(4, int)}),
        ("obs/x: .*NaN", {"x": np.full((4, 1), 1e300), "y": np.zeros(4, int)}),
        (
            r"obs/y: .*\(\) of int64.*of float32",
            {"x": np.zeros((4, 1)), "y": np.ones(4, "f")},
        ),
        ("obs/y: missing", {"x": np.zeros((4, 1))}),
        ("obs/x: missing", np.zeros((4, 1), np.float32)),
    ],
)
def test_a_mismatched_observation_is_refused_by_name_even_the_first(message, obs):
    packer = BatchPacker(2, 4, MODEL)
    with pytest.raises(BadFragment, match=message):
        packer.add(fragment(0, 3, obs=obs))
    assert packer.layout == MODEL


def test_fragments_must_have_a_declared_layout():
    declared = Layout.of_example({"x": np.zeros(1, np.float32), "y": np.int32(0)}, np.int64(0))
    assert declared == Layout.of(fragment(0, 3))


def test_other_types_are_refused():
    with pytest.raises(BadFragment, match="dict"):
        check({"reward": 1}, None)


def columns(start: int, rows: int, unroll_length: int = 4, **changes) -> Columns:
    """Columns that count observations, actions and rewards from ``start``; each column ends truncated."""
    numbers = start + np.arange(rows * (unroll_length + 1)).reshape(rows, -1)
    mask = np.ones(numbers.shape, np.float32)
    mask[:, -1] = 0
    truncated = np.zeros(numbers.shape, bool)
    truncated[:, -2] = True
    arrays = {
        "obs/x": numbers.astype(np.float32)[..., None],
        "obs/y": numbers.astype(np.int32),
        "action": numbers.astype(np.int64),
        "log_prob": np.full(numbers.shape, -0.5, np.float32),
        "reward": numbers.astype(np.float32),
        "terminated": np.zeros(numbers.shape, bool),
        "truncated": truncated,
        "mask": mask,
        "policy_version": np.full(numbers.shape, 3, np.int64),
    }
    return Columns({key: array for key, array in {**arrays, **changes}.items() if array is not None})


def test_columns_count_their_transitions():
    assert len(columns(0, 3)) == 12


def test_columns_of_a_batchs_size_become_the_batch_without_a_copy():
    packer = BatchPacker(2, 4)
    list(packer.add(fragment(0, 3)))
    pushed = columns(10, 2)
    (batch,) = packer.add(pushed)
    assert all(batch[key] is pushed.arrays[key] for key in pushed.arrays)
    assert packer.waiting == 3


@settings(max_examples=200)
@given(
    pushes=st.lists(st.tuples(st.booleans(), st.integers(1, 11), ENDS), min_size=1, max_size=12),
    batch_size=st.integers(1, 4),
)
def test_columns_and_fragments_together_are_packed_once_with_next_observations(pushes, batch_size):
    packer, batches, expected, start = BatchPacker(batch_size, 4), [], [], 1
    for is_columns, size, end in pushes:
        pushed = columns(start, size) if is_columns else fragment(start, size, end)
        if is_columns:
            expected += pushed.arrays["action"][pushed.arrays["mask"] > 0].tolist()
        else:
            expected += pushed.action.tolist()
        start += size * 5 + 1
        batches += packer.add(pushed)
    waiting = packer.waiting
    last = packer.flush()
    assert waiting == (0 if last is None else last["mask"].sum())
    batches += [last] if last is not None else []
    assert sorted(steps(batches, "action")) == sorted(expected)
    for batch in batches:
        assert {array.shape[:2] for array in batch.values()} == {(batch_size, 5)}
        for b, t in zip(*np.nonzero(batch["mask"]), strict=True):
            number = batch["action"][b, t]
            assert batch["obs/y"][b, t] == number
            assert batch["terminated"][b, t] or batch["obs/y"][b, t + 1] == number + 1


HALF = np.full((2, 5), 0.5, np.float32)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("reward: missing", {"reward": None}),
        ("obs/x: missing", {"obs/x": None}),
        ("more: not in", {"more": np.zeros((2, 5))}),
        ("reward: .*2 columns of 5", {"reward": np.zeros((3, 5), np.float32)}),
        ("log_prob: .*2 columns of 5", {"log_prob": np.zeros((2, 4), np.float32)}),
        ("obs/x: expected shape", {"obs/x": np.zeros((2, 5, 2), np.float32)}),
        ("action: expected shape", {"action": np.zeros((2, 5), np.float32)}),
        ("obs/x: holds NaN", {"obs/x": np.full((2, 5, 1), np.nan, np.float32)}),
        ("mask: expected only 0 and 1", {"mask": HALF}),
        ("mask: is 1 at", {"mask": np.ones((2, 5), np.float32)}),
        ("terminated: expected shape", {"terminated": np.zeros((2, 5), np.float32)}),
        ("obs/y: not an array", {"obs/y": [[1], [1, 2]]}),
        ("obs/y: expected numbers", {"obs/y": np.full((2, 5), "a")}),
    ],
)
def test_bad_columns_are_refused_by_name_and_pack_nothing(message, changes):
    packer = BatchPacker(3, 4)
    list(packer.add(columns(0, 2)))
    with pytest.raises(BadFragment, match=message):
        packer.add(columns(0, 2, **changes))
    assert packer.waiting == 8


def test_bad_columns_are_refused_even_if_they_are_the_first():
    for changes in ({"mask": None}, {"obs/x": None, "obs/y": None}, {"action": None}, {"mask": np.zeros((0, 5))}):
        with pytest.raises(BadFragment):
            BatchPacker(3, 4).add(columns(0, 2, **changes))


def test_finite_numbers_whose_sum_overflows_pass_as_finite():
    list(BatchPacker(3, 4).add(columns(0, 2, reward=np.full((2, 5), 3e38, np.float32))))


def test_observations_of_columns_are_converted_for_the_model():
    packer = BatchPacker(2, 4, MODEL)
    (batch,) = packer.add(columns(0, 2, **{"obs/x": np.ones((2, 5, 1))}))
    assert (batch["obs/x"].dtype, batch["obs/y"].dtype) == (np.float32, np.int64)


def test_a_masked_action_may_be_anything():
    packer = BatchPacker(1, 3, Layout.of_model((np.zeros((1, 2), np.float32),), DISCRETE))
    (batch,) = BatchPacker(1, 3).add(fragment(0, 3, "terminated", obs=np.zeros((4, 2), np.float32)))
    batch["mask"][:, 1:] = 0
    padded = np.where(batch["mask"] > 0, batch["action"], -1)
    (packed,) = packer.add(Columns({**batch, "action": padded}))
    np.testing.assert_array_equal(packed["action"], padded)


@pytest.mark.parametrize(
    ("acts", "good", "bad", "message"),
    [
        (DISCRETE, [0, 3, 1], [0, 5, 1], "action: .*0 to 3, .*got 5"),
        (DISCRETE, [0.0, 3.0, 1.0], [0, -1, 1], "action: .*0 to 3, .*got -1"),
        (DISCRETE, [True, False, True], [0.5, 0.0, 1.0], "action: .*fractions"),
        (DISCRETE, [0, 3, 1], [[0], [3], [1]], r"action: .*\(\) .*got \(1,\)"),
        (HEADS, [[1, 2]] * 3, [[1, 2], [2, 1], [0, 0]], "action: .*0 to 1, .*got 2"),
        (SQUASHED, [[0.5, -1.0]] * 3, [[0.5, -1.5]] * 3, "action: .*-1 to 1, .*got -1.5"),
        (HYBRID, [[1, 2, -9.5, 7]] * 3, [[1, 3, 0, 0]] * 3, "action: .*0 to 2, .*got 3"),
        (HYBRID, [[1, 2, -9.5, 7]] * 3, [[1, 0.5, 0, 0]] * 3, "action: .*fractions"),
        (HYBRID, [[1, 2, -9.5, 7]] * 3, [[1, 2]] * 3, r"action: .*\(4,\) "),
        (GAUSSIAN, [[7.0, -9.0]] * 3, [[7.0]] * 3, r"action: .*\(2,\) "),
    ],
)
def test_actions_outside_the_models_range_are_refused(acts, good, bad, message):
    def pushed(action):
        action = np.array(action)
        plain = fragment(0, 3, "terminated", obs=np.zeros((4, 2), np.float32))
        steps = np.concatenate([action, np.zeros_like(action[:1])])[None]
        (batch,) = BatchPacker(1, 3).add(plain)
        return dataclasses.replace(plain, action=action), Columns({**batch, "action": steps})

    layout = Layout.of_model((np.zeros((1, 2), np.float32),), acts)
    for replay in pushed(good):
        (batch,) = BatchPacker(1, 3, layout).add(replay)
        np.testing.assert_array_equal(batch["action"][0, :3], good)
    for replay in pushed(bad):
        packer = BatchPacker(1, 3, layout)
        with pytest.raises(BadFragment, match=message):
            packer.add(replay)
        assert packer.layout is layout


def test_whole_numbers_outside_the_limits_are_refused_unless_they_are_masked():
    layout = Layout.of_model((np.zeros((1,), np.int64),), limits={"obs": Limits.of(3, 5)})
    whole = fragment(0, 3, "terminated", obs=np.array([5, 6, 7, 5]))
    (batch,) = BatchPacker(1, 3, layout).add(whole)
    with pytest.raises(BadFragment, match=r"obs: 8 at \[2\], expected 5 to 7"):
        BatchPacker(1, 3, layout).add(dataclasses.replace(whole, obs=np.array([5, 6, 8, 5])))
    padded = {key: np.concatenate([array, np.zeros_like(array)], 1) for key, array in batch.items()}
    check_columns(Columns(padded), padded["mask"].shape[1] - 1, layout)
    running = {**batch, "terminated": np.zeros((1, 4), bool), "obs": np.array([[5, 6, 7, 4]])}
    with pytest.raises(BadFragment, match=r"obs: 4 at \[3\], expected 5 to 7"):  # the step that is bootstrapped from
        check_columns(Columns(running), 3, layout)
