"""Bray's options in a job: accepted if they mean the same, otherwise refused with the right name."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from brayx.algorithms.build import algorithm_options
from brayx.errors import ConfigError
from brayx.jobs.bray import OPTIONS, Same
from brayx.jobs.config import KINDS, TOP_OPTIONS, JobConfig
from brayx.jobs.new import new_project

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return new_project("pong", "rl", tmp_path)[0].parent


def load(folder: Path, component: str, **options: Any) -> JobConfig:
    """The project's job with a component's options, also null, written into its file."""
    job = yaml.safe_load((folder / "pong.yaml").read_text())
    part = job.setdefault(component, {}) if component else job
    for name, value in options.items():
        if name.startswith("no_"):
            del part[name.removeprefix("no_")]
        else:
            part[name] = value
    file = folder / "bray.yaml"
    file.write_text(yaml.safe_dump(job, sort_keys=False))
    return JobConfig.load(file)


@pytest.mark.parametrize(
    ("bray", "engine"), [("train", "onnx"), (None, "torch"), ("infer", "onnx-frozen"), ("quantize", "int8")]
)
def test_use_onnx_selects_an_engine(folder: Path, bray: str | None, engine: str) -> None:
    assert load(folder, "model", use_onnx=bray, no_engine=0).models["model"].engine == engine


def test_options_with_other_units_are_reported_if_the_file_is_brays(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(folder, "trainer", num_steps=1000)
    assert not caplog.records, "nothing marks the file as Bray's"
    load(folder, "trainer", num_steps=1000, enable="train")
    warnings = {re.sub(r"^.*?yaml:\d+: ", "", record.getMessage()).split(":")[0]: record for record in caplog.records}
    assert set(warnings) == {"trainer.num_steps", "games.batch_size"}
    assert "counts transitions here, and updates in Bray" in warnings["trainer.num_steps"].getMessage()
    assert "counts columns of `unroll_length` transitions here, and items" in warnings["games.batch_size"].getMessage()


def test_a_refusal_mentions_options_with_other_units(folder: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load(folder, "trainer", num_steps=1000, max_reuse=2)
    first, *others = refused.value.details["errors"]
    assert "is an option of Bray; here `buffer.max_reuse`" in first
    assert any("trainer.num_steps: counts transitions here" in other for other in others)


@pytest.mark.parametrize("serialize", ["json", None])
def test_messages_beside_another_format_are_accepted_as_unused(folder: Path, serialize: str | None) -> None:
    message = {"module": "not_there", "message": "Seen"}
    messages = {"tick_input_proto": message, "tick_output_proto": message}
    job = load(folder, "actor", serialize=serialize, **messages)
    assert job.actors["actor"].tick_input_proto is job.actors["actor"].tick_output_proto is None


def test_options_with_the_same_meaning_are_accepted(folder: Path) -> None:
    assert load(folder, "model", local_mode=False, no_placement=0).models["model"].placement == "remote"
    assert load(folder, "model", num_workers=0).models["model"].num_workers == 1
    trainer = load(folder, "trainer", learning_rate=None, use_gpu=None, num_workers=None, enable="train").trainers
    assert trainer["trainer"].learning_rate == 5e-4
    assert trainer["trainer"].num_workers == 1
    assert not trainer["trainer"].use_gpu


def test_an_option_that_is_nested_here_is_moved(folder: Path) -> None:
    job = yaml.safe_load((folder / "pong.yaml").read_text())["trainer"]["algorithm"]
    del job["max_grad_norm"]
    trainer = load(folder, "trainer", algorithm=job, clip_grad_max_norm=2.5).trainers["trainer"]
    assert trainer.algorithm.max_grad_norm == 2.5


def test_for_mixed_the_option_moves_to_its_reinforcement(folder: Path) -> None:
    trainer = load(folder, "trainer", algorithm={"name": "mixed"}, clip_grad_max_norm=2.5).trainers["trainer"]
    assert trainer.algorithm.reinforcement.max_grad_norm == 2.5


@pytest.mark.parametrize("enable", [True, None, "train"])
def test_trainers_may_have_brays_enable(folder: Path, enable: bool | str | None) -> None:
    assert load(folder, "trainer", enable=enable).trainers["trainer"] == load(folder, "trainer").trainers["trainer"]


def test_a_sources_workers_may_be_null(folder: Path) -> None:
    source = {"kind": "source", "buffer": "games", "module": "json", "func": "loads", "num_workers": None}
    assert load(folder, "recorded", **source).sources["recorded"].num_workers == 1


@pytest.mark.parametrize(
    ("component", "options", "message"),
    [
        (
            "trainer",
            {"algorithm": "ppo", "clip_grad_max_norm": 1.0},
            r"trainer.clip_grad_max_norm: is here algorithm.max_grad_norm: write `algorithm` as \{name: .* it is 'ppo'",
        ),
        ("", {"dump_state": True}, "dump_state: is an option of Bray; here games are kept by a `kind: recording`"),
        ("model", {"checkpoint": 100}, "model.checkpoint: is an option of Bray; here a trial of the same name"),
        ("model", {"use_onnx": "tensor"}, "model.use_onnx: is 'tensor', which Bray does not take either"),
        ("model", {"use_onnx": "train"}, "model.use_onnx: is Bray's name of engine, which is given too"),
        ("trainer", {"batch_kind": "stack"}, "trainer.batch_kind: is an option of Bray"),
        (
            "actor",
            {"episode_save_interval": 100},
            r"episode_save_interval: is 100, .*: a `kind: recording`",
        ),
        ("actor", {"use_tcp": True}, r"bray.yaml:\d+: actor.use_tcp: is an option of Bray; here every actor answers"),
    ],
)
def test_options_that_differ_here_are_refused_with_a_replacement(
    folder: Path, component: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(folder, component, **options)


def test_every_name_of_bray_maps_to_an_existing_option() -> None:
    """Bray's names map to existing options, and every option that an error suggests exists."""
    fields = {"": set(TOP_OPTIONS), **{kind: set(model.model_fields) for kind, model in KINDS.items()}}
    for kind, options in OPTIONS.items():
        for name, option in options.items():
            if isinstance(option, Same):
                assert option.path.split(".")[0] in fields[kind], name
            else:
                for named in option.split("`")[1::2]:
                    place, _, key = named.partition(".")
                    if place in KINDS and key:
                        assert key in fields[place], (name, named)


