"""What a Unity game gets at its start: the engine's settings, environment parameters, number of training areas.

An environment parameter is a number, or a distribution from which the game draws it: ``gravity=9.81``,
``mass=uniform:0.5:10``, ``scale=gaussian:1:0.2``, ``size=multirangeuniform:1:2:7:8``. The bytes are messages of side
channels. Knows nothing of the connection.
"""

from __future__ import annotations

import math
import struct
import uuid
from dataclasses import dataclass

from brayx.errors import ConfigError

_ENGINE = uuid.UUID("e951342c-4f7e-11ea-b238-784f4387d1f7").bytes_le
_PARAMETERS = uuid.UUID("534c891e-810f-11ea-a9d0-822485860400").bytes_le
_SCREEN, _QUALITY, _TIME_SCALE, _FRAME_RATE, _CAPTURE_RATE = range(5)
_NUMBER, _SAMPLER = range(2)
_SAMPLERS = ("uniform", "gaussian", "multirangeuniform")
"""In the order of their numbers on the wire."""


@dataclass(frozen=True, kw_only=True)
class GameSettings:
    """Settings sent to a game when it starts.

    Attributes:
        time_scale: how much faster than real time the game runs.
        width, height: size of a build's window in pixels; None: as the build has it.
        quality_level: index of the project's quality level; None: as the game has it.
        target_frame_rate: frames per second that are drawn at most; -1: no limit.
        capture_frame_rate: frames for each second of the game's time.
        num_areas: copies that a Training Area Replicator makes of its area.
        parameters: environment parameters, ``NAME=VALUE`` each.

    Raises:
        ConfigError: a parameter has another form, or only one of width and height is given.
    """

    time_scale: float = 20.0
    width: int | None = None
    height: int | None = None
    quality_level: int | None = None
    target_frame_rate: int = -1
    capture_frame_rate: int = 60
    num_areas: int = 1
    parameters: tuple[str, ...] | list[str] = ()

    def __post_init__(self) -> None:
        if (self.width is None) != (self.height is None):
            raise ConfigError(f"width is {self.width} and height {self.height}: expected both, or neither", key="width")
        try:
            self.side_channel(0)
        except struct.error:
            raise ConfigError(f"a setting of the game does not fit 32 bits: {self}", key="settings") from None

    def side_channel(self, seed: int) -> bytes:
        """The messages with all of it but the number of areas.

        Args:
            seed: of the game's draws of parameters.
        """
        engine = [
            struct.pack("<if", _TIME_SCALE, self.time_scale),
            struct.pack("<ii", _FRAME_RATE, self.target_frame_rate),
            struct.pack("<ii", _CAPTURE_RATE, self.capture_frame_rate),
        ]
        if self.width is not None:
            engine.append(struct.pack("<iii", _SCREEN, self.width, self.height))
        if self.quality_level is not None:
            engine.append(struct.pack("<ii", _QUALITY, self.quality_level))
        parameters = [_parameter(text, seed + index) for index, text in enumerate(self.parameters)]
        return b"".join(_message(_ENGINE, payload) for payload in engine) + b"".join(
            _message(_PARAMETERS, payload) for payload in parameters
        )


def _message(channel: bytes, payload: bytes) -> bytes:
    return channel + struct.pack("<i", len(payload)) + payload


def _parameter(text: str, seed: int) -> bytes:
    name, _, value = text.partition("=")
    sampler, *words = value.split(":")
    try:
        numbers = [float(word) for word in words or [value]]
        if not (name and name.isascii() and all(map(math.isfinite, numbers))):
            raise ValueError
        key = struct.pack("<i", len(name)) + name.encode()
        if not words:
            return key + struct.pack("<if", _NUMBER, numbers[0])
        kind = _SAMPLERS.index(sampler)
    except ValueError:
        kind, numbers = 0, []
    is_list = _SAMPLERS[kind] == "multirangeuniform"
    if not numbers or len(numbers) % 2 or (len(numbers) > 2 and not is_list):
        raise ConfigError(
            f"the environment parameter is {text!r}, expected NAME=NUMBER, NAME=uniform:MIN:MAX, "
            "NAME=gaussian:MEAN:DEVIATION or NAME=multirangeuniform:MIN:MAX:MIN:MAX...",
            key="parameter",
        )
    length = struct.pack("<i", len(numbers)) if is_list else b""
    return key + struct.pack("<iii", _SAMPLER, seed, kind) + length + struct.pack(f"<{len(numbers)}f", *numbers)
