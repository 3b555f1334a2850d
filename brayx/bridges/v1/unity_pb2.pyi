from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Message(_message.Message):
    __slots__ = ("header", "output", "input")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    header: Header
    output: Output
    input: Input
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., output: _Optional[_Union[Output, _Mapping]] = ..., input: _Optional[_Union[Input, _Mapping]] = ...) -> None: ...

class Header(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: int
    def __init__(self, status: _Optional[int] = ...) -> None: ...

class Output(_message.Message):
    __slots__ = ("agents", "hello")
    AGENTS_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    agents: Agents
    hello: Hello
    def __init__(self, agents: _Optional[_Union[Agents, _Mapping]] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("name", "communicator_version", "behaviours", "package_version", "capabilities")
    NAME_FIELD_NUMBER: _ClassVar[int]
    COMMUNICATOR_VERSION_FIELD_NUMBER: _ClassVar[int]
    BEHAVIOURS_FIELD_NUMBER: _ClassVar[int]
    PACKAGE_VERSION_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    name: str
    communicator_version: str
    behaviours: _containers.RepeatedCompositeFieldContainer[Behaviour]
    package_version: str
    capabilities: Capabilities
    def __init__(self, name: _Optional[str] = ..., communicator_version: _Optional[str] = ..., behaviours: _Optional[_Iterable[_Union[Behaviour, _Mapping]]] = ..., package_version: _Optional[str] = ..., capabilities: _Optional[_Union[Capabilities, _Mapping]] = ...) -> None: ...

class Behaviour(_message.Message):
    __slots__ = ("name", "actions")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    actions: ActionSpec
    def __init__(self, name: _Optional[str] = ..., actions: _Optional[_Union[ActionSpec, _Mapping]] = ...) -> None: ...

class ActionSpec(_message.Message):
    __slots__ = ("num_continuous", "num_discrete", "branch_sizes")
    NUM_CONTINUOUS_FIELD_NUMBER: _ClassVar[int]
    NUM_DISCRETE_FIELD_NUMBER: _ClassVar[int]
    BRANCH_SIZES_FIELD_NUMBER: _ClassVar[int]
    num_continuous: int
    num_discrete: int
    branch_sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_continuous: _Optional[int] = ..., num_discrete: _Optional[int] = ..., branch_sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class Capabilities(_message.Message):
    __slots__ = ("base", "concatenated_pngs", "channel_mapping", "hybrid_actions", "training_analytics", "variable_length", "groups")
    BASE_FIELD_NUMBER: _ClassVar[int]
    CONCATENATED_PNGS_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_MAPPING_FIELD_NUMBER: _ClassVar[int]
    HYBRID_ACTIONS_FIELD_NUMBER: _ClassVar[int]
    TRAINING_ANALYTICS_FIELD_NUMBER: _ClassVar[int]
    VARIABLE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    base: bool
    concatenated_pngs: bool
    channel_mapping: bool
    hybrid_actions: bool
    training_analytics: bool
    variable_length: bool
    groups: bool
    def __init__(self, base: bool = ..., concatenated_pngs: bool = ..., channel_mapping: bool = ..., hybrid_actions: bool = ..., training_analytics: bool = ..., variable_length: bool = ..., groups: bool = ...) -> None: ...

class Agents(_message.Message):
    __slots__ = ("by_behaviour", "side_channel")
    class List(_message.Message):
        __slots__ = ("agents",)
        AGENTS_FIELD_NUMBER: _ClassVar[int]
        agents: _containers.RepeatedCompositeFieldContainer[Agent]
        def __init__(self, agents: _Optional[_Iterable[_Union[Agent, _Mapping]]] = ...) -> None: ...
    class ByBehaviourEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Agents.List
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Agents.List, _Mapping]] = ...) -> None: ...
    BY_BEHAVIOUR_FIELD_NUMBER: _ClassVar[int]
    SIDE_CHANNEL_FIELD_NUMBER: _ClassVar[int]
    by_behaviour: _containers.MessageMap[str, Agents.List]
    side_channel: bytes
    def __init__(self, by_behaviour: _Optional[_Mapping[str, Agents.List]] = ..., side_channel: _Optional[bytes] = ...) -> None: ...

class Agent(_message.Message):
    __slots__ = ("reward", "done", "max_step_reached", "id", "action_mask", "observations", "group_id", "group_reward")
    REWARD_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_REACHED_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    ACTION_MASK_FIELD_NUMBER: _ClassVar[int]
    OBSERVATIONS_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_REWARD_FIELD_NUMBER: _ClassVar[int]
    reward: float
    done: bool
    max_step_reached: bool
    id: int
    action_mask: _containers.RepeatedScalarFieldContainer[bool]
    observations: _containers.RepeatedCompositeFieldContainer[Observation]
    group_id: int
    group_reward: float
    def __init__(self, reward: _Optional[float] = ..., done: bool = ..., max_step_reached: bool = ..., id: _Optional[int] = ..., action_mask: _Optional[_Iterable[bool]] = ..., observations: _Optional[_Iterable[_Union[Observation, _Mapping]]] = ..., group_id: _Optional[int] = ..., group_reward: _Optional[float] = ...) -> None: ...

