"""`brayx.Trainer`: trains a policy for an environment, one iteration at a time, under the program's control.

    trainer = brayx.Trainer("CartPole-v1", learning_rate=1e-3)
    for result in trainer:
        print(result["env_steps"], result["return_mean"])

It runs in this process, and writes nothing until `Trainer.save`. Knows nothing of MLflow.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from brayx import actions
from brayx.algorithms.build import algorithm_options
from brayx.algorithms.config import AlgorithmConfig
from brayx.arrays import as_dtype
from brayx.errors import ConfigError
from brayx.jobs.former import options_without_former
from brayx.jobs.shipped import job_file
from brayx.local.train import LocalTraining, play_evaluation
from brayx.local.training import of_job, with_options
from brayx.rollout.envs import make_envs
from brayx.rollout.evaluate import PolicyEvaluation
from brayx.rollout.policy import RolloutPolicy
from brayx.temporary import temporary_folder
from brayx.trainer.loop import RETURN_METRIC
from brayx.types import NestedArray, flatten

if TYPE_CHECKING:
    from brayx.actions import ActionSpec
    from brayx.jobs.config import JobConfig
    from brayx.local.run import CurvePoint
    from brayx.rollout.envs import EnvSource
    from brayx.rollout.networks import Model

_META, _ABOUT = "meta.json", "made_with"
"""The JSON file of a checkpoint, and its key with the arguments that make the same trainer."""
_PANEL_S, _CURVE_S = 0.25, 2.0
"""Minimum time between two drawings of the progress, and of the curve."""


class Trainer:
    """Trains a policy in this process, one iteration at a time. It is a context manager, or call `close`.

    An iteration collects ``unroll_length`` steps of each environment, and learns from them. Schedules end at
    ``num_steps``, and so does a ``for`` loop over the trainer; `train` may be called after that.

    Args:
        env: Gymnasium id; a function that returns one environment, or a vector of them; or a job with one rollout: the
            path of its YAML, or the name of a shipped one.
        algorithm: its name, the module of your own, or its options; None: PPO, or the job's.
        model: as for `brayx.train_local`.
        resume: a checkpoint to continue from.
        **options: options by name: of `brayx.Training` (``num_envs``), of the algorithm (``clip_param``) or of the
            network (``network={"hidden": [64]}``). They override those of a job.

    Raises:
        ConfigError: there is no such option (names the nearest), environment or job, or they do not fit each other.
        EnvironmentFailed, ModelError: as for `brayx.train_local`.
        TrackingError: the checkpoint is of another model.
    """

    def __init__(
        self,
        env: EnvSource | Path | JobConfig,
        algorithm: str | AlgorithmConfig | None = None,
        *,
        model: Callable[[NestedArray, ActionSpec], Model] | None = None,
        resume: str | Path | None = None,
        **options: Any,
    ) -> None:
        job = _job_of(env)
        if job is not None:
            if algorithm is not None:
                raise ConfigError("a job has its own algorithm: leave the argument out", key="algorithm")
            self._env, algorithm, model, given = of_job(job)
            options = {**given, **options}
            source: dict[str, Any] = {"job": job.as_dict(), "folder": job.folder}
        else:
            self._env = cast("EnvSource", env)
            source = {"env": env if isinstance(env, str) else None}
        if not isinstance(algorithm, AlgorithmConfig):
            source["algorithm"] = algorithm or "ppo"
            chosen: AlgorithmConfig | type[AlgorithmConfig] = algorithm_options(source["algorithm"], os.getcwd())
        else:
            chosen = algorithm
        config, training = with_options(chosen, options)
        self.name = job.project if job is not None else str(source["env"] or getattr(env, "__name__", "environment"))
        folder = None if resume is None else Path(resume)
        self._running = LocalTraining(self._env, config, training, model=model, resume=folder)
        self.close = weakref.finalize(self, self._running.close)
        self._running.run.about[_ABOUT] = {
            "algorithm": config.module or config.name,
            **source,
            "options": {
                **training.model_dump(mode="json", exclude_unset=True),
                **config.model_dump(mode="json", exclude_unset=True, exclude={"name", "module"}),
            },
        }
        self._running.__enter__()
        self._iterations = 0
        self._player: _Player | None = None

    @classmethod
    def restore(
        cls,
        path: str | Path,
        env: EnvSource | None = None,
        *,
        model: Callable[[NestedArray, ActionSpec], Model] | None = None,
        **options: Any,
    ) -> Trainer:
        """A trainer that continues from what `save` wrote: weights, optimiser and counters, with new episodes.

        Args:
            path: the checkpoint's folder.
            env: environment, if it was a function.
            model: model, if it was a function.
            **options: options to change.

        Raises:
            ConfigError: there is no such checkpoint, or it needs ``env``; and as for a new trainer.
        """
        try:
            about = json.loads((Path(path) / _META).read_text())[_ABOUT]
        except (OSError, ValueError, KeyError):
            raise ConfigError(f"{path} is no checkpoint that a Trainer saved", key="path") from None
        source: Any = env if env is not None else about.get("env")
        if "job" in about:
            from brayx.jobs.config import JobConfig

            source = JobConfig.of(about["job"], about["folder"])
        if source is None:
            raise ConfigError(f"{path}: its environments were made by a function: pass it as env", key="env")
        algorithm = None if "job" in about else about["algorithm"]
        saved, refused = options_without_former(about["options"], about["algorithm"])
        if refused:
            raise ConfigError(f"{path}: {'; '.join(refused)}", key="path")
        return cls(source, algorithm, model=model, resume=path, **{**saved, **options})

    def train(self) -> dict[str, float]:
        """One iteration; returns its metrics by name.

        Sums, such as ``env_steps``, are those since the process started, and ``return_mean`` is the mean return of the
        last hundred episodes, NaN before the first has ended. ``iteration`` counts the calls.

        Raises:
            EnvironmentFailed, BadWeights, Diverged: as for `brayx.train_local`.
        """
        self._check_open()
        numbers = self._running.iterate()
        self._iterations += 1
        run = self._running.run
        return {
            **numbers,
            "iteration": self._iterations,
            "env_steps": run.env_steps,
            "env_steps_per_s": run.steps_per_s,
            "return_mean": numbers.get(RETURN_METRIC, math.nan),
        }

    def __iter__(self) -> Iterator[dict[str, float]]:
        """Iterations until ``num_steps`` or ``target_return``. Shows its progress on a terminal, and in a notebook with
        the curve."""
        training = self._running.training
        with _LoopDisplay(self.name, training.num_steps, training.target_return) as display:
            while self._running.goes_on():
                result = self.train()
                display.show(result, self.curve, last=not self._running.goes_on())
                yield result

    @property
    def curve(self) -> list[CurvePoint]:
        """The learning curve: one point after each iteration, from the first finished episode on."""
        return self._running.run.curve

    def save(self, path: str | Path | None = None) -> Path:
        """Writes a checkpoint, and returns its folder.

        Args:
            path: a new or an empty folder, or another checkpoint, which is replaced. None: a folder
                ``checkpoint-ENV_STEPS`` in the current one.

        Raises:
            ConfigError: there is something else at ``path``.
            TrackingError: it cannot be written.
        """
        self._check_open()
        folder = Path(path or f"checkpoint-{self._running.run.env_steps}").absolute()
        if folder.exists() and not (folder / _META).is_file() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} exists, and is no checkpoint: expected another path", key="path")
        with temporary_folder("checkpoint") as temporary:
            self._running.loop.write(temporary)
            if folder.exists():
                shutil.rmtree(folder)
            shutil.copytree(temporary, folder)
        return folder

    def evaluate(self, games: int = 10) -> PolicyEvaluation:
        """Plays whole episodes with the most likely actions, in environments of their own.

        Their mean return is `PolicyEvaluation.mean`.

        Raises:
            ConfigError: ``games`` is below 1.
            EnvironmentFailed: an environment raised.
        """
        training = self._running.training
        if games < 1:
            raise ConfigError(f"games is {games}, expected 1 or more", key="games")
        num_envs = min(games, training.num_envs) if isinstance(self._env, str) else training.num_envs
        player = self._playing()
        with contextlib.closing(
            make_envs(self._env, num_envs, vectorization=training.vectorization, options=training.env_options)
        ) as envs:
            normaliser = self._running.collector.obs_normaliser
            return play_evaluation(training, envs, player.policy, games, normaliser=normaliser)

    def act(self, obs: NestedArray, *, start: bool = False, greedy: bool = True) -> Any:
        """The policy's action for one observation, as the environment takes it.

        Args:
            obs: one observation of the environment.
            start: a game begins, so a policy with a memory forgets the last one.
            greedy: the most likely action instead of a drawn one.

        Raises:
            ConfigError: the observation is not the environment's.
        """
        return self._playing().act(obs, start=start, greedy=greedy)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self.close.alive:
            raise ConfigError("the trainer is closed: make another, or restore one")

    def _playing(self) -> _Player:
        """A separate copy of the newest policy, because training may be acting with its own in another thread."""
        self._check_open()
        if self._player is None:
            self._player = _Player(self._running)
        weights, version = self._running.run.newest_weights()
        if version != self._player.policy.version:
            self._player.policy.load(weights, version)
        return self._player


def _job_of(env: Any) -> JobConfig | None:
    """The job that ``env`` is or names; None: it is an environment."""
    from brayx.jobs.config import JobConfig

    if isinstance(env, Path) or (isinstance(env, str) and env.endswith((".yaml", ".yml"))):
        return JobConfig.load(job_file(env))
    return env if isinstance(env, JobConfig) else None


class _Player:
    """Acts for single observations with a training's policy and normalisation."""

    def __init__(self, running: LocalTraining) -> None:
        self.policy = RolloutPolicy(running.module, running.forward_args, engine="torch")
        self._collector = running.collector
        self._memory = self.policy.initial_state(1)
        self._rng = np.random.default_rng(running.training.seed)

    def act(self, obs: NestedArray, *, start: bool, greedy: bool) -> Any:
        leaves, normaliser = flatten(obs, "obs"), self._collector.obs_normaliser
        inputs = []
        for key, spec in zip(self.policy.obs_keys, self.policy.obs_leaves, strict=True):
            leaf = as_dtype(np.asarray(leaves[key]), spec.dtype) if key in leaves else None
            if leaf is None or leaf.shape != spec.shape:
                got = {name: (str(np.asarray(leaf).dtype), np.shape(leaf)) for name, leaf in leaves.items()}
                raise ConfigError(f"{key}: expected {spec.dtype} {list(spec.shape)}, got {got}", key=key)
            inputs.append(leaf[None] if normaliser is None else normaliser(key, leaf[None]))
        if start:
            self._memory = self.policy.initial_state(1)
        outputs, self._memory = self.policy.step(inputs, self._memory)
        action = actions.greedy(outputs) if greedy else actions.sample(outputs, self._rng)[0]
        return self._collector.action_spec.to_env(action)[0]


