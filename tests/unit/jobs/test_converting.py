"""A job of Bray becomes one of brayx: what changed its meaning has a comment, and `brayx check` takes the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from brayx.jobs.checks import check_learning
from brayx.jobs.code import check_code
from brayx.jobs.config import JobConfig
from brayx.jobs.converting import convert
from brayx.jobs.new import new_project

BRAY = """\
# Ping-pong, learned from people first.
project: pong
trial: first   # of many
mode: train
dump_state: true

net:
  kind: model
  module: pong_model        # has build_model
  checkpoint_interval: 500
  checkpoint: null
  max_batch_size: 16
  num_workers: 0
  cpus_per_worker: 0.5
  gpus_per_worker: 0.0
  memory_per_worker: 256
  use_onnx: null
  local_mode: true
  override_model: true
  tensorboard_graph: false
  tensorboard_step: true

players:
  kind: source
  enable: train
  module: pong_expert
  func: build_source
  num_workers: null
  epoch: 30

held_back: {kind: source, enable: train, module: pong_expert, func: build_source, epoch: 1}

recorded:
  kind: buffer
  enable: train
  sources: [players]
  size: 4
  batch_size: 256  # enough for one GPU
  num_workers: 1
  density: 50

testing:
  kind: buffer
  sources:
    - held_back
  size: 2
  batch_size: 128

games:
  kind: buffer
  size: 8
  batch_size: 256

agent:
  kind: agent
  module: pong_agent
  class: CatchAgent

picture:
  kind: render
  module: pong_features
  func: encode

door:
  kind: actor
  port: 8000
  num_workers: 1
  actors_per_worker: 20
  cpus_per_worker: 1.0
  memory_per_worker: 512
  use_tcp: true
  use_gateway: head
  agents: [agent]
  episode_length: 64
  episode_save_interval: 100
  serialize: json
  tick_input_proto: {module: pong_pb2, message: Seen}
  tick_output_proto: {module: pong_pb2, message: Done}

learner:
  kind: trainer
  enable: train
  module: pong_trainer
  class: Trainer
  model: net
  buffers: [recorded, games]
  buffer_weights: [0.25, 0.75]
  eval: {buffer: testing, interval: 200, steps: 5}
  use_gpu: null
  num_workers: null
  cpus_per_worker: null
  batch_size: 2
  batch_kind: concate
  prefetch_size: 1
  max_reuse: 3
  clip_grad_max_norm: 1.5
  optimizer_step_interval: 1
  weights_publish_interval: 2
  num_steps: 1000

network: {kind: config, hidden: [32]}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return new_project("pong", "mixed", tmp_path)[0].parent


@pytest.fixture
def converted(folder: Path) -> str:
    text = BRAY.replace("CatchAgent", agent_class(folder))
    conversion = convert(text, folder / "bray.yaml")
    assert not conversion.left
    return conversion.text


def agent_class(folder: Path) -> str:
    job: dict[str, Any] = yaml.safe_load((folder / "pong.yaml").read_text())
    return str(job["agent"]["class"])


def test_a_job_of_all_seven_kinds_passes_the_check(
    folder: Path, converted: str, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "job.yaml").write_text(converted)
    job = JobConfig.load(folder / "job.yaml")
    assert not caplog.records, "no option of Bray is left"
    check_code(job, job.actors, mode="train")
    check_learning(job)
    model, trainer = job.models["net"], job.trainers["learner"]
    assert (model.engine, model.placement, model.num_workers, model.memory_per_worker) == ("torch", "local", 1, 256)
    assert {name: source.buffer for name, source in job.sources.items()} == {
        "players": "recorded",
        "held_back": "testing",
    }
    assert (job.sources["players"].epochs, job.sources["players"].num_workers) == (30, 1)
    sizes = {name: (buffer.batch_size, buffer.unroll_length) for name, buffer in job.buffers.items()}
    assert sizes == {"recorded": (8, 64), "games": (8, 64), "testing": (4, 64)}, "256 items, stacked in twos"
    assert (job.buffers["games"].max_reuse, job.buffers["recorded"].density) == (3, 50)
    assert (trainer.algorithm.name, trainer.algorithm.reinforcement.max_grad_norm) == ("mixed", 1.5)
    assert (trainer.weights, trainer.prefetch, trainer.checkpoint_interval) == ([0.25, 0.75], 1, 500)
    assert (trainer.eval_buffers, trainer.eval_interval, trainer.eval_batches) == (["testing"], 200, 5)
    assert (trainer.num_steps, trainer.learning_rate, trainer.x_axis) == (1000 * 512, 5e-4, "updates")
    assert job.renders["picture"].func == "encode"