class Observation(_message.Message):
    __slots__ = ("shape", "compression", "compressed", "floats", "channel_mapping", "dimensions", "name")
    class Compression(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NONE: _ClassVar[Observation.Compression]
        PNG: _ClassVar[Observation.Compression]
    NONE: Observation.Compression
    PNG: Observation.Compression
    class Floats(_message.Message):
        __slots__ = ("data",)
        DATA_FIELD_NUMBER: _ClassVar[int]
        data: _containers.RepeatedScalarFieldContainer[float]
        def __init__(self, data: _Optional[_Iterable[float]] = ...) -> None: ...
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    COMPRESSED_FIELD_NUMBER: _ClassVar[int]
    FLOATS_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_MAPPING_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    compression: Observation.Compression
    compressed: bytes
    floats: Observation.Floats
    channel_mapping: _containers.RepeatedScalarFieldContainer[int]
    dimensions: _containers.RepeatedScalarFieldContainer[int]
    name: str
    def __init__(self, shape: _Optional[_Iterable[int]] = ..., compression: _Optional[_Union[Observation.Compression, str]] = ..., compressed: _Optional[bytes] = ..., floats: _Optional[_Union[Observation.Floats, _Mapping]] = ..., channel_mapping: _Optional[_Iterable[int]] = ..., dimensions: _Optional[_Iterable[int]] = ..., name: _Optional[str] = ...) -> None: ...

class Input(_message.Message):
    __slots__ = ("actions", "welcome")
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    actions: Actions
    welcome: Welcome
    def __init__(self, actions: _Optional[_Union[Actions, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ...) -> None: ...

class Actions(_message.Message):
    __slots__ = ("by_behaviour", "command", "side_channel")
    class Command(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STEP: _ClassVar[Actions.Command]
        RESET: _ClassVar[Actions.Command]
        QUIT: _ClassVar[Actions.Command]
    STEP: Actions.Command
    RESET: Actions.Command
    QUIT: Actions.Command
    class List(_message.Message):
        __slots__ = ("actions",)
        ACTIONS_FIELD_NUMBER: _ClassVar[int]
        actions: _containers.RepeatedCompositeFieldContainer[Action]
        def __init__(self, actions: _Optional[_Iterable[_Union[Action, _Mapping]]] = ...) -> None: ...
    class ByBehaviourEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Actions.List
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Actions.List, _Mapping]] = ...) -> None: ...
    BY_BEHAVIOUR_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    SIDE_CHANNEL_FIELD_NUMBER: _ClassVar[int]
    by_behaviour: _containers.MessageMap[str, Actions.List]
    command: Actions.Command
    side_channel: bytes
    def __init__(self, by_behaviour: _Optional[_Mapping[str, Actions.List]] = ..., command: _Optional[_Union[Actions.Command, str]] = ..., side_channel: _Optional[bytes] = ...) -> None: ...

class Action(_message.Message):
    __slots__ = ("continuous", "discrete")
    CONTINUOUS_FIELD_NUMBER: _ClassVar[int]
    DISCRETE_FIELD_NUMBER: _ClassVar[int]
    continuous: _containers.RepeatedScalarFieldContainer[float]
    discrete: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, continuous: _Optional[_Iterable[float]] = ..., discrete: _Optional[_Iterable[int]] = ...) -> None: ...

class Demonstration(_message.Message):
    __slots__ = ("api_version", "name", "num_steps")
    API_VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    api_version: int
    name: str
    num_steps: int
    def __init__(self, api_version: _Optional[int] = ..., name: _Optional[str] = ..., num_steps: _Optional[int] = ...) -> None: ...

class Demonstrated(_message.Message):
    __slots__ = ("agent", "action")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    agent: Agent
    action: Action
    def __init__(self, agent: _Optional[_Union[Agent, _Mapping]] = ..., action: _Optional[_Union[Action, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("seed", "communicator_version", "package_version", "capabilities", "num_areas")
    SEED_FIELD_NUMBER: _ClassVar[int]
    COMMUNICATOR_VERSION_FIELD_NUMBER: _ClassVar[int]
    PACKAGE_VERSION_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    NUM_AREAS_FIELD_NUMBER: _ClassVar[int]
    seed: int
    communicator_version: str
    package_version: str
    capabilities: Capabilities
    num_areas: int
    def __init__(self, seed: _Optional[int] = ..., communicator_version: _Optional[str] = ..., package_version: _Optional[str] = ..., capabilities: _Optional[_Union[Capabilities, _Mapping]] = ..., num_areas: _Optional[int] = ...) -> None: ...
