"""What a Unity game is told when it starts: the bytes of its side channels."""

from __future__ import annotations

import struct
import uuid
from typing import Any

import pytest

from brayx.bridges.unity_settings import GameSettings
from brayx.errors import ConfigError

ENGINE = uuid.UUID("e951342c-4f7e-11ea-b238-784f4387d1f7").bytes_le
PARAMETERS = uuid.UUID("534c891e-810f-11ea-a9d0-822485860400").bytes_le


def messages(data: bytes) -> list[tuple[bytes, bytes]]:
    """Channel and payload of each message."""
    listed = []
    while data:
        (length,) = struct.unpack_from("<i", data, 16)
        listed.append((data[:16], data[20 : 20 + length]))
        data = data[20 + length :]
    return listed


def test_the_engine_gets_only_what_is_set() -> None:
    time_scale, frames, capture = messages(GameSettings().side_channel(0))
    assert time_scale == (ENGINE, struct.pack("<if", 2, 20.0))
    assert frames == (ENGINE, struct.pack("<ii", 3, -1))
    assert capture == (ENGINE, struct.pack("<ii", 4, 60))
    settings = GameSettings(width=84, height=60, quality_level=5)
    assert messages(settings.side_channel(0))[3:] == [
        (ENGINE, struct.pack("<iii", 0, 84, 60)),
        (ENGINE, struct.pack("<ii", 1, 5)),
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("gravity=-9.5", struct.pack("<if", 0, -9.5)),
        ("gravity=uniform:0.5:2", struct.pack("<iiiff", 1, 7, 0, 0.5, 2.0)),
        ("gravity=gaussian:1:0.25", struct.pack("<iiiff", 1, 7, 1, 1.0, 0.25)),
        ("gravity=multirangeuniform:1:2:7:8", struct.pack("<iiiiffff", 1, 7, 2, 4, 1.0, 2.0, 7.0, 8.0)),
    ],
)
def test_an_environment_parameter(text: str, value: bytes) -> None:
    *_, (channel, payload) = messages(GameSettings(parameters=[text]).side_channel(7))
    assert channel == PARAMETERS
    assert payload == struct.pack("<i", 7) + b"gravity" + value


@pytest.mark.parametrize(
    "text", ["gravity", "=1", "gravity=", "gravity=nan", "gravity=uniform:1", "gravity=uniform:1:2:3:4", "g=pareto:1:2"]
)
def test_a_parameter_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected NAME=NUMBER, NAME=uniform:MIN:MAX"):
        GameSettings(parameters=[text])


@pytest.mark.parametrize("options", [{"width": 84}, {"width": 84, "height": 2**31}])
def test_settings_that_the_wire_cannot_have_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        GameSettings(**options)
