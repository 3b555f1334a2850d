"""Credentials: the literal token, refusals and their messages, and the file of keys."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brayx.errors import ConfigError, Unauthorized
from brayx.gamecore.auth import Keys, new_key, sign, variables
from brayx.gamecore.protocol import StepKind, StepRequest

SECRET = b"correct horse battery"
OTHER = b"staple staple staple!"
NOW = 1_700_000_000


@pytest.fixture
def keys() -> Keys:
    return Keys({"game": SECRET, "other": OTHER})


def request(
    key: str = "game", session: str = "s", time: str = str(NOW), token: str | None = None, secret: bytes = SECRET
) -> StepRequest:
    made = sign(secret, key, session, time) if token is None else token
    return StepRequest(StepKind.TICK, session, b"body", key, time, made)


def test_the_token_is_these_bytes() -> None:
    # printf 'game\ns\n1700000000' | openssl dgst -sha256 -hmac 'correct horse battery'
    assert sign(SECRET, "game", "s", "1700000000") == (
        "bdb71b684e448cd07e674eabd1f8bbeb0b1676a9b79621ed700fae836d9a7842"
    )


def test_a_request_signed_with_any_of_the_keys_passes(keys: Keys) -> None:
    keys.check(request(), NOW)
    keys.check(request("other", secret=OTHER), NOW)
    keys.check(request(session=""), NOW)  # a stateless call


@pytest.mark.parametrize("off_s", [-300, -299.5, 0, 300])
def test_a_time_within_the_window_passes(keys: Keys, off_s: float) -> None:
    keys.check(request(), NOW + off_s)


@pytest.mark.parametrize(("off_s", "said"), [(301, "301 s behind"), (-4000, "4000 s ahead of")])
def test_a_time_outside_the_window_is_refused_with_the_difference(keys: Keys, off_s: int, said: str) -> None:
    with pytest.raises(Unauthorized, match=f"{said} .*300 s") as refused:
        keys.check(request(), NOW + off_s)
    assert refused.value.details == {"field": "time", "behind_s": off_s, "window_s": 300.0}


@pytest.mark.parametrize("time", ["now", "1.7e9", "-5", "+1700000000", " 1700000000", "१७०००००००००", "1" * 20, "NaN"])
def test_a_time_that_is_not_a_decimal_number_is_refused(keys: Keys, time: str) -> None:
    with pytest.raises(Unauthorized, match=r"'time' is .* expected Unix seconds"):
        keys.check(request(time=time), NOW)


@pytest.mark.parametrize("name", ["key", "time", "token"])
def test_a_missing_field_is_named(keys: Keys, name: str) -> None:
    with pytest.raises(Unauthorized, match=f"requires keys: '{name}' missing: sign with a line"):
        keys.check(request()._replace(**{name: ""}), NOW)


def test_an_unknown_key_and_a_wrong_token_get_the_same_error(keys: Keys) -> None:
    messages = set()
    for wrong in (request("stranger"), request(token="0" * 64), request(secret=OTHER), request(token="x")):
        with pytest.raises(Unauthorized) as refused:
            keys.check(wrong, NOW)
        messages.add((str(refused.value), str(refused.value.details)))
    assert len(messages) == 1
    said = messages.pop()[0]
    assert SECRET.decode() not in said
    assert "stranger" not in said


@given(
    field=st.sampled_from(["key", "session", "time", "token"]),
    index=st.integers(min_value=0),
    char=st.characters(max_codepoint=0x2FF),
    how=st.sampled_from(["replace", "insert", "delete"]),
)
def test_any_changed_character_is_refused(field: str, index: int, char: str, how: str) -> None:
    right = request(session="game-7-agent-red")
    value = getattr(right, field)
    index %= len(value)
    changed = value[:index] + (char if how != "delete" else "") + value[index + (how != "insert") :]
    keys = Keys({"game": SECRET, "other": OTHER}, window_s=1e18)
    keys.check(right, NOW)
    if changed != value:
        with pytest.raises(Unauthorized):
            keys.check(right._replace(**{field: changed}), NOW)


@given(st.text(), st.text(), st.text(), st.text())
def test_no_text_breaks_the_check(key: str, session: str, time: str, token: str) -> None:
    with pytest.raises(Unauthorized):
        Keys({"game": SECRET}, window_s=1e18).check(StepRequest(StepKind.CALL, session, b"", key, time, token), NOW)


def test_a_renewed_request_passes_long_after(keys: Keys) -> None:
    later = NOW + 10_000
    old = request(session="long")
    with pytest.raises(Unauthorized):
        keys.check(old, later)
    renewed = keys.renewed(old, later + 0.9)
    keys.check(renewed, later)
    assert renewed._replace(time=old.time, token=old.token) == old
    with pytest.raises(Unauthorized):
        keys.renewed(request("stranger"), later)


# The file


def test_a_file_of_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.txt"
    path.write_text("# of the arena\n\n  game : correct horse battery  \r\nother: with: a colon, and ä\n")
    path.chmod(0o600)
    keys = Keys.load(path)
    assert len(keys) == 2
    assert keys.secret("game") == SECRET
    keys.check(request("other", secret="with: a colon, and ä".encode()), NOW)
    assert not caplog.records


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected at least one key"),
        ("# none\n", "expected at least one key"),
        ("game\n", "line 1: expected `id: secret`"),
        (f"a: {'x' * 16}\n\na: {'y' * 16}", "line 3: key 'a' is given twice"),
        ("a: short-hush", "line 1: the secret of 'a' has 10 bytes, at least 16"),
        (f"two words: {'x' * 16}", "line 1: 'two words' cannot be the id"),
        (f": {'x' * 16}", "line 1: '' cannot be the id"),
        (f"{'k' * 65}: {'x' * 16}", "cannot be the id"),
    ],
)
def test_a_bad_file_names_the_line_and_no_secret(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "keys.txt"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=said) as refused:
        Keys.load(path)
    assert str(path) in str(refused.value)
    assert not any(secret in str(refused.value) for secret in ("short-hush", "x" * 16, "y" * 16))


def test_a_file_that_is_missing_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        Keys.load(tmp_path / "none.txt")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="it is UTF-16: save it as UTF-8"):
        Keys.load(tmp_path / "binary")


def test_file_permissions_are_checked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.txt"
    new_key(path)
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        Keys.load(path)
    assert "can be read by others: chmod 600" in caplog.text
    path.chmod(0o620)
    with pytest.raises(ConfigError, match="can be written by others"):
        Keys.load(path)


def test_where_keys_come_from(tmp_path: Path) -> None:
    first, second = tmp_path / "first.txt", tmp_path / "second.txt"
    new_key(first, "first")
    new_key(second, "second")
    inline = {"BRAYX_KEYS": "inline: 0123456789abcdef"}

    def first_of(path: str | None, environment: dict[str, str]) -> str:
        keys = Keys.configured(path, 5.0, environment)
        assert keys is not None
        return keys.first

    assert Keys.configured(None, 5.0, {}) is None
    assert first_of(None, inline) == "inline"
    assert first_of(None, {"BRAYX_KEYS_FILE": str(second)}) == "second"
    assert first_of(str(first), {"BRAYX_KEYS_FILE": str(second)}) == "first"
    with pytest.raises(ConfigError, match="both set"):
        Keys.configured(None, 5.0, {"BRAYX_KEYS_FILE": str(second), **inline})
    with pytest.raises(ConfigError, match="BRAYX_KEYS, line 1"):
        Keys.configured(None, 5.0, {"BRAYX_KEYS": "secretsecretsecret"})


def test_a_game_in_another_folder_finds_the_keys_of_its_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys.txt").write_text(f"studio: {SECRET.decode()}\n")
    monkeypatch.chdir(tmp_path)
    given = variables("keys.txt")
    monkeypatch.setenv("BRAYX_KEYS_FILE", "keys.txt")
    assert variables(None) == given
    monkeypatch.chdir("/")
    keys = Keys.configured(None, 5.0, {"BRAYX_KEYS": f"other: {SECRET.decode()}", **given})
    assert keys is not None
    assert keys.first == "studio"
    monkeypatch.delenv("BRAYX_KEYS_FILE")
    assert variables(None) == {}, "the environment is inherited as it is"


def test_the_window_is_the_configured_one() -> None:
    keys = Keys.configured(None, 5.0, {"BRAYX_KEYS": f"game: {SECRET.decode()}"})
    assert keys is not None
    keys.check(request(), NOW + 5)
    with pytest.raises(Unauthorized, match="at most 5 s"):
        keys.check(request(), NOW + 6)


def test_new_keys_are_appended_and_private(tmp_path: Path) -> None:
    path = tmp_path / "keys.txt"
    before = os.umask(0)
    try:
        made = new_key(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text(path.read_text().rstrip("\n"))  # as some editors save it
    assert new_key(path, "second") == "second"
    keys = Keys.load(path)
    assert len(keys) == 2
    assert keys.secret(made) != keys.secret("second")
    assert len(keys.secret(made)) == 64
    with pytest.raises(ConfigError, match="'second' already"):
        new_key(path, "second")
    with pytest.raises(ConfigError, match="cannot be the id"):
        new_key(path, "a b")
    with pytest.raises(ConfigError, match="cannot be written"):
        new_key(tmp_path / "nowhere" / "keys.txt")
    assert keys.first == made
    with pytest.raises(ConfigError, match="no key 'third'"):
        keys.secret("third")


@pytest.mark.parametrize("secrets", [{}, {"a b": SECRET}, {"a": b"short"}])
def test_invalid_ids_are_refused(secrets: dict[str, bytes]) -> None:
    with pytest.raises(ConfigError):
        Keys(secrets)
