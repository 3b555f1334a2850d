"""What a client gets of an exception, and what only the log has."""

from __future__ import annotations

import pytest

from brayx.errors import AgentError, BadBody, ModelError
from brayx.faults import fault_id, note_of, report


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


@pytest.mark.parametrize("show_text", [False, True])
def test_a_client_gets_the_type_and_an_id_and_the_text_only_if_configured(
    show_text: bool, caplog: pytest.LogCaptureFixture
) -> None:
    error = report(raised(KeyError("secret")), "on_tick", "session s", show_text=show_text)
    assert type(error) is AgentError
    assert error.details == {"type": "KeyError", "id": fault_id(raised(KeyError("other")))}
    assert ("secret" in error.message) is show_text
    assert "session s" in caplog.text
    assert "secret" in caplog.text


def test_an_error_for_the_client_passes_unchanged_and_one_that_was_reported_is_not_reported_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad, reported = BadBody("x is 1", field="x"), ModelError("it failed", id="0")
    for error in (bad, reported):
        assert report(error, "the forward", "session s", show_text=False) is error
    assert caplog.text == ""


def test_an_agents_error_is_reported_with_its_message_and_the_type_of_its_cause() -> None:
    cause = raised(ValueError("secret"))
    error = AgentError("agent 'a'.on_tick", agent="a")
    error.__cause__ = cause
    told = report(error, "unused", "session s", show_text=False)
    assert told.message.startswith("agent 'a'.on_tick: ValueError")
    assert told.details == {"agent": "a", "type": "ValueError", "id": fault_id(cause)}


def test_an_id_is_of_the_type_and_the_place() -> None:
    ids = {fault_id(raised(error)) for error in (ValueError("a"), ValueError("b"), KeyError("a"))}
    assert len(ids) == 2


def test_a_note_is_one_line_without_control_characters() -> None:
    assert note_of(ValueError("red \x1b[31m\nsecond"), "a.py:1") == r"ValueError: red \x1b[31m (a.py:1)"
    assert note_of(ValueError("x"), "") == "ValueError: x"
