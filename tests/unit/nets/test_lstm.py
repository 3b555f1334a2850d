"""`brayx.nets.lstm` against torch's own, and a sequence against its steps."""

from __future__ import annotations

import pytest
import torch

from brayx.nets.lstm import LSTM


def test_a_step_matches_torch():
    torch.manual_seed(0)
    ours, theirs = LSTM(3, 5), torch.nn.LSTMCell(3, 5)
    with torch.no_grad():
        theirs.weight_ih.copy_(ours.inputs.weight)
        theirs.bias_ih.copy_(ours.inputs.bias)
        theirs.weight_hh.copy_(ours.recurrent.weight)
        theirs.bias_hh.zero_()
    x, state = torch.randn(4, 3), {"h": torch.randn(4, 5), "c": torch.randn(4, 5)}
    y, after = ours(x, state)
    h, c = theirs(x, (state["h"], state["c"]))
    torch.testing.assert_close(y, h)
    torch.testing.assert_close(after["h"], h)
    torch.testing.assert_close(after["c"], c)


def test_initially_forgets_little():
    assert LSTM(3, 5).inputs.bias[5:10].tolist() == [1.0] * 5


def test_a_sequence_equals_its_steps_and_starts_from_stored_states():
    torch.manual_seed(0)
    steps, columns = 7, 3
    lstm = LSTM(3, 5)
    x = torch.randn(steps, columns, 3)
    stored = {"h": torch.randn(steps, columns, 5), "c": torch.randn(steps, columns, 5)}
    carry = torch.rand(steps, columns) < 0.6
    carry[0] = True  # there is nothing to carry from
    y, last = lstm(x, stored, carry)
    for b in range(columns):
        state = None
        for t in range(steps):
            if t == 0 or not carry[t, b]:
                state = {key: value[t, b][None] for key, value in stored.items()}
            out, state = lstm(x[t, b][None], state)
            torch.testing.assert_close(y[t, b], out[0])
        torch.testing.assert_close(last["h"][b], state["h"][0])
        torch.testing.assert_close(last["c"][b], state["c"][0])


def test_gradients_stop_where_the_state_is_not_carried():
    lstm = LSTM(2, 4)
    x = torch.randn(4, 1, 2, requires_grad=True)
    stored = {key: torch.zeros(4, 1, 4) for key in ("h", "c")}
    y, _ = lstm(x, stored, torch.tensor([[False], [True], [False], [True]]))
    y[3].sum().backward()
    assert x.grad[:2].abs().max() == 0
    assert x.grad[2:].abs().min() > 0


def by_steps(lstm, x, stored, carry):
    """The same by autograd, step by step."""
    outputs, state = [], None
    for t in range(len(x)):
        before = {key: leaf[t] for key, leaf in stored.items()}
        if t:
            before = {key: torch.where(carry[t, :, None], state[key], leaf) for key, leaf in before.items()}
        y, state = lstm(x[t], before)
        outputs.append(y)
    return torch.stack(outputs)


def test_gradients_of_a_sequence_equal_autograds():
    torch.manual_seed(1)
    lstm = LSTM(3, 5).double()
    x = torch.randn(9, 4, 3, dtype=torch.float64, requires_grad=True)
    stored = {key: torch.randn(9, 4, 5, dtype=torch.float64, requires_grad=True) for key in ("h", "c")}
    carry = torch.rand(9, 4) < 0.6
    leaves = [x, *stored.values(), *lstm.parameters()]
    (ours, gradients), (theirs, expected) = (
        (y, torch.autograd.grad((y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum(), leaves))
        for y in (lstm(x, stored, carry)[0], by_steps(lstm, x, stored, carry))
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    for gradient, want in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, want, rtol=0, atol=1e-12)
        assert want.abs().max() > 1e-3


def test_a_second_derivative_is_refused():
    lstm = LSTM(3, 5)
    x, stored = torch.randn(7, 2, 3, requires_grad=True), {key: torch.zeros(7, 2, 5) for key in ("h", "c")}
    y, _ = lstm(x, stored, torch.ones(7, 2, dtype=torch.bool))
    (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.square().sum().backward()


def test_a_sequence_keeps_full_precision_under_autocast():
    torch.manual_seed(0)
    lstm = LSTM(3, 5)
    x, stored = torch.randn(7, 2, 3), {key: torch.zeros(7, 2, 5) for key in ("h", "c")}
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = lstm(x, stored, torch.ones(7, 2, dtype=torch.bool))
    assert y.dtype == torch.float32
    y.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in lstm.parameters())