def test_what_changed_has_a_comment_and_what_did_not_keeps_its_own(converted: str) -> None:
    lines = converted.splitlines()
    for line in (
        "# Ping-pong, learned from people first.",
        "trial: first  # of many",
        "  module: pong_model  # has build_model",
        "  max_batch_size: 16",
        "  engine: torch  # Bray: use_onnx: null",
        "  buffer: recorded  # Bray: recorded.sources",
        "  batch_size: 8  # columns of unroll_length; Bray: 256 items x learner.batch_size 2",
        "  num_steps: 512000  # transitions; Bray: 1000 updates",
        "  eval_buffers: [testing]  # Bray: eval.buffer",
    ):
        assert line in lines, line
    for dropped in (
        "dump_state: true",
        "checkpoint: null",
        "use_tcp: true",
        "episode_save_interval: 100",
        'use_gateway: "head"',
        "optimizer_step_interval",
    ):
        assert any(line.lstrip().startswith(f"# Bray's {dropped}") for line in lines), dropped
    assert "instead of pong_trainer.Trainer" in converted


@pytest.mark.parametrize(("sources", "algorithm"), [([], "ppo"), (["games"], "bc"), (["games", "recorded"], "bc")])
def test_the_algorithm_is_for_what_the_buffers_get(folder: Path, sources: list[str], algorithm: str) -> None:
    job: dict[str, Any] = yaml.safe_load(BRAY.replace("CatchAgent", agent_class(folder)))
    del job["held_back"], job["testing"], job["players"], job["learner"]["eval"]
    for buffer in ("games", "recorded"):
        job[buffer].pop("sources", None)
        if buffer in sources:
            job[buffer]["sources"] = [f"of_{buffer}"]
            job[f"of_{buffer}"] = {"kind": "source", "module": "pong_expert"}
    if sources == ["games"]:
        job["learner"].update(buffers=["games"], buffer_weights=[1.0])
    text = convert(yaml.safe_dump(job, sort_keys=False), folder / "bray.yaml").text
    assert yaml.safe_load(text)["learner"]["algorithm"]["name"] == algorithm


def test_what_is_left_to_fill_in_is_a_comment_above_its_line(folder: Path) -> None:
    text = BRAY.replace("pong_agent", "not_there").replace("gpus_per_worker: 0.0", "gpus_per_worker: 1.0")
    conversion = convert(text, folder / "bray.yaml")
    lines = conversion.text.splitlines()
    assert len(conversion.left) == 2
    for option in ("module: not_there", "gpus_per_worker: 1.0"):
        (place,) = [number for number, line in enumerate(lines) if line.strip().startswith(option)]
        above = "".join(lines[max(0, place - 2) : place])
        assert "# TO DO:" in above, option


def test_the_command_says_what_is_left(folder: Path, command: Any) -> None:
    file = folder / "bray.yaml"
    file.write_text(BRAY.replace("CatchAgent", agent_class(folder)))
    done = command("convert", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    assert yaml.safe_load(done.stdout)["project"] == "pong"
    file.write_text(BRAY.replace("pong_model", "not_there"))
    done = command("convert", str(file))
    assert done.returncode == 1
    assert done.stderr.startswith("brayx: to do: net.module: ")
    assert command("convert", str(folder / "none.yaml")).returncode == 2
