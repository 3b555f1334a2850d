"""Options of the ``model`` component."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from brayx.gamecore.browser import are_origins


class CanaryConfig(BaseModel):
    """A share of the sessions that another version serves."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    alias: Annotated[str, Field(pattern=r"^[A-Za-z][\w-]*$")] = "candidate"
    """Alias of their version in the registry; while it is not set, no session gets it."""
    share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of the sessions, chosen by their ids."""


class ModelConfig(BaseModel):
    """A model: the module, the engine that runs it and where."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: Literal["model"] = "model"
    module: str
    """Import path of a module with ``build_model(name, config)``, searched in the YAML file's folder first;
    ``config`` is the whole job as plain dicts."""
    engine: Literal["onnx", "onnx-frozen", "int8", "tensorrt", "torch"] = "onnx"
    """Executor that acts; learning is always torch. ``onnx-frozen`` and ``int8`` take no new weights, so they are for
    serving only; ``tensorrt`` needs its extra and a GPU."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the torch engine."""
    compile: bool = False
    """The torch engine runs through ``torch.compile``, which takes seconds to minutes at the start."""
    placement: Literal["local", "remote"] = "local"
    """``local``: in every actor replica; ``remote``: in a model deployment that all replicas call."""
    max_batch_size: Annotated[int, Field(ge=-65536, le=65536)] = 64
    """Maximum observations in one engine call; negative: exactly that many, padded."""
    max_wait_ms: Annotated[float, Field(ge=0, le=10_000)] = 0.0
    """Time that an incomplete batch waits for more rows; 0: none, once the engine is free."""
    max_queue: Annotated[int, Field(ge=1)] = 1024
    """Forwards that may wait in one process; more are refused."""
    deadline_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """A forward without a result after this long fails."""
    max_versions: Annotated[int, Field(ge=1, le=4096)] = 2
    """Policy versions that each process keeps ready, the newest included; the weight store keeps as many, or four."""
    threads: Annotated[int, Field(ge=1, le=256)] = 1
    """Threads of one engine call."""
    num_workers: Annotated[int, Field(ge=1, le=1024)] = 1
    """Replicas of the model deployment, when remote."""
    cpus_per_worker: Annotated[float, Field(ge=0)] = 0.0
    """CPUs that Ray reserves for a replica, when remote."""
    gpus_per_worker: Annotated[float, Field(ge=0, validate_default=True)] = 0.0
    """GPUs that Ray reserves for a replica, when remote; ``device: cuda`` needs a share of one there."""
    memory_per_worker: Annotated[int, Field(ge=0)] = 0
    """Memory in MiB that Ray reserves for a replica, when remote; 0: none."""
    cors_origins: Annotated[list[str], AfterValidator(are_origins)] = []
    """Origins of web pages whose scripts may call the model over HTTP, as of the actor."""
    allowed_hosts: list[str] = []
    """Host names, besides localhost, that its HTTP door on loopback answers to; ``*``: all."""

    follow_s: Annotated[float, Field(gt=0, le=3600)] | None = 10.0
    """If it is served by an alias: interval at which the alias is read; null: never. Sessions keep the version that
    they began with."""
    canary: CanaryConfig | None = None
    """If it is served by an alias: another alias's version serves a share of the sessions; needs ``follow_s``."""

    @field_validator("canary")
    @classmethod
    def _followed(cls, value: CanaryConfig | None, info: ValidationInfo) -> CanaryConfig | None:
        if value is not None and (
            info.data.get("follow_s") is None or info.data.get("engine") in ("onnx-frozen", "int8")
        ):
            raise ValueError("null, unless follow_s is set and the engine takes new weights")
        return value

    @field_validator("device", "compile")
    @classmethod
    def _torch_only(cls, value: str | bool, info: ValidationInfo) -> str | bool:
        if value not in ("cpu", False) and info.data.get("engine") != "torch":
            raise ValueError(f"{'false' if value is True else 'cpu'}, unless engine is torch")
        return value

    @field_validator("gpus_per_worker")
    @classmethod
    def _a_gpu_to_see(cls, value: float, info: ValidationInfo) -> float:
        on_gpu = info.data.get("device") == "cuda" or info.data.get("engine") == "tensorrt"
        if not value and on_gpu and info.data.get("placement") == "remote":
            raise ValueError("a share of a GPU, since the engine runs on one")
        if value and not on_gpu:
            raise ValueError("0, unless the engine runs on a GPU: tensorrt, or torch with device cuda")
        return value

    @field_validator("max_batch_size")
    @classmethod
    def _not_zero(cls, value: int) -> int:
        if value == 0:
            raise ValueError("at least 1, or negative for batches of a fixed size")
        return value
