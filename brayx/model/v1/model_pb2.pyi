from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Leaf(_message.Message):
    __slots__ = ("path", "shape", "dtype")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    path: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    def __init__(self, path: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ...) -> None: ...

class Signature(_message.Message):
    __slots__ = ("inputs", "outputs", "policy_version")
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    inputs: _containers.RepeatedCompositeFieldContainer[Leaf]
    outputs: _containers.RepeatedCompositeFieldContainer[Leaf]
    policy_version: int
    def __init__(self, inputs: _Optional[_Iterable[_Union[Leaf, _Mapping]]] = ..., outputs: _Optional[_Iterable[_Union[Leaf, _Mapping]]] = ..., policy_version: _Optional[int] = ...) -> None: ...

class ForwardRequest(_message.Message):
    __slots__ = ("arrays", "version", "deadline_s")
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    arrays: bytes
    version: int
    deadline_s: float
    def __init__(self, arrays: _Optional[bytes] = ..., version: _Optional[int] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class ForwardReply(_message.Message):
    __slots__ = ("arrays",)
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    arrays: bytes
    def __init__(self, arrays: _Optional[bytes] = ...) -> None: ...