class _LoopDisplay(contextlib.ExitStack):
    """The progress of a ``for`` loop on a terminal or in a notebook, which also gets the curve; otherwise none."""

    def __init__(self, title: str, num_steps: int, target: float | None) -> None:
        super().__init__()
        from rich.console import Console

        from brayx.jobs.progress import Progress

        console = Console(stderr=True)
        self._title, self._target = title, target
        self._notebook = console.is_jupyter
        self._picture: Any = None
        self._panel_at = self._curve_at = -math.inf
        self._progress = None
        if console.is_jupyter or console.is_terminal:
            self._progress = self.enter_context(Progress(title, num_steps=num_steps, target=target, console=console))

    def show(self, result: Mapping[str, float], curve: list[CurvePoint], *, last: bool) -> None:
        now = time.monotonic()
        if self._progress is not None and (last or now - self._panel_at >= _PANEL_S):
            self._panel_at = now
            self._progress.update(result)
        if self._notebook and curve and (last or now - self._curve_at >= _CURVE_S):
            self._draw(curve)
            self._curve_at = time.monotonic()  # drawing takes a tenth of a second

    def _draw(self, curve: list[CurvePoint]) -> None:
        import io

        from IPython.display import Image, display

        from brayx.jobs.evaluate import draw_curve

        picture = io.BytesIO()
        points = [(point.env_steps, point.return_mean) for point in curve]
        draw_curve(points, title=self._title, target=self._target).savefig(picture, format="png", dpi=80)
        image = Image(picture.getvalue())  # type: ignore[no-untyped-call]
        if self._picture is None:
            self._picture = display(image, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._picture.update(image)
