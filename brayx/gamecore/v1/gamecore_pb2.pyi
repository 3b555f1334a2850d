from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StepKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STEP_KIND_CALL: _ClassVar[StepKind]
    STEP_KIND_START: _ClassVar[StepKind]
    STEP_KIND_TICK: _ClassVar[StepKind]
    STEP_KIND_STOP: _ClassVar[StepKind]
STEP_KIND_CALL: StepKind
STEP_KIND_START: StepKind
STEP_KIND_TICK: StepKind
STEP_KIND_STOP: StepKind

class StepRequest(_message.Message):
    __slots__ = ("session", "kind", "body", "key", "time", "token", "seq", "opponent", "record")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    OPPONENT_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    session: str
    kind: StepKind
    body: bytes
    key: str
    time: str
    token: str
    seq: int
    opponent: str
    record: bool
    def __init__(self, session: _Optional[str] = ..., kind: _Optional[_Union[StepKind, str]] = ..., body: _Optional[bytes] = ..., key: _Optional[str] = ..., time: _Optional[str] = ..., token: _Optional[str] = ..., seq: _Optional[int] = ..., opponent: _Optional[str] = ..., record: bool = ...) -> None: ...

class StepReply(_message.Message):
    __slots__ = ("body",)
    BODY_FIELD_NUMBER: _ClassVar[int]
    body: bytes
    def __init__(self, body: _Optional[bytes] = ...) -> None: ...

class PlayReply(_message.Message):
    __slots__ = ("body", "error")
    BODY_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    body: bytes
    error: bytes
    def __init__(self, body: _Optional[bytes] = ..., error: _Optional[bytes] = ...) -> None: ...