BRAY_OPTIONS = set(
    re.findall(
        r"\w+",
        "project trial mode dump_state enable module checkpoint_interval checkpoint max_batch_size num_workers "
        "cpus_per_worker gpus_per_worker memory_per_worker use_onnx local_mode override_model tensorboard_graph "
        "tensorboard_step func epoch sources size batch_size density class port actors_per_worker use_tcp use_gateway "
        "agents episode_length episode_save_interval serialize tick_input_proto tick_output_proto model buffers "
        "buffer_weights eval use_gpu batch_kind prefetch_size max_reuse learning_rate clip_grad_max_norm "
        "weights_publish_interval num_steps optimizer_step_interval",
    )
)
"""The options in Bray's template configurations and its trainer's loop."""
BRAY_NAMES = set(
    re.findall(
        r"\w+",
        "init run_until_asked_to_stop forward push pop RemoteBuffer ListBuffer StackBuffer ConcateBuffer "
        "TorchTensorBuffer PrefetchBuffer CallbackBuffer SampleBuffer RemoteModel RemoteTorchModel "
        "get_torch_model_weights "
        "set_torch_model_weights ModelPool ModelServer RemoteActor Actor Metric RemoteServer Server RemoteTrainer "
        "train_loop_per_worker Trainer NestedArray handle_nested_array make_batch serialize_nested_array "
        "deserialize_nested_array ray_scheduling_local ray_prepare_model Worker merge query add_scalar add_image "
        "add_video add_histogram add_graph set_tensorboard_step get_trial_launch_path get_global_step set get "
        "register log export_onnx set_local_mode get_model clone publish_weights sample sample_name update_pool "
        "flatten_nested_array unflatten_nested_array split_batch StateDumper RemoteStateDumper AgentActor Gateway "
        "ActorGateway ServerGateway ActorWorker ServerWorker BufferWorker Buffer WorkerLoadBalance Master "
        "ModelWeightsPublisher ModelWeightsSubscriber TorchModelWorker OnnxModelWorker ModelOnnxManager ModelWorker "
        "ModelWorkerManager ModelForwardProxy ModelCheckpointManager gae multi_head_gae loss cal_kl cal_policy "
        "cal_value cal_action from_logits multi_from_logits from_importance_weights log_probs_from_logits_and_actions "
        "multi_log_probs_from_logits_and_actions get_log_rhos ImpalaBatchBuffer AttentionEntityEncoder SpatialEncoder "
        "SingleSelectDecoder GeneralAttentionScore wrap_deepmind render fake",
    )
)
"""What Bray's package exports, its classes, and the functions of its algorithms."""


def test_the_page_has_every_option_and_every_name() -> None:
    words = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", (ROOT / "docs" / "from-bray.md").read_text()))))
    assert not {*BRAY_OPTIONS, *BRAY_NAMES, *(name for options in OPTIONS.values() for name in options)} - words


def test_every_reference_of_the_page_exists() -> None:
    """Names of brayx and its modules, arguments of its classes, options of its components and of its algorithms."""
    codes = re.findall(r"`([^`]+)`", (ROOT / "docs" / "from-bray.md").read_text())
    fields = {kind: set(model.model_fields) for kind, model in KINDS.items()}
    algorithms = [algorithm_options(name) for name in ("ppo", "impala", "sac", "bc", "mixed", "mappo")]
    fields["algorithm"] = {name for options in algorithms for name in options.model_fields}
    missing = []
    for code in codes:
        named = re.match(r"((?:brayx|deployments)(?:\.\w+)+)(?::(\w+))?(?:\((\w+)=)?", code)
        if named and not _is_there(*named.groups()):
            missing.append(code)
        option = re.match(r"(\w+)\.(\w+)", code)
        if option and option[1] in fields and option[2] not in fields[option[1]]:
            missing.append(code)
    assert missing == []


def _is_there(path: str, attribute: str | None, argument: str | None) -> bool:
    first, *names = [*path.split("."), *([attribute] if attribute else [])]
    target: Any = importlib.import_module(first)
    for name in names:
        if not hasattr(target, name):
            try:
                importlib.import_module(f"{target.__name__}.{name}")
            except ModuleNotFoundError:
                return False
        target = getattr(target, name)
    return argument is None or argument in inspect.signature(target).parameters
